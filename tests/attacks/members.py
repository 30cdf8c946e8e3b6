"""Members of a real run as processes, honest ones and attackers, commanded over the bridge.

Every wait is for an event of a process; `PATIENCE` bounds only how long a broken build hangs.
"""

import queue
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

from attacks.peer import HONEST, Corrupt, Stand, Train, entry
from flockstep.collectives.agreement.electorate import Electorate
from flockstep.optim.member.border import BLANK, OpenRun, Pulse, TelemetryNotice
from flockstep.peer import wire
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.identity import Identity
from flockstep.peer.process.bridge import Command, NetworkProcess, Notice
from support.bootstraps import Bootstrap, publish_run

T = TypeVar("T")
Event: TypeAlias = dict[str, Any]
"""One of a peer's telemetry."""
RUN = """
name = "attacked"
[data]
source = "own"
[outer]
rounds = 1000
checkpoint_every = 1
[codec]
contribution = "int8"
result = "int8"
[timing]
floor = 10.0
"""
PATIENCE = 120.0
MOST_ROUNDS = 3
ENTRY = entry(HONEST)


def spawn() -> NetworkProcess:
    return NetworkProcess(ENTRY, (TelemetryNotice, Pulse))


class Member:
    """One peer, as seen from outside."""

    def __init__(self, home: Path, process: NetworkProcess) -> None:
        self.home = home
        self.id = ""
        self.position = BLANK
        self._process = process
        self._events: list[Event] = []
        self._mark = 0

    def open(self, link: str) -> None:
        """Reach the run, without being a member yet."""
        config = PeerConfig(home=self.home, host="127.0.0.1", port=0, upnp=False)
        self.id = self.call(OpenRun(link, config)).peer_id

    def stand(self) -> None:
        """Become a member that holds the run's state."""
        self.position = self.call(Stand())

    def train(self, round_: int, members: Iterable[str]) -> None:
        """Take part until this round is done, from when these are the members who train, as far as it knows."""
        self.position = self.call(Train(round_, tuple(sorted(members))))

    def call(self, command: Command[T]) -> T:
        return self._process.call(command, timeout=PATIENCE)

    def post(self, command: Command[Any]) -> None:
        self._process.post(command)

    def mark(self) -> None:
        """What it tells from now on is news."""
        self._drain()
        self._mark = len(self._events)

    def news(self, name: str, **fields: Any) -> list[Event]:
        """The events of a name and with these fields since the mark."""
        self._drain()
        found = (event for event in self._events[self._mark :] if event["event"] == name)
        return [event for event in found if fields.items() <= event.items()]

    def wait(self, name: str, **fields: Any) -> Event:
        """The first such event since the mark."""
        while not (found := self.news(name, **fields)):
            try:
                self._take(self._process.notices.get(timeout=PATIENCE)[1])
            except queue.Empty:
                raise AssertionError(f"no {name} {fields}; its last words are {self._events[-8:]}") from None
        return found[0]

    def kill(self) -> None:
        """SIGKILL, as often as you like."""
        self._process.stop(0.0)

    def fallen(self) -> bool:
        """Whether it has killed itself, as it was told to; waits for its end."""
        return self._process._process.wait(PATIENCE) == -signal.SIGKILL

    def _drain(self) -> None:
        while not self._process.notices.empty():
            self._take(self._process.notices.get()[1])

    def _take(self, notice: Notice) -> None:
        if isinstance(notice, TelemetryNotice):
            self._events.append(notice.event)


def at_once(members: Iterable[Member], do: Callable[[Member], T]) -> list[T]:
    """Do it with all of them at the same time."""
    everybody = list(members)
    with ThreadPoolExecutor(len(everybody)) as pool:
        return list(pool.map(do, everybody))


