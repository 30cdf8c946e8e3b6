"""A group of real peer processes: commanded, observed, and checked after every round.

Every wait is for an event of a process, and a timeout shows its last output. `PATIENCE` bounds only how long a broken build
hangs.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from chaos.seeded import mean_hash
from flockstep.collectives.vector.codec import CELL
from support.commands import Command

Event: TypeAlias = dict[str, Any]
"""One line of a peer: an event of its telemetry, or an answer to a command."""
PATIENCE = 120.0
PATHS = os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
"""Where the peers' program is found, wherever the tests were started from."""


class Peer:
    """One peer process, as seen from outside."""

    def __init__(self, index: int, command: Iterable[str], news: threading.Condition) -> None:
        self.index = index
        self.id = ""
        self.addresses: list[str] = []
        self.events: list[Event] = []
        self.ended = False
        self.stopped = False
        self._news = news
        self.popen = _start(tuple(command))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.on_event: Callable[[Peer, Event], None] | None = None

    def send(self, op: str, **arguments: Any) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.popen.stdin.flush()

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)
        self.stopped = number == signal.SIGSTOP

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._reader.join()
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            pipe.close()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            event = json.loads(line)
            if self.on_event is not None:
                self.on_event(self, event)
            with self._news:
                self.events.append(event)
                self._news.notify_all()
        with self._news:
            self.ended = True
            self._news.notify_all()


