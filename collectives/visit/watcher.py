"""Follows a run as a light client, for those who look at it: the driver of `picture`.

Theory of operation. A watcher takes part in nothing. It finds the members by the run's directory, asks a few of them in
turn for newer member records and for the certificates after the newest one that it holds, and folds what they answer
(`picture.fold`). So what it shows of the chain is signed by the run's voters, whoever has sent it; what members say of
themselves is shown as theirs.

It begins with the certificate that the link or its bootstraps name (`light.anchor`), or else with the head that most members
state. It reads on from there, and fills in the rounds before it backwards, page by page. A member whose head is on another
chain is asked for its certificates once: two of one round are an alarm, and the picture shows that, and no further round.
Members may leave, lie or be slow: each answer has its limit in time and size, a failed one is an event and the next member's
turn. Where no member is on this chain any more, the watcher begins anew.

A closed run gives its certificates to members only; of it a watcher shows what its members have published, and on a
member's computer the certificates that its peer holds.
"""

import math
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import trio

from ...dht.directory.interface import Directory
from ...dht.members.owner_log import read_pages
from ...dht.members.table import Member
from ...dht.run.link import JoinLink
from ...dht.run.manifest import SignedManifest
from ...dht.run.statements import OwnerStatements
from ...dht.run.succession import describe_succession, is_ending
from ...peer import wire
from ...peer.base.errors import NetworkError, RemoteError
from ...peer.base.plain import shortened
from ...peer.base.transport import PeerId
from ...peer.node.node import Node
from ...peer.wire.signed import verify_signed
from ..accountability.credit import Credits, PeerCredit
from ..chain.certificate import certificate_hash, check_right_to_vote
from ..chain.chain import NOTHING, Head
from ..chain.fork_choice import Relation, head_of, training
from ..chain.packed import checked
from ..chain.reader import ChainReader
from ..chain.replay import ask_page
from ..evaluation.draw import evaluation_after
from ..light.anchor import ask_named, find_anchor
from ..light.marks import Marks
from ..light.own_ledger import OwnLedger
from ..picture.fold import MAX_RECENT, MAX_ROWS, ChainFold, ChainView, params_of
from ..picture.picture import Picture, RunTrouble, TroubleKind
from ..picture.progress import progress_of
from ..picture.shown import (
    MAX_TROUBLES,
    REASON_SHOWN,
    all_troubles,
    median_loss,
    shown_credit,
    shown_members,
)
from ..picture.votes import VotesHere
from ..spec import charter_of
from .before import credit_before
from .polls import ask_votes
from .scores import ScoreReader
from .visited import MembersVisited

_T = TypeVar("_T")

MEMBERS_PERIOD = 5.0
CHAIN_PERIOD = 2.0
"""Seconds between two questions for further certificates: an empty answer has some 100 bytes."""
POLL_PERIOD = 10.0
SCORES_PERIOD = 20.0
SLOW_PERIOD = 60.0
"""Seconds between two looks at what changes rarely: the owner's statements, history that nobody had, a chain left alone."""
ASKED_TO_FOLLOW = 2
ASKED_FOR_PAGES = 8
"""Members that are asked for the past: liars and slow ones delay it by their timeouts at most so many times."""
ASKED_TO_BEGIN = 3
"""Members that are asked for a head that they state: a crowd of free keys that states one and is silent costs 30 s."""
MAX_POLLED = 64
COMPARE_SECONDS = 10.0
"""Seconds between two chains that are fetched, each of up to 256 certificates: keys are free, and so are false heads."""
MAX_TRIED_HEADS = 256
MAX_FAILED_PEERS = 1024

CLOSED = (
    "nothing: this run is closed, and what is shown of it its members state themselves; its certificates are theirs, and "
    "--home shows them where one of their peers has its home folder"
)


