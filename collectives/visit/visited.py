"""Who is in a run, as a visitor learns it: from the directory, and from members that it asks in turn."""

import random
from collections.abc import Callable

import trio

from ...dht.directory.interface import Directory
from ...dht.members.table import Member, MemberTable, MergeOutcome
from ...dht.records import Record
from ...dht.rendezvous import find_members
from ...dht.run.admission import Charter
from ...peer import wire
from ...peer.base.errors import NetworkError, ProtocolViolation, RemoteError, RequestRefused
from ...peer.base.transport import PeerId
from ...peer.node.node import Node

ASKED_FOR_RECORDS = 3
ANSWER_SECONDS = 5.0
HERE_SECONDS = 60.0
"""What the last question to a member has shown, an answer or none, is shown for so long."""


class MembersVisited:
    """The members of one run, as one visitor has heard of them. `charge` is told of what breaks a rule."""

    def __init__(
        self, node: Node, directory: Directory, charter: Charter, charge: Callable[[PeerId, str, RemoteError], None]
    ) -> None:
        self._node, self._directory = node, directory
        self._charter = charter
        self._charge = charge
        self._table = MemberTable(charter.run, node.peer_id, charter=charter)
        self._asked: dict[PeerId, tuple[float, bool]] = {}
        """When each member was asked last, and whether it has answered."""
        self._random = random.Random(node.peer_id)

    def members(self) -> tuple[Member, ...]:
        """Return the members whose records are valid."""
        return self._table.claimed(trio.current_time())

    def lately(self) -> tuple[Member, ...]:
        """Return them, and those that have left lately: what these call themselves is known still."""
        return tuple(self._table)

    def here(self) -> dict[PeerId, bool]:
        """Return whether each member that was asked in the last minute has answered the last question."""
        oldest = trio.current_time() - HERE_SECONDS
        return {peer: answers for peer, (at, answers) in self._asked.items() if at >= oldest}

    def note(self, peer: PeerId, answers: bool) -> None:
        """Note whether a member has answered a question."""
        here = self.here()
        self._asked = {it: asked for it, asked in self._asked.items() if it in here} | {peer: (trio.current_time(), answers)}

    async def find(self) -> None:
        """Find members by the directory. Raises `NetworkError` if it does not answer."""
        for member in await find_members(self._node, self._directory, self._charter.run):
            self._merge(member.record.encode(), "")

    async def ask(self) -> None:
        """Ask a few members for newer records; the directory if none of them tells. Raises as `find`."""
        members = [member.peer for member in self.members()]
        asked = self._random.sample(members, min(ASKED_FOR_RECORDS, len(members)))
        async with trio.open_nursery() as nursery:
            for peer in asked:
                nursery.start_soon(self._ask_member, peer)
        here = self.here()
        if not any(here.get(peer) for peer in asked) or self._charter.kind != "open":  # Those of a closed one tell nothing.
            await self.find()

    async def _ask_member(self, peer: PeerId) -> None:
        try:
            question = wire.MembersAsk(self._charter.run, self._table.summary(peer))
            answer = await self._node.ask(peer, question, timeout=ANSWER_SECONDS)
            if not isinstance(answer, wire.Members):
                raise ProtocolViolation(f"{type(answer).__name__} in answer to MembersAsk")
            self.note(peer, True)
            for data in answer.records:
                self._merge(data, peer)
        except RequestRefused as error:  # It is there; a closed run tells visitors no more.
            self.note(peer, True)
            self._node.telemetry.emit("gossip.failed", peer=peer, step="watch a run", reason=str(error))
        except NetworkError as error:
            self.note(peer, False)
            self._node.telemetry.emit("member.unreachable", peer=peer, step="watch a run", reason=str(error))
        except RemoteError as error:
            self._charge(peer, "ask for members", error)

    def _merge(self, data: bytes, carrier: PeerId) -> None:
        """Merge a record that a peer carried. Raises `RemoteError`."""
        record = Record.decode(data)
        merge = self._table.merge(record, trio.current_time(), carrier=carrier)
        if merge.outcome in (MergeOutcome.REFUSED, MergeOutcome.FULL):  # It is not admitted, or one of too many claims.
            self._node.refuse(carrier or record.peer, "members", merge.reason)
        member = self._table.get(record.peer)
        if member is not None:
            self._node.learn(member.peer, member.body.addresses)
