"""Six peers in six homes train the demo's model: every round certified, everybody in every cut, equal state roots.

And the same while one home is cut off for a while in the middle of a round, or gets another public address: it is left
out, comes back and takes part again; for the others no round is void.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, log_path, read_events
from natlab.lab import Home, Lab, environment
from natlab.people import start_bootstrap

HOMES = (
    Home("cone", delay=0.005, up=20, down=100),
    Home("cone", delay=0.010, up=40, down=100),
    Home("symmetric", delay=0.015, up=20, down=50),
    Home("symmetric", delay=0.020, up=50, down=100),
    Home("shift", delay=0.0125, up=20, down=20),
    Home("open", delay=0.025, up=100, down=100),
)
"""Lines of 20 to 100 Mbit/s, 20 to 100 ms round trip from home to home."""

ROUNDS = 6
AWAY_ROUNDS = 14
"""Long enough for the home that was away to be back before the last one."""
CUT_SECONDS = 20.0
STRUCK = 1
"""The home to which something happens."""


QUORUM = 4

PATIENCE = 600.0
"""Seconds: a safety net against a hang, six trainers on two cores take about a quarter of it."""
pytestmark = pytest.mark.timeout(PATIENCE + 60)

RUN_TOML = """
name = "homes"
[model]
name = "gpt"
size = "1m"
[data]
source = "text:{stdlib}"
sequence_length = 128
batch_size = 2
[inner]
steps = {steps}
[outer]
rounds = {rounds}
{mode}
[admission]
voters = "members"
min_peers = {min_peers}
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-u", "-m", "flockstep", *words]


STREAMING = 'mode = "streaming"\nfragments = 2'


