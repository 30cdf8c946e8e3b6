"""`flockstep simulate`: production peers on a network in memory, under a virtual clock.

Theory of operation. One process, one thread, one event loop under a virtual clock that jumps to the next deadline. All
randomness is drawn from the seed, so a run is reproducible event by event. Its trace is a hash of the JSONL of all
events of all peers in their order. `peer` is a peer, `chaos` injects faults, `harm` assigns attacks and measures their
effect, `check` holds the invariants, and `report` prints the result.
"""

import gc
import hashlib
import json
import random
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import trio
from rich.console import Console

from ....collectives.allreduce.actions import OutcomeKind
from ....collectives.driver.contribution import Averaged, Contribution
from ....collectives.robust.rules import rule_named
from ....dht.directory.memory import MemoryBoard, MemoryDirectory
from ....dht.published import validate_published
from ....dht.run.admission import Charter
from ....peer import wire
from ....peer.base.digest import keyed
from ....peer.base.errors import LocalError, sole_error
from ....peer.identity import Identity
from ....peer.log.telemetry import Event, Telemetry
from ....peer.memory.network import MemoryNetwork, run_virtual
from ..attacks.protocol import TOGETHER
from .chaos import Chaos
from .check import Checks
from .harm import Harm, corrupt
from .meter import Meter
from .options import SimulateOptions
from .peer import SimulatedPeer
from .report import Report
from .state import State

GRAIN = 5e-3
"""Seconds; packets arrive on multiples of this, so that one wake-up of the clock delivers many of them."""
STANDSTILL = 900.0
"""Virtual seconds without a newly certified round, beyond an inner phase, after which the simulation ends."""
GC_THRESHOLD = (5_000_000, 20, 20)
"""Python's default first threshold, 700, starts a collection after every few messages of a round."""
LOG = "events.jsonl"


def simulate(options: SimulateOptions, tell: Callable[[str], object] = lambda progress: None) -> Report:
    """Run a simulation, and tell after each virtual second how far it is.

    Raises `LocalError` if the folder cannot be written, and what a custom attack raises.
    """
    with ExitStack() as stack:
        log: IO[bytes] | None = None
        if options.out is not None:
            log = stack.enter_context(_open(options.out))
        folder = stack.enter_context(TemporaryDirectory(prefix="flockstep-simulate-"))
        world = World(options, log, Path(folder), tell)
        stack.callback(gc.set_threshold, *gc.get_threshold())
        gc.set_threshold(*GC_THRESHOLD)
        try:
            seconds = run_virtual(world.run, seed=options.seed)
        except BaseExceptionGroup as group:  # From the nurseries of a peer, such as an error of a custom attack.
            raise sole_error(group) from None
    return Report(
        options=options,
        rows=list(world.checks.rows.values()),
        violations=world.checks.violations,
        unmet=[str(strike) for strike in world.chaos.unmet],
        living=len(world.living),
        harm=world.harm,
        seconds=seconds,
        cpu=world.meter.seconds,
        trace=str(world.trace),
    )


def _open(folder: Path) -> IO[bytes]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / LOG).open("wb")
    except OSError as error:
        raise LocalError(f"cannot write to {folder}: {error.strerror}", remedy="choose another --out") from error


class Trace:
    """The JSONL of all events in their order, and its hash; peers by their `names`."""

    def __init__(self, folder: Path, log: IO[bytes] | None) -> None:
        self.names: dict[str, str] = {}
        """Of the peers, by their ids."""
        self._folder = folder
        self._log = log
        self._hash = hashlib.blake2b()

    def named(self, text: str) -> str:
        """Replace peer ids by names, and remove the folder, whose name differs each time."""
        text = text.replace(str(self._folder), "")
        return re.sub(r"12D3KooW\w{44}", lambda found: self.names.get(found[0], found[0]), text)

    def write(self, record: Event) -> None:
        """Append a record."""
        line = self.named(json.dumps(record, ensure_ascii=False, separators=(",", ":"))).encode() + b"\n"
        self._hash.update(line)
        if self._log is not None:
            self._log.write(line)

    def __str__(self) -> str:
        return self._hash.hexdigest()[:16]


