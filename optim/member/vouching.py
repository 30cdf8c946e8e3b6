"""The owner's own peer vouches by itself for members with many certified rounds, so that the run outlives it.

The rules are those of `accountability.tenure`. Here members are asked whether they hold a state: each shows a checkpoint on
my chain with its leaf hashes, and one leaf that I choose. What keeps a member from being vouched for is an event, once.
"""

import secrets
from collections.abc import Collection

import trio

from ...collectives.accountability.tenure import (
    MAX_STATED,
    VOUCH_PERIOD,
    Candidate,
    Tenure,
    earned_vote,
    in_order,
    num_due,
    why_not_vouch,
)
from ...collectives.chain.chain import ChainPosition
from ...collectives.chain.fork_choice import is_keeper, training
from ...collectives.codec import CELL
from ...collectives.spec import Spec
from ...collectives.state import merkle
from ...collectives.state.archive import Archive
from ...collectives.state.transfer import LEAF_STALL_SECONDS, ask_leaves, ask_offers
from ...dht.members.owner_log import OwnerLog
from ...dht.members.presence import Presence
from ...dht.run.manifest import SignedManifest
from ...dht.run.statements import OwnerStatement, OwnerVerb
from ...peer.errors import FlockstepError, NetworkError, RemoteError
from ...peer.node.node import Node
from ...peer.quota.origins import UNKNOWN
from ...peer.transport import PeerId

MAX_EXAMINED = 4
"""Members examined at a time, once in `VOUCH_PERIOD` rounds, those first that were not before: 16 MiB at most."""
EXAMINE_SECONDS = 60.0
"""The timeout for one of them: a leaf has 4 MiB, and its round goes first."""
MAX_EXPLAINED = 1024
"""Members for which the last reason is remembered."""


