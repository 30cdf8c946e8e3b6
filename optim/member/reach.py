"""Reaches a run, and keeps in contact with it: host, directory, manifest and node, then the members and what is published.

For every kind of member, and before it holds a state. In the directory stand the newest head, what the run's owner has
stated, and evaluations of the shared model.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import trio

from ...collectives.agreement.electorate import Electorate
from ...collectives.allreduce.actions import Outcome
from ...collectives.chain.certificate import certificate_hash, value_of
from ...collectives.chain.chain import ChainPosition, Head
from ...collectives.chain.head import Heads, RunValues
from ...collectives.light.anchor import find_anchor
from ...collectives.spec import charter_of, credential
from ...collectives.state.archive import has_ledger
from ...dht.directory.interface import Directory
from ...dht.directory.kademlia import KademliaDirectory
from ...dht.keys import listing_key
from ...dht.members.body import MemberBody, fitted
from ...dht.members.gossip import Gossip
from ...dht.members.owner_log import OWNER_PERIOD, OwnerLog, publish_pages, read_pages
from ...dht.members.remembered import Remembered
from ...dht.members.table import MemberTable
from ...dht.rendezvous import check_alone, find_manifest, open_bootstraps, take_manifest
from ...dht.run.link import JoinLink
from ...dht.run.listing import LISTING_FILE, RENEWAL_SECONDS, sign_listing
from ...dht.run.manifest import SignedManifest
from ...dht.run.revision import revised_by, why_not_revise
from ...dht.run.statements import OwnerStatements
from ...dht.run.succession import successor_of, why_not_follow
from ...peer import wire
from ...peer.base.config import PeerConfig
from ...peer.base.errors import NetworkError, RemoteError, UsageError
from ...peer.base.transport import Address, Host, PeerId, Rung
from ...peer.identity import Identity, identity_path
from ...peer.log.telemetry import Telemetry
from ...peer.node.node import Node
from ..shards.seeding import Seeds
from .evaluations import Evaluations
from .handed_over import hand_over

STATEMENTS_SECONDS = 5.0
"""The members pass on what the owner has stated, too; so a newcomer does not wait longer for a directory."""

MAX_LINE = 64
"""Runs of a line that a link leads through: each is on the disk then."""
ANNOUNCE_PERIOD = 2.0
"""Seconds between announcements of mere progress; a change of state is announced at once."""

@dataclass(frozen=True, slots=True)
class ReachedRun:
    """A run that this computer has reached, before it is a member."""

    node: Node
    host: Host
    directory: Directory
    signed: SignedManifest
    remembered: Remembered
    invite: bytes
    """My credential; empty where the run demands none."""
    folder: Path
    """The run's folder on my disk."""
    anchor: Head | None
    """The certificate that the join link names, or of a newcomer its bootstraps; None if none does."""
    seeds: Seeds
    """The files of the run's data, where members provide them."""
    check_alone: Callable[[Sequence[Address]], Awaitable[None]] | None = None
    """Raises `LocalError` if another process with this peer's key answers there; None on a network in memory."""


