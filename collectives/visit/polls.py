"""Polls: which voters of a run's next round are here, asked from its members by anybody.

Each member answers for itself which round it votes in next. A member record outlives its author by a minute: only an
answer shows that a voter is here, and that it holds the state of the last certified round.
"""

from collections.abc import Callable, Collection

import trio

from ...dht.run.admission import Charter
from ...peer import wire
from ...peer.base.errors import NetworkError, ProtocolViolation, RemoteError, RequestRefused
from ...peer.base.transport import PeerId
from ...peer.node.node import Node
from ..agreement.electorate import Electorate
from ..picture.votes import VotesHere

POLL_SECONDS = 5.0
"""Seconds for the answer of one member, which is dialled meanwhile; all are asked at once."""


def serve_votes(node: Node, run: str, round_: Callable[[], int]) -> None:
    """Answer whoever asks which round this peer votes in next."""

    async def answer(peer: PeerId, question: wire.VoteAsk) -> wire.VoteShown:
        if question.run != run:
            raise NetworkError("this peer takes part in another run")
        return wire.VoteShown(round_())

    node.on_ask(wire.VoteAsk, answer)


async def ask_votes(
    node: Node,
    peers: Collection[PeerId],
    charter: Charter,
    round_: int,
    electorate: Electorate,
    note: Callable[[PeerId, bool], None],
) -> VotesHere:
    """Ask these peers which voters of the round after `round_` are here; `electorate` has those voters.

    `note` learns who has answered. A peer that does not answer is an event; one that answers with something else is charged.
    A voter that is one round late counts: the certificate may be on its way.
    """
    shown: dict[PeerId, int] = {}

    async def ask(peer: PeerId) -> None:
        try:
            answer = await node.ask(peer, wire.VoteAsk(charter.run), timeout=POLL_SECONDS)
            if not isinstance(answer, wire.VoteShown):
                raise ProtocolViolation(f"{type(answer).__name__} in answer to VoteAsk")
            shown[peer] = answer.round
            note(peer, True)
        except NetworkError as error:
            note(peer, isinstance(error, RequestRefused))
            node.telemetry.emit("vote.unheard", peer=peer, step="ask", reason=str(error))
        except RemoteError as error:
            node.charge(peer, "ask for its vote", error)

    async with trio.open_nursery() as nursery:
        for peer in set(peers):
            nursery.start_soon(ask, peer)
    if not shown:  # They may be too busy: their records say that they are here.
        return VotesHere(round_, electorate, tuple(it for it in electorate.voters if it in peers), owner=charter.owner)
    here = tuple(voter for voter in electorate.voters if shown.get(voter, -1) >= round_)
    return VotesHere(round_, electorate, here, owner=charter.owner)