class Vouching:
    """The owner's vouching after so many rounds; `look` does nothing where the run has none, or for another peer."""

    def __init__(
        self, node: Node, signed: SignedManifest, spec: Spec, archive: Archive, presence: Presence, owner_log: OwnerLog
    ) -> None:
        is_owner = node.peer_id == signed.manifest.owner
        self._after = signed.manifest.admission.vouch_after if is_owner else 0
        self._node = node
        self._spec = spec
        self._archive = archive
        self._presence = presence
        self._owner_log = owner_log
        self._tenure = Tenure()
        self._is_busy = False
        self._examined = -VOUCH_PERIOD
        """The last round after which members were examined."""
        self._passed_over: dict[PeerId, int] = {}
        """Who could not be vouched for, with the round in which it was examined: the others come first."""
        self._explained: dict[PeerId, str] = {}

    async def look(self, place: ChainPosition, voters: Collection[PeerId]) -> None:
        """After a certified round, whose next voters these are: vouch for members if any are due."""
        if not self._after or place.certificate is None or self._is_busy:
            return
        self._is_busy = True
        try:
            await self._node.compute(self._tenure.advance, place.certificate, self._archive.ledger.certificate)
            if (stated := len(self._owner_log.statements)) >= MAX_STATED:
                why_not = f"{stated} statements are in the owner's log: it vouches by hand only, the rest is for bans"
                self._explain(self._node.peer_id, why_not, place.round)
            wanted = num_due(place.round, voters, self._owner_log.statements)
            if wanted and place.round >= self._examined + VOUCH_PERIOD:
                await self._vouch(place.round, voters, wanted)
        finally:
            self._is_busy = False

    async def _vouch(self, round_: int, voters: Collection[PeerId], wanted: int) -> None:
        networks = {self._network(peer): peer for peer in voters if peer != self._node.peer_id and self._network(peer)}
        chosen: list[Candidate] = []
        if due := self._due(voters):
            self._examined = round_
        for candidate in due:
            if not (why_not := why_not_vouch(candidate, self._owner_log.statements, networks, chosen)):
                why_not = await self._why_not_holder(candidate.peer, round_)
            if why_not:
                self._passed_over[candidate.peer] = round_
                self._explain(candidate.peer, why_not, round_)
            else:
                chosen.append(candidate)
            if len(chosen) == wanted:
                break
        if len(chosen) < wanted:
            for candidate in chosen:  # Of two voters the loss of either stops the run.
                self._explain(candidate.peer, "the first voters beside the owner are vouched for in pairs", round_)
            return
        await self._state(chosen, round_)

    async def _state(self, chosen: list[Candidate], round_: int) -> None:
        reasons = {candidate.peer: str(earned_vote(candidate, round_)) for candidate in chosen}
        try:
            await self._owner_log.state([OwnerStatement(OwnerVerb.VOUCH, peer, why) for peer, why in reasons.items()])
        except FlockstepError as error:
            for peer in reasons:
                self._explain(peer, f"the statement could not be made: {error}", round_)
            return
        for peer, why in reasons.items():
            self._explained.pop(peer, None)
            self._node.telemetry.emit("owner.vouched", peer=peer, reason=why, round=round_)

    def _due(self, voters: Collection[PeerId]) -> list[Candidate]:
        """Return the members to be examined now, the first in order."""
        charter, banned = self._archive.conduct.charter, self._node.guard.banned
        done = {self._node.peer_id, *voters, *charter.vouched, *(charter.keepers or ()), *banned}
        here = [member for member in training(self._presence.active()) if member.peer not in done]
        found = in_order(
            (
                Candidate(member.peer, self._tenure.of(member.peer), is_keeper(member), self._network(member.peer))
                for member in here
            ),
            self._after,
        )
        past = {candidate.peer: self._passed_over.get(candidate.peer, 0) for candidate in found}
        self._passed_over = {peer: round_ for peer, round_ in past.items() if round_}
        return sorted(found, key=lambda candidate: past[candidate.peer])[:MAX_EXAMINED]

    def _network(self, peer: PeerId) -> str:
        """Return the network in which I see a peer; empty while I do not."""
        origin = self._node.origin_of(peer)
        return "" if origin is UNKNOWN else origin.network

    async def _why_not_holder(self, peer: PeerId, round_: int) -> str:
        """Return why a member does not show that it holds a state of my chain; empty if it does."""
        node, run, ledger = self._node, self._spec.run, self._archive.ledger
        size = self._spec.num_cells * CELL
        lengths = [4 * (stop - start) for _ in range(2) for start, stop in merkle.leaf_spans(size)]
        try:
            with trio.fail_after(EXAMINE_SECONDS):
                offers = await ask_offers(node, [peer], run, charter=self._spec.charter)
                mine = [offer for offer in offers if ledger.at(offer.place.round) == offer.place.head]
                if not mine:
                    return "it offers no state of this chain"
                leaves = await ask_leaves(node, mine[0], run)
                if len(leaves) != len(lengths):
                    return "it offers a state of another size"
                number = secrets.randbelow(len(leaves))
                await node.fetch(peer, leaves[number], lengths[number], patience=LEAF_STALL_SECONDS)
        except trio.TooSlowError:
            return f"its state did not come in {EXAMINE_SECONDS:.0f} s"
        except NetworkError as error:
            return f"its state did not come: {error}"
        except RemoteError as error:
            node.charge(peer, "show a state", error)
            return f"it showed a false state: {error}"
        return ""

    def _explain(self, peer: PeerId, why_not: str, round_: int) -> None:
        """Emit why I do not vouch for a member, unless I have said so."""
        if self._explained.get(peer) == why_not:
            return
        self._explained.pop(peer, None)
        self._explained[peer] = why_not
        if len(self._explained) > MAX_EXPLAINED:
            del self._explained[next(iter(self._explained))]
        self._node.telemetry.emit("owner.not_vouched", peer=peer, step="vouch", reason=why_not, round=round_)
