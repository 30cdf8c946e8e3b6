"""Folds the certificates of a run, forwards and backwards, into rows, the last rounds and trust. Pure.

Theory of operation. The fold holds a stretch of the chain without a gap. It takes the certificates that a reader has
verified (`chain.reader`), those after its newest one and those before its oldest one; the order changes nothing.

A certified round is final: another certificate of one that is held changes nothing. Memory is bounded:
`MAX_ROWS` rows, `MAX_RECENT` rounds by names, `KEPT_WHOLE` certificates, and the credit of `credit.MAX_CONTRIBUTORS`.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from sys import intern

from ...dht.run.admission import Charter
from ...dht.run.manifest import EvalSettings
from ...peer import wire
from ...peer.base.transport import PeerId
from ..accountability.credit import Credits, PeerCredit
from ..accountability.trust import Trust, TrustRecord
from ..agreement.electorate import Electorate
from ..chain.certificate import certificate_hash, genesis, value_of
from ..chain.chain import NOTHING, ChainLink, Head, HeldChain
from ..chain.voters import electorate_after
from ..evaluation.draw import DueEvaluation
from ..vector.codec import CELL
from .picture import NOT_COUNTED, CertifiedRound, RecentRound

MAX_ROWS = 20_000
"""Rounds of which a row is held, some 200 bytes each: a run of a month with a round in two minutes."""
MAX_RECENT = 200
MAX_DUE = 200
"""Evaluations that are held, as many as rounds by name."""
KEPT_WHOLE = 64
"""Certificates held whole: enough for the trust of all (`TRUST_WINDOW` rounds)."""
ROOT_SHOWN_BYTES = 4
NOT_CUT = "no work of it came in time"
VOTED = "it voted, and sent no work"
"""Of a keeper, as certificate and manifest tell: what it says of itself now changes no round of the past."""


NO_LOSSES: Mapping[int, float] = {}


@dataclass(frozen=True, slots=True)
class ChainView:
    """What a fold holds at one moment."""

    head: Head
    first: int
    """The first round that is held; 1 before any."""
    electorate: Electorate
    """The voters of the next round."""
    rows: tuple[CertifiedRound, ...]
    """A row for each round that is held, in order."""
    recent: tuple[RecentRound, ...]
    """The last rounds, the newest first."""
    trust: Mapping[PeerId, TrustRecord]
    """The trust of all members of the last rosters, as far as the certificates held determine it."""
    num_cells: int
    """The cells of the run's vector, as far as certificates have shown them."""

    credit: tuple[PeerCredit, ...]
    """What contributors have given in the rounds that were folded, the most tokens first; once `first` is 1, in all."""
    due: tuple[DueEvaluation, ...]
    """The last evaluations that the run asks for, in order."""
    revision: bytes
    """The owner's revision of the run's settings that holds in the next round; empty while the manifest's do."""

    def is_on_chain(self, head: Head) -> bool:
        """Return True if this is the head, or was one before: of rounds that are not held by name nothing is known."""
        if head.round > self.head.round:
            return False
        place = self.head.round - head.round
        return place >= len(self.recent) or self.recent[place].hash == head.hash.hex()