class Contact:
    """One peer's contact with its run."""

    def __init__(
        self,
        node: Node,
        table: MemberTable,
        gossip: Gossip,
        body: MemberBody,
        rung: Callable[[], Rung | None] = lambda: None,
        check_alone: Callable[[Sequence[Address]], Awaitable[None]] | None = None,
    ) -> None:
        """`gossip` fills the `table`. `rung` returns how others reach me, None where that is not known.

        `check_alone`: see `ReachedRun`.
        """
        self.node = node
        self.table = table
        self.gossip = gossip
        self.presence = gossip.presence
        self.body = body
        """What my record states."""
        self.heads: Heads | None = None
        """The published head; None where nothing is published."""
        self.owner_log: OwnerLog | None = None
        self.evaluations: Evaluations | None = None
        self._check_alone = check_alone
        self._may_follow: Callable[..., Awaitable[bool]] | None = None
        self._rung = rung
        self._announced: float | None = None
        self._clamped = ""

    @classmethod
    def of(cls, reached: ReachedRun, body: MemberBody) -> Self:
        """The contact with a run that this computer has reached."""
        node, directory, signed, remembered = reached.node, reached.directory, reached.signed, reached.remembered
        charter, seed = charter_of(signed), signed.manifest.seed
        table = MemberTable(
            signed.run_id,
            node.peer_id,
            sequence=int(time.time() * 1000),
            charter=charter,
            wall_time=time.time,
            known=remembered.bodies(),
        )
        gossip = Gossip(node, table, directory, signed.run_id, seed=seed, remembered=remembered)
        body = replace(body, invite=reached.invite)
        contact = cls(node, table, gossip, body, lambda: reached.host.reachability.rung, reached.check_alone)
        contact.heads = Heads(directory, signed.run_id, charter, node.telemetry)
        contact.evaluations = Evaluations(node.identity, directory, signed, node.telemetry)
        stated = remembered.statements(OwnerStatements(signed.run_id, signed.manifest.owner))
        contact.owner_log = OwnerLog(node, gossip.presence, directory, stated, seed=seed, remembered=remembered)
        contact._may_follow = partial(may_follow, directory, signed, remembered, node.telemetry)
        return contact

    def begin(self, mine: Head) -> None:
        """Meet the members, and look for what is published; `mine` is the head of my state."""
        start = self.node.nursery.start_soon
        start(self.gossip.run)
        if self.owner_log is not None:
            start(self.owner_log.run)
        if self.heads is not None:
            start(self.heads.look, mine)

    async def await_look(self, seconds: float) -> None:
        """Wait for the first answers of the directory, and of the members that it names, for some seconds at most."""
        with trio.move_on_after(seconds):
            await self.gossip.looked.wait()
            if self.heads is not None:
                await self.heads.looked.wait()

    async def check_alone(self) -> None:
        """Raise `LocalError` if another process has signed a record with this peer's key, and answers."""
        if self._check_alone is not None and (stated := await self.gossip.doubles()):
            await self._check_alone(stated)

    def report(self, outcome: Outcome, *, is_last: bool) -> None:
        """After a certified round: publish its head, if I proposed it or the run ends with it; read its evaluations."""
        certificate, start = outcome.certificate, self.node.nursery.start_soon
        if self.heads is not None and certificate is not None and (is_last or outcome.members[0] == self.node.peer_id):
            start(partial(self.heads.publish, certificate, is_last=is_last))  # At the end its proposer may leave at once.
        if self.evaluations is not None:
            start(self.evaluations.look, certificate)

    def change(self, **changes: Any) -> None:
        """Change fields of my record, which the next announcement states."""
        self.body = replace(self.body, **changes)

    def announce(self, **changes: Any) -> None:
        """Announce my record, with these changes."""
        self._announced = trio.current_time()
        node, traffic = self.node, self.node.transport.traffic()
        self.change(
            addresses=node.transport.addresses(),  # They change when this computer moves to another network.
            rung=self._rung(),
            up=node.upload_rate,
            down=node.download_rate,
            sent=traffic.sent,
            received=traffic.received,
            **changes,
        )
        body, clamped = fitted(self.body)
        if clamped and clamped != self._clamped:
            node.telemetry.emit("member.clamped", step="announce", reason=clamped)
        self._clamped = clamped
        self.gossip.announce(body)

    def renew(self, *, at_once: bool = False) -> None:
        """Announce my record again if that is due, or `at_once`; not before its first announcement."""
        if self._announced is not None and (at_once or trio.current_time() - self._announced >= ANNOUNCE_PERIOD):
            self.announce()

    def show(self, statements: OwnerStatements) -> None:
        """State in my record that I hold what the run's owner has stated, and serve it."""
        self.change(statements=statements.hash, statements_bytes=len(statements.packed))
        self.renew(at_once=True)

    async def may_follow(
        self, run: str, place: ChainPosition, certificate: Callable[[int], wire.Certificate | None]
    ) -> bool:
        """Return True once it is known that my run goes on as that one, from my state or another one (`may_follow`)."""
        return self._may_follow is None or await self._may_follow(run, place, certificate)

    @property
    def has_moved(self) -> bool:
        """Whether others may dial me elsewhere than my record says."""
        return self.body.addresses != self.node.transport.addresses()


