"""Who contributes, by the words of holders: what liars among them can change, and what not."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import combinations

import pytest
from flockstep.collectives.allreduce.words import (
    Claims,
    Seating,
    Standing,
    claims_in,
    counted_in,
    holders_of,
    is_enough,
    is_fit,
    names_in,
    standing,
)
from flockstep.peer import wire
from hypothesis import assume, given
from hypothesis import strategies as st

SLOT = wire.Slot("r" * 52, 1, bytes(32))
HAVE = wire.Have(SLOT, bytes(32), b"", ((0, (1, 3)), (2, (3,))), b"1" * 16 + b"3" * 16, bytes(32))

Words = dict[int, dict[int, dict[int, bytes]]]
"""By author, as `Claims`, to be changed."""


def name(index: int, of: int = 0) -> bytes:
    """Return the name of a member's statement; of a liar's there may be several."""
    return bytes([index, of])


def seated(
    count: int,
    *,
    owners: Iterable[int] | None = None,
    voters: Iterable[int] | None = None,
    trainers: Iterable[int] | None = None,
    old: Iterable[int] = (),
) -> Seating:
    """Return the places of so many members; None: all of them. The deputies are the next two in the ring.

    Of those that train the voters are known, and the `old`.
    """
    everybody = frozenset(range(count))
    deputies = tuple(tuple((part + step) % count for step in (1, 2) if step < count) for part in range(count))
    own, deciding, training = (everybody if it is None else frozenset(it) for it in (owners, voters, trainers))
    return Seating(own, deciding, training, training & {*deciding, *old}, deputies)


def chosen(seating: Seating, words: Mapping[int, Claims], names: Mapping[int, bytes]) -> list[int]:
    """Return the holder of each part that an honest proposer names; the owner where nobody has spoken of it."""
    return [next(iter(holders_of(seating, words, names, part)), part) for part in sorted(seating.owners)]


def honest(seating: Seating, among: Collection[int]) -> Words:
    """Return the words of honest holders: each owner holds its part of all."""
    words: Words = {}
    for part in seating.owners:
        words.setdefault(part, {})[part] = {index: name(index) for index in among}
    return words


def found(seating: Seating, words: Mapping[int, Claims], holders: Collection[int], among: Collection[int]) -> Standing:
    """Return what follows from words that are a valid cut."""
    result = standing(seating, words, holders, among)
    assert isinstance(result, Standing), result
    return result


@st.composite
def any_words(draw: st.DrawFn, seating: Seating, authors: Collection[int], among: Collection[int]) -> Words:
    """Words in which these authors say of any part, and of anybody, what they like."""
    parts, members = st.sampled_from(sorted(seating.owners)), st.sampled_from(sorted(among))
    names = st.integers(0, 2)
    claims = st.dictionaries(parts, st.dictionaries(members, names, max_size=len(among)), max_size=4)
    said: Words = {}
    for author in authors:
        said[author] = {
            part: {index: name(index, of) for index, of in held.items()} for part, held in draw(claims).items()
        }
    return said


@st.composite
def runs_with_liars(draw: st.DrawFn) -> tuple[Seating, frozenset[int], Words]:
    """Four voters or more, all owners, of which fewer than a third lie; beside them keepers, and owners without a vote."""
    num_voters, others = draw(st.integers(4, 13)), draw(st.integers(0, 3))
    count = num_voters + others
    trainers = draw(st.sets(st.integers(0, count - 1), min_size=1))
    seating = seated(count, voters=range(num_voters), trainers=trainers)
    most = (num_voters - 1) // 3
    liars = draw(st.sets(st.integers(0, num_voters - 1), max_size=most)) | {*range(num_voters, count)}
    words = {by: it for by, it in honest(seating, trainers).items() if by not in liars}
    return seating, frozenset(liars), words | draw(any_words(seating, sorted(liars), trainers))


@given(runs_with_liars())
def test_whom_all_honest_owners_list_under_one_name_is_in_under_it_whatever_liars_say(
    run: tuple[Seating, frozenset[int], Words],
) -> None:
    seating, _, words = run
    assert names_in(seating, words, seating.trainers) == {index: name(index) for index in sorted(seating.trainers)}


@given(runs_with_liars(), st.data())
def test_whom_no_honest_owner_lists_is_not_in(run: tuple[Seating, frozenset[int], Words], data: st.DataObject) -> None:
    seating, liars, words = run
    unseen = data.draw(st.sampled_from(sorted(seating.trainers)))
    for author in words.keys() - liars:
        for held in words[author].values():
            held.pop(unseen, None)
    assert unseen not in names_in(seating, words, seating.trainers)


@given(runs_with_liars())
def test_what_an_honest_holder_lists_counts_in_its_part_and_in_no_part_more_than_its_holder_lists(
    run: tuple[Seating, frozenset[int], Words],
) -> None:
    seating, liars, words = run
    names = names_in(seating, words, seating.trainers)
    for part in seating.owners:
        counted = counted_in(words, names, part, part)
        assert counted <= words[part].get(part, {}).keys() & names.keys()
        assert part in liars or counted == seating.trainers


@given(runs_with_liars(), st.randoms(use_true_random=False))
def test_the_order_of_words_and_members_decides_nothing(
    run: tuple[Seating, frozenset[int], Words], random: object
) -> None:
    def shuffled(mapping: Mapping[int, object]) -> dict[int, object]:
        keys = sorted(mapping)
        random.shuffle(keys)  # type: ignore[attr-defined]
        return {key: shuffled(it) if isinstance(it := mapping[key], Mapping) else it for key in keys}

    seating, _, words = run
    names = names_in(seating, words, seating.trainers)
    holders = chosen(seating, words, names)
    assume(all(part in words.get(holder, ()) for part, holder in zip(sorted(seating.owners), holders, strict=True)))
    again: Words = shuffled(words)  # type: ignore[assignment]
    among = sorted(seating.trainers, reverse=True)
    first = found(seating, words, holders, seating.trainers)
    assert found(seating, again, holders, among) == first
    assert list(first.names) == sorted(first.names)


@given(st.data(), st.integers(1, 7))
def test_no_word_of_a_member_on_itself_makes_it_in_where_another_owner_has_spoken(
    data: st.DataObject, count: int
) -> None:
    members = st.integers(0, count - 1)
    owners, voters = data.draw(st.sets(members, min_size=1)), data.draw(st.sets(members))
    seating = seated(count, owners=owners, voters=voters)
    words = data.draw(any_words(seating, range(count), range(count)))
    index = data.draw(st.integers(0, count - 1))
    assume(any(owner in words[owner] for owner in owners - {index}))
    silent = {by: {part: dict(held) for part, held in it.items()} for by, it in words.items()}
    for held in silent[index].values():
        held.pop(index, None)
    everybody = range(count)
    before, after = (names_in(seating, it, everybody).get(index) for it in (words, silent))
    assert before == after


def test_the_only_owner_says_itself_whom_it_holds() -> None:
    seating = seated(2, owners=[0])
    assert names_in(seating, honest(seating, (0, 1)), (0, 1)) == {0: name(0), 1: name(1)}


@pytest.mark.parametrize(("count", "denying", "is_in"), [(4, 1, True), (4, 2, False), (5, 2, True), (5, 3, False)])
def test_half_of_the_other_owners_are_enough(count: int, denying: int, is_in: bool) -> None:
    seating = seated(count)
    words = honest(seating, range(count))
    for owner in range(denying):
        del words[owner][owner][count - 1]
    assert (count - 1 in names_in(seating, words, range(count))) is is_in


def test_owners_that_vote_decide_for_those_that_do_not() -> None:
    seating = seated(6, voters=[0, 1])
    words = honest(seating, range(5))
    for owner in range(2, 6):
        words[owner][owner] = {5: name(5)}
    assert names_in(seating, words, range(6)) == {index: name(index) for index in range(5)}


def test_where_no_owner_votes_the_longest_word_on_each_part_decides() -> None:
    """These owners may be free keys: one says nothing, the other lists itself alone, and deputies speak for their parts."""
    seating = seated(5, owners=[0, 1], voters=[2, 3, 4])
    everybody = {index: name(index) for index in range(5)}
    words = {1: {1: {1: name(1)}}, 2: {0: dict(everybody), 1: dict(everybody)}, 3: {1: {0: name(0, 1)}}}
    result = found(seating, words, (2, 2), range(5))
    assert result.names == {index: name(index) for index in (0, 1, 3, 4)}  # It speaks for both, and not for itself.
    assert result.parts == {part: frozenset({0, 1, 3, 4}) for part in (0, 1)}


def test_two_statements_of_one_contributor_count_under_the_name_that_more_owners_have() -> None:
    seating = seated(7)
    words = honest(seating, range(7))
    for owner in (0, 1):
        words[owner][owner][6] = name(6, 9)
    result = found(seating, words, range(7), range(7))
    assert result.names[6] == name(6)
    assert [6 in result.parts[part] for part in range(7)] == [False, False, True, True, True, True, True]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_names_that_as_many_owners_have_the_greater_counts_in_any_order(order: tuple[int, int]) -> None:
    words = {owner: {owner: {2: name(2, owner)}} for owner in order}
    assert names_in(seated(3), words, (2,)) == {2: name(2, 1)}


@given(st.integers(4, 9), st.data())
def test_whom_one_holder_denies_is_missing_in_its_part_and_in_no_other(count: int, data: st.DataObject) -> None:
    seating, everybody = seated(count), range(count)
    holder, victim = data.draw(st.sampled_from(everybody)), data.draw(st.sampled_from(everybody))
    assume(holder != victim)
    words = honest(seating, everybody)
    before = found(seating, words, everybody, everybody)
    assert before == Standing(
        {index: name(index) for index in everybody},
        {part: frozenset(everybody) for part in everybody},
        {part: part for part in everybody},
    )
    del words[holder][holder][victim]
    after = found(seating, words, everybody, everybody)
    assert after == replace(before, parts={**before.parts, holder: before.parts[holder] - {victim}})


REFUSED: dict[str, tuple[tuple[int, ...], str]] = {
    "holders": ((0, 1, 2), "one holder for each part"),
    "more holders": ((0, 1, 2, 3, 3), "one holder for each part"),
    "not of the three": ((3, 1, 2, 3), "member 3 is not to hold part 0"),
    "holds another part": ((2, 1, 2, 3), "member 2 is not to hold part 0"),
}


@pytest.mark.parametrize("flaw", REFUSED)
def test_a_cut_names_a_holder_of_each_part_that_says_that_it_holds_it(flaw: str) -> None:
    seating = seated(4)
    holders, reason = REFUSED[flaw]
    words = honest(seating, range(4))
    words[3][0] = {index: name(index) for index in range(4)}
    result = standing(seating, words, holders, range(4))
    assert isinstance(result, str)
    assert reason in result


@given(st.integers(1, 12), st.data())
def test_a_cut_names_the_words_of_two_thirds_of_the_owners_that_decide(count: int, data: st.DataObject) -> None:
    """Else a proposer could name liars alone."""
    seating, everybody = seated(count + 2, voters=range(count)), range(count + 2)
    named = data.draw(st.sets(st.sampled_from(range(count))))
    words = honest(seating, everybody)
    few = {by: it for by, it in words.items() if by in named or by >= count}
    for by, it in few.items():  # The deputies hold the parts of the others.
        for part in seating.owners:
            if by in seating.deputies[part]:
                it[part] = {index: name(index) for index in everybody}
    names = names_in(seating, few, everybody)
    holders = chosen(seating, few, names)
    result = standing(seating, few, holders, everybody)
    if 3 * len(named) < 2 * count:
        assert result == f"it names the words of {len(named)} of {count} owners that decide who is in"
    else:
        assert isinstance(result, Standing) or any(part not in few.get(it, ()) for part, it in enumerate(holders))


def test_a_word_that_says_nothing_of_its_authors_own_part_is_no_jurors() -> None:
    seating = seated(4)
    words = honest(seating, range(4))
    for owner in (0, 1):
        del words[owner][owner]
    assert standing(seating, words, range(4), range(4)) == "it names the words of 2 of 4 owners that decide who is in"


def test_a_cut_by_which_nobody_is_in_is_not_valid() -> None:
    seating = seated(4)
    assert standing(seating, honest(seating, ()), range(4), range(4)) == "nobody is in by the words that it names"


@pytest.mark.parametrize(("listed", "is_valid"), [((0, 1, 2, 3), True), ((1, 2, 3, 4), True), ((0, 2, 4, 6), False)])
def test_a_holder_with_too_few_of_those_that_are_known_gives_way_to_another_one(
    listed: tuple[int, ...], is_valid: bool
) -> None:
    """Four voters train, and one of many rounds; a new trainer without a vote adds nothing to the two thirds of them."""
    seating = seated(7, voters=[0, 1, 2, 4, 5], trainers=(0, 1, 2, 3, 4, 6), old=[3])
    words = honest(seating, seating.trainers)
    words[5][5] = {index: name(index) for index in listed}
    words[6][5] = {index: name(index) for index in seating.trainers}
    words[0][5] = {6: name(6)}
    names = names_in(seating, words, seating.trainers)
    assert names.keys() == seating.trainers
    assert is_fit(seating, names, listed, 5) is is_valid
    result = standing(seating, words, range(7), seating.trainers)
    assert isinstance(result, Standing) is is_valid
    assert is_valid or result == "member 5 is not to hold part 5 by the words that it names"
    other = standing(seating, words, (0, 1, 2, 3, 4, 6, 6), seating.trainers)
    if is_valid:  # A proposer does not choose among those whose words are fit.
        assert other == "member 6 is not to hold part 5 by the words that it names"
    else:
        assert isinstance(other, Standing)
        assert other.parts[5] == seating.trainers


@given(runs_with_liars())
def test_where_no_word_is_fit_the_part_is_theirs_by_whom_most_count(run: tuple[Seating, frozenset[int], Words]) -> None:
    seating, _, words = run
    names = names_in(seating, words, seating.trainers)
    for part in seating.owners:
        counted = {
            by: counted_in(words, names, part, by) for by in seating.three(part) if part in words.get(by, ())
        }
        holders = holders_of(seating, words, names, part)
        assert holders.keys() <= counted.keys()
        assert bool(holders) is bool(counted)
        fit = {by for by, each in counted.items() if is_fit(seating, names, each, by)}
        assert holders.keys() == fit or (not fit and {*map(len, holders.values())} == {max(map(len, counted.values()))})


def test_a_run_in_which_no_voter_trains_takes_whom_its_owners_hold() -> None:
    seating = seated(4, voters=[0, 1], trainers=[2, 3])
    result = found(seating, honest(seating, (2, 3)), range(4), (2, 3))
    assert result.parts == {part: frozenset({2, 3}) for part in range(4)}
    assert is_enough(seating, result.names)


def test_a_cut_has_a_quorum_of_the_voters_that_train_whoever_else_is_in_it() -> None:
    seating = seated(5, voters=(1, 2, 3, 4), trainers=(0, 1, 2, 3))  # The first has no vote, the last is a keeper.
    sets = [some for size in range(6) for some in combinations(range(5), size)]
    assert [some for some in sets if is_enough(seating, some)] == [some for some in sets if {1, 2, 3} <= {*some}]
    five = seated(6, voters=range(5))
    assert [is_enough(five, range(size)) for size in range(6)] == [False, False, False, False, True, True]
    idle = seated(3, trainers=())
    assert is_enough(idle, (0,))
    assert not is_enough(idle, ())


def test_a_word_lists_the_name_of_each_member_once() -> None:
    assert claims_in(HAVE) == {0: {1: b"1" * 16, 3: b"3" * 16}, 2: {3: b"3" * 16}}
    assert claims_in(replace(HAVE, parts=((0, ()),), names=b"")) == {0: {}}


@pytest.mark.parametrize(
    "changes",
    [
        {"names": b""},
        {"names": b"1" * 16},
        {"names": b"1" * 33},
        {"names": b"1" * 48},
        {"parts": ((0, (1,)), (0, (3,)))},
        {"parts": ()},
    ],
)
def test_a_word_whose_names_do_not_fit_is_none(changes: dict[str, object]) -> None:
    assert claims_in(replace(HAVE, **changes)) is None  # type: ignore[arg-type]
