"""Brings my state to the run's: by replaying missed rounds, or by state transfer.

Theory of operation. Fork choice (`chain.fork_choice`) elects the run's chain by its certificates; a member on it is the
provider of the state that I should hold. If its chain continues mine, I fetch the certificates and the outputs of the
missed rounds from members that have them, and replay their outer steps (`held`). If the outputs are gone, or have more
bytes than the state, I take the checkpoint that most members hold, leaf by leaf from several of them, and replay the
rounds since. Before anything of mine changes, the certificates from that checkpoint to the provider's state are in the
ledger.

Leaves go to my disk as they arrive (a draft of the same checkpoint), so that verified ones are not fetched again, neither
by the next attempt nor after a restart. A restarted process begins with its own checkpoint and the outputs on its disk.

The ledger is ahead of the state meanwhile: it holds the certificates that were read (`state.run_chain`). If a checkpoint is
from before its first one, those between are read, too, backwards.
"""

import math
from collections.abc import Sequence

import trio

from ...collectives.chain.certificate import value_of
from ...collectives.chain.chain import NOTHING, ChainPosition, Head
from ...collectives.chain.fork_choice import alike, check_model, choose_provider, elected, goes_first, head_of, training
from ...collectives.chain.replay import MAX_REPLAYED, in_my_order
from ...collectives.spec import Spec
from ...collectives.state.archive import Archive
from ...collectives.state.run_chain import RunChain
from ...collectives.state.take_state import take_state
from ...collectives.state.transfer import Offer, ask_leaves, ask_offers
from ...dht.members.gossip import Gossip
from ...dht.members.table import Member
from ...peer import wire
from ...peer.base.errors import NetworkError, RemoteError, UsageError
from ...peer.base.transport import PeerId
from ...peer.node.node import Node
from .held import HeldState, judged

LOOK_SECONDS = 1.0
"""Polling period while waiting for another newcomer: its record may expire, which is no change of the table."""
PAUSE_SECONDS = 0.2
"""Backoff after a provider failed, since its connection may just be coming back; doubles with each failure in a row."""
LONGEST_PAUSE = 5.0
PROOF_PATIENCE = 2.0
"""Seconds that a member waits for the certificates of others' heads before it goes on with its state: some may be lies."""
OFF_LINK_SECONDS = 5.0
"""Where all members are on other chains than my join link names, a newcomer waits so long for one more that is not."""
NEWCOMER_SECONDS = 60.0
"""A newcomer waits so much longer than it waits for others: it may start the run only if nobody is ahead of it."""