@asynccontextmanager
async def reach_run(link: JoinLink, config: PeerConfig, telemetry: Telemetry) -> AsyncIterator[ReachedRun]:
    """Reach a run; all is closed at the end. Whoever calls it holds the lock of the home folder. Raises `FlockstepError`."""
    may_be_copied = identity_path(config.home).exists()
    identity = Identity.load_or_create(identity_path(config.home))
    dialled = set(await check_alone(identity, link, config)) if may_be_copied else set()
    remembered = Remembered(config.home / "runs" / link.run_id, link.run_id, telemetry)
    values = RunValues()
    async with open_bootstraps(identity, link, config, telemetry, values, remembered) as (host, directory):
        run = await lead(directory, config.home, link.run_id, telemetry)
        link, folder = replace(link, run_id=run, at=link.at if run == link.run_id else None), config.home / "runs" / run
        remembered = Remembered(folder, run, telemetry)
        signed = await take_manifest(directory, remembered, run)
        hand_over(config.home, signed, telemetry)
        charter = charter_of(signed)
        values.charter_of = {run: charter}.get
        if charter.kind != "open":
            charter = charter.amended(await _stated(directory, remembered, signed, telemetry))
        entry = 0.0 if has_ledger(folder) else time.time()  # Whoever has been in may come back after the expiry.
        invite = credential(charter, identity.peer_id, config.invite or remembered.ticket(), entry)
        if config.invite:
            remembered.keep_ticket(config.invite)
        anchor = None if link.at is None else Head(*link.at, tokens=0)
        if config.resume and not has_ledger(folder):
            anchor = anchor or await find_anchor(directory, link, telemetry)
            await report_absent(directory, remembered, signed, identity.peer_id, telemetry)
        async with Node(host, identity, config, telemetry) as node:
            if signed.manifest.owner == identity.peer_id and (folder / LISTING_FILE).exists():
                node.nursery.start_soon(renew_listing, directory, identity, signed.run_id, folder, telemetry)
            node.nursery.start_soon(keep_leading, directory, config.home, signed, telemetry)
            seeds = Seeds(node, directory, signed, config.home, invite)
            node.nursery.start_soon(seeds.run)

            async def check(stated: Sequence[Address]) -> None:
                if new := [address for address in stated if address not in dialled]:  # Old records may be shown again.
                    dialled.update(new)
                    await check_alone(identity, link, config, host, new)

            yield ReachedRun(node, host, directory, signed, remembered, invite, folder, anchor, seeds, check)


async def lead(directory: Directory, home: Path, run: str, telemetry: Telemetry) -> str:
    """Return the run that a run goes on as by now: itself, as a rule.

    Raises `NetworkError` where a manifest is not found, `UsageError` where the owner names a run that is no such one.
    """
    for _ in range(MAX_LINE):
        remembered = Remembered(home / "runs" / run, run, telemetry)
        signed = await take_manifest(directory, remembered, run)
        stated = await _stated(directory, remembered, signed, telemetry)
        named = successor_of(stated)
        if not (following := remembered.successor() or named):
            return run
        remembered.keep_statements(stated)
        if following != named:
            reason = f"its owner names run {named or 'none'} now, this computer has followed {following}"
            telemetry.emit("succession.refused", step="follow", reason=reason, run=named, round=0)
        after = await take_manifest(directory, Remembered(home / "runs" / following, following, telemetry), following)
        if why_not := why_not_follow(signed, after):
            remedy = "ask the run's owner for the link of a run that you can agree to"
            raise UsageError(f"its owner states that run {run} goes on as {following}: {why_not}", remedy=remedy)
        remembered.keep_successor(following)
        hand_over(home, after, telemetry)
        telemetry.emit("run.led", run=following, round=after.manifest.follows.round, reason=f"run {run} goes on as this one")
        run = following
    raise UsageError(f"the link leads through more than {MAX_LINE} runs", remedy="ask the run's owner for a newer link")


async def keep_leading(directory: Directory, home: Path, signed: SignedManifest, telemetry: Telemetry) -> None:
    """Publish what leads on from the runs before a run, as far as they are known here: old links are shared for years."""
    while before := signed.manifest.follows.run:
        remembered = Remembered(home / "runs" / before, before, telemetry)
        if (earlier := remembered.manifest()) is None:
            return
        none = OwnerStatements(before, earlier.manifest.owner)
        try:
            await take_manifest(directory, remembered, before)
            await publish_pages(directory, remembered.statements(none), none)
        except NetworkError as error:
            telemetry.emit("directory.failed", step="publish what an old link leads to", reason=str(error))
        signed = earlier


