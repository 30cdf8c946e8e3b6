"""The owner's statements that a peer holds, kept equal to those of the directory and of the other members.

Theory of operation. A peer reads the statements (`run.statements`) from its disk and from the directory when it joins,
and asks the directory for further ones at a slow period. Its member record names the hash of what it holds. A peer that
sees another hash in a record fetches those statements by their hash, as any bulk bytes, so that a new one reaches all
members by gossip once one of them has found it. Two peers whose statements differ exchange them and accuse each other of
nothing. What is not the owner's charges whoever served it, and each member is asked at most once in a period.

Every peer publishes what it holds where the directory holds less: statements outlive their owner's computer, as the
manifest does, and a directory that has lost its records.
"""

import random
from collections.abc import Callable, Iterable, Sequence

import trio

from ...peer.base.errors import NetworkError, RemoteError
from ...peer.base.transport import PeerId
from ...peer.node.node import Node
from ..directory.interface import Directory
from ..keys import statements_key
from ..records import Record
from ..run.statements import OwnerStatement, OwnerStatements, OwnerVerb, next_page, pages_of, unpack_statements
from ..run.succession import alarm_of
from .presence import Presence
from .remembered import Remembered
from .table import Member

OWNER_PERIOD = 30.0
"""Seconds between lookups in the directory, the period of member records; also between two fetches from one member."""
COMPARE_PERIOD = 1.0
"""Seconds between two comparisons with the members' records: in a round these change many times a second."""
NUM_ASKED = 3
"""Members that are asked at a time: one that sends nothing delays nobody."""
VAIN_PAUSE = 10.0
"""Seconds until the next comparison where nobody asked had anything new: junk of free keys costs 1.2 MB/s at most."""
FETCH_SECONDS = 30.0
"""The timeout of one fetch: 3.9 MB at most, as a rule some kB."""

Follow = Callable[[OwnerStatements], None]


async def read_pages(directory: Directory, statements: OwnerStatements) -> OwnerStatements:
    """Return the union with the statements in the directory. Raises `NetworkError`, and `RemoteError` for false ones."""
    while True:
        page = next_page(statements)
        value = await directory.get(statements_key(statements.run, statements.owner, page))
        if value is None:
            return statements
        statements = statements.merge(unpack_statements(value))
        if next_page(statements) == page:
            return statements


async def publish_pages(directory: Directory, statements: OwnerStatements, published: OwnerStatements) -> None:
    """Publish the pages that differ from those that were `published`, and keep them so. Raises `NetworkError`."""
    before = dict(pages_of(published))
    for number, value in pages_of(statements):
        if before.get(number) != value:
            await directory.put(statements_key(statements.run, statements.owner, number), value)


class OwnerLog:
    """One peer's copy of a run's statements."""

    def __init__(
        self,
        node: Node,
        presence: Presence,
        directory: Directory,
        statements: OwnerStatements,
        *,
        seed: int,
        remembered: Remembered | None = None,
    ) -> None:
        self.statements = statements
        self._node = node
        self._presence = presence
        self._directory = directory
        self._remembered = remembered
        self._random = random.Random(seed)
        self._asked: dict[PeerId, float] = {}
        self._follow: list[Follow] = []
        self._published = OwnerStatements(statements.run, statements.owner)
        self._serve(self._published)

    def on_change(self, follow: Follow) -> None:
        """Call `follow(statements)` now, and whenever there are further ones."""
        self._follow.append(follow)
        follow(self.statements)

    async def state(self, stated: Sequence[OwnerStatement]) -> None:
        """Sign statements as the run's owner; they are published with the next look.

        The directory is read before: an owner that has lost its disk gives no number a second time. Raises
        `FlockstepError`.
        """
        assert self._remembered is not None
        await self._take((await read_pages(self._directory, self.statements)).records)
        signed = await self._node.compute(self._remembered.append, self.statements, self._node.identity, stated)
        await self._take(signed.records)

    async def run(self) -> None:
        """Look for further statements until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look)
            nursery.start_soon(self._compare)

    async def _look(self) -> None:
        """Compare with the directory, period after period."""
        while True:
            try:
                await self._take((await read_pages(self._directory, self.statements)).records)
                statements = self.statements
                await publish_pages(self._directory, statements, self._published)
                self._published = statements
            except NetworkError as error:
                self._node.telemetry.emit("directory.failed", step="find the owner's statements", reason=str(error))
            except RemoteError as error:  # Of a directory that validates nothing.
                self._node.telemetry.emit("directory.junk", step="find the owner's statements", reason=str(error))
            await trio.sleep(OWNER_PERIOD)

    async def _compare(self) -> None:
        """Compare with the members' records, and fetch what differs."""
        while True:
            now = self._node.now()
            self._asked = {peer: when for peer, when in self._asked.items() if when > now - OWNER_PERIOD}
            differing = [member for member in self._presence.active() if self._differs(member)]
            askable = [member for member in differing if member.peer not in self._asked]
            chosen = self._random.sample(askable, min(NUM_ASKED, len(askable)))
            before = len(self.statements)
            async with trio.open_nursery() as nursery:
                for member in chosen:
                    self._asked[member.peer] = now
                    nursery.start_soon(self._fetch, member)
            await trio.sleep(VAIN_PAUSE if chosen and len(self.statements) == before else COMPARE_PERIOD)

    def _differs(self, member: Member) -> bool:
        return member.body.statements_bytes > 0 and member.body.statements != self.statements.hash

    async def _fetch(self, member: Member) -> None:
        """Merge the statements of a member."""
        peer, body = member.peer, member.body
        try:
            with trio.fail_after(FETCH_SECONDS):
                data = await self._node.fetch(peer, body.statements, body.statements_bytes, patience=FETCH_SECONDS)
                await self._take(unpack_statements(data))
        except NetworkError as error:
            self._node.telemetry.emit("owner.unheard", peer=peer, step="fetch", reason=str(error))
        except trio.TooSlowError:
            reason = f"{body.statements_bytes} bytes did not come in time"
            self._node.telemetry.emit("owner.unheard", peer=peer, step="fetch", reason=reason)
        except RemoteError as error:
            self._node.charge(peer, "owner's statements", error)

    async def _take(self, records: Iterable[Record]) -> None:
        """Merge statements, and follow what is new. Raises `RemoteError`."""
        merged = await self._node.compute(self.statements.merge, records)
        merged = merged.merge(self.statements.records)  # Others may have come meanwhile.
        before = self.statements
        if merged == before:
            return
        self.statements = merged
        self._serve(before)
        held = set(before.records)
        for record, stated in zip(merged.records, merged.statements, strict=True):
            if record not in held:
                reason = alarm_of(merged) if stated.verb == OwnerVerb.SUCCEED else stated.reason
                self._node.telemetry.emit("owner.stated", peer=stated.peer, step=stated.verb, reason=reason)
        for follow in self._follow:
            follow(merged)
        if self._remembered is not None:
            await self._node.compute(self._remembered.keep_statements, merged)

    def _serve(self, before: OwnerStatements) -> None:
        """Serve what I hold now in place of what I held before."""
        if before.records:
            self._node.blobs.drop([before.hash])
        if self.statements.records:
            self._node.blobs.put(self.statements.hash, self.statements.packed)
