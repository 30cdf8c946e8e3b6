"""Who is sent the certificate of a decided round, and how often, whatever free keys ask for."""

import pytest
from flockstep.collectives.driver.hints import (
    SENDERS,
    TOLD_BURST,
    TOLD_PER_SECOND,
    TOLD_SECONDS,
    LateReadys,
    senders,
)
from flockstep.peer import wire

SLOT = wire.Slot("run", 3, b"p" * 32)
VOTERS = [f"voter {number}" for number in range(4)]
KEYS = [f"key {number}" for number in range(1000)]


@pytest.mark.parametrize("attempt", range(20))
def test_a_thousand_free_keys_take_no_voters_place_among_the_senders(attempt: int) -> None:
    chosen = senders(SLOT.at(attempt), [*KEYS, *VOTERS], VOTERS)
    assert len(chosen) == len(set(chosen)) == SENDERS
    assert set(chosen) <= set(VOTERS)


def test_others_stand_in_where_few_vote_and_all_send_where_few_are_here() -> None:
    chosen = senders(SLOT, [*KEYS[:10], VOTERS[0]], VOTERS)
    assert VOTERS[0] in chosen
    assert len(chosen) == SENDERS
    assert set(senders(SLOT, KEYS[:3], VOTERS)) == set(KEYS[:3])


def test_a_peer_is_answered_once_in_a_while() -> None:
    late = LateReadys()
    times = [number * TOLD_SECONDS / 4 for number in range(40)]
    assert sum(late.may_answer("peer", now, votes=True) for now in times) == 10


def test_free_keys_together_are_answered_at_a_rate_and_voters_always() -> None:
    late, seconds = LateReadys(), 30
    answered = sum(late.may_answer(key, float(now), votes=False) for now in range(seconds) for key in KEYS[:100])
    assert answered == TOLD_BURST + TOLD_PER_SECOND * (seconds - 1)
    now = float(seconds - 1)
    assert not late.may_answer(KEYS[100], now, votes=False)
    assert all(late.may_answer(voter, now, votes=True) for voter in VOTERS)
    assert late.may_answer(KEYS[101], now + 1.0, votes=False)