class RunWatcher:
    """One reader of a run, over a node. `decides` is who decides its rounds, in one line; `own` are certificates here."""

    def __init__(
        self,
        node: Node,
        directory: Directory,
        signed: SignedManifest,
        link: JoinLink,
        *,
        decides: str = "",
        own: OwnLedger | None = None,
    ) -> None:
        self._node = node
        self._own = own
        self._directory = directory
        self._signed = signed
        self._link = link
        self._decides = decides
        self._charter = charter_of(signed)
        self._visit = MembersVisited(node, directory, self._charter, self._charge)
        self._fold = ChainFold(self._charter, lambda certificate: evaluation_after(certificate, signed))
        self._folding = trio.Lock()
        self._reader = ChainReader(self, signed.run_id, self._charter)
        self.chain = self._fold.view()
        """What is verified of the run's chain."""
        self.statements = OwnerStatements(signed.run_id, signed.manifest.owner)
        """What the run's owner has stated, as far as the directory has it."""
        self._scores = ScoreReader(directory, signed.run_id, node.telemetry)
        self._called: dict[PeerId, str] = {}
        """What contributors have called themselves while I looked: they are thanked by name after they have left."""
        self._votes: VotesHere | None = None
        self._missed_at: float | None = None
        """When voters were first too few; None while they are not."""
        self._notes: deque[RunTrouble] = deque(maxlen=MAX_TROUBLES)
        self._failed: dict[PeerId, float] = {}
        """When members have failed to show certificates, the oldest forgotten first."""
        self._tried: dict[bytes, None] = {}
        """The heads of other chains whose members were asked for them, the oldest forgotten first."""
        self._anchor = "what most of its members state"
        self._anchored = False
        self._began = -math.inf
        self._random = random.Random(node.peer_id)
        self.revision = 0
        """Grows with each change of the picture."""

    @property
    def shows_chain(self) -> bool:
        """True if the run shows its certificates to my key, or this computer has them."""
        return self._charter.admits(self._node.peer_id, b"") or self._own is not None

    def members(self) -> tuple[Member, ...]:
        """Return the members whose records are valid."""
        return self._visit.members()

    async def ask_bootstraps(self) -> Mapping[PeerId, Marks | None]:
        """Ask which head each bootstrap of the link follows."""
        return await ask_named(self._directory, self._link, self._node.telemetry)

    async def ask(self, peer: PeerId, message: Any, *, timeout: float) -> Any:
        """Ask a member for certificates, or this computer's own peer where that has them. Raises as `Node.ask`."""
        if self._own is not None:
            return await self.compute(self._own.page, message.from_round, message.limit)
        answer = await self._node.ask(peer, message, timeout=timeout)
        self._visit.note(peer, True)
        return answer

    async def compute(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Run long work beside the event loop."""
        return await self._node.compute(partial(function, *arguments))

    async def credit(self, home: Path) -> tuple[tuple[PeerCredit, ...], int]:
        """Return the credit of this run and of all that it goes on from, and how many rounds these had.

        `home` may hold certificates of theirs. Raises as `credit_before`.
        """
        manifest, summed = self._signed.manifest, Credits()
        members = [member.peer for member in self._in_order(training(self.members()))]
        rounds = await credit_before(self._node, self._directory, manifest, members, home, summed)
        summed.add(self._fold.credits)
        return summed.all(), rounds

    async def look(self, history: int = MAX_RECENT) -> None:
        """Look at the run once, with so many rounds of its past.

        Raises `NetworkError` if the directory does not answer, `UsageError` if the bootstraps disagree on the run.
        """
        await self._visit.find()
        self.revision += 1
        if self.shows_chain:
            await self._begin()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read_statements)
            if self._charter.earned:
                nursery.start_soon(self._poll)
            if self.shows_chain:
                nursery.start_soon(self._fill, history)
        await self._read_scores()

    async def run(self) -> None:
        """Follow the run until cancelled. Raises as `look`, which comes first."""
        await self.look()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._repeat, MEMBERS_PERIOD, self._visit.ask)
            nursery.start_soon(self._repeat, SLOW_PERIOD, self._read_statements)
            if self.shows_chain:
                nursery.start_soon(self._repeat, CHAIN_PERIOD, self._follow)
                nursery.start_soon(self._repeat, COMPARE_SECONDS, self._compare)
            if self._charter.earned:
                nursery.start_soon(self._repeat, POLL_PERIOD, self._poll)
            if self.shows_chain:
                nursery.start_soon(self._repeat, SLOW_PERIOD, self._fill)
                nursery.start_soon(self._repeat, SCORES_PERIOD, self._read_scores)

    def picture(self) -> Picture:
        """Return the run as it is known now."""
        view, members, votes, here = self.chain, self.members(), self._votes, self._visit.here()
        if votes is not None and self._missed_at is not None:
            votes = replace(votes, away=trio.current_time() - self._missed_at)
        manifest = self._signed.manifest
        present = [member for member in members if here.get(member.peer, True)]
        progress = progress_of(self._signed, view, present, votes, has_ended=is_ending(self.statements))
        credit = shown_credit(view.credit, self._visit.lately(), self._called)
        self._called = {one.peer: one.name for one in credit if one.name}
        link = self._link if view.head == NOTHING else JoinLink(self._link.run_id, self._link.via, _at(view.head))
        return Picture(
            run=self._signed.run_id,
            name=shortened(manifest.name, REASON_SHOWN),
            model=shortened(manifest.model_name, REASON_SHOWN),
            by=shortened(manifest.by, REASON_SHOWN),
            contact=shortened(manifest.contact, REASON_SHOWN),
            data=shortened(manifest.data.source, REASON_SHOWN),
            params=params_of(view.num_cells),
            link=str(link),
            owner=manifest.owner,
            taken_at=time.time(),
            taken_by=self._node.peer_id,
            decides=self._decides,
            joining=manifest.joining,
            goes_on=describe_succession(self._signed, self.statements, self._link.via),
            verified=self._verified(),
            progress=progress,
            rounds=view.rows,
            recent=view.recent,
            members=shown_members(members, view.electorate, view.trust, here, view.credit),
            votes=votes,
            evaluations=self._scores.shown(view.due),
            credit=credit,
            troubles=all_troubles(view, votes, self._notes, self.statements),
        )

    def _verified(self) -> str:
        if not self.shows_chain:
            return CLOSED
        if self.chain.head == NOTHING and self._anchored and self._own is None:
            return f"nothing: no member shows a chain of certificates with {self._anchor}"
        if self.chain.head == NOTHING:
            return "no round is certified yet"
        if self.chain.first == 1:
            return "every certificate from the first round on"
        return f"every certificate from round {self.chain.first} on, after {self._anchor}"

    async def _repeat(self, period: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await trio.sleep(period)
            try:
                await work()
            except NetworkError as error:
                self._node.telemetry.emit("directory.failed", step="watch a run", reason=str(error))
            self.revision += 1

    # What goes wrong

    def _fail(self, peer: PeerId) -> None:
        self._failed.pop(peer, None)
        self._failed[peer] = trio.current_time()
        while len(self._failed) > MAX_FAILED_PEERS:
            del self._failed[next(iter(self._failed))]

    def _charge(self, peer: PeerId, step: str, error: RemoteError) -> None:
        self._fail(peer)
        self._node.charge(peer, step, error)
        self._note(TroubleKind.LIAR, self.chain.head.round, peer, f"{step}: {error}")

    def _note(self, kind: TroubleKind, round_: int, peer: PeerId, reason: str) -> None:
        """Keep what went wrong; of one kind and peer the last."""
        others = [note for note in self._notes if (note.kind, note.peer) != (kind, peer)]
        self._notes = deque(others, maxlen=MAX_TROUBLES)
        self._notes.append(RunTrouble(round_, time.time(), kind, peer, shortened(reason, REASON_SHOWN)))

    # The chain

    async def _begin(self) -> None:
        """Begin with the anchor, or with the head that most members state, and read on from there."""
        self._began = trio.current_time()
        if self._own is not None:
            self._anchored, self._anchor = True, "what this computer's own peer holds"
            if (newest := await self._node.compute(self._own.head)) != NOTHING:
                await self._begin_at(self._node.peer_id, newest, is_trusted=True)
            return
        anchor = await self._find_anchor()
        here = training(self.members())
        stated = Counter(head_of(member) for member in here)
        for head in sorted(stated, key=lambda head: (-stated[head], -head.round, head.hash)):
            if head == NOTHING and anchor is None:
                return
            holders = [member.peer for member in here if head_of(member) == head]
            for peer in self._random.sample(holders, min(ASKED_TO_BEGIN, len(holders))):
                if await self._begin_at(peer, anchor or head, is_trusted=anchor is not None):
                    while await self._read_on():
                        pass
                    return

    async def _find_anchor(self) -> Head | None:
        self._anchored = True
        if self._link.at is not None:
            self._anchor = f"that of round {self._link.at[0]}, which the link names"
            return Head(*self._link.at, tokens=0)
        anchor = await find_anchor(self._directory, self._link, self._node.telemetry)
        self._anchored = anchor is not None
        if anchor is not None:
            self._anchor = f"that of round {anchor.round}, which the bootstraps of the link name"
        return anchor

    async def _begin_at(self, peer: PeerId, start: Head, *, is_trusted: bool) -> bool:
        """Begin with a certificate of which only the hash is known; returns False if a member does not show it."""
        page, losses = await self._ask(peer, start.round, 1)
        if not page or certificate_hash(page[0]) != start.hash:
            if page and is_trusted:
                self._note(TroubleKind.FORK, start.round, peer, f"it is not on the chain with {self._anchor}")
            return False

        def begin() -> None:
            checked(page, self._charter.run, verify_signed, self._charter)
            if not is_trusted:
                check_right_to_vote(page[0], self._charter)
            self._fold.begin(page[0], losses)

        try:
            await self._folded(begin)
        except RemoteError as error:
            self._charge(peer, "show its head", error)
            return False
        return True

    async def _follow(self) -> None:
        """Read on from the newest certificate; begin where there is none."""
        here = training(self.members())
        if self.chain.head != NOTHING:
            await self._read_on(time.time())
        elif trio.current_time() >= self._began + COMPARE_SECONDS and (
            self._anchored or any(head_of(member) != NOTHING for member in here)
        ):
            await self._begin()

    async def _read_on(self, seen_at: float | None = None) -> bool:
        """Ask two members for the certificates after the newest one, which are seen now; returns whether one has some."""
        for peer in self._holders()[:ASKED_TO_FOLLOW]:
            if self._reader.alarm is not None or await self._extend(peer, seen_at):
                break
        else:
            return False
        return self._reader.alarm is None

    def _holders(self) -> list[PeerId]:
        """Return whom to ask for certificates, in this order; myself where this computer's own peer has them."""
        if self._own is not None:
            return [self._node.peer_id]
        return [member.peer for member in self._in_order(training(self.members()))]

    def _in_order(self, members: Sequence[Member]) -> list[Member]:
        """Return members in the order of asking: voters, the last rosters, those ahead; who failed lately comes last."""
        view, recently = self.chain, trio.current_time() - SLOW_PERIOD

        def order(member: Member) -> tuple[bool, bool, bool, bool, float]:
            peer, is_ahead = member.peer, member.body.round > view.head.round
            has_failed = self._failed.get(peer, -math.inf) > recently
            is_known = peer in view.electorate.votes, peer in view.trust
            return has_failed, not is_known[0], not is_known[1], not is_ahead, self._random.random()

        return sorted(members, key=order)

    async def _extend(self, peer: PeerId, seen_at: float | None) -> bool:
        """Take a page after the newest certificate from a member. Returns whether it has some."""
        before, take = self.chain.head, partial(self._take, seen_at)
        with self._troubles(peer, "show its chain"):
            until = before.round + wire.MAX_PAGE
            self._judge(peer, await self._reader.follow(self._fold.held(), peer, until, take))
        return self.chain.head != before

    async def _take(
        self, seen_at: float | None, page: list[wire.Certificate], losses: Mapping[int, float]
    ) -> bool:
        """Fold a page; the loss of rounds that are seen now is what the members state."""
        if seen_at is not None:
            loss = median_loss(self.members(), self.chain.recent[0].roster if self.chain.recent else ())
            losses = {} if loss is None else dict.fromkeys((it.slot.round for it in page), loss)
        await self._folded(self._fold.extend, page, losses, seen_at)
        return True

    def _judge(self, peer: PeerId, how: Relation) -> None:
        """Note a member whose chain parts from the one that is followed."""
        if how is not Relation.EXTENDS:
            self._fail(peer)
            self._node.telemetry.emit("watch.parted", peer=peer, round=self.chain.head.round, reason=how.value)
            self._note(TroubleKind.FORK, self.chain.head.round, peer, how.value)

    async def _compare(self) -> None:
        """Ask one member whose head is on no chain of mine for its certificates; begin anew where nobody is on mine."""
        if self._own is not None:  # My peer may have begun with another chain.
            if not await self._node.compute(partial(self._own.holds, self.chain.head)):
                await self._begin()
            return
        here = training(self.members())
        apart = [member for member in here if self._is_apart(member)] if self.chain.head != NOTHING else []
        for member in self._in_order(apart):
            if member.body.head not in self._tried:
                self._tried[member.body.head] = None
                while len(self._tried) > MAX_TRIED_HEADS:
                    del self._tried[next(iter(self._tried))]
                with self._troubles(member.peer, "show its chain"):
                    take, head = partial(self._take, time.time()), head_of(member)
                    self._judge(member.peer, await self._reader.reach(self._fold.held(), head, member.peer, take))
                return
        if apart and len(apart) == len(here) and trio.current_time() > self._began + SLOW_PERIOD:
            await self._begin()

    def _is_apart(self, member: Member) -> bool:
        head = head_of(member)
        return head != NOTHING and not self.chain.is_on_chain(head)

    async def _fill(self, history: int = MAX_ROWS) -> None:
        """Fetch the rounds before those that are held, so many of them in all."""
        first = max(1, self.chain.head.round + 1 - history)

        async def take(page: list[wire.Certificate], losses: Mapping[int, float]) -> bool:
            return await self._folded(self._fold.prepend, page, losses)

        while self._fold.oldest is not None and (before := self.chain.first) > first:
            for peer in self._holders()[:ASKED_FOR_PAGES]:
                with self._troubles(peer, "show the chain's past"):
                    await self._reader.fill(self._fold.oldest, max(first, before - wire.MAX_PAGE), peer, take)
                if self.chain.first != before:
                    break
            else:
                reason = f"nobody that was asked has the certificates before round {before}"
                self._node.telemetry.emit("watch.partial", round=before, reason=reason)
                return

    async def _ask(self, peer: PeerId, round_: int, limit: int) -> tuple[list[wire.Certificate], dict[int, float]]:
        """Ask a member for certificates and losses; empty if it has none, or does not answer as it should."""
        with self._troubles(peer, "show certificates"):
            return await ask_page(self, peer, wire.LedgerAsk(self._signed.run_id, round_, limit))
        return [], {}

    @contextmanager
    def _troubles(self, peer: PeerId, step: str) -> Iterator[None]:
        """Note why a member does not show certificates, and go on."""
        try:
            yield
        except NetworkError as error:
            self._fail(peer)
            self._node.telemetry.emit(
                "head.unproven", peer=peer, step="watch a run", reason=str(error), round=self.chain.head.round
            )
        except RemoteError as error:
            self._charge(peer, step, error)

    async def _folded(self, work: Callable[..., _T], *arguments: object) -> _T:
        """Change the fold beside the event loop, and see it afterwards. Raises `RemoteError`."""
        async with self._folding:

            def fold() -> tuple[_T, ChainView]:
                return work(*arguments), self._fold.view()

            result, self.chain = await self._node.compute(fold)
        self.revision += 1
        return result

    # Votes and statements

    async def _poll(self) -> None:
        """Ask which of the voters of the next round are here."""
        view, here = self.chain, training(self.members())
        order = sorted(here, key=lambda member: (member.peer not in view.electorate.votes, self._random.random()))
        peers = [member.peer for member in order[:MAX_POLLED]]
        if view.head == NOTHING and (not here or any(head_of(member) != NOTHING for member in here)):
            self._votes = None  # Nobody has a state to vote on, or shows the certificate that says who votes.
            return
        note = self._visit.note
        self._votes = await ask_votes(self._node, peers, self._charter, view.head.round, view.electorate, note)
        if self._votes.electorate.is_quorum(self._votes.here):
            self._missed_at = None
        elif self._missed_at is None:
            self._missed_at = trio.current_time()
        self.revision += 1

    async def _read_scores(self) -> None:
        await self._scores.look(self.chain.due)
        self.revision += 1

    async def _read_statements(self) -> None:
        try:
            self.statements = await read_pages(self._directory, self.statements)
        except NetworkError as error:
            self._node.telemetry.emit("directory.failed", step="find the owner's statements", reason=str(error))
        except RemoteError as error:  # Of a directory that validates nothing.
            self._node.telemetry.emit("directory.junk", step="find the owner's statements", reason=str(error))


def _at(head: Head) -> tuple[int, bytes]:
    return head.round, head.hash
