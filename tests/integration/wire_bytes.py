"""A program in a network namespace: one int4 round of 4 hosts, and the interface's bytes.

unshare --net --map-root-user python wire_bytes.py 2000000
"""

import fcntl
import json
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import trio
from flockstep.collectives.driver.contribution import Contribution
from flockstep.collectives.driver.rounds import Averager
from flockstep.collectives.spec import Spec
from flockstep.collectives.vector.codec import CELL, FlatSum, codec_named
from flockstep.dht.run.admission import Charter
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.host import open_host
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.node.node import Node

PEERS = 4
IDENTITIES = [Identity.from_seed(bytes([number + 1]) * 32) for number in range(PEERS)]
ROUNDS = 2
HANG_SECONDS = 240.0
"""Every deadline of a round: on a busy machine the others go on without a member that misses one."""


def raise_loopback() -> None:
    """What `ip link set lo up` does, without the program."""
    set_flags, up_and_running = 0x8914, 0x41
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, set_flags, struct.pack("16sh14x", b"lo", up_and_running))


def sent_on_loopback() -> int:
    """All bytes of all packets that the interface has sent, TCP and IP headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[8])
    raise LookupError("there is no lo")


class Peer:
    """A node and its averager on real sockets."""

    def __init__(self, identity: Identity, num_cells: int) -> None:
        self.identity = identity
        self.num_cells = num_cells
        self.active: frozenset[str] = frozenset()

    async def run(self, *, task_status: Any) -> None:
        config = PeerConfig(host="127.0.0.1", port=0)
        telemetry = Telemetry()
        codec = codec_named("int4")
        spec = Spec(
            run="bytes",
            num_cells=self.num_cells,
            contribution=codec,
            output=codec,
            min_peers=PEERS,
            floor=HANG_SECONDS,
            ceiling=HANG_SECONDS,
            charter=Charter(founders=frozenset(identity.peer_id for identity in IDENTITIES)),
        )
        async with (
            open_host(self.identity, config, telemetry) as host,
            Node(host, self.identity, config, telemetry) as node,
        ):
            self.node = node
            self.averager = Averager(node, spec, lambda: self.active)
            task_status.started(self)
            await trio.sleep_forever()

    async def round(self) -> None:
        vector = np.random.default_rng(0).normal(size=self.num_cells * CELL).astype(np.float32)
        for number in range(1, ROUNDS + 1):
            contribution = Contribution(
                vector=FlatSum([vector]), round=number, base_root=bytes(32), tokens=1, steps=1, loss=0.0, grace=0.0
            )
            averaged = await self.averager.average(contribution, lambda bounds, outputs: bytes(32))
            assert averaged.outcome.certificate is not None, averaged.outcome.reason
            assert len(averaged.outcome.value.contributors) == PEERS, "a contribution was left out, and its bytes"


async def main(parameters: int) -> None:
    cells = parameters // CELL
    peers = [Peer(identity, cells) for identity in IDENTITIES]
    async with trio.open_nursery() as nursery:
        for peer in peers:
            await nursery.start(peer.run)
        for peer in peers:
            peer.active = frozenset(other.identity.peer_id for other in peers)
            for other in peers:
                peer.node.learn(other.identity.peer_id, other.node.transport.addresses())
            peer.node.watch(peer.active)
        before = sent_on_loopback()
        async with trio.open_nursery() as rounds:
            for peer in peers:
                rounds.start_soon(peer.round)
        sent = sent_on_loopback() - before
        nursery.cancel_scope.cancel()
    # Each peer sends a contribution's parts to the other owners, and its part's output to the others: two directions.
    useful = 2 * parameters * (PEERS - 1) / PEERS * PEERS * ROUNDS
    print(json.dumps({"bits_per_parameter": sent * 8 / (useful / 2)}))  # noqa: T201


raise_loopback()
trio.run(main, int(sys.argv[1]))
