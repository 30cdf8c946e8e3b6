"""Folds the certificates of a run, forwards and backwards, into rows, the last rounds and trust. Pure.

Theory of operation. The fold holds a stretch of the chain without a gap. Forwards it takes the certificates that a reader
has verified (`chain.reader`). Backwards it takes a page whose last certificate the oldest held one names by its hash; the
voters of each are checked by the one before it. So one trusted certificate makes all others verified, and the order in
which they arrive changes nothing.

A certified round is final: another certificate of one that is held changes nothing. Memory is bounded:
`MAX_ROWS` rows, `MAX_RECENT` rounds by names, `KEPT_WHOLE` certificates, and the credit of `MAX_CONTRIBUTORS`, of whom
those with the least tokens are forgotten.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from sys import intern

from ...dht.run.admission import Charter
from ...dht.run.manifest import EvalSettings
from ...peer import wire
from ...peer.base.transport import PeerId
from ...peer.wire.signed import Verify
from ..accountability.credit import PeerCredit
from ..accountability.trust import Trust, TrustRecord
from ..agreement.electorate import Electorate
from ..chain.certificate import certificate_hash, genesis, value_of
from ..chain.chain import NOTHING, ChainLink, Head, HeldChain
from ..chain.packed import checked
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
MAX_CONTRIBUTORS = 20_000
"""Contributors whose credit is held: keys are free, and a run may go on for years."""
ROOT_SHOWN_BYTES = 4
NOT_CUT = "no work of it came in time"
VOTED = "it voted, and sent no work"
"""Of a keeper, as certificate and manifest tell: what it says of itself now changes no round of the past."""


@dataclass(frozen=True, slots=True)
class Sight:
    """When a certificate was seen first, in Unix seconds, and the median of the losses that members stated then."""

    time: float | None = None
    loss: float | None = None


UNSEEN = Sight()
NO_LOSSES: Mapping[int, float] = {}


@dataclass(frozen=True, slots=True)
class ChainView:
    """What a fold holds at one moment."""

    head: Head
    first: int
    """The first round that is held; 1 before any."""
    is_full: bool
    """True if no older rounds are missing, or none would fit."""
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
    is_anchored: bool
    """True if the certificate that the fold was begun to reach is on the chain."""

    def is_on_chain(self, head: Head) -> bool:
        """Return True if this is the head, or was one before: of rounds that are not held by name nothing is known."""
        if head.round > self.head.round:
            return False
        place = self.head.round - head.round
        return place >= len(self.recent) or self.recent[place].hash == head.hash.hex()


class ChainFold:
    """The stretch of a run's chain that one reader has verified. `verify` checks a signature."""

    def __init__(
        self,
        charter: Charter,
        verify: Verify,
        evaluation: Callable[[wire.Certificate], EvalSettings] = lambda certificate: EvalSettings(),
    ) -> None:
        """`evaluation` returns how the state after a certificate is evaluated."""
        self._charter = charter
        self._verify = verify
        self._kept: deque[wire.Certificate] = deque(maxlen=KEPT_WHOLE)
        self._rows: deque[CertifiedRound] = deque(maxlen=MAX_ROWS)
        self._recent: deque[RecentRound] = deque(maxlen=MAX_RECENT)
        self._oldest: wire.Certificate | None = None
        self._trust: tuple[tuple[bytes, int], Mapping[PeerId, TrustRecord]] = (b"", 0), {}
        self._num_cells = 0
        self._evaluation = evaluation
        self._due: deque[DueEvaluation] = deque(maxlen=MAX_DUE)
        self._tokens: Counter[PeerId] = Counter()
        self._rounds: Counter[PeerId] = Counter()
        self._anchor: Head | None = None
        self._is_anchored = False

    @property
    def newest(self) -> wire.Certificate | None:
        """The last certificate; None before the first."""
        return self._kept[-1] if self._kept else None

    @property
    def head(self) -> Head:
        """The head of the chain; `NOTHING` before the first certificate."""
        return NOTHING if self.newest is None else ChainLink.of(self.newest).head

    @property
    def first(self) -> int:
        """The first round that is held; 1 before any."""
        return self._rows[0].round if self._rows else 1

    @property
    def is_full(self) -> bool:
        """True if no older rounds are missing, or none would fit."""
        return self.first == 1 or len(self._rows) == MAX_ROWS

    def view(self) -> ChainView:
        """Return what is held."""
        return ChainView(
            head=self.head,
            first=self.first,
            is_full=self.is_full,
            electorate=electorate_after(None if self.newest is None else value_of(self.newest), self._charter),
            rows=tuple(self._rows),
            recent=tuple(reversed(self._recent)),
            trust=self._earned(),
            num_cells=self._num_cells,
            credit=self._credited(),
            due=tuple(self._due),
            revision=b"" if self.newest is None else value_of(self.newest).revision,
            is_anchored=self._is_anchored,
        )

    def begin(self, certificate: wire.Certificate, sight: Sight = UNSEEN, anchor: Head | None = None) -> None:
        """Begin with a certificate that its caller trusts, or trusts once an `anchor` was found among those before it.

        Whatever was held is dropped. Raises `RemoteError`.
        """
        checked([certificate], self._charter.run, self._verify, self._charter)
        self.drop()
        self._anchor, self._is_anchored = anchor, False
        self._append(certificate, None, sight)

    def extend(self, page: Sequence[wire.Certificate], sight: Sight = UNSEEN) -> None:
        """Take certificates that a reader has verified (`chain.reader`), as far as they continue the chain."""
        for certificate in page:
            before = self.newest
            if certificate.slot.previous == (self.head.hash if before else genesis(self._charter.run)):
                self._append(certificate, before, sight)

    def prepend(self, page: Sequence[wire.Certificate], losses: Mapping[int, float] = NO_LOSSES) -> None:
        """Take a page that ends right before the oldest certificate, with what its sender claims as losses by round.

        Raises `RemoteError`, and takes nothing then.
        """
        if self._oldest is None or not page or self.is_full:
            return
        checked([*page, self._oldest], self._charter.run, self._verify, self._charter)
        certificates = [*page, self._oldest]
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
                self._rows.appendleft(row_of(certificate, Sight(loss=losses.get(round_))))
        self._oldest = page[0]

    def drop(self) -> None:
        """Drop all that is held."""
        for held in (self._kept, self._rows, self._recent, self._due, self._tokens, self._rounds):
            held.clear()

    def held(self) -> HeldChain:
        """Return the chain as a `ChainReader` continues it: the last certificates are held whole."""
        return HeldChain.of(tuple(self._kept), self.head)

    def _earned(self) -> Mapping[PeerId, TrustRecord]:
        basis = self.head.hash, len(self._kept)
        if self._trust[0] != basis:
            trust = Trust(self._charter.earned)
            for certificate in self._kept:
                trust.take(certificate)
            self._trust = basis, trust.all()
        return self._trust[1]

    def _credited(self) -> tuple[PeerCredit, ...]:
        found = (PeerCredit(peer, self._tokens[peer], rounds) for peer, rounds in self._rounds.items() if rounds > 0)
        return tuple(sorted(found, key=lambda one: (-one.tokens, -one.rounds, one.peer)))

    def _append(self, certificate: wire.Certificate, before: wire.Certificate | None, sight: Sight) -> None:
        if not self._kept:
            self._oldest = certificate
        self._kept.append(certificate)
        self._rows.append(row_of(certificate, sight))
        self._recent.append(recent_of(certificate, before, self._charter))
        if (due := DueEvaluation.after(certificate, self._evaluation(certificate))) is not None:
            self._due.append(due)
        self._count(certificate)

    def _count(self, certificate: wire.Certificate) -> None:
        """Count a round's vector and contributions; see whether it is the anchor."""
        value = value_of(certificate)
        if self._anchor is not None and value.round == self._anchor.round:
            self._is_anchored = certificate_hash(certificate) == self._anchor.hash
        self._num_cells = max(self._num_cells, value.bounds[-1])
        peers = [value.members[index] for index in value.contributors]
        for place, peer in enumerate(peers):
            self._rounds[peer] += 1
            self._tokens[peer] += value.credit[place] if value.credit else 0  # Version 0.1 lists none.
        if len(self._rounds) > MAX_CONTRIBUTORS:
            kept = self._credited()[: MAX_CONTRIBUTORS * 3 // 4]  # Fewer, so that not every round sorts all of them.
            self._rounds = Counter({one.peer: one.rounds for one in kept})
            self._tokens = Counter({one.peer: one.tokens for one in kept})


def row_of(certificate: wire.Certificate, sight: Sight) -> CertifiedRound:
    """Return the row of a validated certificate."""
    value, slot = value_of(certificate), certificate.slot
    return CertifiedRound(
        round=slot.round,
        time=sight.time,
        tokens=value.tokens,
        members=len(value.members),
        contributors=len(value.contributors),
        flagged=len(value.flagged),
        voters=len(certificate.voters),
        attempt=slot.attempt,
        loss=sight.loss,
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
