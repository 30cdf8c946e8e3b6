"""From the state that I hold to the run's: from my disk, by replaying the rounds that I missed, or by taking a state.

Theory of operation. A member whose chain of certificates is the run's (`standing`) holds what I should hold. If it goes on
from mine, I fetch the certificates and the outputs of the rounds between from whoever has them, and make their outer
steps: each only once I know that it leads to the certified root, so that what I hold is the state of some certified
round at every moment. Where the outputs are gone, or have more bytes than the state, I take the checkpoint that most
members hold, leaf by leaf from several of them, and replay the rounds since. Before anything of mine is changed, the
certificates from that checkpoint to the state that the member claims must be here, each one following the one before.

What I take goes to my disk as it comes (a draft of the same checkpoint), so that what was right is not fetched again,
neither by the next attempt nor by my next life. That one begins with my own checkpoint and the outputs on my disk.

The ledger follows the state: it joins the other chain where it left mine, and where none of mine is in it, as after a
partition since the beginning, or for a newcomer, it begins anew with the certificate of that state. Error feedback and
the progress since the last round are the trainer's and stay as they are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import trio

from ...collectives.averager import Spec
from ...collectives.chain.certificate import check_certificate, genesis, verify
from ...collectives.chain.chain import NOTHING, Head, Link
from ...collectives.chain.fork_choice import check_model, choose_giver, elected, goes_first, head_of, training
from ...collectives.chain.packed import checked
from ...collectives.chain.replay import MAX_TRAIL, ask_range, fetch_outputs, fetch_trail, in_my_order
from ...collectives.codec import Floats
from ...collectives.place import Place
from ...collectives.state import merkle
from ...collectives.state.archive import Archive
from ...collectives.state.head_proofs import Proofs
from ...collectives.state.take_state import take_state
from ...collectives.state.transfer import Offer, ask_leaves, ask_offers
from ...dht.members.gossip import Gossip
from ...dht.members.table import Member
from ...peer import wire
from ...peer.digest import DIGEST_BYTES
from ...peer.errors import NetworkError, ProtocolViolation, RemoteError, sole_error
from ...peer.node.bulk import Blob
from ...peer.node.node import Node
from ...peer.transport import PeerId
from ..outer import OuterSettings
from .apply import apply_outputs, next_root

Leaves: TypeAlias = tuple[list[bytes], list[bytes]]
"""The hashes of θ's leaves, and of m's."""
LOOK_SECONDS = 1.0
"""While waiting for another newcomer: its record may also run out, which is no change of the table."""
PAUSE_SECONDS = 0.2
"""After a giver failed: its connection may just be coming back. Twice as long after each failure in a row."""
LONGEST_PAUSE = 5.0


class CatchUp:
    """One peer's state (θ, m), and where it stands."""

    def __init__(
        self, node: Node, spec: Spec, outer: OuterSettings, state: tuple[Floats, Floats], archive: Archive
    ) -> None:
        self._node = node
        self._spec = spec
        self._outer = outer
        self._state = self._theta, self._momentum = state
        self._archive = archive
        self.proofs = Proofs(node, spec, archive.ledger)
        self._tired: set[PeerId] = set()
        self._failures = 0
        self._waiting = False
        self.place = Place(0, bytes(DIGEST_BYTES), 0, None)
        self.num_bytes = 0
        """Fetched so far."""
        self.changed = False
        """Whether θ or m may be others than when this was last set to False."""

    def giver(self, members: Sequence[Member]) -> Member | None:
        """Whose state I should have; None if mine is the run's, as far as the others' claims are proven."""
        credible, chains = self.proofs.credible(members), self.proofs.chains(self.place)
        return choose_giver(credible, self._node.peer_id, chains, tired=self._tired)

    def outrun(self, members: Sequence[Member]) -> bool:
        """Whether another chain than mine is the run's, be it one that goes on from mine: as far as that is proven.

        What is not is asked for in the background; so this is for between rounds, as rounds tell themselves how they end.
        """
        mine = self.place.head.hash
        if all(member.body.head == mine for member in members):
            return False  # As it is most of the time.
        if self.proofs.wanted(members, self.place):
            self._node.nursery.start_soon(self.proofs.examine, members, self.place)
        return elected(self.proofs.credible(members), self._node.peer_id, self.proofs.chains(self.place)) is not None

    async def examine(self, members: Sequence[Member]) -> bool:
        """Have the members prove on which chains they are; whether all that matter have."""
        await self.proofs.examine(members, self.place)
        return not self.proofs.unproven(members, self.place)

    async def resume(self, place: Place) -> None:
        """I begin at `place`; at the run's start the ledger keeps what it knows until I have looked for who has it."""
        if place.certificate is None:
            self.place = place
        else:
            await self.advance(place)

    async def restore(self) -> None:
        """I begin where my disk ends: at my newest checkpoint, and after the rounds of which everything is here.

        What is known beyond stays in the ledger until I have looked for who has it. Raises `LocalError`.
        """
        ledger = self._archive.ledger
        checkpoint = self._archive.checkpoints.newest(ledger)
        if checkpoint is None:
            return
        await self._node.compute(checkpoint.copy_to, self._state)
        self.place, self.changed = checkpoint.place, True
        rounds = range(self.place.round + 1, ledger.head.round + 1)
        try:
            for number in rounds:
                certificate = await self._node.compute(ledger.certificate, number)
                if certificate is None:
                    raise NetworkError(f"the certificate of round {number} is not here")
                await self._step_over(certificate, ())
        except (NetworkError, RemoteError, BaseExceptionGroup) as raised:
            self._tell_stop("restore", self._judge(self._node.peer_id, "restore", raised))
        place = self.place
        self._node.telemetry.emit(
            "state.restored", round=place.round, root=place.root.hex(), checkpoint=checkpoint.place.round
        )

    async def reach(
        self, gossip: Gossip, patience: float, *, published: Head | None = None, rounds: float = math.inf
    ) -> tuple[Leaves, PeerId | None]:
        """Hold the run's state, or my own where I start the run; its leaves, and from whom it came.

        Of several who come first, whoever does not start the run waits up to `patience` seconds for who does. Where a
        head is `published` and I hold nothing of the run, I do not start it, but wait for who holds its state; if all
        of its `rounds` are done, nobody will come. Raises `UsageError` where my model is not that of the others,
        `NetworkError` where the run has ended without me.
        """
        leaves, source, me = await self.hash_state(), None, self._node.peer_id
        deadline = trio.current_time() + patience
        while True:
            members = gossip.active()
            check_model(members, me)
            proven = await self.examine(members)
            giver = self.giver(members)
            if giver is not None:
                leaves, source = await self.take_from(giver, members), giver.peer
            elif published is not None and self.place.certificate is None:
                ended = published.round >= rounds and trio.current_time() >= deadline
                await self._await_holder(gossip, published, ended=ended)
            elif not proven and (self.place.certificate is None or trio.current_time() < deadline):
                await self._pause()
            elif trio.current_time() < deadline and not goes_first(members, me, self.place):
                with trio.move_on_after(LOOK_SECONDS):
                    await gossip.changed()
            else:
                return leaves, source

    async def _await_holder(self, gossip: Gossip, head: Head, *, ended: bool) -> None:
        if ended:
            raise NetworkError(
                f"all {head.round} rounds of the run are done, and nobody who holds its last state is here",
                remedy="who took part has the model on disk: `flockstep export` makes files of it",
            )
        if not self._waiting:
            self._waiting = True
            reason = f"the run is at round {head.round}, and nobody who holds its state is here"
            self._node.telemetry.emit("state.awaited", step="sync", reason=reason, round=head.round)
        with trio.move_on_after(LOOK_SECONDS):
            await gossip.changed()

    async def take_from(self, giver: Member, members: Sequence[Member]) -> Leaves:
        """Come closer to a giver's state, with the help of `members`. What fails is an event; `place` tells the rest.

        Returns the hashes of the leaves that the vectors then have.
        """
        try:
            if not await self._replay(giver, members):
                await self._take_checkpoint(giver, members)
            self._tired.discard(giver.peer)
            self._failures = 0
        except (NetworkError, RemoteError, BaseExceptionGroup) as raised:
            error = self._judge(giver.peer, "sync", raised)
            self._tired.add(giver.peer)
            self._node.telemetry.emit("state.retry", peer=giver.peer, step="sync", reason=str(error))
            await self._pause()
        return await self.hash_state()

    async def _pause(self) -> None:
        await trio.sleep(min(LONGEST_PAUSE, PAUSE_SECONDS * 2**self._failures))
        self._failures += 1

    async def hash_state(self) -> Leaves:
        """The leaves of the vectors as they are now: they decide which root I hold, whatever I was told."""
        leaves = await self._node.compute(lambda: (merkle.leaves(self._theta), merkle.leaves(self._momentum)))
        self.place = replace(self.place, root=merkle.root(leaves[0] + leaves[1]))
        return leaves

    async def advance(
        self, place: Place, trail: Sequence[wire.Certificate] = (), following: Sequence[wire.Certificate] = ()
    ) -> None:
        """My state is at `place` now; the ledger follows, by way of a `trail` of certificates that ends there.

        `following` are those of the rounds after it, which I am about to replay.
        """
        self.place = place
        ledger = self._archive.ledger
        checked_before = [*([] if place.certificate is None else [place.certificate]), *following]
        try:
            await self._node.compute(ledger.follow, [*trail[:-1], *checked_before])
        except RemoteError as error:
            self._node.telemetry.emit("ledger.refused", step="follow", reason=str(error), round=place.round)
            await self._node.compute(ledger.follow, checked_before)

    async def _replay(self, giver: Member, members: Sequence[Member]) -> bool:
        """Make the outer steps from my state to the giver's; whether I did, and what stood in the way is an event."""
        rounds = range(self.place.round + 1, giver.body.round + 1)
        state_bytes = self._theta.nbytes + self._momentum.nbytes
        if len(rounds) * self._spec.output.num_bytes(self._spec.num_cells) > state_bytes:
            return False
        if not 1 <= len(rounds) <= MAX_TRAIL:
            return False
        try:
            for certificate in await ask_range(self._node, giver.peer, self._spec.run, rounds):
                await self._replay_round(certificate, members)
        except (NetworkError, RemoteError, BaseExceptionGroup) as raised:
            self._tell_stop("replay", self._judge(giver.peer, "replay", raised), giver.peer)
            return False
        return True

    async def _take_checkpoint(self, giver: Member, members: Sequence[Member]) -> None:
        """Take a checkpoint from which the giver's chain goes on, and replay the rounds since."""
        node, run = self._node, self._spec.run
        offer, following = await self._choose(giver, members)
        leaves = await ask_leaves(node, offer, run)
        self.changed = True  # Should it fail half way, leaves of that state are here already.
        self.num_bytes += await take_state(node, self._archive.checkpoints, offer, leaves, self._state)
        trail: Sequence[wire.Certificate] = ()
        if offer.place.certificate is not None:
            trail = await fetch_trail(node, giver.peer, run, self._archive.ledger, offer.place.certificate)
        await self.advance(offer.place, trail, following)
        for certificate in following:
            await self._replay_round(certificate, members)

    async def _choose(self, giver: Member, members: Sequence[Member]) -> tuple[Offer, list[wire.Certificate]]:
        """The checkpoint to take, and the certificates, checked, that lead from it to what the giver states."""
        node, spec, checkpoints = self._node, self._spec, self._archive.checkpoints
        newest = None if head_of(giver) == NOTHING else await self.proofs.prove(giver, self.place)
        end = giver.body.round
        others = {member.peer for member in training(self.proofs.credible(members))} - {node.peer_id, giver.peer}
        peers = [giver.peer, *in_my_order(node.peer_id, others)]
        offered = await ask_offers(node, peers, spec.run, charter=spec.charter)
        offers = [offer for offer in offered if 0 <= end - offer.place.round <= MAX_TRAIL]
        # A draft of an earlier attempt is worth more than a few rounds less to replay.
        for offer in sorted(offers, key=lambda offer: not checkpoints.drafted(offer.place.round)):
            following: list[wire.Certificate] = []
            try:
                if newest is not None and offer.place.round < end:
                    between = range(offer.place.round + 1, end)
                    following = [*await ask_range(node, giver.peer, spec.run, between), newest]
                    await node.compute(checked, following, spec.run, verify, spec.charter)
            except NetworkError as error:  # Somebody may offer what is older than all that the giver knows.
                node.telemetry.emit("state.not_offered", peer=giver.peer, step="choose a state", reason=str(error))
                continue
            if self._leads(offer.place, following, giver) and not self._is_past(offer.place, following):
                return offer, following
        raise NetworkError(f"nobody offers a checkpoint that leads on from my state to that of round {end}")

    def _leads(self, start: Place, following: Sequence[wire.Certificate], giver: Member) -> bool:
        """Whether these rounds, each of which follows the one before, lead from a state to the giver's."""
        if not following:
            return start.head == head_of(giver) and (start.certificate is not None or start.root == giver.body.root)
        roster, _, _ = check_certificate(following[0], verify)
        return (Link.of(following[0]).previous, roster.base_root) == (self._previous(start), start.root)

    def _is_past(self, start: Place, following: Sequence[wire.Certificate]) -> bool:
        """Whether I hold that state already, or one that comes after it on the same chain."""
        heads = {start.head, *(Link.of(certificate).head for certificate in following)}
        return self.place.root == self.place.certified and self.place.head in heads

    def _previous(self, place: Place) -> bytes:
        """What the certificate of the round after a state must name as the one before it."""
        return genesis(self._spec.run) if place.certificate is None else place.head.hash

    async def _replay_round(self, certificate: wire.Certificate, members: Sequence[Member]) -> None:
        """Make the outer step of the next round, with its outputs from whoever has them."""
        me, place = self._node.peer_id, self.place
        further = [m.peer for m in training(self.proofs.credible(members)) if m.body.round > place.round and m.peer != me]
        outputs = await self._step_over(certificate, in_my_order(me, further))
        self.num_bytes += sum(len(data) for data in outputs.values())
        await self._archive.outputs.keep(self.place.round, outputs)
        if self._archive.ledger.at(self.place.round) != self.place.head:
            await self.advance(self.place)

    async def _step_over(self, certificate: wire.Certificate, holders: Sequence[PeerId]) -> Mapping[bytes, Blob]:
        """Make the outer step of the next round; its outputs by hash, from my disk or from these holders."""
        node, spec, place = self._node, self._spec, self.place
        roster, _, result = await node.compute(lambda: check_certificate(certificate, verify, charter=spec.charter))
        link = Link.of(certificate)
        follows = (spec.run, place.round + 1, self._previous(place), place.root)
        if (certificate.slot.run, link.head.round, link.previous, roster.base_root) != follows:
            raise NetworkError(f"its round {link.head.round} does not follow from my state")
        outputs = await fetch_outputs(node, spec.output, spec.num_cells, (roster, result), holders)
        step = (self._theta, self._momentum, self._outer, spec.output, roster.bounds)
        blobs = [outputs[key] for key in result.outputs]
        root = await node.compute(next_root, *step, blobs)
        if root != result.next_root:
            raise ProtocolViolation(f"the outputs of round {link.head.round} do not lead to its certified state")
        self.changed = True
        await node.compute(apply_outputs, *step, blobs)
        self.place = Place(link.head.round, root, result.tokens, certificate)
        num_bytes = sum(len(data) for data in outputs.values())
        node.telemetry.emit("round.replayed", round=link.head.round, root=root.hex(), bytes=num_bytes)
        return outputs

    def _tell_stop(self, step: str, error: BaseException, peer: PeerId = "") -> None:
        """Why I did not get further from my own state."""
        reason = str(error)
        self._node.telemetry.emit("replay.failed", peer=peer, step=step, reason=reason, round=self.place.round + 1)

    def _judge(self, peer: PeerId, step: str, raised: BaseException) -> BaseException:
        """The one error behind what was raised; a breach of the rules is charged to `peer`, what is a bug passes on."""
        error = sole_error(raised)
        if isinstance(error, RemoteError):
            self._node.charge(peer, step, error)
        elif not isinstance(error, NetworkError):
            raise raised
        return error
