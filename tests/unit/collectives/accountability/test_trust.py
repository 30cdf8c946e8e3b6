"""Trust: earned by rounds, independent of the first certificate, and its effect on weights."""

import statistics
from collections.abc import Iterable

import numpy as np
import pytest
from flockstep.collectives.accountability import trust as trust_module
from flockstep.collectives.accountability.trust import (
    FIRST_TRUST,
    MAX_PEER_TOKENS,
    MAX_ROUND_TOKENS,
    TRUST_WINDOW,
    YOUNG_ROUNDS,
    YOUNG_SHARE,
    Trust,
    TrustRecord,
    after,
    credit_of,
    idle_of,
    misstated,
    newcomer_record,
    token_weights,
    weigh,
)
from flockstep.collectives.chain.certificate import certificate_hash, value_of
from flockstep.dht.run.manifest import Earned
from flockstep.peer import wire
from flockstep.peer.identity import Identity
from hypothesis import given
from hypothesis import strategies as st
from support.certificates import certify, seats

FOUR = [Identity.from_seed(bytes([n]) * 32) for n in range(1, 5)]
IDS = [identity.peer_id for identity in FOUR]


def chain(rounds: int, roster: list[Identity] = FOUR, *, before: wire.Certificate | None = None) -> list[wire.Certificate]:
    """Certificates whose rosters say what those before them have earned for their members."""
    trust, found = Trust(True), list[wire.Certificate]()
    if before is not None:
        trust.take(before)
    for _ in range(rounds):
        before = certify(before, 100, roster=roster, trust_of=lambda peer: trust.of(peer) or newcomer_record(True))
        trust.take(before)
        found.append(before)
    return found


def earned(rounds: int) -> TrustRecord:
    """Of a newcomer after so many clean rounds."""
    record = newcomer_record(True)
    for _ in range(rounds):
        record = after(wire.Seat(record.trust, record.rounds), contributed=True, flagged=False)
    assert record.trust == pytest.approx(1 - 0.8 ** (rounds + 1))
    return record


def taken(certificates: list[wire.Certificate]) -> Trust:
    trust = Trust(True)
    for certificate in certificates:
        trust.take(certificate)
    return trust


def test_a_clean_round_earns_a_fifth_of_what_is_missing_and_a_flag_halves() -> None:
    seat = wire.Seat(0.5, 7)
    assert after(seat, contributed=True, flagged=False) == TrustRecord(0.6, 8)
    assert after(seat, contributed=True, flagged=True) == TrustRecord(0.25, 7)
    assert after(seat, contributed=False, flagged=False) == TrustRecord(0.5, 7)
    assert after(wire.Seat(1.0, YOUNG_ROUNDS), contributed=True, flagged=False) == TrustRecord(1.0, YOUNG_ROUNDS)


def test_rounds_add_up_and_whom_no_certificate_knows_begins_anew() -> None:
    trust = taken(chain(6))
    assert trust.all().keys() == set(IDS)
    assert trust.of(IDS[0]) == earned(6)
    assert trust.of("somebody else") == newcomer_record(True) == TrustRecord(FIRST_TRUST, 0)
    assert Trust(False).of("somebody else") == TrustRecord(1.0, 0)


@given(st.integers(0, 11))
def test_whoever_begins_later_computes_the_same(start: int) -> None:
    """A peer that took a state holds the certificates since then: what they know is what everybody knows."""
    certificates = chain(12)
    whole, late = taken(certificates), taken(certificates[start:])
    assert whole.all() == late.all()
    assert late.of("somebody else") == (newcomer_record(True) if start == 0 else None)


def test_who_stays_away_for_a_window_begins_anew_and_takes_no_memory() -> None:
    away = chain(3)
    rest = chain(TRUST_WINDOW - 1, FOUR[:3], before=away[-1])
    trust = taken(away + rest)
    assert trust.of(IDS[3]) == earned(3)
    trust.take(chain(1, FOUR[:3], before=rest[-1])[0])
    assert trust.of(IDS[3]) == newcomer_record(True)
    assert len(trust.all()) == 3


def test_who_is_flagged_in_a_certificate_loses_half() -> None:
    first = chain(1)[0]
    second = certify(first, 100, roster=FOUR, flagged=(2,))
    members = value_of(second).members
    trust = taken([first, second])
    found = {peer: trust.of(peer) for peer in members}
    assert found[members[2]] == TrustRecord(0.5, 0)
    assert [s for s in found.values() if s is not None and s.rounds == 1] == [TrustRecord(1.0, 1)] * 3


def test_weights_are_tokens_times_trust() -> None:
    trusted = [wire.Seat(t, YOUNG_ROUNDS) for t in (1.0, 0.5, 0.25)]
    assert weigh([100] * 3, [1.0] * 3, trusted, earned=True) == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    assert weigh([100] * 3, [1.0, 1.0, 0.5], trusted, earned=False) == pytest.approx([8 / 13, 4 / 13, 1 / 13])
    alike = weigh([100, 50, 900], [1.0] * 3, seats(3), earned=False)
    assert alike == token_weights([100, 50, 900])
    assert weigh([0, 0], [1.0] * 2, seats(2), earned=True) == (0.0, 0.0)