class CatchUp:
    """Brings one peer's state to that of the run."""

    def __init__(
        self,
        node: Node,
        spec: Spec,
        held: HeldState,
        archive: Archive,
        *,
        anchor: Head | None = None,
    ) -> None:
        """`anchor` is the certificate that the join link or its bootstraps name, for a newcomer to begin with."""
        self._node = node
        self._spec = spec
        self._held = held
        self._archive = archive
        self.chain = RunChain(node, spec, archive, anchor)
        self._anchor = anchor
        self._backed_off: set[PeerId] = set()
        self._failures = 0
        self._waiting = False

    def provider(self, members: Sequence[Member]) -> Member | None:
        """The member whose state I should hold; None if mine is the run's, as far as the others' claims are proven."""
        return choose_provider(
            self.chain.credible(members),
            self._node.peer_id,
            self.chain.own(self._held.place),
            start=self._spec.start,
            founders=self._spec.charter.founders,
            backed_off=self._backed_off,
        )

    def follows_another_chain(self, members: Sequence[Member]) -> bool:
        """Whether another chain than mine is the run's, be it a continuation of mine, as far as that is proven.

        Before the first round: whether another start state is. Unproven claims are examined in the background. For use
        between rounds: a round itself reports how it ended.
        """
        if self._held.place.certificate is None and self.provider(members) is not None:
            return True
        mine = self.chain.own(self._held.place)
        if all(mine.has_applied(head) for head in set(map(head_of, members))):
            return False  # The usual case; in a crowd most state an earlier round until they renew their records.
        self.chain.ask(members, self._held.place)
        return elected(self.chain.credible(members), self._node.peer_id, mine) is not None

    def ask_again(self) -> None:
        """Before the first round, ask those again that did not give me their state: a founder has gone on without them."""
        if self._held.place.certificate is None:
            self._backed_off.clear()

    async def await_proofs(self, gossip: Gossip, seconds: float) -> None:
        """Examine the others' heads until I should follow one of them, or all are proven; at most for some seconds."""
        until = trio.current_time() + seconds
        with trio.move_on_at(until):
            while True:
                members = alike(gossip.presence.active(), self._node.peer_id)
                provider = await self._await_provider(members, until)
                if provider is not None or not self.chain.unproven(members, self._held.place):
                    return
                await trio.sleep(PAUSE_SECONDS)

    async def _await_provider(self, members: Sequence[Member], until: float) -> Member | None:
        """Examine the others' heads until I should follow one of them, or all have been asked; not beyond `until`.

        Anybody may take as long as it likes to prove what it states, and then state something else.
        """
        self.chain.ask(members, self._held.place)
        while (provider := self.provider(members)) is None and self.chain.asked_for and trio.current_time() < until:
            with trio.move_on_at(until):
                await self.chain.changed.wait()
        return provider

    async def reach(
        self,
        gossip: Gossip,
        patience: float,
        *,
        published: Head | None = None,
        rounds: float = math.inf,
        compare: bool = True,
        starts: bool = True,
    ) -> PeerId | None:
        """Hold the run's state, or my own if I start the run. Returns the provider that it came from.

        Of several first members, those that do not start the run wait up to `patience` seconds for the one that does.
        I start no run, but wait for a member that holds its state,
        - if a head is `published` and I hold nothing of the run; if all of its `rounds` are done, none will come;
        - if the manifest names the first state and I do not hold it: whatever the seed makes is not the run's;
        - if I cannot start one (not `starts`), and hold neither what my disk had nor what I took from a member.

        Raises `UsageError` if I `compare` my model, as a newcomer does, and it differs from that of the others, if the
        members let me in no more, or are on another chain than my join link names, `NetworkError` if the run has ended
        without me.
        """
        await self._held.hash()
        source, me = None, self._node.peer_id
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
            is_new = self._held.place.certificate is None
            until = deadline + NEWCOMER_SECONDS if is_new else min(deadline, began + PROOF_PATIENCE)
            provider = await self._await_provider(members, until)
            proven = not self.chain.unproven(members, self._held.place)
            if provider is None and is_new and trio.current_time() >= deadline:
                # Members that let me in would have given me their state by now.
                gossip.check_entry(has_begun=published is not None)
            if provider is not None:
                source = provider.peer
                await self.take_from(provider, members)
            elif published is not None and self._held.place.certificate is None:
                now = trio.current_time()
                if (now >= min(calm_at, deadline)) if proven else (now >= max(calm_at, deadline)):
                    self._check_link(members)
                ended = published.round >= rounds and trio.current_time() >= deadline
                await self._await_holder(gossip, published, ended=ended, proven=proven)
            elif not proven and trio.current_time() < min(until, deadline):  # Anybody may state what it cannot prove.
                await self._pause()
            elif self._spec.start and self._held.place.certificate is None:
                if self._held.place.root == self._spec.start:
                    return source
                reason = "the run starts from a given state, and no member that holds it is here"
                await self._look_again(gossip, reason, 0)
            elif self._held.is_blank and not starts:
                await self._look_again(gossip, "no member that holds a state of the run is here", 0)
            elif trio.current_time() < deadline and not goes_first(everybody, me, self._held.place):
                with trio.move_on_after(LOOK_SECONDS):
                    await gossip.presence.changed()
            else:
                return source

    def _check_link(self, members: Sequence[Member]) -> None:
        """Raise `UsageError` if my join link names a certificate that no member's chain has, as far as members answer."""
        if self.chain.have_failed(members, self._held.place) and self.chain.is_off_link(members):
            raise UsageError(
                "no chain of the run's members has the certificate that this join link or its bootstraps name",
                remedy="ask somebody in the run for a link with &at=: `flockstep run info` prints one",
            )

    async def _await_holder(self, gossip: Gossip, head: Head, *, ended: bool, proven: bool) -> None:
        if ended:
            raise NetworkError(
                f"all {head.round} rounds of the run are done, and no member that holds its last state is here",
                remedy="a peer that took part has the model on disk: `flockstep export` makes files of it",
            )
        reason = f"the run is at round {head.round}, and no member that holds its state is here"
        if not proven:
            first = self.chain.held().head.round + 1
            reason = f"no member shows the certificates from round {first} on: a link with &at= names a later one"
        await self._look_again(gossip, reason, head.round)

    async def _look_again(self, gossip: Gossip, reason: str, round_: int) -> None:
        """Wait for a change of the members, for a moment; the reason is an event the first time."""
        if not self._waiting:
            self._waiting = True
            self._node.telemetry.emit("state.awaited", step="sync", reason=reason, round=round_)
        with trio.move_on_after(LOOK_SECONDS):
            await gossip.presence.changed()

    async def take_from(self, provider: Member, members: Sequence[Member]) -> None:
        """Come closer to a provider's state, with the help of `members`. A failure is an event."""
        try:
            if not await self._replay(provider, members):
                await self._take_checkpoint(provider, members)
            self._held.is_blank = False
            self._backed_off.discard(provider.peer)
            self._failures = 0
        except (NetworkError, RemoteError, BaseExceptionGroup) as raised:
            error = judged(self._node, provider.peer, "sync", raised)
            self._backed_off.add(provider.peer)
            self._node.telemetry.emit("state.retry", peer=provider.peer, step="sync", reason=str(error))
            await self._pause()
        await self._held.hash()

    async def _pause(self) -> None:
        await trio.sleep(min(LONGEST_PAUSE, PAUSE_SECONDS * 2**self._failures))
        self._failures += 1

    async def replay(self, certificate: wire.Certificate) -> bool:
        """Make the outer step of a round that was decided and whose end I missed. A failure is an event.

        Nobody else may hold its state: who voted alone was killed before it held what it had decided.
        """
        value, me = value_of(certificate), self._node.peer_id
        if value.base_root != self._held.place.root:
            return False
        try:
            await self._held.replay(certificate, in_my_order(me, {*value.members} - {me}), self._backed_off)
        except (NetworkError, RemoteError, BaseExceptionGroup) as raised:
            self._held.report_stop("replay", judged(self._node, me, "replay", raised))
            return False
        return True

    async def _replay(self, provider: Member, members: Sequence[Member]) -> bool:
        """Replay the outer steps from my state to the provider's. Returns whether that succeeded; a failure is an event."""
        rounds = range(self._held.place.round + 1, provider.body.round + 1)
        state_bytes = sum(vector.nbytes for vector in self._held.vectors)
        if (
            sum(self._spec.output.num_bytes(len(self._spec.cells_of(round_))) for round_ in rounds[:MAX_REPLAYED])
            > state_bytes
        ):
            return False
        if not 1 <= len(rounds) <= MAX_REPLAYED:
            return False
        try:
            await self._replay_to(provider.body.round, members)
        except (NetworkError, RemoteError, BaseExceptionGroup) as raised:
            self._held.report_stop("replay", judged(self._node, provider.peer, "replay", raised), provider.peer)
            return False
        return True

    async def _take_checkpoint(self, provider: Member, members: Sequence[Member]) -> None:
        """Take a checkpoint on the provider's chain, and replay the rounds since."""
        node, run = self._node, self._spec.run
        offer = await self._choose(provider, members)
        leaves = await ask_leaves(node, offer, run)
        held = self._held
        held.changed = True  # Should it fail half way, leaves of that state are here already.
        held.forget()
        held.num_bytes += await take_state(node, self._archive.checkpoints, offer, leaves, held.vectors)
        held.place = offer.place
        await self._replay_to(provider.body.round, members)

    async def _choose(self, provider: Member, members: Sequence[Member]) -> Offer:
        """Choose a checkpoint to take, from which the chain leads to the provider's head."""
        node, spec, checkpoints = self._node, self._spec, self._archive.checkpoints
        end = provider.body.round
        newest = None if head_of(provider) == NOTHING else await node.compute(self._archive.ledger.certificate, end)
        others = {member.peer for member in training(self.chain.credible(members))} - {node.peer_id, provider.peer}
        voters = () if newest is None else newest.voters  # Others may all be keys of one stranger.
        peers = [provider.peer, *sorted(in_my_order(node.peer_id, others), key=lambda peer: peer not in voters)]
        offered = await ask_offers(node, peers, spec.run, charter=spec.charter)
        offers = [offer for offer in offered if 0 <= end - offer.place.round <= MAX_REPLAYED]
        most = max((len(offer.providers) for offer in offers), default=0)

        def is_begun(offer: Offer) -> bool:
            """A draft of an earlier attempt saves more than a few rounds less to replay, but not from one liar alone."""
            return checkpoints.drafted(offer.place.round) and 2 * len(offer.providers) >= most

        for offer in sorted(offers, key=lambda offer: not is_begun(offer)):
            try:
                if await self._leads_on(offer.place, provider):
                    return offer
            except NetworkError as error:  # An offer may be older than all that the provider knows.
                node.telemetry.emit("state.not_offered", peer=provider.peer, step="choose a state", reason=str(error))
        raise NetworkError(f"nobody offers a checkpoint that leads on from my state to that of round {end}")

    async def _leads_on(self, place: ChainPosition, provider: Member) -> bool:
        """Return True if the chain leads from a state on to the provider's, and it is not in my state's past.

        Raises as `RunChain.fill`.
        """
        ledger, mine = self._archive.ledger, self._held.place
        if mine.is_certified and place.round <= mine.round:
            return False
        if place.certificate is not None:
            if place.round < ledger.first:
                await self.chain.fill(provider.peer, place.round)
            return ledger.at(place.round) == place.head
        if head_of(provider) == NOTHING:
            return place.root == provider.body.root
        first = await self._node.compute(ledger.certificate, 1)
        return first is not None and place.root == value_of(first).base_root

    async def _replay_to(self, round_: int, members: Sequence[Member]) -> None:
        """Replay the rounds up to this one by the ledger's certificates, with their outputs from members that have them."""
        held, me = self._held, self._node.peer_id
        while (at := held.place.round) < round_:
            certificate = await self._node.compute(self._archive.ledger.certificate, at + 1)
            if certificate is None:
                raise NetworkError(f"the certificate of round {at + 1} is not here")
            further = [m.peer for m in training(self.chain.credible(members)) if m.body.round > at and m.peer != me]
            await held.replay(certificate, in_my_order(me, further), self._backed_off)
