"""Bootstrap outages while peers train: their effect on the run and on a newcomer.

cd tests && python -m chaos.outage

Real `flockstep join` and `flockstep bootstrap` processes on loopback. One of two bootstraps is killed, then the other one
once the first is back, then both. A newcomer joins while none is there, and again as soon as one is back, which then has
lost its disk, too. It checks that no round is void, that no member loses another, and the newcomer's error message, and
prints the duration of each step.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio
from chaos.door import free_port, stranger
from flockstep.dht.published import validate_published
from flockstep.dht.run.link import JoinLink
from flockstep.peer.address import split_p2p
from flockstep.peer.errors import FlockstepError
from flockstep.peer.telemetry import Event, log_path, read_events
from flockstep.scripts.processes import PROCESS_POLL, Process, Processes
from support.bootstraps import Bootstrap

MEMBERS = 3
CALM = 5
"""Rounds that are waited for in each state of the bootstraps."""
PATIENCE = 120.0
RUN_TOML = """\
name = "outage"
seed = 3
[model]
name = "gpt"
size = "0.2m"
[data]
source = "text:{stdlib}"
sequence_length = 64
batch_size = 4
[inner]
steps = 20
[outer]
rounds = 100000
"""


@dataclass
class Member:
    """One `flockstep join` and what its log says."""

    process: Process
    home: Path
    events: list[Event] = field(default_factory=list)
    offset: int = 0

    def named(self, *names: str) -> list[Event]:
        for offset, event in read_events(log_path(self.home), offset=self.offset):
            self.offset = offset
            self.events.append(event)
        return [event for event in self.events if event["event"] in names]

    def has_finished(self) -> bool:
        """Whether it has a round behind it."""
        return self.round > 0

    @property
    def round(self) -> int:
        return max((int(str(event["round"])) for event in self.named("round.done")), default=0)


class Outage:
    """A run, its members, and its two bootstraps."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.folder = folder
        self.processes = processes
        self.ports = [free_port(), free_port()]
        self.bootstraps = [Bootstrap(self.home(number), port=self.ports[number]) for number in range(2)]
        toml = folder / "run.toml"
        toml.write_text(RUN_TOML)
        via = [word for bootstrap in self.bootstraps for word in ("--via", bootstrap.address())]
        create = ["run", "create", str(toml), *via, "--home", str(folder / "owner"), "--host", "127.0.0.1", "--port", "0"]
        creator = processes.start("run create", create, folder / "owner" / "log.txt")
        self.link = creator.await_line(r"flockstep://[^\s']+", PATIENCE)
        self.members: list[Member] = []

    def home(self, number: int) -> Path:
        return self.folder / f"bootstrap{number}"

    def close(self) -> None:
        for bootstrap in self.bootstraps:
            bootstrap.kill()

    def come(self) -> Member:
        home = self.folder / f"member{len(self.members)}"
        words = ["join", self.link, "--home", str(home), "--host", "127.0.0.1", "--port", "0", "--threads", "1"]
        member = Member(self.processes.start(home.name, words, home / "log.txt"), home)
        self.members.append(member)
        return member

    def wait(self, what: str, holds: Callable[[], object]) -> float:
        """Seconds until that holds."""
        begin = time.monotonic()
        while not holds():
            assert time.monotonic() - begin < PATIENCE, f"{what} did not come"
            for member in self.members:
                if member.process.code is not None:
                    raise member.process.died()
            time.sleep(PROCESS_POLL)
        return time.monotonic() - begin

    def train_on(self, what: str) -> None:
        """Some rounds with everybody in the cut, and nothing else."""
        first = max(member.round for member in self.members) + 1
        everybody = len(self.members)

        def whole(member: Member) -> bool:
            done = [event for event in member.named("round.done") if int(str(event["round"])) >= first]
            cuts = [event["cut"] for event in done]
            return len([cut for cut in cuts if isinstance(cut, list) and len(cut) == everybody]) >= CALM

        seconds = self.wait(f"rounds with {what}", lambda: all(map(whole, self.members)))
        send(f"{what}: {CALM} rounds of {everybody} in {seconds:.1f} s")

    def noticed(self) -> list[Event]:
        """What a run without any trouble does not tell."""
        names = ("round.void", "round.missed", "round.behind", "peer.lost", "peer.charged", "network.died")
        return [event for member in self.members for event in member.named(*names)]

    def start_again(self, number: int) -> float:
        """Start a bootstrap where it was; the point in time at which it serves."""
        self.bootstraps[number] = Bootstrap(self.home(number), port=self.ports[number])
        self.bootstraps[number].address()
        return time.monotonic()

    def names_all(self, number: int) -> bool:
        """Whether one bootstrap alone can name all members."""
        via = JoinLink.parse(self.link).bootstraps[number]

        async def ask() -> bool:
            async with stranger("127.0.0.1", validate=validate_published) as (host, directory):
                address, peer = split_p2p(via)
                await host.connect(peer, [address])
                await directory.add_server(peer)
                return len(await directory.find(JoinLink.parse(self.link).run_id)) == MEMBERS

        return trio.run(ask)

    def knock(self) -> str:
        """What `join` says to a newcomer whom nobody lets in."""
        words = ["join", self.link, "--home", str(self.folder / "newcomer"), "--host", "127.0.0.1", "--port", "0"]
        begin = time.monotonic()
        said = subprocess.run(
            [sys.executable, "-m", "flockstep", *words], capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        send(f"newcomer: exit code {said.returncode} after {time.monotonic() - begin:.1f} s: {said.stderr.strip()}")
        assert said.returncode == 1
        return said.stdout + said.stderr


def send(words: str) -> None:
    print(words, flush=True)  # noqa: T201


def main() -> None:
    """Everything once."""
    with tempfile.TemporaryDirectory() as folder, Processes() as processes:
        outage = Outage(Path(folder), processes)
        try:
            for _ in range(MEMBERS):
                outage.come()
            outage.wait("the first round of all", lambda: all(member.round >= 2 for member in outage.members))
            before = len(outage.noticed())
            outage.train_on("both bootstraps")
            for number in range(2):
                outage.bootstraps[number].kill()
                outage.train_on(f"bootstrap {number} killed")
                outage.start_again(number)
                seconds = outage.wait("the members' return", partial(outage.names_all, number))
                send(f"bootstrap {number} names {MEMBERS} members {seconds:.1f} s after it is back")
            for bootstrap in outage.bootstraps:
                bootstrap.kill()
            outage.train_on("both killed")
            said = outage.knock()
            assert said.count("\n") == 1, said
            assert "the bootstrap is down" in said
            assert "ask for a new one" in said
            outage.train_on("both killed, and a newcomer outside")
            (outage.home(0) / "directory").unlink()
            back = outage.start_again(0)
            seconds = outage.wait("the members' return", partial(outage.names_all, 0))
            send(f"bootstrap 0, with an empty disk, names {MEMBERS} members {seconds:.1f} s after it is back")
            while True:
                newcomer = outage.come()
                try:
                    outage.wait("the newcomer's first round", partial(Member.has_finished, newcomer))
                    break
                except FlockstepError as error:
                    send(f"newcomer {time.monotonic() - back:.1f} s after: {error}")
                    outage.members.remove(newcomer)
            send(f"a newcomer has ended a round {time.monotonic() - back:.1f} s after it is back")
            outage.train_on("one back, and the newcomer in")
            send(f"noticed: {[(e['event'], e.get('reason')) for e in outage.noticed()[before:]]}")
        finally:
            outage.close()


if __name__ == "__main__":
    main()