@pytest.mark.parametrize("claimed", [1, 10**15])
def test_twenty_young_keys_do_not_move_the_cap_on_anybodys_tokens(claimed: int) -> None:
    # Nearly trusted, but young: a fifth of the median is theirs. One old liar claims as much as they do.
    old, young = wire.Seat(1.0, YOUNG_ROUNDS), wire.Seat(0.95, YOUNG_ROUNDS - 1)
    tokens = [*range(90, 100), 10**15] + [claimed] * 20
    weights = weigh(tokens, [1.0] * 31, [old] * 11 + [young] * 20, earned=True)
    assert weights[10] / weights[0] < 1.7
    assert weights[9] / weights[0] == pytest.approx(99 / 90)


def test_the_young_have_a_fifth_together_where_anybody_is_not() -> None:
    old, young = wire.Seat(1.0, YOUNG_ROUNDS), wire.Seat(0.9, YOUNG_ROUNDS - 1)
    weights = weigh([100] * 64, [1.0] * 64, [old] * 4 + [young] * 60, earned=True)
    assert sum(weights[4:]) == pytest.approx(YOUNG_SHARE)
    assert weights[:4] == pytest.approx([0.2] * 4)
    few = weigh([100] * 10, [1.0] * 10, [old] * 9 + [young], earned=True)
    assert few[9] == pytest.approx(0.9 / 9.9)
    alone = weigh([100] * 3, [1.0] * 3, [young] * 3, earned=True)
    assert alone == pytest.approx([1 / 3] * 3)
    assert weigh([100] * 64, [1.0] * 64, [old] * 4 + [young] * 60, earned=False)[0] < 0.02


@pytest.mark.parametrize(
    ("old", "young", "share"),
    [(1, 1, 0.5), (1, 3, 0.25), (2, 2, 0.5), (3, 1, 0.75), (1, 60, 1 / 61), (3, 60, 3 / 63), (4, 60, 0.8), (10, 1, 1 / 1.1)],
)
@pytest.mark.parametrize("trust", [0.2, 1.0])
def test_fewer_than_four_of_tenure_have_no_more_than_their_share_of_heads(
    old: int, young: int, share: float, trust: float
) -> None:
    told = [wire.Seat(1.0, YOUNG_ROUNDS)] * old + [wire.Seat(trust, YOUNG_ROUNDS - 1)] * young
    n = old + young
    weights = weigh([100] * n, [1.0] * n, told, earned=True)
    if old < 4:
        assert sum(weights[:old]) == pytest.approx(share)
    elif young > 1:
        assert sum(weights[:old]) == pytest.approx(1 - YOUNG_SHARE)
    else:
        assert sum(weights[:old]) == pytest.approx(old / (old + trust))


@pytest.mark.parametrize(
    ("old", "young", "share"), [(1, 1, 0.2), (2, 2, 0.4), (1, 8, 1 / 9), (3, 17, 3 / 20), (4, 60, 0.8)]
)
def test_the_young_leave_those_of_tenure_a_share_however_little_these_have_trained(
    old: int, young: int, share: float
) -> None:
    told = [wire.Seat(1.0, YOUNG_ROUNDS)] * old + [wire.Seat(1.0, YOUNG_ROUNDS - 1)] * young
    weights = weigh([1] * old + [1000] * young, [1.0] * (old + young), told, earned=True)
    assert sum(weights[:old]) == pytest.approx(share)


def test_who_states_next_to_no_ramp_is_not_lifted_to_a_weight() -> None:
    old, young = wire.Seat(1.0, YOUNG_ROUNDS), wire.Seat(1.0, 0)
    assert weigh([100, 100], [1.0, 5e-324], [young, old], earned=True) == (1.0, 0.0)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(0.0, 1.0), st.integers(0, 40)), min_size=1, max_size=64))
def test_no_seats_break_the_weights(peers: list[tuple[int, float, int]]) -> None:
    told = [wire.Seat(trust, rounds) for _, trust, rounds in peers]
    weights = weigh([tokens for tokens, _, _ in peers], [1.0] * len(peers), told, earned=True)
    assert all(weight >= 0 for weight in weights)
    assert not any(weights) or sum(weights) == pytest.approx(1)