async def may_follow(
    directory: Directory,
    signed: SignedManifest,
    remembered: Remembered,
    telemetry: Telemetry,
    run: str,
    place: ChainPosition,
    certificate: Callable[[int], wire.Certificate | None],
) -> bool:
    """Return True once the manifest of a run is here that mine goes on as; False, with an event, if it is no such run.

    `certificate` returns that of a round, where my ledger has it: the other run must begin with the state that it proves.
    """
    while True:
        try:
            after = await find_manifest(directory, run)
        except (NetworkError, RemoteError) as error:
            telemetry.emit("directory.failed", step="find the run that this one goes on as", reason=str(error))
            await trio.sleep(OWNER_PERIOD)
            continue
        follows = after.manifest.follows
        mine = None if (held := certificate(follows.round)) is None else (certificate_hash(held), value_of(held).next_root)
        why_not = why_not_follow(signed, after)
        if (followed := remembered.successor()) not in ("", run):
            why_not = f"this computer has followed run {followed}"
        if not why_not and mine not in (None, (bytes.fromhex(follows.hash), bytes.fromhex(after.manifest.start))):
            why_not = f"it begins with another state than the certified one of round {follows.round}"
        if why_not:
            telemetry.emit("succession.refused", step="follow", reason=why_not, run=run, round=place.round)
            return False
        if place.round > follows.round:
            reason = f"it goes on from round {follows.round}: what was certified later is lost"
            telemetry.emit("succession.late", step="follow", reason=reason, run=run, round=place.round)
        remembered.keep_successor(run)
        return True


async def report_absent(
    directory: Directory, remembered: Remembered, signed: SignedManifest, me: PeerId, telemetry: Telemetry
) -> None:
    """Emit for which voters a run waits: those that are connected to no bootstrap, unless enough are or others vote.

    Only bootstraps are asked: no member hears of a newcomer before its user has agreed.
    """
    charter = charter_of(signed)
    founders = Electorate(dict.fromkeys(charter.founders, 1))
    with trio.move_on_after(STATEMENTS_SECONDS), suppress(NetworkError):
        here = await directory.connected(signed.run_id) if isinstance(directory, KademliaDirectory) else charter.founders
        if not founders.is_quorum({me, *here}) and not (await _stated(directory, remembered, signed, telemetry)).vouched:
            telemetry.emit("voters.absent", step="join", reason=founders.awaits(here, charter.owner))


async def as_revised(directory: Directory, signed: SignedManifest, telemetry: Telemetry) -> SignedManifest:
    """Return a run with its settings as its owner has stated them last, as far as the directory knows."""
    return replace(signed, manifest=revised_by(signed, await stated_revision(directory, None, signed, telemetry)))


async def stated_revision(
    directory: Directory, remembered: Remembered | None, signed: SignedManifest, telemetry: Telemetry
) -> bytes:
    """Return the newest revision of a run that its owner has stated, as far as it is known; empty if there is none."""
    revision = (await _stated(directory, remembered, signed, telemetry)).revision
    return b"" if why_not_revise(signed, revision, b"") else revision


async def _stated(
    directory: Directory, remembered: Remembered | None, signed: SignedManifest, telemetry: Telemetry
) -> OwnerStatements:
    """Return what a run's owner has stated, as far as my disk and the directory know it."""
    none = OwnerStatements(signed.run_id, signed.manifest.owner)
    known = none if remembered is None else remembered.statements(none)
    try:
        with trio.move_on_after(STATEMENTS_SECONDS):
            return await read_pages(directory, known)
    except (NetworkError, RemoteError) as error:
        telemetry.emit("directory.failed", step="read the owner's statements", reason=str(error))
    return known


async def renew_listing(
    directory: Directory, identity: Identity, run_id: str, folder: Path, telemetry: Telemetry
) -> None:
    """Renew the listing of a run of mine every day; once it is withdrawn, publish that instead."""
    listed = True
    while listed:
        listed = (folder / LISTING_FILE).exists()
        try:
            record = sign_listing(identity, run_id, time.time(), listed=listed)
            await directory.put(listing_key(run_id, identity.peer_id), record.encode())
        except NetworkError as error:
            telemetry.emit("directory.failed", step="renew the listing", reason=str(error))
        await trio.sleep(RENEWAL_SECONDS)
