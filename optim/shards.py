"""Which shards of the data are mine, and in which order.

Without any talk between peers: each peer walks through all shards in an order of its own, drawn from the run's seed,
the epoch and its id. Peers overlap by chance only, and a peer that comes back goes on where it was. What replaces it
by leases needs to offer `order` alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..peer.digest import keyed
from ..peer.transport import PeerId


@dataclass(frozen=True, slots=True)
class Shares:
    """The share of `peer_id` in the `num_shards` training shards of a run."""

    run_seed: int
    peer_id: PeerId
    num_shards: int

    def order(self, epoch: int) -> Iterator[int]:
        """The shards of my pass number `epoch` over the data, each once."""
        seed = keyed("shares", str(self.run_seed).encode(), self.peer_id.encode(), str(epoch).encode())
        random = np.random.Generator(np.random.PCG64(int.from_bytes(seed)))
        return iter(random.permutation(self.num_shards).tolist())
