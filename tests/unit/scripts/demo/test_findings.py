"""From event logs to the findings of a demo: synthetic peers with a known story, no network."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from flockstep.peer.log.telemetry import log_path, read_events
from flockstep.scripts.demo.findings import Findings, summary_of
from flockstep.scripts.demo.processes import Killed
from flockstep.scripts.watch.story import PeerStory, bits_per_parameter, rounds_of

PARAMETERS = 1_000_000
ROUNDS = 6
BYTES = 750_000  # What 4 of 4 peers send at 8 bits a parameter: 8e6 bits x 3/4 / 8.


def made_up_log(home: Path, peer_id: str, *, first: int, last: int, odd_root_in: int = -1, finish: bool = True) -> Path:
    """The log of a peer that took part in rounds `first` to `last` of a run of four."""
    events: list[dict[str, object]] = [
        {"event": "peer.start", "device": "cpu", "version": "0.1.0", "time": 1000.0},
        {"event": "run.joined", "run": "r" * 52, "peers": 3},
    ]
    bytes_of = {"sent": BYTES, "received": BYTES}
    for number in range(first, last + 1):
        roster = [peer for peer in "abcd" if peer != "c" or number <= 3]  # c is killed after round 3 had been cut.
        loss = 5.5 * math.exp(-0.2 * number) + (ord(peer_id) % 5) * 0.03
        for tick in range(5):
            figures = {"step": 20 * number + 4 * tick, "loss": loss - 0.05 * tick, "tokens_per_s": 900.0}
            time = 1000 + 10 * number + 1.5 * tick
            events.append({"event": "step", "time": time, "sent": 5 * BYTES, "rung": "direct", **figures})
        events.append({"event": "phase.end", "round": number, "tokens": 10_000})
        if number == 2:
            events.append(
                {"event": "round.void", "round": 2, "roster": roster, "reason": "lost its owner c", "sent": 7}
            )
        cut = [peer for peer in roster if peer != "d" or number != 3]
        root = f"{number if number != odd_root_in else 99:064x}"
        figures = {"time": 1008.5 + 10 * number, "loss": loss, "seconds": 1.5}
        events.append(
            {"event": "round.done", "round": number, "roster": roster, "cut": cut, "root": root} | figures | bytes_of
        )
    if finish:
        events += [{"event": "run.finished", "round": last}, {"event": "peer.leave", "reason": "the run is finished"}]
    home.mkdir(exist_ok=True)
    log_path(home).write_text("".join(json.dumps(event) + "\n" for event in events))
    return home


def story(home: Path, name: str, peer_id: str) -> PeerStory:
    peer = PeerStory(name, peer_id)
    for _, event in read_events(log_path(home)):
        peer.apply(event)
    return peer


@pytest.fixture
def peers(tmp_path: Path) -> list[PeerStory]:
    stories = [
        story(made_up_log(tmp_path / peer_id, peer_id, first=0, last=ROUNDS - 1), f"peer-{index}", peer_id)
        for index, peer_id in enumerate("abd", start=1)
    ]
    killed = story(made_up_log(tmp_path / "c", "c", first=0, last=2, finish=False), "peer-c", "c")
    killed.kill()
    return [*stories, killed]


@pytest.fixture
def keeper(tmp_path: Path) -> PeerStory:
    log = log_path(made_up_log(tmp_path / "k", "k", first=0, last=4, finish=False))
    log.write_text(log.read_text().replace('"device": "cpu"', '"device": "keeper"').replace('["a", ', '["k", "a", '))
    return story(log.parent, "keeper", "k")


@pytest.fixture
def findings(peers: list[PeerStory], keeper: PeerStory) -> Findings:
    return Findings(
        fragments=1,
        run_id="r" * 20,
        model="gpt 1m <bytes>",
        parameters=PARAMETERS,
        data="text:{stdlib}",
        peers=peers,
        keeper=keeper,
        seconds=70.0,
        heldout_loss_start=5.55,
        heldout_loss_end=2.5,
        prompt="def ",
        sample_start="\x03\x91",
        sample="main() -> <None>:\n    pass",
        killed=Killed(children=2, left=0, seconds=0.1),
    )


def test_rounds_are_joined_over_peers(peers: list[PeerStory]) -> None:
    rounds = rounds_of(peers)
    assert [facts.round for facts in rounds] == list(range(ROUNDS))
    assert all(facts.agreed and facts.outcome == "done" for facts in rounds)
    assert rounds[2].voids == ("lost its owner c",)
    assert rounds[3].cut == ("peer-1", "peer-2", "peer-c")
    assert set(rounds[5].state_roots) == {"peer-1", "peer-2", "peer-3"}


def test_a_keeper_is_shown_as_one_and_its_state_is_compared(peers: list[PeerStory], keeper: PeerStory) -> None:
    rounds = rounds_of([*peers, keeper])
    assert keeper.rounds[0].roster == ("k", "a", "b", "c", "d")
    assert rounds[0].roster == ("peer-1", "peer-2", "peer-c", "peer-3")
    assert set(rounds[4].state_roots) == {"peer-1", "peer-2", "peer-3", "keeper"}


def test_bits_count_what_was_sent_in_rounds_and_void_attempts(peers: list[PeerStory]) -> None:
    assert bits_per_parameter(peers, PARAMETERS) == pytest.approx((8.0, 8.0))
    assert bits_per_parameter([], PARAMETERS) is None
    assert peers[0].rounds[2].sent == BYTES + 7
    assert peers[0].rounds[3].sent == BYTES


def test_differing_roots_and_a_risen_loss_are_faults(tmp_path: Path, findings: Findings) -> None:
    assert findings.faults() == []
    odd = story(made_up_log(tmp_path / "odd", "d", first=0, last=5, odd_root_in=4), "peer-3", "d")
    broken = replace(findings, peers=[*findings.peers[:2], odd], heldout_loss_end=5.6, killed=Killed(2, 1, 2.0))
    assert broken.faults() == [
        "state roots differ in round 4",
        "1 of its 2 child processes still ran 2.0 s later.",
        "held-out loss did not fall (5.550 → 5.600, +0.9 %)",
    ]


def test_the_summary_has_the_promised_keys(findings: Findings) -> None:
    first, loss, roots, sent = findings.lines()
    assert first.startswith("4 peers, one of which was killed and one came later, trained one model of ")
    assert "5.550 → 2.500" in loss
    assert f"bit for bit, after {ROUNDS} of {ROUNDS} rounds" in roots
    assert "8.0 bits for each parameter" in sent
    figures = json.loads(json.dumps(summary_of(findings)))
    assert figures["heldout_loss_start"] == 5.55
    assert figures["heldout_loss_end"] == 2.5
    assert figures["bits_per_param_per_direction"] == pytest.approx(8.0)
    assert set(figures["rounds"][0]) >= {"round", "roster", "cut", "outcome", "state_roots"}
    assert set(figures["rounds"][0]["state_roots"]) <= set(figures["peers"])
