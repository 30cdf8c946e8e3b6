"""Certificates and proofs: each reason to refuse one, what their hash covers, and how long they are."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from flockstep.collectives.agreement.electorate import NOBODY, Electorate
from flockstep.collectives.chain.certificate import (
    certificate_hash,
    check_certificate,
    check_proof,
    check_votes,
    genesis,
    value_hash,
    value_of,
)
from flockstep.collectives.chain.packed import pack_certificate
from flockstep.dht.run.admission import OPEN, Charter, Invitation, Ticket
from flockstep.dht.run.statements import OwnerStatement, OwnerStatements
from flockstep.peer import wire
from flockstep.peer.base.errors import BadSignature, ProtocolViolation
from flockstep.peer.identity import Identity
from flockstep.peer.wire.schema import encode
from flockstep.peer.wire.signed import verify_signed
from support.certificates import RUN, decided, proven, seats

FOUR = sorted((Identity.from_seed(bytes([number]) * 32) for number in range(1, 5)), key=lambda one: one.peer_id)
A, B, C, D = FOUR
IDS = tuple(identity.peer_id for identity in FOUR)
STRANGER = Identity.from_seed(bytes([9]) * 32)
SLOT = wire.Slot(RUN, 3, b"p" * 32, 2)
VALUE = wire.Value(
    *SLOT.decision,
    bytes(32),
    IDS,
    (0, 1, 2, 3, 4),
    seats(4),
    b"c" * 32,
    (0, 1, 3),
    (b"o" * 32,) * 4,
    b"n" * 32,
    900,
    (3,),
    credit=(400, 500, 0),
)
E = Electorate(dict.fromkeys(IDS, 1))


def certificate(*voters: Identity, value: wire.Value = VALUE, slot: wire.Slot = SLOT) -> wire.Certificate:
    return decided(value, slot, voters or FOUR[:3])


def check(found: wire.Certificate | wire.Proof, charter: Charter = OPEN) -> wire.Value:
    if isinstance(found, wire.Proof):
        return check_proof(found, verify_signed, charter=charter)
    return check_certificate(found, verify_signed, charter=charter)


@pytest.mark.parametrize("make", [decided, proven])
@pytest.mark.parametrize("slot", [SLOT, SLOT.at(0), SLOT.at(73)])
def test_a_certificate_and_a_proof_of_any_attempt_hold(make: Callable[..., Any], slot: wire.Slot) -> None:
    found = make(VALUE, slot, FOUR[:3])
    assert check(found) == VALUE
    check_votes(found, E)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"run": "b" * 52}, "of another round"),
        ({"round": 4}, "of another round"),
        ({"previous": b"q" * 32}, "of another round"),
        ({"members": IDS[:3]}, "4 seats for 3 members"),
        ({"seats": seats(3)}, "3 seats for 4 members"),
        ({"members": (*IDS[:3], IDS[0])}, "a member has two seats"),
        ({"bounds": (0, 1, 2, 3)}, "3 parts and 4 outputs for 4 members"),
        ({"bounds": (0, 1, 2, 3, 4, 5)}, "5 parts and 4 outputs for 4 members"),
        ({"outputs": (b"o" * 32,) * 3}, "4 parts and 3 outputs for 4 members"),
        ({"contributors": (1, 0, 3)}, "contributors are not members in order"),
        ({"contributors": (0, 1, 1, 3)}, "contributors are not members in order"),
        ({"contributors": (0, 1, 3, 4)}, "contributors are not members in order"),
        ({"flagged": (2,)}, "flags a member that did not contribute"),
        ({"flagged": (9,)}, "flags a member that did not contribute"),
        ({"credit": (300, 300)}, "credit for 2 of 3 contributors"),
        ({"credit": (300, 300, 300, 0)}, "credit for 4 of 3 contributors"),
        ({"credit": (300, 300, 300)}, "credit for a contribution that it flags"),
    ],
)
@pytest.mark.parametrize("make", [decided, proven])
def test_a_value_that_does_not_fit_its_round_or_itself_is_refused(
    make: Callable[..., Any], changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ProtocolViolation, match=why):
        check(make(replace(VALUE, **changes), SLOT, FOUR[:3]))


def shuffled(found: wire.Certificate, order: Sequence[int]) -> wire.Certificate:
    """The same with these of its voters, each with its own signature."""
    voters, signatures = ([items[place] for place in order] for items in (found.voters, found.signatures))
    return replace(found, voters=tuple(voters), signatures=tuple(signatures))  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 1, 2, 2), (0, 0, 1)])
def test_voters_are_listed_once_each_and_in_order(order: Sequence[int]) -> None:
    with pytest.raises(ProtocolViolation, match="once each"):
        check(shuffled(certificate(), order))


@pytest.mark.parametrize("keep", [2, 4])
def test_each_voter_has_one_signature(keep: int) -> None:
    found = certificate()
    with pytest.raises(ProtocolViolation, match="with their signatures"):
        check(replace(found, signatures=(found.signatures * 2)[:keep]))


def test_every_signature_is_checked_and_covers_kind_slot_and_value() -> None:
    found = certificate()
    for place in range(3):
        wrong = [*found.signatures]
        wrong[place] = bytes(64)
        with pytest.raises(BadSignature, match=found.voters[place]):
            check(replace(found, signatures=tuple(wrong)))
    for other in (
        certificate(slot=SLOT.at(3)),
        certificate(value=replace(VALUE, tokens=901)),
        proven(VALUE, SLOT, FOUR[:3]),
        certificate(B, C, D),
    ):
        with pytest.raises(BadSignature):
            check(replace(found, signatures=other.signatures))


def test_what_the_run_does_not_admit_is_in_no_certificate() -> None:
    with pytest.raises(ProtocolViolation, match=f"includes {IDS[3]}: the run's manifest does not list it"):
        check(certificate(), Charter(kind="allow", allowed=frozenset(IDS[:3])))
    with pytest.raises(ProtocolViolation, match="4 members, where the run asks for 5"):
        check(certificate(), Charter(min_peers=5))
    ticket = Ticket(Invitation.sign(A, RUN, STRANGER.peer_id, count=2), bytes([9]) * 32)
    shown = tuple(wire.Seat(1.0, 0, invite=ticket.credential(peer) if peer != IDS[0] else b"") for peer in IDS)
    with pytest.raises(ProtocolViolation, match="3 peers share an invitation for 2"):
        check(certificate(value=replace(VALUE, seats=shown)), Charter(RUN, IDS[0], "invite"))


# Votes.


def test_strangers_votes_are_refused_and_not_just_left_out() -> None:
    found = certificate(A, B, C, STRANGER)
    assert check(found) == VALUE
    with pytest.raises(ProtocolViolation, match=f"signed by {STRANGER.peer_id}, which has no vote"):
        check_votes(found, E)


def test_a_quorum_is_one_of_the_electorate_whoever_is_in_the_roster() -> None:
    check_votes(certificate(A, B, C), E)
    with pytest.raises(ProtocolViolation, match="2 of 3 votes"):
        check_votes(certificate(A, B), E)
    three = Electorate(dict.fromkeys(IDS[:3], 1))
    check_votes(certificate(A, B), three)
    with pytest.raises(ProtocolViolation, match="1 of 2 votes"):
        check_votes(certificate(A), three)
    larger = Electorate(dict.fromkeys((*IDS, STRANGER.peer_id), 1))
    with pytest.raises(ProtocolViolation, match="3 of 4 votes"):
        check_votes(certificate(A, B, C), larger)
    with pytest.raises(ProtocolViolation, match=f"signed by {IDS[0]}"):
        check_votes(certificate(), Electorate({IDS[1]: 1, IDS[2]: 1}))


def test_where_nobody_votes_nothing_is_decided() -> None:
    with pytest.raises(ProtocolViolation, match="no vote in its round"):
        check_votes(certificate(), NOBODY)


# Hashes and lengths.


def test_the_hash_of_a_certificate_is_that_of_its_value_whoever_signed_this_copy_and_when() -> None:
    one, other = certificate(A, B, C), certificate(B, C, D, slot=SLOT.at(0))
    assert certificate_hash(one) == certificate_hash(other) == value_hash(encode(VALUE))
    assert value_of(one) == value_of(other) == value_of(proven(VALUE, SLOT, FOUR)) == VALUE
    others: dict[str, Any] = {"tokens": 901, "flagged": (1,), "credit": (1, 2, 0), "cut": b"d" * 32, "next_root": b"m" * 32}
    for name, changed in others.items():
        assert certificate_hash(certificate(value=replace(VALUE, **{name: changed}))) != certificate_hash(one)


def test_the_start_of_each_run_has_a_hash_of_its_own() -> None:
    assert genesis(RUN) != genesis("b" * 52)
    assert len(genesis(RUN)) == 32


def of_64(**shown: Sequence[Any]) -> wire.Certificate:
    """The certificate of a full roster, with hashes and signatures as incompressible as real ones."""
    crowd = [Identity.from_seed(bytes([number, 7]) * 16) for number in range(64)]
    ids = sorted(identity.peer_id for identity in crowd)
    stated = [{name: items[number] for name, items in shown.items()} for number in range(64)]
    found = tuple(
        replace(wire.Seat(0.2 + number / 100, number % 21), **stated[number]) for number in range(64)
    )
    value = wire.Value(
        *(RUN, 1 << 20, value_hash(b"previous"), value_hash(b"base"), tuple(ids)),
        tuple(1000 * number for number in range(65)),
        found,
        value_hash(b"cut"),
        tuple(range(64)),
        tuple(value_hash(bytes([number])) for number in range(64)),
        value_hash(b"next"),
        1 << 40,
        credit=(1 << 35,) * 64,
    )
    slot = wire.Slot(RUN, value.round, value.previous, 2)
    return decided(value, slot, crowd)


def test_a_certificate_of_64_members_fits_where_it_must() -> None:
    plain = of_64()
    assert check(plain) == value_of(plain)
    assert len(encode(plain)) <= 20_000
    assert len(pack_certificate(plain)) <= 16_000
    crowd = [Identity.from_seed(bytes([number, 7]) * 16).peer_id for number in range(64)]
    ticket = Ticket(Invitation.sign(A, RUN, STRANGER.peer_id, count=64), bytes([9]) * 32)
    invites = [ticket.credential(peer) for peer in crowd]
    stated = OwnerStatements(RUN, A.peer_id)
    vouchers = [stated.sign(A, OwnerStatement("vouch", peer)).voucher(peer) for peer in crowd]
    assert len(pack_certificate(of_64(invite=invites, voucher=vouchers))) <= wire.MAX_PACKED_BYTES