def _start(inside: tuple[str, ...]) -> "Command | subprocess.Popen[str]":
    """A peer's process: forked, or spawned where it is to be `inside` of a network of its own."""
    if not inside:
        return Command(program="chaos.peer", stdin=subprocess.PIPE)
    # One thread each: several peers on one machine share its cores.
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [*inside, sys.executable, "-m", "chaos.peer"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


@dataclass
class Report:
    """A round as the survivors saw it."""

    round: int
    cut: list[int]
    seconds: float
    """Of the slowest survivor, from being told to take part to holding the certified result."""
    attempts: int
    events: dict[int, list[Event]] = field(repr=False, default_factory=dict)
    """By peer, those of this round."""

    def first(self, index: int, name: str, **fields: Any) -> Event | None:
        """The first event of that name and with these fields that a peer told in this round."""
        for event in self.events.get(index, []):
            if event["event"] == name and fields.items() <= event.items():
                return event
        return None


class Group:
    """`count` peers who know each other. Use as a context: on leaving no process is left."""

    def __init__(
        self,
        count: int,
        *,
        seed: int = 0,
        params: int = 4 * CELL,
        codec: str = "int4",
        floor: float = 5.0,
        launch: Callable[[int], tuple[list[str], str]] = lambda index: ([], "127.0.0.1"),
    ) -> None:
        self.count = count
        self.setting: Event = {"count": count, "seed": seed, "params": params, "codec": codec, "floor": floor}
        self.peers: list[Peer] = []
        self.certificate = ""
        self.next_round = 1
        self._launch = launch
        self._news = threading.Condition()

    def __enter__(self) -> Self:
        try:
            for index in range(self.count):
                self.peers.append(self._start(index))
            for peer in self.peers:
                self._greet(peer)
            self.meet()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for peer in self.peers:
            peer.end()

    def living(self) -> list[Peer]:
        """Those whom no strike has hit."""
        return [peer for peer in self.peers if not peer.ended and not peer.stopped]

    def order(self) -> list[Peer]:
        """The living, the proposer of the next round first: voters take turns by id."""
        peers = sorted(self.living(), key=lambda peer: peer.id)
        turn = self.next_round % len(peers)
        return peers[turn:] + peers[:turn]

    def meet(self) -> None:
        """All who live know and watch each other, and stand at the next round."""
        living = self.living()
        marks = {peer.index: len(peer.events) for peer in living}
        members = [(peer.index, peer.id, peer.addresses) for peer in living]
        for peer in living:
            peer.send("expect", round=self.next_round, certificate=self.certificate)
            peer.send("meet", members=members)
        for peer in living:
            self.wait(peer, "expecting", since=marks[peer.index])
            self.wait(peer, "met", since=marks[peer.index])

    def revive(self, index: int) -> None:
        """A process in the place of one that was killed."""
        self.peers[index].end()
        self.peers[index] = self._start(index)
        self._greet(self.peers[index])
        self.meet()

    def resume(self, index: int) -> None:
        """SIGCONT, for whoever is stopped, and everybody meets again."""
        self.peers[index].signal(signal.SIGCONT)
        self.meet()

    def round(self, victims: Mapping[int, tuple[str, int]] | None = None) -> Report:
        """One round, in which the `victims` (index: word, signal) are struck. Holds the survivors to their promises."""
        victims = victims or {}
        living = self.living()
        marks = {peer.index: len(peer.events) for peer in living}
        for peer in living:
            word, number = victims.get(peer.index, ("", 0))
            peer.send("prepare", round=self.next_round, at=word, signal=number)
        for peer in living:
            self.wait(peer, "prepared", since=marks[peer.index])
        for peer in living:
            peer.send("round")
        for index in victims:
            self.wait(self.peers[index], "struck", since=marks[index])
            if victims[index][1] == signal.SIGKILL:
                assert self.peers[index].popen.wait() == -signal.SIGKILL
                self._await(lambda index=index: self.peers[index].ended or None, self.peers[index])  # type: ignore[misc]
            else:
                self.peers[index].stopped = True
        survivors = [peer for peer in living if peer.index not in victims]
        ends = {peer.index: self.wait(peer, "round.over", since=marks[peer.index]) for peer in survivors}
        report = self._hold(ends)
        report.events = {peer.index: peer.events[marks[peer.index] :] for peer in living}
        return report

    def wait(self, peer: Peer, name: str, *, since: int = 0, **fields: Any) -> Event:
        """The first event of that name and with these fields behind the first `since` events of a peer."""

        def find() -> Event | None:
            found = (event for event in peer.events[since:] if event["event"] == name)
            return next((event for event in found if fields.items() <= event.items()), None)

        event: Event = self._await(find, peer)
        return event

    def _hold(self, ends: Mapping[int, Event]) -> Report:
        """The promises of a round: certified for all, the same bytes, and these are the mean of the certified cut."""
        kinds = {index: (end["kind"], end["reason"]) for index, end in ends.items()}
        assert {kind for kind, _ in kinds.values()} == {"done"}, kinds
        (cut,) = {tuple(end["cut"]) for end in ends.values()}
        (found,) = {end["hash"] for end in ends.values()}
        setting = self.setting
        num_cells = -(-setting["params"] // CELL)
        parts = max((end["parts"] for end in ends.values()), key=len)  # Who has fetched the result knows none.
        due = mean_hash(setting["seed"], cut, parts, self.next_round, num_cells, setting["codec"])
        assert found == due, f"round {self.next_round} gave other bytes than the weighted mean of {cut}"
        self.certificate = next(iter(ends.values()))["certificate"]
        self.next_round += 1
        seconds = max(end["seconds"] for end in ends.values())
        attempts = max(end["attempts"] for end in ends.values())
        return Report(self.next_round - 1, list(cut), seconds, attempts)

    def _start(self, index: int) -> Peer:
        command, host = self._launch(index)
        peer = Peer(index, command, self._news)
        peer.send("open", **self.setting, index=index, host=host)
        return peer

    def _greet(self, peer: Peer) -> None:
        opened = self.wait(peer, "opened")
        peer.id, peer.addresses = opened["peer"], opened["addresses"]

    def _await(self, find: Callable[[], Any], peer: Peer) -> Any:
        deadline = time.monotonic() + PATIENCE
        with self._news:
            while (found := find()) is None:
                last = peer.events[-8:]
                assert not peer.ended, f"peer {peer.index} has ended; its last words: {last}"
                assert self._news.wait(deadline - time.monotonic()), f"no word of peer {peer.index}; its last: {last}"
        return found
