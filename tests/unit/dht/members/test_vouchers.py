"""Words on sessions: more than a third of the votes; in a crowd of the electors, and two; a crowd's choices overlap."""

import pytest
from flockstep.dht.members import vouchers
from flockstep.dht.members.vouchers import (
    CHOSEN_WITNESSES,
    MAX_VOUCHERS,
    NUM_WITNESSES,
    WORD_LIFETIME,
    Vouchers,
    chosen_witnesses,
    tag_of,
    tags_of,
    witnesses,
)
from flockstep.peer.base.errors import MalformedMessage
from hypothesis import given, settings
from hypothesis import strategies as st

PEERS = [f"peer {number}" for number in range(400)]


@given(st.dictionaries(st.sampled_from(PEERS[:12]), st.tuples(st.integers(0, 1 << 30), st.booleans()), max_size=12))
@settings(max_examples=200, deadline=None)
def test_a_peer_counts_by_more_than_a_third_of_the_votes(members: dict[str, tuple[int, bool]]) -> None:
    words, votes = Vouchers(), {peer: vote for peer, (vote, _) in members.items() if vote} | {"a voter elsewhere": 5}
    for peer, (_, says) in members.items():
        words.hear(peer, tags_of(["x", "other"] if says else ["other"]), 0.0)
    enough = 3 * sum(vote for vote, says in members.values() if says) > sum(votes.values())
    assert words.vouched(members.keys(), ["x", "never"], 1.0, votes) == ({"x"} if enough else set())
    heads = sum(says for _, says in members.values())
    alike = heads >= 2 and 3 * heads > len(members)
    assert words.vouched(members.keys(), ["x", "never"], 1.0) == ({"x"} if alike else set())


def test_words_of_keys_without_a_vote_do_not_push_out_those_of_voters() -> None:
    words = Vouchers()
    words.hear("voter", tags_of(["x"]), 0.0)
    assert words.vouched(["voter", *PEERS], ["x"], 1.0, {"voter": 1}) == {"x"}
    for peer in PEERS[: 3 * MAX_VOUCHERS]:
        words.hear(peer, tags_of(["ghost"]), 1.0)
    assert words.vouched(["voter", *PEERS], ["x", "ghost"], 2.0, {"voter": 1}) == {"x"}


def test_a_word_holds_for_a_minute_and_the_newest_counts() -> None:
    words, electors = Vouchers(), PEERS[:3]
    for elector in electors:
        words.hear(elector, tags_of(["x", "y"]), 0.0)
    assert words.vouched(electors, ["x", "y"], WORD_LIFETIME - 1) == {"x", "y"}
    assert words.vouched(electors, ["x", "y"], WORD_LIFETIME) == frozenset()
    for elector in electors[:2]:
        words.hear(elector, tags_of(["x"]), 1.0)
    assert words.vouched(electors, ["x", "y"], 2.0) == {"x"}
    words.hear(electors[0], b"", 3.0)
    words.hear(electors[1], b"", 3.0)
    assert words.vouched(electors, ["x", "y"], 4.0) == frozenset()
    assert words.vouched(["nobody", "nobody else"], ["x"], 2.0) == frozenset()


def test_a_word_is_news_unless_it_repeats_one_that_holds() -> None:
    words = Vouchers()
    said = [(["x"], 0.0), (["x"], 1.0), (["x", "y"], 2.0), (["x", "z"], 3.0), (["x", "z"], 4.0)]
    assert [words.hear("a", tags_of(peers), now) for peers, now in said] == [True, False, True, True, False]
    assert not words.hear("a", tags_of(["x", "z"]), 3.0 + WORD_LIFETIME)
    assert words.hear("a", tags_of(["x", "z"]), 3.0 + 2 * WORD_LIFETIME)


def test_words_are_bounded_and_those_of_whom_i_do_not_ask_do_not_count() -> None:
    words = Vouchers()
    for peer in PEERS[: MAX_VOUCHERS + 5]:
        words.hear(peer, tags_of(["x"]), 0.0)
    assert len(words) == MAX_VOUCHERS
    assert words.vouched(PEERS[:5], ["x"], 1.0) == frozenset()  # They were forgotten.
    assert words.vouched(PEERS[5:7], ["x"], 1.0) == {"x"}


def test_words_of_others_do_not_push_out_those_of_electors() -> None:
    words, electors = Vouchers(), PEERS[:3]
    for elector in electors:
        words.hear(elector, tags_of(["x"]), 0.0)
    assert words.vouched(electors, ["x"], 1.0) == {"x"}
    for peer in PEERS[3 : 3 * MAX_VOUCHERS]:
        words.hear(peer, tags_of(["ghost"]), 1.0)
    assert len(words) == MAX_VOUCHERS
    assert words.vouched(electors, ["x"], 2.0) == {"x"}


@pytest.mark.parametrize("tags", [bytes(7), b"b" * 8 + b"a" * 8, b"a" * 16])
def test_what_is_no_list_of_tags_is_refused(tags: bytes) -> None:
    with pytest.raises(MalformedMessage):
        Vouchers().hear("x", tags, 0.0)


@given(st.sets(st.sampled_from(PEERS), min_size=65), st.data())
@settings(max_examples=50, deadline=None)
def test_any_two_members_of_a_crowd_share_half_of_their_witnesses(members: set[str], data: st.DataObject) -> None:
    one, other = (data.draw(st.sampled_from(sorted(members))) for _ in range(2))
    choices = [set(chosen_witnesses(members, each)) for each in (one, other)]
    assert all(len(each) == CHOSEN_WITNESSES for each in choices)
    assert all(each <= set(witnesses(members)) for each in choices)
    assert one not in choices[0]
    assert 2 * len(choices[0] & choices[1]) >= CHOSEN_WITNESSES
    assert CHOSEN_WITNESSES * 3 == NUM_WITNESSES * 2


def test_the_load_of_the_witnesses_is_shared() -> None:
    load = dict.fromkeys(witnesses(PEERS), 0)
    for peer in PEERS:
        for witness in chosen_witnesses(PEERS, peer):
            load[witness] += 1
    assert max(load.values()) < 0.8 * len(PEERS)
    assert len(tag_of("x")) == 8


def test_two_keys_that_share_a_tag_make_nobodys_word_malformed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a pair takes 2³² keys: all that have met both would be charged by all others, and lose their sessions."""
    twins, own = ("twin 1", "twin 2"), vouchers.tag_of
    monkeypatch.setattr(vouchers, "tag_of", lambda peer: own("twin") if peer in twins else own(peer))
    words, electors = Vouchers(), PEERS[:3]
    for elector in electors:
        words.hear(elector, tags_of([*twins, *PEERS[3:9]]), 0.0)
    assert words.vouched(electors, [*twins, "never"], 1.0) == set(twins)