def test_no_sum_of_floats_is_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last bits are others since 3.12: peers with two versions of Python would compute two outputs."""

    def of_integers(values: Iterable[float]) -> int:
        terms = [*values]
        assert all(isinstance(term, int) for term in terms)
        return int(np.sum(terms))

    monkeypatch.setattr(trust_module, "sum", of_integers, raising=False)
    told = [wire.Seat(0.1 * index, rounds) for index in range(1, 10) for rounds in (1, YOUNG_ROUNDS)]
    for some in (told, told[:8]):
        tokens = range(100, 100 + len(some))
        assert sum(weigh(tokens, [1.0] * len(some), some, earned=True)) == pytest.approx(1)


def test_a_flag_changes_what_is_signed() -> None:
    one, other = (certify(None, 100, roster=FOUR, flagged=flagged) for flagged in ((), (1,)))
    assert certificate_hash(one) != certificate_hash(other)


def credited(tokens: list[int], trust: list[float] | None = None, *, earned: bool = False) -> tuple[int, ...]:
    seats = [wire.Seat(each, 0) for each in trust or [1.0] * len(tokens)]
    return credit_of(tokens, seats, [True] * len(tokens), earned=earned)


@given(st.lists(st.integers(0, 1 << 50), min_size=1, max_size=64))
def test_credit_is_what_counts_under_the_cap_and_its_total_never_overflows(tokens: list[int]) -> None:
    cap = 1.5 * statistics.median_low(tokens)
    for count, credit in zip(tokens, credited(tokens), strict=True):
        assert credit <= count
        assert credit == MAX_PEER_TOKENS or 0 <= min(count, cap) - credit < 1
    assert sum(credited(tokens)) <= MAX_ROUND_TOKENS
    assert MAX_ROUND_TOKENS * 1_000_000 < wire.MAX_COUNT  # As many rounds as a manifest may ask for.


def test_who_claims_any_number_of_tokens_gets_little_more_credit_than_the_others() -> None:
    assert credited([100, 100, 100, 1 << 50]) == (100, 100, 100, 150)
    assert credited([100, 1 << 50]) == (100, 150)
    assert credited([1 << 50]) == (MAX_PEER_TOKENS,)
    strangers = [100] * 3 + [1 << 50] * 7
    assert credited(strangers, [1.0] * 3 + [0.2] * 7) == (100,) * 3 + (150,) * 7
    assert max(credited(strangers, [1.0] * 3 + [0.6] * 7)) == MAX_PEER_TOKENS
    # In an open run newcomers count for a fifth of the median together, however many they are.
    seats = [wire.Seat(1.0, 20)] * 4 + [wire.Seat(0.6, 0)] * 60
    assert max(credit_of([100] * 4 + [1 << 50] * 60, seats, [True] * 64, earned=True)) == 150


def test_who_is_flagged_or_left_without_weight_gets_no_credit() -> None:
    seats = (wire.Seat(1.0, 0),) * 3
    assert credit_of([100, 80, 120], seats, [True, False, True], earned=False) == (100, 0, 120)
    assert credit_of([0, 0, 0], seats, [True] * 3, earned=False) == (0, 0, 0)
    assert credit_of([7], (wire.Seat(0.0, 0),), [True], earned=True) == (7,)


def test_what_is_short_is_work_if_its_tokens_explain_it() -> None:
    tokens, seats = [100, 100, 100, 5, 100, 5, 1000], [wire.Seat(1.0, 20)] * 7
    short = {3: 0.05, 4: 0.05, 5: 0.004, 6: 0.099}
    assert idle_of(tokens, seats, short, earned=False) == (4, 5, 6)
    assert idle_of(tokens, seats, {3: 0.0}, earned=False) == (3,)
    assert idle_of([0, 0, 1], seats[:3], {2: 0.09}, earned=False) == (2,)
    # Newcomers that state few tokens do not excuse what one of tenure states.
    many = [100] * 4 + [1] * 20
    young = [wire.Seat(1.0, 20)] * 4 + [wire.Seat(0.2, 0)] * 20
    assert idle_of(many, young, {0: 0.05, 23: 0.05}, earned=True) == (0,)


@pytest.mark.parametrize("lie", [{"trust": 0.51}, {"rounds": 4}])
def test_a_seat_that_misstates_what_its_holder_has_earned_shows(lie: dict[str, float]) -> None:
    record, true = TrustRecord(0.5, 3), {"trust": 0.5, "rounds": 3}
    assert not misstated(wire.Seat(**true), record)  # type: ignore[arg-type]  # Of two types.
    assert misstated(wire.Seat(**{**true, **lie}), record)  # type: ignore[arg-type]


def test_what_was_earned_in_the_run_before_counts_from_the_first_round_on() -> None:
    brought = Earned(IDS[0], 0.75, 20)
    trust = Trust(True, [brought])
    assert trust.of(IDS[0]) == TrustRecord(0.75, 20)
    assert trust.of(IDS[1]) == newcomer_record(True)
    first = certify(None, 100, roster=FOUR, trust_of=lambda peer: trust.of(peer) or newcomer_record(True))
    trust.take(first)
    assert trust.of(IDS[0]) == TrustRecord(0.8, 20)
    late = Trust(True, [brought])  # Who holds no certificate of the first rounds knows of it by later ones alone.
    late.take(chain(2, before=first)[-1])
    assert late.of("nobody") is None
    assert Trust(False, [brought]).of(IDS[0]) == newcomer_record(False)
