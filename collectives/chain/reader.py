"""Reads the chain of a run from any peer: forwards by the quorum that each certificate determines, backwards by hashes.

Theory of operation. Whoever holds one certificate of a chain can tell the next one: the electorate that the held one
determines has signed it. So a reader asks a peer, its giver, for what follows its head, page by page, and checks each page
before it asks for the next. The giver may be anybody: it can be late or silent, and cannot lead the reader elsewhere. What
is before the oldest certificate held is named by its hash, and so are all those before.

A certified round is final. If the giver's chain parts from the reader's, the reader looks for the first round in which they
differ, by halves, and checks the giver's certificate of it by the one before, which both have. Two certificates of one round
prove that voters with more than a third of the votes have signed both: the alarm. None of the two is better.

Bootstraps, watchers, newcomers and members that catch up read by it. Each holds what it needs of a chain (`HeldChain`), and
takes the pages that were verified.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

import trio

from ...dht.run.admission import Charter
from ...peer import wire
from ...peer.base.errors import NetworkError
from ...peer.base.transport import PeerId
from ...peer.wire.signed import verify_signed
from .certificate import certificate_hash
from .chain import Head, HeldChain
from .fork_choice import Relation
from .packed import checked, continued
from .replay import LEDGER_ANSWER_SECONDS, Asker, ask_certificates, ask_page

Take = Callable[[list[wire.Certificate], Mapping[int, float]], Awaitable[bool]]
"""Takes verified certificates that follow those before, and by round the losses that their giver claims.

It returns False to stop reading.
"""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two valid certificates of one round: voters with more than a third of the votes have signed both."""

    mine: wire.Certificate
    other: wire.Certificate

    def __str__(self) -> str:
        return (
            f"there are two certificates of round {self.mine.slot.round}: voters with more than a third of the votes have "
            "signed both, so neither counts"
        )


class ChainReader:
    """Reads one run's chain from peers."""

    def __init__(
        self, asker: Asker, run: str, charter: Charter, spend: Callable[[list[wire.Certificate]], object] = len
    ) -> None:
        """`spend` is told of each page before it is verified, which costs its signatures."""
        self._asker, self._run, self._charter, self._spend = asker, run, charter, spend
        self.alarm: Conflict | None = None
        """The first conflict that was found: stop, and say so."""

    async def follow(self, chain: HeldChain, giver: PeerId, until: int, take: Take) -> Relation:
        """Take what follows the head of a chain up to a round, as far as a peer gives it.

        Raises `NetworkError`, or `RemoteError` for what is false, once what is valid before it was taken.
        """
        mine = chain.head
        before = await self._certificate(chain, mine.round, giver)
        parts = before is None and mine.round > 0
        parts = parts or await self._read(before, giver, until, take)
        return await self._part(chain, mine.round, giver) if parts else Relation.EXTENDS

    async def fill(self, oldest: wire.Certificate, first: int, giver: PeerId, take: Take) -> wire.Certificate:
        """Take what leads to a certificate, backwards down to round `first`, as far as a peer gives it.

        Returns the oldest certificate then. Raises as `follow`.
        """
        size = wire.MAX_PAGE
        while size and first < (at := oldest.slot.round):
            begin = max(first, at - size)
            page, losses = await ask_page(self._asker, giver, wire.LedgerAsk(self._run, begin, at - begin))
            if len(page) < at - begin:  # Whoever joined late has the last ones only.
                size //= 4
                continue
            self._spend(page)
            check = partial(checked, [*page, oldest], self._run, verify_signed, self._charter)
            await self._asker.compute(check)
            if not await take(page, losses):
                break
            oldest = page[0]
        return oldest

    async def reach(self, chain: HeldChain, head: Head, giver: PeerId, take: Take) -> Relation:
        """Return how a head relates to a chain, by the certificates that a peer gives. Raises as `follow`.

        What leads to a later head is taken, as far as the peer gives it.
        """
        if (known := chain.at(head.round)) is not None and known.hash == head.hash:  # A join link names no tokens.
            return Relation.EXTENDS
        if head.round < chain.first:
            return Relation.OLDER
        if head.round <= chain.head.round:
            return await self._part(chain, head.round, giver)
        return await self.follow(chain, giver, head.round, take)

    async def _read(self, before: wire.Certificate | None, giver: PeerId, until: int, take: Take) -> bool:
        """Take what follows a certificate. Returns True if the giver's next one follows another."""
        at = 0 if before is None else before.slot.round
        deadline = trio.current_time() + LEDGER_ANSWER_SECONDS
        goes_on = True
        while goes_on and at < until:
            question = wire.LedgerAsk(self._run, at + 1, min(wire.MAX_PAGE, until - at))
            timeout = min(LEDGER_ANSWER_SECONDS, deadline - trio.current_time())
            page, losses = await ask_page(self._asker, giver, question, timeout=max(0.0, timeout))
            if not page:
                break
            deadline += LEDGER_ANSWER_SECONDS * len(page) / wire.MAX_PAGE  # An answer may hold one certificate.
            if before is not None and page[0].slot.previous != certificate_hash(before):
                return True
            self._spend(page)
            check = partial(continued, page, before, self._run, verify_signed, self._charter)
            valid, error = await self._asker.compute(check)
            if valid:
                before, at = valid[-1], valid[-1].slot.round
                goes_on = await take(valid, losses)
            if error is not None:
                raise error
        return False

    async def _part(self, chain: HeldChain, differs: int, giver: PeerId) -> Relation:
        """Find the first round whose certificate is another one than mine, and check that: the alarm."""
        common = 0 if chain.first <= 1 else chain.first
        if common and (common >= differs or not await self._is_common(chain, common, giver)):
            return Relation.APART
        while differs - common > 1:
            middle = (common + differs) // 2
            if await self._is_common(chain, middle, giver):
                common = middle
            else:
                differs = middle
        mine = await self._asker.compute(chain.certificate, differs)
        before = await self._certificate(chain, common, giver)
        page = await self._ask(giver, differs)
        if mine is None or (before is None and common) or not page or certificate_hash(mine) == certificate_hash(page[0]):
            raise NetworkError(f"two certificates of round {differs} cannot be compared: one is not here any more")
        await self._asker.compute(partial(checked, page, self._run, verify_signed, self._charter, before=before))
        self.alarm = self.alarm or Conflict(mine, page[0])
        return Relation.TWICE

    async def _is_common(self, chain: HeldChain, round_: int, giver: PeerId) -> bool:
        page, known = await self._ask(giver, round_), chain.at(round_)
        if not page:
            raise NetworkError(f"its ledger lacks round {round_}")
        return known is not None and known.hash == certificate_hash(page[0])

    async def _certificate(self, chain: HeldChain, round_: int, giver: PeerId) -> wire.Certificate | None:
        """Return the certificate of a round of mine, which a join link names by its hash alone.

        None before the first round, and if it is not here and the giver has another one.
        """
        if not round_:
            return None
        found: wire.Certificate | None = await self._asker.compute(chain.certificate, round_)
        if found is None:
            page, known = await self._ask(giver, round_), chain.at(round_)
            if not page:
                raise NetworkError(f"the certificate of round {round_} is not here, and its ledger lacks it")
            found = page[0] if known is not None and known.hash == certificate_hash(page[0]) else None
        return found

    async def _ask(self, giver: PeerId, round_: int) -> list[wire.Certificate]:
        return await ask_certificates(self._asker, giver, wire.LedgerAsk(self._run, round_, 1))