class World:
    """All peers of a simulation and their network."""

    def __init__(
        self, options: SimulateOptions, log: IO[bytes] | None, folder: Path, tell: Callable[[str], object]
    ) -> None:
        self.living: dict[str, SimulatedPeer] = {}
        self.meter = Meter()
        self.network: MemoryNetwork
        self.nursery: trio.Nursery
        self._folder = folder
        self._tell = tell
        self.trace = Trace(folder, log)
        self._options = options
        liars = [attackers for attackers in options.attacks for _ in range(attackers.count)]
        first = options.peers - len(liars)
        self.roles = {self._identity(first + at).peer_id: attackers for at, attackers in enumerate(liars)}
        """The attacks of the last founders, by peer id."""
        covered = {peer for peer, attackers in self.roles.items() if attackers.name in TOGETHER}
        self.checks = Checks(self.trace.named, rule_named(options.rule), self.roles, covered)
        self.harm = Harm(self.roles, self.trace.names)
        self._random = random.Random(f"{options.seed} roads")
        self._board = MemoryBoard()
        voting = first if options.voters == "honest" else options.peers
        # More would not find a seat each in the first roster.
        founders = frozenset(self._identity(number).peer_id for number in range(min(voting, wire.MAX_PARTS)))
        self.charter = Charter(founders=founders, keepers=founders if options.voters == "keepers" else None)

    async def run(self) -> float:
        """Run until all living peers have done all rounds, or none progresses; return the virtual seconds."""
        options = self._options
        trio.lowlevel.add_instrument(self.meter)
        self.network = MemoryNetwork(seed=options.seed, loss=options.loss, grain=GRAIN)
        async with self.network.open(), trio.open_nursery() as self.nursery:
            self.chaos = Chaos(self, options)
            for _ in range(options.peers):
                self._launch(founder=True)
            await self._watch()
            self.nursery.cancel_scope.cancel()
        return trio.current_time()

    async def _watch(self) -> None:
        last, since = 0, 0.0
        while not self._over():
            await trio.sleep(1.0)
            newest = max((row.number for row in self.checks.rows.values() if row.certified), default=0)
            self._tell(f"round {newest} of {self._options.rounds} certified, {trio.current_time():.0f} virtual seconds")
            if newest > last:
                last, since = newest, trio.current_time()
            if trio.current_time() - since > STANDSTILL + self._options.steps_time.high:
                self.checks.blame("progress", f"no round was certified in {STANDSTILL:g} s after round {last}")
                break
        self.checks.finish(self.honest())

    def honest(self) -> list[SimulatedPeer]:
        """Return the living peers that do not attack."""
        return [peer for peer in self.living.values() if peer.peer not in self.roles]

    def _over(self) -> bool:
        """Return True if all living honest peers have done all rounds and hold one state."""
        peers, rounds = self.honest(), self._options.rounds
        is_done = all(peer.settled and peer.place.round >= rounds for peer in peers)
        return is_done and len({peer.place.head for peer in peers}) == 1

    def join(self, number: int | None = None) -> None:
        """Start one more peer, which knows only the directory; with a number a killed one, with its key and its disk."""
        self._launch(founder=False, number=number)

    def _launch(self, *, founder: bool, number: int | None = None) -> None:
        if number is None:
            number = len(self.trace.names)
        options = self._options
        identity = self._identity(number)
        state = State(options.seed)
        peer = SimulatedPeer(f"p{number}", identity, options, self, state)
        self.trace.names[peer.peer] = peer.name
        telemetry = Telemetry(clock=trio.current_time)
        telemetry.subscribe(lambda event: self._event(peer, event))
        rate = options.bandwidth.draw(self._random) if options.bandwidth is not None else None
        latency = options.latency.draw(self._random) / 2
        transport = self.network.transport(peer.peer, up=rate, down=rate, latency=latency, telemetry=telemetry)
        directory = MemoryDirectory(self._board, peer.peer, transport.addresses(), validate_published)
        self.living[peer.peer] = peer
        if not founder:
            self.note("peer.joined", peer=peer.peer)

        async def live() -> None:
            await peer.live(transport, directory, telemetry, self._folder / peer.name, founder=founder)

        self.nursery.start_soon(live)

    def _identity(self, number: int) -> Identity:
        seed = str(self._options.seed).encode()
        return Identity.from_seed(keyed("key of a simulated peer", seed, str(number).encode()))

    def end(self, peer: SimulatedPeer, why: str) -> None:
        """Kill a peer."""
        self.note("peer.gone", peer=peer.peer, reason=why)
        del self.living[peer.peer]
        self.network.kill(peer.peer)
        peer.scope.cancel()

    def assembled(self, peer: SimulatedPeer) -> None:
        """A peer is assembled, and has sent no message yet."""
        corrupt(peer, self.roles)

    def sent(self, sender: SimulatedPeer, message: wire.RoundMessage) -> None:
        """A peer has sent a message of a round."""
        if isinstance(message, wire.Ready):
            self.checks.row(message.slot.round, trio.current_time())
        self.chaos.sent(sender, message)

    def started(self, peer: SimulatedPeer, contribution: Contribution) -> None:
        """Take note of what a peer contributes to an attempt that begins for it."""
        self.checks.started(peer, contribution)

    def ended(self, peer: SimulatedPeer, averaged: Averaged) -> None:
        """An attempt has ended for a peer, and its state includes the round if it was certified."""
        if peer.peer in self.roles:
            return
        self.checks.ended(peer, averaged, trio.current_time())
        if averaged.outcome.kind is OutcomeKind.DONE:
            self.harm.ended(averaged.outcome)

    def note(self, event: str, *, peer: str = "", reason: str = "") -> None:
        """Emit an event of the simulation itself."""
        self._event(None, {"event": event, "peer": peer, "reason": reason})

    def _event(self, at: SimulatedPeer | None, event: Event) -> None:
        record = {"time": round(trio.current_time(), 6), "at": at.name if at is not None else "", **event}
        self.trace.write(record)
        if at is not None and at.peer in self.roles:
            self.harm.made[at.peer] += event["event"] == "attack.made"
        elif at is not None:
            self.checks.event(at.name, event)
            self.harm.event(at.name, event)


def run_simulate(options: SimulateOptions, write_line: Callable[[str], None], *, as_json: bool) -> bool:
    """Simulate and report; return True if all invariants held."""
    with Console(stderr=True).status(f"{options.peers} peers start") as shown:  # Only a terminal shows it.
        report = simulate(options, shown.update)
    report.show(write_line, as_json=as_json)
    return not report.violations
