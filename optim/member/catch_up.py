"""Brings my state to the run's: from my disk, by replaying missed rounds, or by state transfer.

Theory of operation. Fork choice (`chain.fork_choice`) elects the run's chain by its certificates; a member on it is the
provider of the state that I should hold. If its chain continues mine, I fetch the certificates and the outputs of the
missed rounds from members that have them, and replay their outer steps. Each step is made only after a check that it
leads to the certified root, so that my state is that of some certified round at every moment. If the outputs are gone,
or have more bytes than the state, I take the checkpoint that most members hold, leaf by leaf from several of them, and
replay the rounds since. Before anything of mine changes, the certificates from that checkpoint to the provider's state
must be here, each one following the one before.

Leaves go to my disk as they arrive (a draft of the same checkpoint), so that verified ones are not fetched again, neither
by the next attempt nor after a restart. A restarted process begins with its own checkpoint and the outputs on its disk.

The ledger follows the state: it joins the other chain at the fork. If the other chain has none of my rounds, as after a
partition since the beginning, or for a newcomer, the ledger starts anew with the certificate of that state. Error
feedback and the progress since the last round belong to the trainer and stay as they are.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import trio

from ...collectives.chain.certificate import genesis, value_of
from ...collectives.chain.chain import NOTHING, ChainLink, ChainPosition, Head, check_trail
from ...collectives.chain.fork_choice import alike, check_model, choose_provider, elected, goes_first, head_of, training
from ...collectives.chain.packed import checked
from ...collectives.chain.replay import MAX_TRAIL, ask_range, fetch_outputs, fetch_trail, in_my_order
from ...collectives.spec import Spec
from ...collectives.state.archive import Archive
from ...collectives.state.head_proofs import Proofs
from ...collectives.state.take_state import take_state
from ...collectives.state.transfer import Offer, ask_leaves, ask_offers
from ...dht.members.gossip import Gossip
from ...dht.members.table import Member
from ...peer import wire
from ...peer.arrays import Floats
from ...peer.digest import DIGEST_BYTES
from ...peer.errors import NetworkError, ProtocolViolation, RemoteError, UsageError, sole_error
from ...peer.node.bulk import Blob
from ...peer.node.node import Node
from ...peer.transport import PeerId
from ...peer.wire.signed import verify_signed
from ..outer import OuterSettings
from .apply import LeafHashes, OuterState

LOOK_SECONDS = 1.0
"""Polling period while waiting for another newcomer: its record may expire, which is no change of the table."""
PAUSE_SECONDS = 0.2
"""Backoff after a provider failed, since its connection may just be coming back; doubles with each failure in a row."""
LONGEST_PAUSE = 5.0
PROOF_PATIENCE = 2.0
"""Seconds that a member waits for proofs of the others' heads before it goes on with its own state: some may be lies."""
OFF_LINK_SECONDS = 5.0
"""Where all members are on other chains than my join link names, a newcomer waits so long for one more that is not."""
NEWCOMER_SECONDS = 60.0
"""A newcomer waits so much longer than it waits for others: it may start the run only if nobody is ahead of it."""