class ChainFold:
    """The stretch of a run's chain that one reader has verified."""

    def __init__(
        self,
        charter: Charter,
        evaluation: Callable[[wire.Certificate], EvalSettings] = lambda certificate: EvalSettings(),
    ) -> None:
        """`evaluation` returns how the state after a certificate is evaluated."""
        self._charter = charter
        self._kept: deque[wire.Certificate] = deque(maxlen=KEPT_WHOLE)
        self._rows: deque[CertifiedRound] = deque(maxlen=MAX_ROWS)
        self._recent: deque[RecentRound] = deque(maxlen=MAX_RECENT)
        self.oldest: wire.Certificate | None = None
        """The first certificate; None before any."""
        self._trust: tuple[tuple[bytes, int], Mapping[PeerId, TrustRecord]] = (b"", 0), {}
        self._num_cells = 0
        self._evaluation = evaluation
        self._due: deque[DueEvaluation] = deque(maxlen=MAX_DUE)
        self.credits = Credits()
        """Of the rounds that were folded."""

    @property
    def newest(self) -> wire.Certificate | None:
        """The last certificate; None before the first."""
        return self._kept[-1] if self._kept else None

    @property
    def head(self) -> Head:
        """The head of the chain; `NOTHING` before the first certificate."""
        return NOTHING if self.newest is None else ChainLink.of(self.newest).head

    def view(self) -> ChainView:
        """Return what is held."""
        return ChainView(
            head=self.head,
            first=self._rows[0].round if self._rows else 1,
            electorate=electorate_after(None if self.newest is None else value_of(self.newest), self._charter),
            rows=tuple(self._rows),
            recent=tuple(reversed(self._recent)),
            trust=self._earned(),
            num_cells=self._num_cells,
            credit=self.credits.all(),
            due=tuple(self._due),
            revision=b"" if self.newest is None else value_of(self.newest).revision,
        )

    def begin(self, certificate: wire.Certificate, losses: Mapping[int, float] = NO_LOSSES) -> None:
        """Begin anew with a certificate that its caller has verified."""
        for held in (self._kept, self._rows, self._recent, self._due):
            held.clear()
        self.credits = Credits()
        self._append(certificate, None, None, losses)

    def extend(
        self, page: Sequence[wire.Certificate], losses: Mapping[int, float] = NO_LOSSES, time: float | None = None
    ) -> None:
        """Take the next certificates, as far as they continue the chain.

        `losses` are claimed, by round; `time` is when the certificates were seen first, in Unix seconds.
        """
        for certificate in page:
            before = self.newest
            if certificate.slot.previous == (self.head.hash if before else genesis(self._charter.run)):
                self._append(certificate, before, time, losses)

    def prepend(self, page: Sequence[wire.Certificate], losses: Mapping[int, float] = NO_LOSSES) -> bool:
        """Take those right before the oldest certificate; returns False if they are others, or there is no place."""
        if self.oldest is None or certificate_hash(page[-1]) != self.oldest.slot.previous or len(self._rows) == MAX_ROWS:
            return False
        certificates = [*page, self.oldest]
        for index in range(len(page) - 1, -1, -1):
            certificate, round_ = certificates[index], page[index].slot.round
            self._count(certificate)
            due = DueEvaluation.after(certificate, self._evaluation(certificate))
            if due is not None and len(self._due) < MAX_DUE:
                self._due.appendleft(due)
            if self._recent and self._recent[0].round == round_ + 1:
                self._recent[0] = recent_of(certificates[index + 1], certificate, self._charter)
                if len(self._recent) < MAX_RECENT:
                    self._recent.appendleft(recent_of(certificate, None, self._charter))
            if self._kept[0].slot.round == round_ + 1 and len(self._kept) < KEPT_WHOLE:
                self._kept.appendleft(certificate)
            if len(self._rows) < MAX_ROWS:
                self._rows.appendleft(row_of(certificate, None, losses))
        self.oldest = page[0]
        return True

    def held(self) -> HeldChain:
        """Return the chain as a `ChainReader` continues it: the last certificates are held whole."""
        return HeldChain.of(tuple(self._kept), self.head)

    def _earned(self) -> Mapping[PeerId, TrustRecord]:
        basis = self.head.hash, len(self._kept)
        if self._trust[0] != basis:
            trust = Trust(self._charter.earned, self._charter.carried)
            for certificate in self._kept:
                trust.take(certificate)
            self._trust = basis, trust.all()
        return self._trust[1]

    def _append(
        self,
        certificate: wire.Certificate,
        before: wire.Certificate | None,
        time: float | None,
        losses: Mapping[int, float],
    ) -> None:
        if not self._kept:
            self.oldest = certificate
        self._kept.append(certificate)
        self._rows.append(row_of(certificate, time, losses))
        self._recent.append(recent_of(certificate, before, self._charter))
        if (due := DueEvaluation.after(certificate, self._evaluation(certificate))) is not None:
            self._due.append(due)
        self._count(certificate)

    def _count(self, certificate: wire.Certificate) -> None:
        value = value_of(certificate)
        self._num_cells = max(self._num_cells, value.bounds[-1])
        self.credits.take(value)


def row_of(certificate: wire.Certificate, time: float | None, losses: Mapping[int, float]) -> CertifiedRound:
    """Return the row of a validated certificate."""
    value, slot = value_of(certificate), certificate.slot
    return CertifiedRound(
        round=slot.round,
        time=time,
        tokens=value.tokens,
        members=len(value.members),
        contributors=len(value.contributors),
        flagged=len(value.flagged),
        voters=len(certificate.voters),
        attempt=slot.attempt,
        loss=losses.get(slot.round),
        root=value.next_root[:ROOT_SHOWN_BYTES].hex(),
    )


def recent_of(certificate: wire.Certificate, before: wire.Certificate | None, charter: Charter) -> RecentRound:
    """Return who took part in a certified round; its quorum too if the certificate before is known, or it is the first."""
    value, slot = value_of(certificate), certificate.slot
    names = tuple(map(intern, value.members))  # The same in all rounds: one copy of each.
    electorate = None
    if before is not None or slot.round == 1:
        electorate = electorate_after(None if before is None else value_of(before), charter)
    keepers = () if charter.keepers is None else charter.founders | set(certificate.voters)
    return RecentRound(
        round=slot.round,
        hash=certificate_hash(certificate).hex(),
        root=value.next_root.hex(),
        tokens=value.tokens - (0 if before is None else value_of(before).tokens) if electorate is not None else 0,
        roster=names,
        cut=tuple(names[index] for index in value.contributors),
        flagged=tuple(names[index] for index in value.flagged),
        away=tuple(_away(names, value, keepers)),
        voters=tuple(map(intern, certificate.voters)),
        quorum=None if electorate is None else electorate.quorum,
        total=None if electorate is None else electorate.total,
        attempt=slot.attempt,
    )


def params_of(num_cells: int) -> int:
    """Return the parameters of a vector of so many cells."""
    return num_cells * CELL


def _away(
    names: Sequence[PeerId], value: wire.Value, keepers: Collection[PeerId]
) -> Iterator[tuple[PeerId, str]]:
    for index, peer in enumerate(names):
        if index in value.flagged:
            yield peer, NOT_COUNTED
        elif index not in value.contributors:
            yield peer, VOTED if peer in keepers else NOT_CUT
