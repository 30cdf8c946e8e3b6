"""One exchange of words under a roster: holders say what they have, the proposer names the words that count. Pure.

A round has two: about contributions (COLLECT), and about the sketches of those that are in (JUDGE). The cut of each is valid
by the words that it names alone (`words`), whoever has heard what: a peer that lacks one of them waits for it, or asks.
"""

from collections.abc import Collection, Mapping, Sequence

from ...peer import wire
from ...peer.base.transport import PeerId
from ..accountability.statements import MAX_WORDS
from ..agreement.actions import Note
from .actions import Action, Forward, Send
from .facts import MessageLog
from .roster import RosterView, Word
from .words import Claims, Standing, counted_in, holders_of, is_enough, is_fit, jury_of, names_in, standing, unmasked


class Stage:
    """One member's view of one exchange of words."""

    def __init__(
        self, facts: MessageLog, table: RosterView, among: Collection[int], nonce: bytes, before: bytes = b""
    ) -> None:
        """`among` are the members that may be in, `before` is the hash of the first cut in the second exchange."""
        self.standing: Standing | None = None
        """What follows from the proposer's cut, once it is here and valid."""
        self.signed: wire.Signed | None = None
        """That cut."""
        self.failure = ""
        self.is_late = False
        """True once nobody waits for contributors any more."""
        self.is_hurrying = False
        """True once those are waited for alone that let nobody wait in vain lately."""
        self.takes_best = False
        """True once nobody waits for others of a part's three any more, where nobody's word is fit."""
        self._facts = facts
        self._table = table
        self._among = among
        self._nonce = nonce
        self._before = before
        self._sent: wire.Have | None = None
        self._num_sent, self._words_left = 0, 1
        """Words that this member has said, and may say until the next look: each change alone would use them up."""
        self.num_looks = 0
        self._num_taken = 0
        self._has_proposed = False
        self._seen: tuple[int, int] = -1, -1
        self._read = -1
        self._words: dict[int, Claims] = {}
        self._names: dict[int, bytes] = {}

    @property
    def hash(self) -> bytes:
        """The hash of the cut; empty before."""
        return b"" if self.signed is None else self.signed.hash

    @property
    def words(self) -> Mapping[int, Claims]:
        """The word of each holder that counts: of several the newest, unless an earlier one says more that is in.

        An honest holder only adds to what it has said. With the newest a liar would give what it has told one deputy to the
        proposer, too, and take it back there: the deputy would see no reason to stand in, and the proposer would wait.
        """
        if self._read != (read := self._facts.num_ever(wire.Have)):
            self._read = read
            said = self._table.words(self._before)
            newest = {index: words[-1].claims for index, words in said.items()}
            is_single = all(len(words) == 1 for words in said.values())
            names = {} if is_single else names_in(self._table.seating, newest, self._among)
            chosen = {index: self._best(index, words, names) for index, words in said.items()}
            self._words = {index: word.claims for index, word in chosen.items()}
            self._names = {index: word.name for index, word in chosen.items()}
        return self._words

    def _best(self, index: int, words: Sequence[Word], names: Mapping[int, bytes]) -> Word:
        """Return which of a holder's words lists most under the names that are in: of the known in its part, then of all."""
        if len(words) == 1:
            return words[0]
        known = self._table.seating.known & names.keys() or frozenset(names)

        def worth(word: Word) -> tuple[int, int]:
            right = {
                part: {it for it, name in held.items() if names.get(it) == name} for part, held in word.claims.items()
            }
            return len(right.get(index, set()) & known), sum(map(len, right.values()))

        return max(reversed(words), key=worth)

    @property
    def names(self) -> Mapping[int, bytes]:
        """The names of these words."""
        return self._names if self.words else {}

    @property
    def has_spoken(self) -> bool:
        """True once I have sent a word."""
        return self._sent is not None

    def say(self, held: Mapping[int, Mapping[int, bytes]]) -> list[Action]:
        """Send my word on what I hold, if it is another one than before: by part, members and names of their statements."""
        parts = tuple((part, tuple(sorted(held[part]))) for part in sorted(held))
        names = {index: name for each in held.values() for index, name in each.items()}
        packed = b"".join(names[index] for index in sorted(names))
        have = wire.Have(self._table.slot, self._table.hash, self._before, parts, packed, self._nonce)
        is_full = 2 * self._num_sent >= MAX_WORDS  # Others keep no more: there are two exchanges.
        if have == self._sent or is_full or not self._words_left:
            return []
        self._sent, self._num_sent, self._words_left = have, self._num_sent + 1, self._words_left - 1
        return [Send(self._table.voters, have)]

    def look(self, words: int = 1) -> None:
        """Look at what owners without a vote say, and allow so many words more."""
        self.num_looks, self._words_left = self.num_looks + 1, max(self._words_left, words)

    def close(self) -> None:
        """Stop waiting for contributors: a word says what is here, another one what was on its way."""
        self.is_late = True
        self.look(words=2)

    def denied(self, parts: Collection[int], among: Collection[int]) -> set[int]:
        """Return those of these parts whose owner's word is not fit to count: of owners without a vote at a look alone."""
        is_look, self._num_taken, voters = self.num_looks > self._num_taken, self.num_looks, len(self._table.voters)
        found = {part for part in parts if (is_look or part < voters) and self._is_denied(part, among)}
        self._words_left = max(self._words_left, any(part < voters for part in found))
        return found

    def unheard(self, active: Collection[PeerId]) -> dict[int, frozenset[int]]:
        """Return by part the holder whose word has not come: the first of its three that is not lost."""
        table, words, missing = self._table, self.words, dict[int, frozenset[int]]()
        for part in table.owners:
            silent = frozenset(it for it in table.living(part, active)[:1] if part not in words.get(it, ()))
            if silent:
                missing[part] = silent
        return missing

    def open_parts(self) -> set[int]:
        """Return the parts of which nobody's word is fit to count: a deputy may have said a part of it only so far."""
        seating, claims = self._table.seating, self.words
        names = names_in(seating, claims, self._among)
        held = {part: holders_of(seating, claims, names, part) for part in self._table.owners}
        return {
            part for part, found in held.items() if not any(is_fit(seating, names, each, by) for by, each in found.items())
        }

    def _is_denied(self, part: int, among: Collection[int]) -> bool:
        """Return True if the word of a part's owner on these members is not fit to count in it."""
        words = self.words
        stated = words.get(part, {}).get(part)
        if stated is None or self.standing is not None or len(stated) >= len(among):
            return False
        return not self._is_fit(part, words, among)

    def passed_over(self) -> set[int]:
        """Return the owners that lost their part in the cut: without a word, or without a vote and by a word that is not fit.

        From a voter a lying proposer may have hidden words.
        """
        if self.standing is None:
            return set()
        words, voters, holders = self.words, len(self._table.voters), self.standing.holders
        unfit = {part for part, it in holders.items() if it != part >= voters and part in words.get(part, ())}
        absent = {*self._table.owners} - self.spoken
        return absent | {part for part in unfit if not self._is_fit(part, words, self._among)}

    def _is_fit(self, part: int, words: Mapping[int, Claims], among: Collection[int]) -> bool:
        """Return True if the word of a part's owner is fit to count in it."""
        seating = self._table.seating
        names = names_in(seating, words, among)
        return is_fit(seating, names, counted_in(words, names, part, part), part)

    def needs(self, index: int, have: wire.Have) -> bool:
        """Return True if this word of a part's owner is fit to count in it, and there are as many of it as I keep.

        It may have said all of these to me, the proposer, and this one to its deputy alone. Who is in is what the others say,
        once two thirds of them have: by its own words false ones would be fit before, and take the place of this one.
        """
        seating, others = self._table.seating, {it: claims for it, claims in self.words.items() if it != index}
        if 3 * len(jury_of(seating, others)) < 2 * len(seating.jurors - {index}):
            return False
        num_said = self._facts.num_by(wire.Have, self._table.members[index])
        if self.standing is not None or have.cut != self._before or not MAX_WORDS <= num_said < 2 * MAX_WORDS:
            return False
        claims = self._table.claims(index, have)
        if isinstance(claims, str) or index not in self._table.owners:
            return False
        names = names_in(seating, others, self._among)
        return is_fit(seating, names, counted_in({**others, index: claims}, names, index, index), index)

    def propose(self, active: Collection[PeerId]) -> list[Action]:
        """Name the words that count, as the proposer: once all are here that I wait for."""
        table = self._table
        if table.me != 0 or self._has_proposed or (not self.is_late and self.unheard(active)):
            return []
        claims = self.words
        names = names_in(table.seating, claims, self._among)
        chosen: list[int] = []
        for part in sorted(table.owners):
            found = holders_of(table.seating, claims, names, part)
            holder = next(iter(found), None)
            if holder is None or not (self.takes_best or is_fit(table.seating, names, found[holder], holder)):
                return []  # Others of its three may still come to hold it; if not, the deadline ends the wait.
            chosen.append(holder)
        if not table.are_enough_nonces(claims.keys()):
            return []
        follows = standing(table.seating, claims, chosen, self._among)
        if isinstance(follows, str):
            return []
        if not self._before and not is_enough(table.seating, names):
            if not self.unheard(active):
                self.failure = f"only {len(names)} of {len(table.training)} contributions are held by the owners"
            return []
        self._has_proposed = True
        named = tuple(sorted(self.names.items()))
        told = tuple(follows.names), follows.masks
        return [Send(table.members, wire.Cut(table.slot, table.hash, self._before, tuple(chosen), named, *told))]

    def take(self) -> list[Action]:
        """Take the proposer's cut, once all words that it names are here; who has no vote takes it as it is."""
        found = self._found()
        if self.standing is not None or self.failure or found is None:
            return []
        signed, cut = found
        if not self._table.is_voter:
            self.standing = self._told(cut)
            self.signed = None if self.standing is None else signed
            return []
        state = self._facts.num_ever(wire.Cut), self._facts.num_ever(wire.Have)
        if state == self._seen:
            return []
        self._seen = state
        self._table.words(self._before)
        words = {index: self._table.word(self._before, index, name) for index, name in cut.words}
        claims = {index: word.claims for index, word in words.items() if word is not None}
        is_sorted = list(words) == sorted(words) and len(words) == len(cut.words)
        fits = cut.roster == self._table.hash and is_sorted and max(words) < len(self._table.members)
        if fits and len(claims) < len(words):
            return []  # They are on their way, or others have them.
        flaw = self._flaw(cut, claims) if fits else "it does not fit its roster"
        if isinstance(flaw, Standing):
            self.signed, self.standing = signed, flaw
            return []
        self.failure = f"the cut of {signed.sender}: {flaw}"
        return [Note("peer.charged", signed.sender, "Cut", flaw), Forward(self._table.voters, signed)]

    def _told(self, cut: wire.Cut) -> Standing | None:
        """Return what a cut tells a member that is sent no words; None if the cut does not fit its roster.

        A proposer that tells it another thing than the words say has lost its turn: no voter takes that cut.
        """
        table, commits = self._table, self._table.commits()
        fits = cut.roster == table.hash and len(cut.holders) == len(cut.masks) == len(table.owners)
        if not fits or max(cut.holders) >= len(table.members) or not table.training.issuperset(cut.contributors):
            return None
        names = {index: table.commit_name(index) if index in commits else b"" for index in cut.contributors}
        parts = {part: unmasked(cut.contributors, mask) for part, mask in zip(sorted(table.owners), cut.masks, strict=True)}
        return Standing(names, parts, dict(zip(parts, cut.holders, strict=True)))

    @property
    def is_named(self) -> bool:
        """True if the proposer's cut is here, be it that words which it names are not."""
        return self._found() is not None

    @property
    def spoken(self) -> set[int]:
        """The members whose word is here, or is named in the proposer's cut."""
        found = self._found()
        return {*self.words, *(index for index, _ in (() if found is None else found[1].words))}

    def has_named(self, index: int, signed: wire.Signed) -> bool:
        """Return True if the proposer's cut names this word of a member."""
        found = self._found()
        return found is not None and (index, signed.name) in found[1].words

    def missing(self) -> list[int]:
        """Return whose words the proposer's cut names and are not here."""
        found = self._found()
        if self.standing is not None or found is None:
            return []
        named = [(index, name) for index, name in found[1].words if index < len(self._table.members)]
        return [index for index, name in named if self._table.word(self._before, index, name) is None]

    def _found(self) -> tuple[wire.Signed, wire.Cut] | None:
        proposer, is_second = self._table.members[0], bool(self._before)
        cuts = [it for it in self._facts.every(wire.Cut, self._table.slot) if it[0].sender == proposer]
        return next((it for it in cuts if bool(it[1].before) == is_second and it[1].before == self._before), None)

    def _flaw(self, cut: wire.Cut, claims: Mapping[int, Claims]) -> Standing | str:
        table = self._table
        if not table.are_enough_nonces(claims.keys()):
            return "it opens the nonces of a third of the owners, or fewer"
        found = standing(table.seating, claims, cut.holders, self._among)
        if isinstance(found, str):
            return found
        if not self._before and not is_enough(table.seating, found.names):
            return f"{len(found.names)} contributions are in, too few of the voters that train"
        is_told = (tuple(found.names), found.masks) == (cut.contributors, cut.masks)
        return found if is_told else "it tells who is sent no words another thing than these say"