class CatchUp:
    """Holds one peer's state (θ, m) and its position in the run."""

    def __init__(
        self,
        node: Node,
        spec: Spec,
        outer: OuterSettings,
        state: tuple[Floats, Floats],
        archive: Archive,
        *,
        anchor: Head | None = None,
        resumes: bool = True,
    ) -> None:
        """`anchor` is the certificate that the join link names; without `resumes` neither it nor my ledger binds me."""
        self._node = node
        self._spec = spec
        self._outer = outer
        self.state = OuterState(*state, outer.at(1), spec.output)
        self._archive = archive
        self.proofs = Proofs(node, spec, archive.ledger, archive.conduct, anchor=anchor, resumes=resumes)
        self._anchor = anchor if resumes else None
        self._backed_off: set[PeerId] = set()
        self._failures = 0
        self._waiting = False
        self._place = ChainPosition(0, bytes(DIGEST_BYTES), 0, None)
        self.num_bytes = 0
        """Bytes fetched so far."""
        self.changed = False
        """Whether θ or m may have changed since this was last set to False."""

    @property
    def place(self) -> ChainPosition:
        """Where my state stands; the settings of the round after it are those that its certificate names."""
        return self._place

    @place.setter
    def place(self, place: ChainPosition) -> None:
        self._place = place
        with contextlib.suppress(UsageError):  # Of a later version: no step is made by it.
            settings = self._outer if self._spec.settings is None else OuterSettings.of(self._spec.settings(self._revision))
            self.state.use(settings.at(place.round + 1), self.spec.output)

    @property
    def spec(self) -> Spec:
        """What holds in the next round. Raises `UsageError` if this version does not know it."""
        return self._spec.under(self._revision)

    @property
    def is_last(self) -> bool:
        """Whether the run ends with my state; not under settings of a later version, with which the trainer ends."""
        with contextlib.suppress(UsageError):
            settings = self._spec.settings
            return settings is not None and self._place.round >= settings(self._revision).num_rounds
        return False

    @property
    def _revision(self) -> bytes:
        return b"" if self._place.certificate is None else value_of(self._place.certificate).revision

    def provider(self, members: Sequence[Member]) -> Member | None:
        """The member whose state I should hold; None if mine is the run's, as far as the others' claims are proven."""
        return choose_provider(
            self.proofs.credible(members),
            self._node.peer_id,
            self.proofs.chains(self.place),
            start=self._spec.start,
            founders=self._spec.charter.founders,
            backed_off=self._backed_off,
        )

    def follows_another_chain(self, members: Sequence[Member]) -> bool:
        """Whether another chain than mine is the run's, be it a continuation of mine, as far as that is proven.

        Before the first round: whether another start state is. Unproven claims are examined in the background. For use
        between rounds: a round itself reports how it ended.
        """
        if self.place.certificate is None and self.provider(members) is not None:
            return True
        mine = self.place.head.hash
        if all(member.body.head == mine for member in members):
            return False  # The usual case.
        if self.proofs.wanted(members, self.place):
            self.proofs.ask(members, self.place)
        return elected(self.proofs.credible(members), self._node.peer_id, self.proofs.chains(self.place)) is not None

    async def examine(self, members: Sequence[Member]) -> bool:
        """Ask the members to prove their chains. Returns whether all claims that matter are proven."""
        await self.proofs.examine(members, self.place)
        return not self.proofs.unproven(members, self.place)

    def ask_again(self) -> None:
        """Before the first round, ask those again that did not give me their state: a founder has gone on without them."""
        if self.place.certificate is None:
            self._backed_off.clear()

    async def await_proofs(self, gossip: Gossip, seconds: float) -> None:
        """Examine the others' heads until I should follow one of them, or all are proven; at most for some seconds."""
        until = trio.current_time() + seconds
        with trio.move_on_at(until):
            while True:
                members = alike(gossip.presence.active(), self._node.peer_id)
                if await self._await_provider(members, until) is not None or not self.proofs.unproven(members, self.place):
                    return
                await trio.sleep(PAUSE_SECONDS)

    async def _await_provider(self, members: Sequence[Member], until: float) -> Member | None:
        """Examine the others' heads until I should follow one of them, or all have been asked; not beyond `until`.

        Anybody may take as long as it likes to prove what it states, and then state something else.
        """
        self.proofs.ask(members, self.place)
        while (provider := self.provider(members)) is None and self.proofs.is_asking and trio.current_time() < until:
            with trio.move_on_at(until):
                await self.proofs.changed.wait()
        return provider

    async def resume(self, place: ChainPosition) -> None:
        """Begin at a position. At the run's start the ledger keeps its certificates until I have searched for providers."""
        if place.certificate is None:
            self.place = place
        else:
            await self.advance(place)

    async def restore(self) -> None:
        """Begin where my disk ends: at my newest checkpoint, after replaying the rounds whose outputs are kept here.

        Certificates beyond stay in the ledger until I have searched for providers. Raises `LocalError`.
        """
        ledger = self._archive.ledger
        checkpoint = self._archive.checkpoints.newest(ledger)
        if checkpoint is None:
            return
        await self._node.compute(checkpoint.copy_to, self._vectors)
        self.state.forget()
        self.place, self.changed = checkpoint.place, True
        rounds = range(self.place.round + 1, ledger.head.round + 1)
        try:
            for number in rounds:
                certificate = await self._node.compute(ledger.certificate, number)
                if certificate is None:
                    raise NetworkError(f"the certificate of round {number} is not here")
                await self._step_over(certificate, ())
        except (NetworkError, RemoteError, BaseExceptionGroup) as raised:
            self._report_stop("restore", self._judge(self._node.peer_id, "restore", raised))
        place = self.place
        self._node.telemetry.emit(
            "state.restored", round=place.round, root=place.root.hex(), checkpoint=checkpoint.place.round
        )

    async def reach(
        self,
        gossip: Gossip,
        patience: float,
        *,
        published: Head | None = None,
        rounds: float = math.inf,
        compare: bool = True,
    ) -> tuple[LeafHashes, PeerId | None]:
        """Hold the run's state, or my own if I start the run. Returns its leaves, and the provider that it came from.

        Of several first members, those that do not start the run wait up to `patience` seconds for the one that does. If
        a head is `published` and I hold nothing of the run, I do not start it, but wait for a member that holds its
        state; if all of its `rounds` are done, none will come. So I do where the manifest names the first state and I do not
        hold it: whatever the seed makes is not the run's. Raises `UsageError` if I `compare` my model, as a newcomer
        does, and it differs from that of the others, if the members let me in no more, or are on another chain than my
        join link names, `NetworkError` if the run has ended without me.
        """
        leaves, source, me = await self.hash_state(), None, self._node.peer_id
        published = published or self._anchor
        began = trio.current_time()
        deadline = calm_at = began + patience
        seen: tuple[PeerId, ...] = ()
        while True:
            everybody = gossip.presence.active()
            if (others := gossip.presence.others()) != seen:
                seen, calm_at = others, trio.current_time() + OFF_LINK_SECONDS
            if compare:
                check_model(everybody, me)
            members = alike(everybody, me)
            is_new = self.place.certificate is None
            until = deadline + NEWCOMER_SECONDS if is_new else min(deadline, began + PROOF_PATIENCE)
            provider = await self._await_provider(members, until)
            proven = not self.proofs.unproven(members, self.place)
            if provider is None and is_new and trio.current_time() >= deadline:
                # Members that let me in would have given me their state by now.
                gossip.check_entry(has_begun=published is not None)
            if provider is not None:
                leaves, source = await self.take_from(provider, members), provider.peer
            elif published is not None and self.place.certificate is None:
                now = trio.current_time()
                if (now >= min(calm_at, deadline)) if proven else (now >= max(calm_at, deadline)):
                    self._check_link(members)
                ended = published.round >= rounds and trio.current_time() >= deadline
                await self._await_holder(gossip, published, ended=ended)
            elif not proven and trio.current_time() < min(until, deadline):  # Anybody may state what it cannot prove.
                await self._pause()
            elif self._spec.start and self.place.certificate is None:
                if self.place.root == self._spec.start:
                    return leaves, source
                reason = "the run starts from a given state, and no member that holds it is here"
                await self._look_again(gossip, reason, 0)
            elif trio.current_time() < deadline and not goes_first(members, me, self.place):
                with trio.move_on_after(LOOK_SECONDS):
                    await gossip.presence.changed()
            else:
                return leaves, source

    def _check_link(self, members: Sequence[Member]) -> None:
        """Raise `UsageError` if my join link names a certificate that no member's chain has, as far as members answer."""
        if self.proofs.have_failed(members, self.place) and self.proofs.are_off_link(members, self.place):
            raise UsageError(
                "no chain of the run's members has the certificate that this join link or its bootstraps name",
                remedy="ask somebody in the run for a link with &at=: `flockstep run info` prints one",
            )

    async def _await_holder(self, gossip: Gossip, head: Head, *, ended: bool) -> None:
        if ended:
            raise NetworkError(
                f"all {head.round} rounds of the run are done, and no member that holds its last state is here",
                remedy="a peer that took part has the model on disk: `flockstep export` makes files of it",
            )
        reason = f"the run is at round {head.round}, and no member that holds its state is here"
        await self._look_again(gossip, reason, head.round)

    async def _look_again(self, gossip: Gossip, reason: str, round_: int) -> None:
        """Wait for a change of the members, for a moment; the reason is an event the first time."""
        if not self._waiting:
            self._waiting = True
            self._node.telemetry.emit("state.awaited", step="sync", reason=reason, round=round_)
        with trio.move_on_after(LOOK_SECONDS):
            await gossip.presence.changed()

    async def take_from(self, provider: Member, members: Sequence[Member]) -> LeafHashes:
        """Come closer to a provider's state, with the help of `members`. A failure is an event; `place` shows the rest.

        Returns the hashes of the leaves that the vectors then have.
        """
        try:
            if not await self._replay(provider, members):
                await self._take_checkpoint(provider, members)
            self._backed_off.discard(provider.peer)
            self._failures = 0
        except (NetworkError, RemoteError, BaseExceptionGroup) as raised:
            error = self._judge(provider.peer, "sync", raised)
            self._backed_off.add(provider.peer)
            self._node.telemetry.emit("state.retry", peer=provider.peer, step="sync", reason=str(error))
            await self._pause()
        return await self.hash_state()

    async def _pause(self) -> None:
        await trio.sleep(min(LONGEST_PAUSE, PAUSE_SECONDS * 2**self._failures))
        self._failures += 1

    async def replay(self, certificate: wire.Certificate) -> bool:
        """Make the outer step of a round that was decided and whose end I missed. A failure is an event.

        Nobody else may hold its state: who voted alone was killed before it held what it had decided.
        """
        value, me = value_of(certificate), self._node.peer_id
        if value.base_root != self.place.root:
            return False
        try:
            await self._replay_from(certificate, in_my_order(me, {*value.members} - {me}))
        except (NetworkError, RemoteError, BaseExceptionGroup) as raised:
            self._report_stop("replay", self._judge(me, "replay", raised))
            return False
        return True

    async def hash_state(self) -> LeafHashes:
        """Hash the leaves of the vectors: they decide which root my position has, whatever others claimed."""
        self.state.forget()
        leaves = await self._node.compute(lambda: self.state.leaves)
        self.place = replace(self.place, root=self.state.root)
        return leaves

    async def step(self, bounds: Sequence[int], outputs: Sequence[Blob]) -> LeafHashes:
        """Make the outer step of a certified round; my position has the root that it led to. Returns the new leaves."""
        self.changed = True
        await self._node.compute(self.state.apply, bounds, outputs)
        self.place = replace(self.place, root=self.state.root)
        return self.state.leaves

    @property
    def _vectors(self) -> tuple[Floats, Floats]:
        return self.state.theta, self.state.momentum

    async def advance(
        self, place: ChainPosition, trail: Sequence[wire.Certificate] = (), following: Sequence[wire.Certificate] = ()
    ) -> None:
        """Move my position to `place`; the ledger follows along a `trail` of certificates that ends there.

        `following` are the certificates of later rounds, which I am about to replay.
        """
        self.place = place
        ledger = self._archive.ledger
        checked_before = [*([] if place.certificate is None else [place.certificate]), *following]
        try:
            await self._node.compute(ledger.follow, [*trail[:-1], *checked_before])
        except RemoteError as error:
            self._node.telemetry.emit("ledger.refused", step="follow", reason=str(error), round=place.round)
            await self._node.compute(ledger.follow, checked_before)

    async def _replay(self, provider: Member, members: Sequence[Member]) -> bool:
        """Replay the outer steps from my state to the provider's. Returns whether that succeeded; a failure is an event."""
        rounds = range(self.place.round + 1, provider.body.round + 1)
        state_bytes = sum(vector.nbytes for vector in self._vectors)
        if (
            sum(self._spec.output.num_bytes(len(self._spec.cells_of(round_))) for round_ in rounds[:MAX_TRAIL])
            > state_bytes
        ):
            return False
        if not 1 <= len(rounds) <= MAX_TRAIL:
            return False
        try:
            for certificate in await ask_range(self._node, provider.peer, self._spec.run, rounds):
                await self._replay_round(certificate, members)
        except (NetworkError, RemoteError, BaseExceptionGroup) as raised:
            self._report_stop("replay", self._judge(provider.peer, "replay", raised), provider.peer)
            return False
        return True

    async def _take_checkpoint(self, provider: Member, members: Sequence[Member]) -> None:
        """Take a checkpoint on the provider's chain, and replay the rounds since."""
        node, run = self._node, self._spec.run
        offer, following = await self._choose(provider, members)
        leaves = await ask_leaves(node, offer, run)
        self.changed = True  # Should it fail half way, leaves of that state are here already.
        self.state.forget()
        self.num_bytes += await take_state(node, self._archive.checkpoints, offer, leaves, self._vectors)
        trail: Sequence[wire.Certificate] = ()
        if offer.place.certificate is not None:
            trail = await fetch_trail(node, provider.peer, run, self._archive.ledger.joins, offer.place.certificate)
        await self.advance(offer.place, trail, following)
        for certificate in following:
            await self._replay_round(certificate, members)

    async def _choose(self, provider: Member, members: Sequence[Member]) -> tuple[Offer, list[wire.Certificate]]:
        """Choose a checkpoint to take. Returns it with the checked certificates that lead from it to the provider's head."""
        node, spec, checkpoints = self._node, self._spec, self._archive.checkpoints
        newest = None if head_of(provider) == NOTHING else await self.proofs.prove(provider, self.place)
        end = provider.body.round
        others = {member.peer for member in training(self.proofs.credible(members))} - {node.peer_id, provider.peer}
        voters = () if newest is None else newest.voters  # Others may all be keys of one stranger.
        peers = [provider.peer, *sorted(in_my_order(node.peer_id, others), key=lambda peer: peer not in voters)]
        offered = await ask_offers(node, peers, spec.run, charter=spec.charter)
        offers = [offer for offer in offered if 0 <= end - offer.place.round <= MAX_TRAIL]
        most = max((len(offer.providers) for offer in offers), default=0)

        def is_begun(offer: Offer) -> bool:
            """A draft of an earlier attempt saves more than a few rounds less to replay, but not from one liar alone."""
            return checkpoints.drafted(offer.place.round) and 2 * len(offer.providers) >= most

        for offer in sorted(offers, key=lambda offer: not is_begun(offer)):
            following: list[wire.Certificate] = []
            try:
                if newest is not None and offer.place.round < end:
                    between = range(offer.place.round + 1, end)
                    following = [*await ask_range(node, provider.peer, spec.run, between), newest]
                    check_trail([ChainLink.of(certificate) for certificate in following])
            except NetworkError as error:  # An offer may be older than all that the provider knows.
                node.telemetry.emit("state.not_offered", peer=provider.peer, step="choose a state", reason=str(error))
                continue
            if not self._leads(offer.place, following, provider) or self._is_past(offer.place, following):
                continue
            check = partial(checked, before=offer.place.certificate)
            await node.compute(check, following, spec.run, verify_signed, spec.charter)
            return offer, following
        raise NetworkError(f"nobody offers a checkpoint that leads on from my state to that of round {end}")

    def _leads(self, start: ChainPosition, following: Sequence[wire.Certificate], provider: Member) -> bool:
        """Whether these rounds, each of which follows the one before, lead from a state to the provider's."""
        if not following:
            return start.head == head_of(provider) and (start.certificate is not None or start.root == provider.body.root)
        value = value_of(following[0])
        return (value.previous, value.base_root) == (self._previous(start), start.root)

    def _is_past(self, start: ChainPosition, following: Sequence[wire.Certificate]) -> bool:
        """Whether I hold that state already, or a later one on the same chain."""
        heads = {start.head, *(ChainLink.of(certificate).head for certificate in following)}
        return self.place.root == self.place.certified and self.place.head in heads

    def _previous(self, place: ChainPosition) -> bytes:
        """The hash that the certificate of the round after a state must name as its predecessor."""
        return genesis(self._spec.run) if place.certificate is None else place.head.hash

    async def _replay_round(self, certificate: wire.Certificate, members: Sequence[Member]) -> None:
        """Replay the next round, with its outputs from any members that have them."""
        me, place = self._node.peer_id, self.place
        further = [m.peer for m in training(self.proofs.credible(members)) if m.body.round > place.round and m.peer != me]
        await self._replay_from(certificate, in_my_order(me, further))

    async def _replay_from(self, certificate: wire.Certificate, holders: Sequence[PeerId]) -> None:
        outputs = await self._step_over(certificate, holders)
        self.num_bytes += sum(len(data) for data in outputs.values())
        await self._archive.outputs.keep(self.place.round, outputs)
        if self._archive.ledger.at(self.place.round) != self.place.head:
            await self.advance(self.place)

    async def _step_over(self, certificate: wire.Certificate, holders: Sequence[PeerId]) -> Mapping[bytes, Blob]:
        """Make the outer step of the next round. Returns its outputs by hash, from my disk or from these holders."""
        node, spec, place = self._node, self._spec, self.place
        value = value_of(certificate)
        follows = (spec.run, place.round + 1, self._previous(place), place.root)
        if (value.run, value.round, value.previous, value.base_root) != follows:
            raise NetworkError(f"its round {value.round} does not follow from my state")
        await node.compute(partial(checked, [certificate], spec.run, verify_signed, spec.charter, before=place.certificate))
        outputs = await fetch_outputs(
            node, self.spec.output, spec.cells_of(value.round), certificate, holders, self._backed_off
        )
        blobs = [outputs[key] for key in value.outputs]
        root = await node.compute(self.state.next_root, value.bounds, blobs)
        if root != value.next_root:
            raise ProtocolViolation(f"the outputs of round {value.round} do not lead to its certified state")
        await self.step(value.bounds, blobs)
        self.place = ChainPosition(value.round, root, value.tokens, certificate)
        num_bytes = sum(len(data) for data in outputs.values())
        node.telemetry.emit("round.replayed", round=value.round, root=root.hex(), bytes=num_bytes)
        return outputs

    def _report_stop(self, step: str, error: BaseException, peer: PeerId = "") -> None:
        """Emit why the replay stopped."""
        reason = str(error)
        self._node.telemetry.emit("replay.failed", peer=peer, step=step, reason=reason, round=self.place.round + 1)

    def _judge(self, peer: PeerId, step: str, raised: BaseException) -> BaseException:
        """Return the sole error of a group; a `RemoteError` is charged to `peer`, a bug is raised again."""
        error = sole_error(raised)
        if isinstance(error, RemoteError):
            self._node.charge(peer, step, error)
        elif not isinstance(error, NetworkError):
            raise raised
        return error
