"""Fresh keys without end from one host, against honest peers that go on training: what they cost each of these.

    cd tests && python -m chaos.sybils --peers 10 --keys 0 20000

The honest peers are those of `flockstep simulate`, on the network in memory and under virtual time; their founders keep the
run. The host connects under one fresh key after another. Each says that it is a member, brings records of 255 more keys, and
says Ready for the round. The network in memory has no addresses, so that the limits by address and network, which a real host
meets as well, do not help. All is signed before the measurement begins.
"""

import argparse
import resource
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import trio
from flockstep.collectives.chain.certificate import value_of
from flockstep.collectives.chain.voters import electorate_after
from flockstep.dht.members.body import MemberBody, MemberState
from flockstep.dht.members.table import MemberTable
from flockstep.peer import wire
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.digest import keyed
from flockstep.peer.base.transport import PeerId
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.node.node import Node
from flockstep.peer.wire.signed import sign
from flockstep.scripts.lab.simulate.options import SimulateOptions, Span
from flockstep.scripts.lab.simulate.peer import SIM_RUN
from flockstep.scripts.lab.simulate.world import World
from support.simulations import CALM

PAGE = 256
"""Keys of one session, its own included."""
HOLD_SECONDS = 1.0
"""Virtual seconds of a session."""
LAYOUT = keyed("layout of the simulated model")
"""That of the honest peers: members of another model count for nothing."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What an honest peer paid."""

    seconds: float
    """Virtual ones."""
    cpu_share: float
    """Of a core, for each honest peer; the work of the host is in it, too."""
    megabytes: float
    """By which the process grew, for each honest peer."""
    rounds: int
    settled: int
    """Honest peers that took part at the end, the newcomers among them."""
    voters: frozenset[PeerId]
    """Of all electorates."""
    sybils: frozenset[PeerId]
    """The keys that the host has connected with."""
    violations: tuple[str, ...]


class Besieged(World):
    """A simulation with a host of Sybils."""

    def __init__(self, options: SimulateOptions, folder: Path, pages: list[tuple[Identity, tuple[bytes, ...]]]) -> None:
        super().__init__(options, None, folder, lambda progress: None)
        self.sybils = frozenset(identity.peer_id for identity, _ in pages)
        self._pages = pages

    async def _watch(self) -> None:
        self.nursery.start_soon(self._besiege)
        await super()._watch()

    async def _besiege(self) -> None:
        for number, (identity, records) in enumerate(self._pages):
            await self._session(identity, records)
            self.network.kill(identity.peer_id)
            if number == len(self._pages) // 2:
                self.join()  # A newcomer, in the middle of it.

    async def _session(self, identity: Identity, records: tuple[bytes, ...]) -> None:
        telemetry = Telemetry(clock=trio.current_time)
        transport = self.network.transport(identity.peer_id, telemetry=telemetry)
        async with Node(transport, identity, PeerConfig(), telemetry, inline=True) as node:
            honest = list(self.living.values())
            for peer in honest:
                node.learn(peer.peer, (f"/memory/{peer.peer}",))
            node.send([peer.peer for peer in honest], wire.Members(records[:1]))
            await trio.sleep(HOLD_SECONDS / 2)
            node.send([peer.peer for peer in honest], wire.Members(records[1:]))
            place = max((peer.place for peer in honest if peer.settled), key=lambda place: place.round, default=None)
            if place is not None and place.round:
                slot = wire.Slot(SIM_RUN, place.round + 1, place.head.hash)
                ready = wire.Ready(slot, place.root, 1000, 1e6, 1e6, bytes(32))
                node.send([peer.peer for peer in honest], sign(identity, ready))
            await trio.sleep(HOLD_SECONDS / 2)


def page_of(number: int) -> tuple[Identity, tuple[bytes, ...]]:
    """Return a key, and its record with those of 255 more."""
    keys = [Identity.from_seed(keyed("sybil", str(number).encode(), str(at).encode())) for at in range(PAGE)]
    body = MemberBody(state=MemberState.TRAINING, layout=LAYOUT)
    records = tuple(MemberTable(SIM_RUN, one.peer_id).update_own(one, body, 0.0).encode() for one in keys)
    return keys[0], records


def besieged(peers: int, keys: int, rounds: int) -> Cost:
    """Simulate these honest peers with a host of so many keys, for this many rounds."""
    options = replace(CALM, peers=peers, rounds=rounds, rule="mean", steps_time=Span(10.0, 12.0), voters="keepers")
    pages = [page_of(number) for number in range(keys // PAGE)]
    with tempfile.TemporaryDirectory() as folder:
        world = Besieged(options, Path(folder), pages)
        process = psutil.Process()
        before, began = process.memory_info().rss, time.process_time()
        seconds = run_virtual(world.run, seed=options.seed)
        spent, grown = time.process_time() - began, process.memory_info().rss - before
    certificates = [outcome.certificate for row in world.checks.rows.values() for outcome in row.results.values()]
    return Cost(
        seconds=seconds,
        cpu_share=spent / seconds / peers,
        megabytes=grown / 1e6 / peers,
        rounds=sum(bool(row.certified) for row in world.checks.rows.values()),
        settled=sum(peer.settled for peer in world.living.values()),
        voters=frozenset(
            voter
            for certificate in certificates
            if certificate is not None
            for voter in electorate_after(value_of(certificate), world.charter).votes
        ),
        sybils=world.sybils,
        violations=tuple(violation.text for violation in world.checks.violations),
    )


def main() -> None:
    """Measure with each of the numbers of keys."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=10)
    parser.add_argument("--keys", type=int, nargs="+", default=[0, 20_000])
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    for keys in options.keys:
        cost = besieged(options.peers, keys, options.rounds)
        print(  # noqa: T201
            f"{keys} keys, {options.peers} peers: {cost.rounds} rounds in {cost.seconds:.0f} virtual s, "
            f"{100 * cost.cpu_share:.2f} % of a core and {cost.megabytes:.1f} MB for each peer, {cost.settled} take part, "
            f"{len(cost.voters)} have had votes, {len(cost.voters & cost.sybils)} of them Sybils, "
            f"{len(cost.violations)} violations, "
            f"at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB in all",
            flush=True,
        )


if __name__ == "__main__":
    main()
