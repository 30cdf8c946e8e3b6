"""The steward of a run: appoints voters after a long stall, among those that are here, so that nobody needs to be awake.

Theory of operation. It polls the members as `flockstep run appoint` does (`visit.polls`). A term in which no quorum
of its voters has answered for `STEWARD_PATIENCE` seconds has stalled for it, and it appoints those that are ready. Its
patience begins anew with each term and each poll that finds a quorum, and when it is restarted. Its memory is on its disk:
an appointment that nobody has entered yet is shown again, and never replaced by another one.
"""

from collections.abc import Callable, Iterable

import trio

from ...collectives.accountability.appointing import AppointmentRecord
from ...collectives.chain.voters import why_no_quorum
from ...collectives.visit.polls import appoint, ask_poll
from ...dht.members.table import Member
from ...dht.run.admission import Charter
from ...peer import wire
from ...peer.errors import LocalError
from ...peer.node.node import Node

STEWARD_PATIENCE = 600.0
"""Seconds without a quorum until the steward appoints: longer than a reboot or a change of address of those that are away."""
STEWARD_PERIOD = 30.0
"""Seconds between two polls; each asks every member one question."""


class Steward:
    """One run's steward, on a member's node. Nothing raises here: what keeps it from appointing is an event."""

    def __init__(
        self, node: Node, charter: Charter, record: AppointmentRecord, members: Callable[[], Iterable[Member]]
    ) -> None:
        self._node = node
        self._charter = charter
        self._record = record
        self._members = members
        self._stalled: tuple[wire.Slot, float] | None = None
        """The slot in which no quorum has answered, and since when."""
        self._said: tuple[str, wire.Slot, str] | None = None

    async def run(self) -> None:
        """Watch the run until cancelled."""
        while True:
            await self._look()
            await trio.sleep(STEWARD_PERIOD)

    async def _look(self) -> None:
        node, charter = self._node, self._charter
        others = [member.peer for member in self._members() if member.peer != node.peer_id]
        poll = await ask_poll(node, others, charter)
        if poll is None or not why_no_quorum(poll.electorate, poll.slot.term, charter, poll.answered):
            self._stalled = None
            return
        if self._stalled is None or self._stalled[0] != poll.slot:
            self._stalled = poll.slot, trio.current_time()
        if trio.current_time() - self._stalled[1] < STEWARD_PATIENCE:
            return
        try:
            made = await appoint(node, poll, charter, self._record)
        except LocalError as error:
            self._say("steward.waits", poll.slot, str(error))
            return
        self._say("owner.appointed", made.appointment.slot, ", ".join(made.appointment.voters))

    def _say(self, event: str, slot: wire.Slot, reason: str) -> None:
        """Emit an event once, however often it is looked at."""
        if self._said != (event, slot, reason):
            self._said = event, slot, reason
            step = f"term {slot.term}"
            self._node.telemetry.emit(event, peer=self._node.peer_id, step=step, reason=reason, round=slot.round)
