"""Tenure: what counts as a round of a member, and for whom the owner's peer vouches by itself."""

import pytest
from flockstep.collectives.accountability import tenure as module
from flockstep.collectives.accountability.tenure import (
    MAX_SELF_MADE,
    MAX_STATED,
    VOUCH_PERIOD,
    Candidate,
    Tenure,
    earned_vote,
    in_order,
    num_due,
    why_not_vouch,
)
from flockstep.collectives.accountability.trust import TRUST_WINDOW
from flockstep.dht.run.statements import OwnerStatement, OwnerStatements
from flockstep.peer import wire
from flockstep.peer.identity import Identity
from support.certificates import RUN, certify

OWNER, ANNA, BERT, CARL = (Identity.from_seed(bytes([n]) * 32) for n in range(1, 5))
NONE = OwnerStatements(RUN, OWNER.peer_id)


def chain(*rosters: list[Identity], flagged: str = "") -> list[wire.Certificate]:
    found: list[wire.Certificate] = []
    for number, roster in enumerate(rosters):
        order = sorted(identity.peer_id for identity in roster)
        marks = (order.index(ANNA.peer_id),) if flagged[number : number + 1] == "x" else ()
        found.append(certify(found[-1] if found else None, 100, roster=roster, flagged=marks))
    return found


def counted(certificates: list[wire.Certificate]) -> Tenure:
    tenure = Tenure()
    tenure.advance(certificates[-1], {each.slot.round: each for each in certificates}.get)
    return tenure


def candidate(identity: Identity, rounds: int = 30, *, keeps: bool = False, network: str = "192.0.2.0/24") -> Candidate:
    return Candidate(identity.peer_id, rounds, keeps, network)


def vouched(round_: int, *candidates: Candidate, log: OwnerStatements = NONE) -> OwnerStatements:
    for one in candidates:
        log = log.sign(OWNER, OwnerStatement("vouch", one.peer, str(earned_vote(one, round_))))
    return log


def test_rosters_count_and_a_flagged_round_halves_what_they_gave() -> None:
    certificates = chain(*[[OWNER, ANNA]] * 4, [OWNER, BERT], [OWNER, ANNA], flagged="00x0")
    tenure = counted(certificates)
    assert [tenure.of(peer.peer_id) for peer in (OWNER, ANNA, BERT, CARL)] == [6, 3, 1, 0]


def test_one_round_after_the_other_counts_what_a_restart_recounts() -> None:
    certificates = chain(*[[OWNER, ANNA]] * 5, [OWNER, BERT], flagged="0x")
    stepwise = Tenure()
    for certificate in certificates:
        stepwise.advance(certificate, lambda round_: None)
        stepwise.advance(certificate, lambda round_: None)  # The same one again changes nothing.
    again = counted(certificates)
    assert [stepwise.of(peer.peer_id) for peer in (OWNER, ANNA, BERT)] == [6, 3, 1]
    assert [again.of(peer.peer_id) for peer in (OWNER, ANNA, BERT)] == [6, 3, 1]
    assert stepwise.head == again.head


def test_another_chain_is_counted_anew_as_far_back_as_it_is_known() -> None:
    tenure = counted(chain(*[[OWNER, ANNA]] * 3))
    other = chain(*[[OWNER, BERT]] * 4)
    tenure.advance(other[-1], {3: other[2]}.get)
    assert [tenure.of(peer.peer_id) for peer in (OWNER, ANNA, BERT)] == [2, 0, 2]


def test_a_restart_reads_no_more_of_a_long_chain_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RECOUNTED", 3)
    assert counted(chain(*[[OWNER, ANNA]] * 6)).of(ANNA.peer_id) == 3


def test_whoever_was_long_away_begins_anew() -> None:
    certificates = chain([OWNER, ANNA], *[[OWNER]] * (TRUST_WINDOW - 1), [OWNER, ANNA])
    assert counted(certificates[:-1]).of(ANNA.peer_id) == 1
    assert counted([*certificates[:-1], certify(certificates[-2], 100, roster=[OWNER])]).of(ANNA.peer_id) == 0


def test_the_first_come_in_a_pair_and_the_others_one_by_one() -> None:
    assert num_due(30, [OWNER.peer_id], NONE) == 2
    pair = vouched(30, candidate(ANNA), candidate(BERT, network="198.51.100.0/24"))
    everybody = [OWNER.peer_id, ANNA.peer_id, BERT.peer_id]
    assert num_due(30 + 2 * VOUCH_PERIOD - 1, everybody, pair) == 0
    assert num_due(30 + 2 * VOUCH_PERIOD, everybody, pair) == 1
    third = vouched(40, candidate(CARL), log=pair)
    assert [num_due(40 + rounds, everybody, third) for rounds in (VOUCH_PERIOD - 1, VOUCH_PERIOD)] == [0, 1]
    assert num_due(1000, [OWNER.peer_id, ANNA.peer_id], third) == 1  # Of two, one more makes three.


def test_there_is_room_for_those_that_train_and_for_bans() -> None:
    many = [str(number) for number in range(MAX_SELF_MADE)]
    assert [num_due(30, many[:-1], NONE), num_due(30, many, NONE)] == [1, 0]
    log = NONE
    for number in range(MAX_STATED):
        log = log.sign(OWNER, OwnerStatement("ban" if number % 2 else "pardon", CARL.peer_id))
    assert num_due(30, [OWNER.peer_id], log) == 0


def test_keepers_come_first_then_those_with_more_rounds() -> None:
    some = [candidate(ANNA, 40), candidate(BERT, 31, keeps=True), candidate(CARL, 29, keeps=True), candidate(OWNER, 50)]
    assert [one.peer for one in in_order(some, 30)] == [peer.peer_id for peer in (BERT, OWNER, ANNA)]


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        ("", "its network is not known"),
        ("192.0.2.0/24", f"of its network, 192.0.2.0/24, another one counts: {BERT.peer_id}"),
        ("198.51.100.0/24", "of its network, 198.51.100.0/24"),
        ("203.0.113.0/24", "of its network, 203.0.113.0/24"),
        ("2001:db8::/48", ""),
    ],
)
def test_one_of_a_network_counts(network: str, reason: str) -> None:
    log = vouched(30, candidate(BERT))
    here = {"198.51.100.0/24": OWNER.peer_id}
    chosen = [candidate(CARL, network="203.0.113.0/24")]
    assert why_not_vouch(candidate(ANNA, network=network), log, here, chosen).startswith(reason)
    assert bool(reason) == bool(why_not_vouch(candidate(ANNA, network=network), log, here, chosen))


def test_what_the_owner_has_taken_back_is_given_to_nobody_in_that_network() -> None:
    log = vouched(30, candidate(BERT)).sign(OWNER, OwnerStatement("revoke", BERT.peer_id))
    assert "revoked" in why_not_vouch(candidate(BERT), log, {}, ())
    assert "of its network" in why_not_vouch(candidate(ANNA), log, {}, ())
    assert why_not_vouch(candidate(ANNA, network="198.51.100.0/24"), log, {}, ()) == ""
