"""Who contributes to a round: a function of the holders' words that a cut names. Pure.

Theory of operation (docs/round.md). The *three* of a part are its owner and the owner's deputies. A holder's word
(`wire.Have`) lists, for each part that it holds, the members that it has something of, and the name of the statement that
this is bound to. From these words alone follows:

    who is in     a member that at least half of the owners list in their own part, under one name. The *jury* are the
                  owners that vote, where there are any, without the member itself; else the longest word on each part
    in each part  those of them that the part's holder lists under that name

So whom a holder denies is missing in the parts of that holder, and in no others; whom a liar serves in part is in or not
for all alike. What is missing counts as zeros. A holder's word is *fit* if it lists two thirds of those that are in and
known, that is vote or are of many rounds: free keys that serve some owners only make nobody's word unfit. A part goes to
the first of its three whose word is fit, or else to whom most count by.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...peer import wire
from ..chain.quorum import quorum

DEPUTIES = 2
"""Deputies of an owner (failover). Two: the loss of an owner and both of its deputies in one round may void it."""
Claims = Mapping[int, Mapping[int, bytes]]
"""By part: the members that a holder lists, and the name of the statement of each."""


@dataclass(frozen=True, slots=True)
class Seating:
    """The places in a roster that matter to a cut, as roster indices."""

    owners: frozenset[int]
    """The parts that have cells."""
    voters: frozenset[int]
    trainers: frozenset[int]
    """The members that train, with a vote or without."""
    known: frozenset[int]
    """Those of them that vote, or have contributed to many rounds."""
    deputies: tuple[tuple[int, ...], ...]
    """Of each part, the other voters in the order in which they stand in."""

    def three(self, part: int) -> tuple[int, ...]:
        """Return the owner of a part and its first deputies."""
        return part, *self.deputies[part][:DEPUTIES]

    @property
    def jurors(self) -> frozenset[int]:
        """The owners that vote; all owners where none of them does."""
        return self.owners & self.voters or self.owners


@dataclass(frozen=True, slots=True)
class Standing:
    """What follows from the words of a cut."""

    names: Mapping[int, bytes]
    """The members that are in, in order, and the name of the statement of each that counts."""
    parts: Mapping[int, frozenset[int]]
    """By part that has cells: those of them that count in it."""
    holders: Mapping[int, int]
    """By part: whose word that follows from, and who reduces it."""

    @property
    def masks(self) -> tuple[bytes, ...]:
        """Who counts as zeros in each part, as a cut tells it to members without a vote, which are sent no words."""
        places = {index: place for place, index in enumerate(self.names)}
        denied = (self.names.keys() - self.parts[part] for part in sorted(self.parts))
        return tuple(bits_of(places[index] for index in indices) for indices in denied)


def unmasked(contributors: Sequence[int], mask: bytes) -> frozenset[int]:
    """Return the contributors that count in a part by its mask in a cut."""
    denied = places_in(mask)
    return frozenset(index for place, index in enumerate(contributors) if place not in denied)


def bits_of(places: Iterable[int]) -> bytes:
    """Return bytes with these bits set, the first one first, without zeros at the end."""
    bits = sum(1 << place for place in places)
    return bits.to_bytes(-(-bits.bit_length() // 8), "little")


def places_in(bits: bytes) -> frozenset[int]:
    """Return the bits that are set."""
    return frozenset(place for place in range(8 * len(bits)) if bits[place // 8] >> place % 8 & 1)


def claims_in(have: wire.Have) -> Claims | None:
    """Return what a word lists, by part; None if its names do not fit."""
    listed = sorted({index for _, held in have.parts for index in held})
    size = wire.NAME_BYTES
    if len(have.names) != size * len(listed) or len({part for part, _ in have.parts}) != len(have.parts):
        return None
    names = {index: have.names[size * place : size * (place + 1)] for place, index in enumerate(listed)}
    return {part: {index: names[index] for index in held} for part, held in have.parts}


def jury_of(seating: Seating, claims: Mapping[int, Claims]) -> list[tuple[int, Mapping[int, bytes]]]:
    """Return who decides and what it lists: the owners that vote, of their own parts; else of each part whoever lists most.

    Where no owner votes these may be free keys, and all be lost: then the deputies speak for their parts.
    """
    if voting := seating.owners & seating.voters:
        return [(owner, claims[owner][owner]) for owner in sorted(voting) if owner in claims.get(owner, ())]
    said = (
        [(by, claims[by][part]) for by in seating.three(part) if part in claims.get(by, ())] for part in seating.owners
    )
    return [max(words, key=lambda word: len(word[1])) for words in said if words]


def names_in(seating: Seating, claims: Mapping[int, Claims], among: Collection[int]) -> dict[int, bytes]:
    """Return who of `among` is in by these words, and under which name."""
    votes: dict[int, Counter[bytes]] = {index: Counter() for index in sorted(among)}
    jury = jury_of(seating, claims)
    sizes = Counter(by for by, _ in jury)
    for by, listed in jury:
        for index, name in listed.items():
            if index != by and index in votes:
                votes[index][name] += 1
    found: dict[int, bytes] = {}
    for index, counts in votes.items():
        size = len(jury) - sizes[index]
        if not size:  # Nobody else decides: the other owners, or it alone.
            own = {owner: claims[owner][owner] for owner in seating.owners if owner in claims.get(owner, ())}
            others = [owner for owner in own if owner != index] or [*own]
            counts, size = Counter(own[it][index] for it in others if index in own[it]), len(others)
        name, count = max(counts.items(), key=lambda item: (item[1], item[0]), default=(b"", 0))
        if count and 2 * count >= size:
            found[index] = name
    return found


def counted_in(claims: Mapping[int, Claims], names: Mapping[int, bytes], part: int, holder: int) -> frozenset[int]:
    """Return who counts in a part by the word of this holder."""
    stated = claims.get(holder, {}).get(part, {})
    return frozenset(index for index, name in stated.items() if names.get(index) == name)


def is_fit(seating: Seating, names: Mapping[int, bytes], counted: Collection[int], holder: int) -> bool:
    """Return True if these are two thirds of the others that are in and known; of all others, where none of them is known."""
    others = names.keys() - {holder}
    needed = seating.known & others or others
    return 3 * len(needed & set(counted)) >= 2 * len(needed)


def is_enough(seating: Seating, names: Collection[int]) -> bool:
    """Return True if those that are in include a quorum of the voters that train."""
    voters = seating.trainers & seating.voters
    return bool(names) and len(voters & set(names)) >= min(quorum(len(voters)), len(voters))


def holders_of(
    seating: Seating, claims: Mapping[int, Claims], names: Mapping[int, bytes], part: int
) -> dict[int, frozenset[int]]:
    """Return who may hold a part by these words, and who counts by each: whose word is fit, or else whom most count by."""
    counted = {
        holder: counted_in(claims, names, part, holder)
        for holder in seating.three(part)
        if part in claims.get(holder, ())
    }
    fit = {holder: each for holder, each in counted.items() if is_fit(seating, names, each, holder)}
    most = max(map(len, counted.values()), default=0)
    return fit or {holder: each for holder, each in counted.items() if len(each) == most}


def standing(
    seating: Seating, claims: Mapping[int, Claims], holders: Collection[int], among: Collection[int]
) -> Standing | str:
    """Return what follows from the words that a cut names, or why the cut is not valid.

    `claims` are these words by their authors, `holders` one for each part that has cells, in order, `among` who may be in.
    """
    parts = sorted(seating.owners)
    if len(holders) != len(parts):
        return "it does not name one holder for each part"
    jurors = jury_of(seating, claims)
    if 3 * len(jurors) < 2 * len(seating.jurors):
        return f"it names the words of {len(jurors)} of {len(seating.jurors)} owners that decide who is in"
    names = names_in(seating, claims, among)
    if not names:
        return "nobody is in by the words that it names"
    counted: dict[int, frozenset[int]] = {}
    for part, holder in zip(parts, holders, strict=True):
        found = holders_of(seating, claims, names, part)
        if holder != next(iter(found), None):
            return f"member {holder} is not to hold part {part} by the words that it names"
        counted[part] = found[holder]
    return Standing(names, counted, dict(zip(parts, holders, strict=True)))
