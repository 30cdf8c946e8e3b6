"""Asks the members of a run who votes in it, and which of the voters are here."""

from collections import Counter
from collections.abc import Sequence
from functools import partial

from ..dht.members.table import Member
from ..dht.run.manifest import SignedManifest
from ..peer import wire
from ..peer.errors import NetworkError, RemoteError
from ..peer.node.node import Node
from ..peer.transport import PeerId
from .agreement.electorate import NOBODY
from .chain.certificate import value_of
from .chain.chain import NOTHING, ChainLink, Head, position_after
from .chain.fork_choice import head_of, training
from .chain.replay import ask_certificates
from .chain.voters import electorate_after
from .picture.votes import VotesHere
from .polls import ask_poll
from .spec import charter_of


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