def publish(lab: Lab, bootstraps: list[str], folder: Path, **run: object) -> str:
    """The join link of the first peer's run, published from the computer of the first bootstrap."""
    text = RUN_TOML
    for name, value in ({"steps": 5, "mode": ""} | run).items():
        text = text.replace(f"{{{name}}}", str(value))
    (folder / "run.toml").write_text(text, encoding="utf-8")
    via = [word for bootstrap in bootstraps for word in ("--via", bootstrap)]
    create = command("run", "create", str(folder / "run.toml"), *via, "--home", str(folder / "peer0"))
    process = lab.start("boot0", create, stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    words = (str(word).strip("'") for line in process.stdout for word in line.split())
    link = next(word for word in words if word.startswith("flockstep://"))
    process.kill()  # It would go on as a keeper: here the owner trains.
    process.communicate()
    return link


def join(lab: Lab, number: int, link: str, home: Path) -> subprocess.Popen[Any]:
    words = command("join", link, "--home", str(home), "--threads", "1", "--yes")
    with (home.parent / f"{home.name}.txt").open("w", encoding="utf-8") as log:
        return lab.start(f"home{number}", words, stdout=log, stderr=subprocess.STDOUT, env=environment())


def events(home: Path, name: str) -> list[Event]:
    return [event for _, event in read_events(log_path(home)) if event["event"] == name]


@dataclass(frozen=True, slots=True)
class Street:
    """Six homes whose peers train, and what each of them has told."""

    lab: Lab
    homes: list[Path]
    peers: list[subprocess.Popen[Any]]
    deadline: float

    def wait_for(self, home: int, happened: Callable[[Event], object]) -> None:
        """Until a peer has told something."""
        while not any(happened(event) for _, event in read_events(log_path(self.homes[home]))):
            assert time.monotonic() < self.deadline
            assert self.peers[home].poll() is None, f"the peer of home {home} has ended"
            time.sleep(0.05)

    def finish(self) -> list[list[Event]]:
        """Until all have ended; the rounds of each."""
        for peer in self.peers:
            assert peer.wait(self.deadline - time.monotonic()) == 0
        return [events(home, "round.done") for home in self.homes]


@contextmanager
def training(folder: Path, **run: object) -> Iterator[Street]:
    with Lab(HOMES, bootstraps=2, folder=folder) as lab:
        bootstraps = [start_bootstrap(lab, number, folder / f"boot{number}") for number in range(2)]
        link = publish(lab, bootstraps, folder, **run)
        homes = [folder / f"peer{number}" for number in range(len(HOMES))]
        peers = [join(lab, number, link, home) for number, home in enumerate(homes)]
        yield Street(lab, homes, peers, time.monotonic() + PATIENCE)


def voids(home: Path) -> list[str]:
    """Why rounds were void, but for the first one's attempts before enough had come."""
    found = [(round_of(event), str(event["reason"])) for event in events(home, "round.void")]
    return [f"round {round_}: {reason}" for round_, reason in found if round_ > 1 or "the run asks for" not in reason]


def cut_of(event: Event) -> list[str]:
    cut = event["cut"]
    assert isinstance(cut, list)
    return [str(peer) for peer in cut]


@pytest.mark.parametrize(
    "mode", [{"rounds": ROUNDS}, {"rounds": ROUNDS // 2, "steps": 10, "mode": STREAMING}], ids=["blocking", "streaming"]
)
def test_six_homes_train_together(mode: dict[str, object], tmp_path: Path) -> None:
    with training(tmp_path, min_peers=len(HOMES), **mode) as street:
        done = street.finish()
    for rounds in zip(*done, strict=True):
        assert len({event["root"] for event in rounds}) == 1
        assert {len(cut_of(event)) for event in rounds} == {len(HOMES)}
    assert not [reason for home in street.homes for reason in voids(home)]


def cut_for_a_while(street: Street) -> None:
    street.lab.cut(STRUCK)
    time.sleep(CUT_SECONDS)
    street.lab.mend(STRUCK)


def give_another_address(street: Street) -> None:
    street.lab.move(STRUCK, "44.0.77.1")


@pytest.mark.parametrize("strike", [cut_for_a_while, give_another_address])
def test_a_home_that_is_away_for_a_while_is_left_out_and_comes_back(
    tmp_path: Path, strike: Callable[[Street], None]
) -> None:
    with training(tmp_path, rounds=AWAY_ROUNDS, min_peers=QUORUM) as street:
        for home in range(len(HOMES)):
            street.wait_for(home, lambda event: event["event"] == "run.joined")
        # Its own word in the third round with everybody: the others have begun that one with it.
        settled = len(commits(street.homes[STRUCK])) + 3
        street.wait_for(STRUCK, lambda _: len(commits(street.homes[STRUCK])) >= settled)
        struck = commits(street.homes[STRUCK])[-1]
        strike(street)
        done = street.finish()
    roots: dict[int, set[Any]] = {}
    for event in (event for home in done for event in home):
        roots.setdefault(round_of(event), set()).add(event["root"])
    assert sorted(roots) == list(range(1, AWAY_ROUNDS + 1))
    assert all(len(different) == 1 for different in roots.values())
    peer = Identity.load_or_create(street.homes[STRUCK] / "identity.key").peer_id
    for home, told in enumerate(done):
        if home == STRUCK:
            continue
        without = [round_of(event) for event in told if peer not in cut_of(event) and round_of(event) >= struck]
        assert without or strike is give_another_address  # Which it may be over with before the round is.
        assert AWAY_ROUNDS not in without
    assert any(events(street.homes[STRUCK], f"round.{kind}") for kind in ("void", "missed", "behind"))
    # One attempt may be lost: that in which it proposes, or one in which its vote was needed.
    lost = [voids(home) for number, home in enumerate(street.homes) if number != STRUCK]
    assert all(len(reasons) <= 1 for reasons in lost), lost


def commits(home: Path) -> list[int]:
    """The rounds in which a peer has said what it contributes."""
    return [round_of(event) for event in events(home, "round.said") if event["step"] == "Commit"]


def round_of(event: Event) -> int:
    return int(str(event["round"]))