class Company:
    """The honest members of a run, whoever lies among them, and their rounds. Use as a context: no process is left."""

    def __init__(self, folder: Path, num_honest: int) -> None:
        self.honest: list[Member] = []
        self.round = 0
        self._folder = folder
        self._num_honest = num_honest
        self._bootstrap = Bootstrap(folder / "bootstrap")
        self._spare = [spawn() for _ in range(num_honest)]
        self._num_liars = 0
        self._banned: set[str] = set()

    def __enter__(self) -> Self:
        try:
            self._link = publish_run(RUN, (self._bootstrap.address(),), self._folder / "honest-0")
            for number in range(self._num_honest):
                self.honest.append(self._start(self._folder / f"honest-{number}"))
            at_once(self.honest, Member.stand)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self.honest:
            member.kill()
        for process in self._spare:
            process.stop(0.0)
        self._bootstrap.kill()

    @property
    def ids(self) -> list[str]:
        """The honest, sorted."""
        return sorted(member.id for member in self.honest)

    @contextmanager
    def joined_by(self, attack: str, *, proposing: bool = False) -> Iterator[Member]:
        """A newcomer that makes this attack. It votes from its second round on; `proposing`: whether it, and not one of the
        honest, proposes in the first attempt of that.
        """
        for _ in range(self._num_liars and wire.MAX_MISSED + 1):
            self.run_rounds()  # The newcomer before it, which is gone, has a vote until it has missed so many rounds.
        home = self._folder / f"liar-{self._num_liars}"
        self._num_liars += 1
        self._choose_key(home, proposing)
        liar = self._start(home)
        try:
            liar.call(Corrupt(attack))
            liar.stand()
            yield liar
        finally:
            liar.kill()

    def run_rounds(self, *liars: Member, falling: Member | None = None) -> None:
        """The next round of all, in which one may fall and come back: all who are honest end it with one state.

        Where the others are too few for a quorum, they wait for who fell.
        """
        self.round += 1
        members = {member.id for member in (*self.honest, *liars)} - self._banned
        for member in self.honest:
            member.mark()
        for liar in liars:
            liar.post(Train(self.round, tuple(sorted(members))))

        def through(member: Member) -> None:
            if member is falling:
                member.post(Train(self.round, tuple(sorted(members))))
                assert member.fallen()
                self.restart(member).train(self.round, ())  # The others may have banned a liar meanwhile.
            else:
                member.train(self.round, members)

        at_once(self.honest, through)
        assert {member.position.round for member in self.honest} == {self.round}
        assert len({member.position.root for member in self.honest}) == 1

    def run_until(self, seen: Callable[[], bool], *liars: Member) -> None:
        """Rounds until one is seen that is as it should be: on a busy machine a connection may break in the first."""
        for _ in range(MOST_ROUNDS):
            self.run_rounds(*liars)
            if seen():
                return
        raise AssertionError(f"not seen in {MOST_ROUNDS} rounds: {self.cuts()}, {self.voids()}")

    def all_ban(self, liar: Member, proof: str) -> None:
        """Everybody bans it, for this, and nobody who is honest."""
        for member in self.honest:
            assert proof in member.wait("peer.banned", peer=liar.id)["reason"]
        self._banned.add(liar.id)
        assert self.banned() <= self._banned

    def banned(self) -> set[str]:
        """Whom anybody has banned in the last round."""
        return {event["peer"] for member in self.honest for event in member.news("peer.banned")}

    def voids(self) -> list[int]:
        """How many attempts of the last round came to nothing, for each."""
        return [len(member.news("round.void")) for member in self.honest]

    def cuts(self) -> set[tuple[str, ...]]:
        """Whose contributions entered the last round; one cut, if all is well."""
        return {tuple(sorted(event["cut"])) for member in self.honest for event in member.news("round.done")}

    def restart(self, member: Member) -> Member:
        """Another process with the same home, once its former one has been killed."""
        member.kill()
        again = self._start(member.home)
        self.honest[self.honest.index(member)] = again
        again.stand()
        return again

    def _start(self, home: Path) -> Member:
        """A process that has reached the run; those to come load their libraries meanwhile."""
        self._spare.append(spawn())
        member = Member(home, self._spare.pop(0))
        try:
            member.open(self._link)
        except BaseException:
            member.kill()
            raise
        return member

    def _choose_key(self, home: Path, proposing: bool) -> None:
        """Make keys until one of the honest, or the newcomer, proposes in the round after the next."""
        while True:
            identity = Identity.generate()
            voters = sorted([identity.peer_id, *self.ids])
            proposer = Electorate(dict.fromkeys(voters, 1)).proposer(self.round + 2, attempt=0)
            if proposer == identity.peer_id if proposing else proposer in self.ids:
                break
        home.mkdir()
        (home / "identity.key").write_bytes(identity._to_pem())
