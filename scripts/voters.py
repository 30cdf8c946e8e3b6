"""Who votes in a run: in words for whoever publishes or joins it, and as its members are now."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..collectives.agreement.electorate import NOBODY, Electorate
from ..collectives.chain.certificate import value_of
from ..collectives.chain.chain import NOTHING, ChainLink, Head, position_after
from ..collectives.chain.fork_choice import head_of, training
from ..collectives.chain.replay import ask_certificates
from ..collectives.chain.voters import LIAR_PROOF, electorate_after
from ..collectives.polls import ask_poll
from ..collectives.spec import charter_of
from ..dht.members.table import Member
from ..dht.run.manifest import Manifest, SignedManifest
from ..dht.run.statements import EarnedVote, OwnerStatements, OwnerVerb
from ..optim.keeper.steward import STEWARD_PATIENCE
from ..peer import wire
from ..peer.errors import NetworkError, RemoteError
from ..peer.node.node import Node
from ..peer.transport import PeerId
from .story import SHORT_ID


@dataclass(frozen=True, slots=True)
class VotesHere:
    """The voters of a run's next round, and which of them are here."""

    round: int
    """The last round that is certified."""
    electorate: Electorate
    here: tuple[PeerId, ...]
    """The voters that hold the run's state and have answered."""
    term: int = 0
    """The term of the round after it that these voters are of."""
    appointed_by: PeerId = ""
    """Who has appointed them; empty if they follow from the certificates."""

    @property
    def missing(self) -> tuple[PeerId, ...]:
        """The other voters."""
        return tuple(voter for voter in self.electorate.voters if voter not in self.here)

    @property
    def figures(self) -> dict[str, object]:
        """The same for programs."""
        electorate = self.electorate
        return {
            "round": self.round,
            "voters": dict(electorate.votes),
            "here": list(self.here),
            "missing": list(self.missing),
            "votes": electorate.votes_of(self.here),
            "quorum": electorate.quorum,
            "total": electorate.total,
            "term": self.term,
            "appointed_by": self.appointed_by,
        }

    def __str__(self) -> str:
        electorate, missing = self.electorate, ", ".join(voter[-SHORT_ID:] for voter in self.missing)
        votes = f"votes: {electorate.votes_of(self.here)} of {electorate.total} are here, {electorate.quorum} decide"
        quorum = "a quorum is here" if electorate.is_quorum(self.here) else "no quorum is here"
        author = f", appointed by {self.appointed_by[-SHORT_ID:]}" if self.appointed_by else ""
        term = f"term {self.term} of round {self.round + 1}{author}; " if self.term else ""
        return f"{term}{votes}: {quorum}" + (f"; missing: {missing}" if missing else "")


def why_votes(peer: PeerId, manifest: Manifest, statements: OwnerStatements) -> str:
    """Return in a few words why a voter of a run may vote."""
    admission = manifest.admission
    if peer == manifest.owner:
        return "owns the run"
    if not admission.keepers_decide:
        return "is a member"
    if peer in admission.keeper_ids:
        return "is listed in the manifest"
    vouchers = [stated for stated in statements.statements if (stated.peer, stated.verb) == (peer, OwnerVerb.VOUCH)]
    earned = EarnedVote.parse(vouchers[-1].reason) if vouchers else None
    return "the owner vouched for it by hand" if earned is None else f"the owner's peer vouched for it after {earned}"


def describe_voters(votes: VotesHere, manifest: Manifest, statements: OwnerStatements) -> list[str]:
    """Return a line for each voter: whether it is here, and why it may vote."""
    return [
        f"{voter[-SHORT_ID:]}  {'here' if voter in votes.here else 'away'}  {why_votes(voter, manifest, statements)}"
        for voter in votes.electorate.voters
    ]


async def ask_votes(node: Node, members: Sequence[Member], signed: SignedManifest) -> VotesHere | None:
    """Ask the members for the run's newest certificate, which names the voters; None where nobody shows it.

    A member that does not answer is an event; one that shows a false certificate is charged.
    """
    charter, here = charter_of(signed), training(members)
    stated = Counter(head_of(member) for member in here)
    for head in sorted(stated, key=lambda head: (-stated[head], -head.round, head.hash)):
        value = None
        if head != NOTHING:
            holders = [member.peer for member in here if head_of(member) == head]
            certificate = await _newest(node, holders, signed, head)
            if certificate is None:
                continue
            value = value_of(certificate)
        electorate = electorate_after(value, charter)
        poll = await ask_poll(node, [member.peer for member in here], charter)
        term, author = 0, ""
        if poll is not None and poll.slot.term and poll.slot.round == head.round + 1 and poll.electorate is not NOBODY:
            term, electorate, author = poll.slot.term, poll.electorate, poll.appointed_by
        # A record outlives its author by a minute: only an answer shows that a voter is here.
        those = {member.peer for member in here} if poll is None else poll.answered
        present = tuple(voter for voter in electorate.voters if voter in those)
        return VotesHere(head.round, electorate, present, term, author)
    return None if here else VotesHere(0, electorate_after(None, charter), ())


async def _newest(node: Node, holders: Sequence[PeerId], signed: SignedManifest, head: Head) -> wire.Certificate | None:
    for peer in holders:
        try:
            page = await ask_certificates(node, peer, wire.LedgerAsk(signed.run_id, max(1, head.round), 1))
            if page and ChainLink.of(page[0]).head == head:
                await node.compute(partial(position_after, page[0], signed.run_id, charter_of(signed)))
                return page[0]
        except NetworkError as error:
            node.telemetry.emit("head.unproven", peer=peer, step="ask who votes", reason=str(error), round=head.round)
        except RemoteError as error:
            node.charge(peer, "show a certificate", error)
    return None


def who_decides(manifest: Manifest) -> str:
    """Return in one line who decides a run's rounds, and what their loss means."""
    admission = manifest.admission
    if admission.authority == "owner":
        return "its owner alone decides: while it is away, no round is certified"
    if admission.voters == "work":
        return "members decide with the votes that their work has earned: whoever fills most seats decides within hours"
    if admission.voters != "keepers":
        is_listed = admission.kind == "allow"
        return "all members decide, one vote each" + ("" if is_listed else "; its owner alone in the first round")
    count = len({manifest.owner, *admission.keeper_ids})
    quorum = Electorate({str(index): 1 for index in range(count)}).quorum
    if admission.stall == "present" and count > 1:
        return f"{_keepers(count)}, {quorum} of {count} votes; where fewer are here, those that are here decide"
    if admission.stall == "majority" or count < LIAR_PROOF:
        quorum = count // 2 + 1
    lost = count - quorum
    if not lost:
        loss = "while it is away" if count == 1 else "while one of them is away"
    else:
        loss = f"while more than {lost} of them {'is' if lost == 1 else 'are'} away"
    steward = ""
    if admission.steward:
        minutes = f"{STEWARD_PATIENCE / 60:g} minutes"
        steward = f"; after {minutes} its steward {admission.steward} appoints those that are here, if more than half are"
    joining = f"; members with {admission.vouch_after} rounds join them" if admission.vouch_after else ""
    waiting = "no round is certified, and all train on and wait"
    return f"{_keepers(count)}, {quorum} of {count} votes; {loss}, {waiting}{steward}{joining}"


def _keepers(count: int) -> str:
    return "its owner decides, as its only keeper" if count == 1 else f"its {count} keepers decide"
