"""From the state that I hold to the run's: by replaying the rounds that I missed, or by taking another peer's state.

Theory of operation. A member whose chain of certificates is better than mine holds what I should hold. If its chain
goes on from mine and is at most a few rounds further, I fetch those rounds' certificates and outputs from whoever has
them, and make their outer steps: each only once I know that it leads to the certified root, so that what I hold is the
state of some certified round at every moment. Otherwise, or if anything of that is missing, I take the state leaf by
leaf. Either way the ledger follows the state: it joins the other chain where it left mine, and where none of mine is in
it, as after a partition since the beginning, or for a newcomer, it begins anew with the certificate of that state.

Error feedback and the progress since the last round are the trainer's and stay as they are.
A member that could not prove what it stated is not believed again until it states something else.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import trio

from ..collectives import merkle
from ..collectives.averager import Spec
from ..collectives.chain import Link
from ..collectives.codec import Floats
from ..collectives.ledger import Ledger
from ..collectives.quorum import check_certificate, genesis, verify
from ..collectives.replay import KEPT_ROUNDS, Kept, ask_certificates, fetch_outputs, fetch_trail, in_my_order
from ..collectives.transfer import Place, ask_state, take_leaves
from ..dht.gossip import Gossip
from ..dht.members import Member
from ..peer import wire
from ..peer.bulk import Blob
from ..peer.digest import DIGEST_BYTES
from ..peer.errors import NetworkError, ProtocolViolation, RemoteError, sole_error
from ..peer.node import Node
from ..peer.transport import PeerId
from .apply import decode_outputs, next_root
from .outer import OuterSettings, outer_step
from .standing import choose_giver, goes_first, training

Leaves: TypeAlias = tuple[list[bytes], list[bytes]]
"""The hashes of θ's leaves, and of m's."""
LOOK_SECONDS = 1.0
"""While waiting for another newcomer: its record may also run out, which is no change of the table."""
PAUSE_SECONDS = 0.2
"""After a giver failed: its state may just be changing."""


class CatchUp:
    """One peer's state (θ, m), and where it stands."""

    def __init__(
        self, node: Node, spec: Spec, outer: OuterSettings, state: tuple[Floats, Floats], ledger: Ledger, kept: Kept
    ) -> None:
        self._node = node
        self._spec = spec
        self._outer = outer
        self._theta, self._momentum = state
        self._ledger = ledger
        self._kept = kept
        self._disproved: dict[PeerId, tuple[bytes, bytes]] = {}
        self._tired: set[PeerId] = set()
        self.place = Place(0, bytes(DIGEST_BYTES), 0, None)
        self.num_bytes = 0
        """Fetched so far."""
        self.changed = False
        """Whether θ or m may be others than when this was last set to False."""

    def credible(self, members: Sequence[Member]) -> list[Member]:
        """Those of the members who have not failed to prove what they state."""
        return [
            member for member in members if self._disproved.get(member.peer) != (member.body.head, member.body.root)
        ]

    def giver(self, members: Sequence[Member]) -> Member | None:
        """Whose state I should take; None if mine is the run's."""
        return choose_giver(self.credible(members), self._node.peer_id, self.place, tired=self._tired)
    async def resume(self, place: Place) -> None:
        """I begin at `place`; at the run's start the ledger keeps what it knows until I have looked for who has it."""
        if place.certificate is None:
            self.place = place
        else:
            await self.advance(place)

    async def reach(self, gossip: Gossip, patience: float) -> tuple[Leaves, PeerId | None]:
        """Hold the run's state, or my own where I start the run; its leaves, and from whom it came.

        Of several who come first, whoever does not start the run waits up to `patience` seconds for who does.
        """
        leaves, source, me = await self.hash_state(), None, self._node.peer_id
        deadline = trio.current_time() + patience
        while True:
            members = gossip.active()
            giver = self.giver(members)
            if giver is not None:
                leaves, source = await self.take_from(giver, members), giver.peer
            elif trio.current_time() < deadline and not goes_first(members, me, self.place):
                with trio.move_on_after(LOOK_SECONDS):
                    await gossip.changed()
            else:
                return leaves, source

    async def take_from(self, giver: Member, members: Sequence[Member]) -> Leaves:
        """Come closer to a giver's state, with the help of `members`. What fails is an event; `place` tells the rest.

        Returns the hashes of the leaves that the vectors then have.
        """
        try:
            if not await self._replay(giver, members):
                await self._transfer(giver)
            self._tired.discard(giver.peer)
        except (NetworkError, RemoteError, BaseExceptionGroup) as raised:
            error = sole_error(raised)
            if isinstance(error, RemoteError):
                self._node.charge(giver.peer, "sync", error)
            elif not isinstance(error, NetworkError):
                raise
            self._tired.add(giver.peer)
            self._node.telemetry.emit("state.retry", peer=giver.peer, step="sync", reason=str(error))
            await trio.sleep(PAUSE_SECONDS)
        return await self.hash_state()

    async def hash_state(self) -> Leaves:
        """The leaves of the vectors as they are now: they decide which root I hold, whatever I was told."""
        leaves = await self._node.compute(lambda: (merkle.leaves(self._theta), merkle.leaves(self._momentum)))
        self.place = replace(self.place, root=merkle.root(leaves[0] + leaves[1]))
        return leaves

    async def advance(self, place: Place, trail: Sequence[wire.Certificate] = ()) -> None:
        """My state is at `place` now; the ledger follows, by way of a `trail` of certificates that ends there."""
        self.place = place
        certificates = list(trail) or ([] if place.certificate is None else [place.certificate])
        try:
            await self._node.compute(self._ledger.follow, certificates)
        except RemoteError as error:
            # Of the trail only the end has been checked before.
            self._node.telemetry.emit("ledger.refused", step="follow", reason=str(error), round=place.round)
            await self._node.compute(self._ledger.follow, certificates[-1:])

    async def _replay(self, giver: Member, members: Sequence[Member]) -> bool:
        """Make the outer steps from my state to the giver's; whether I did, and what stood in the way is an event."""
        missed = giver.body.round - self.place.round
        state_bytes = self._theta.nbytes + self._momentum.nbytes
        if not 1 <= missed <= KEPT_ROUNDS or missed * self._spec.output.num_bytes(self._spec.num_cells) > state_bytes:
            return False
        question = wire.LedgerAsk(self._spec.run, self.place.round + 1, missed)
        try:
            certificates = await ask_certificates(self._node, giver.peer, question)
            if len(certificates) < missed:
                raise NetworkError(f"its ledger has {len(certificates)} of the {missed} rounds that I missed")
            for certificate in certificates:
                await self._replay_round(certificate, members)
        except (NetworkError, RemoteError, BaseExceptionGroup) as raised:
            error = sole_error(raised)
            if isinstance(error, RemoteError):
                self._node.charge(giver.peer, "replay", error)
            elif not isinstance(error, NetworkError):
                raise
            self._node.telemetry.emit(
                "replay.failed", peer=giver.peer, step="replay", reason=str(error), round=self.place.round + 1
            )
            return False
        return True

    async def _replay_round(self, certificate: wire.Certificate, members: Sequence[Member]) -> None:
        spec, place = self._spec, self.place
        roster, _, result = await self._node.compute(
            lambda: check_certificate(certificate, verify, owner=spec.owner)
        )
        link = Link.of(certificate)
        previous = genesis(spec.run) if place.certificate is None else place.head.hash
        mine = (spec.run, place.round + 1, previous, place.root)
        if (certificate.slot.run, link.head.round, link.previous, roster.base_root) != mine:
            raise NetworkError(f"its round {link.head.round} does not follow from my state")
        me = self._node.peer_id
        further = [m.peer for m in training(self.credible(members)) if m.body.round > place.round and m.peer != me]
        holders = in_my_order(me, further)
        outputs = await fetch_outputs(self._node, spec.output, spec.num_cells, (roster, result), holders)
        blobs = [outputs[key] for key in result.outputs]
        root = await self._node.compute(
            next_root, self._theta, self._momentum, self._outer, spec.output, roster.bounds, blobs
        )
        if root != result.next_root:
            raise ProtocolViolation(f"the outputs of round {link.head.round} do not lead to its certified state")
        self.changed = True
        await self._node.compute(self._step, roster.bounds, blobs)
        self._kept.keep(outputs)
        await self.advance(Place(link.head.round, root, result.tokens, certificate))
        num_bytes = sum(len(data) for data in outputs.values())
        self.num_bytes += num_bytes
        self._node.telemetry.emit("round.replayed", round=link.head.round, root=root.hex(), bytes=num_bytes)

    def _step(self, bounds: Sequence[int], blobs: Sequence[Blob]) -> None:
        """The outer step of a whole round, one leaf's g at a time."""
        g = np.empty(min(merkle.LEAF_ELEMENTS, self._theta.size), np.float32)
        for start, stop in merkle.leaf_spans(self._theta.size):
            decode_outputs(self._spec.output, bounds, blobs, slice(start, stop), g[: stop - start])
            outer_step(self._theta[start:stop], self._momentum[start:stop], g[: stop - start], self._outer)

    async def _transfer(self, giver: Member) -> None:
        """Take the giver's state; what it stated and cannot prove is not believed again."""
        node, spec = self._node, self._spec
        try:
            place, leaves = await ask_state(node, giver.peer, spec.run, mine=self.place.head, owner=spec.owner)
        except RemoteError:
            self._disproved[giver.peer] = (giver.body.head, giver.body.root)
            raise
        before, self.changed = self.changed, True  # Should it fail half way, leaves of its state are here already.
        num_bytes = await take_leaves(node, giver.peer, leaves, self._theta, self._momentum)
        self.changed = before or num_bytes > 0
        self.num_bytes += num_bytes
        trail: Sequence[wire.Certificate] = ()
        if place.certificate is not None:
            trail = await fetch_trail(node, giver.peer, spec.run, self._ledger, place.certificate)
        await self.advance(place, trail)
