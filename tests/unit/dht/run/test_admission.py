"""Admission: lists, invitations bound to a peer or to a count, and where they are checked."""

from dataclasses import replace

import pytest
from flockstep.collectives.chain.certificate import check_certificate
from flockstep.collectives.chain.packed import checked
from flockstep.dht.members.table import MemberBody, MemberState, MemberTable, MergeOutcome
from flockstep.dht.run.admission import OPEN, Charter, Invitation
from flockstep.peer.errors import ProtocolViolation, UsageError
from flockstep.peer.identity import Identity
from flockstep.peer.wire.schema import encode
from flockstep.peer.wire.signed import verify_signed
from hypothesis import given
from hypothesis import strategies as st
from support.certificates import certify, grow, seats

RUN = "a" * 52
OWNER, ANNA, BERT = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
SERIAL = b"12345678"
INVITING = Charter(RUN, OWNER.peer_id, "invite")


def invited(peer: str = "", count: int = 1, *, run: str = RUN, by: Identity = OWNER) -> bytes:
    return encode(Invitation.sign(by, run, SERIAL, peer=peer, count=count))


def test_an_open_run_takes_everybody_and_a_list_those_on_it() -> None:
    listing = Charter(RUN, OWNER.peer_id, "allow", frozenset({ANNA.peer_id}))
    assert OPEN.admits(BERT.peer_id, b"")
    assert listing.admits(ANNA.peer_id, b"")
    assert listing.why_not_admit(BERT.peer_id, b"") == "the run's manifest does not list it"


def test_an_invitation_is_for_one_peer_or_for_any_and_only_from_the_owner() -> None:
    assert INVITING.admits(ANNA.peer_id, invited(ANNA.peer_id))
    assert INVITING.admits(BERT.peer_id, invited())
    assert INVITING.admits(OWNER.peer_id, b"")
    assert "somebody else's" in INVITING.why_not_admit(BERT.peer_id, invited(ANNA.peer_id))
    wrong = [b"", b"\x00", invited(by=ANNA), invited(run="b" * 52), invited(ANNA.peer_id)[:-1]]
    raised = encode(replace(Invitation.sign(OWNER, RUN, SERIAL, count=1), count=9))
    for invite in [*wrong, raised]:
        assert "no invitation" in INVITING.why_not_admit(ANNA.peer_id, invite)


def test_no_more_holders_of_an_invitation_than_its_count_take_part_at_a_time() -> None:
    two, one = invited(count=2), invited(count=1)
    assert INVITING.overbooked([two, two, one, b""]) == ""
    assert INVITING.overbooked([two] * 3) == "3 peers share an invitation for 2"
    assert OPEN.overbooked([two] * 3) == ""


def test_an_invitation_survives_being_pasted() -> None:
    invitation = Invitation.sign(OWNER, RUN, SERIAL, count=5)
    text = str(invitation)
    assert Invitation.parse(f"  {text[:40]}\n{text[40:].upper()} ") == invitation
    for broken in ("", text[:-3], text + "a", "hello", "ä" * 20):
        with pytest.raises(UsageError, match="not a whole invitation"):
            Invitation.parse(broken)


@given(st.binary(max_size=300))
def test_no_bytes_are_an_invitation(invite: bytes) -> None:
    assert not INVITING.admits(ANNA.peer_id, invite)
    assert INVITING.overbooked([invite, invite]) == ""


def test_a_member_that_is_not_admitted_enters_no_table() -> None:
    def outcome_of(identity: Identity, invite: bytes) -> MergeOutcome:
        body = MemberBody(state=MemberState.TRAINING, invite=invite)
        record = MemberTable(RUN, identity.peer_id).update_own(identity, body, 0.0)
        table = MemberTable(RUN, OWNER.peer_id, charter=INVITING)
        outcome = table.merge(record, 0.0).outcome
        assert len(table.active(0.0)) == (outcome is MergeOutcome.NEW)
        return outcome

    assert outcome_of(ANNA, invited(ANNA.peer_id)) is MergeOutcome.NEW
    assert outcome_of(BERT, invited(ANNA.peer_id)) is MergeOutcome.REFUSED
    assert outcome_of(BERT, b"") is MergeOutcome.REFUSED


def test_a_chain_of_peers_who_were_not_admitted_proves_nothing() -> None:
    """However many tokens it claims: keys are free, so in a closed run a certificate must show who let its peers in."""
    forged = grow(None, 2)
    with pytest.raises(ProtocolViolation, match="no invitation"):
        checked(forged, RUN, verify_signed, replace(INVITING, owner=BERT.peer_id))
    roster = [OWNER, ANNA, BERT]
    for holders, fault in ((3, None), (2, "3 peers share an invitation for 2")):
        certificate = certify(None, 1, roster=roster, seats=seats(3, invite=invited(count=holders)))
        if fault is None:
            check_certificate(certificate, verify_signed, charter=INVITING)
        else:
            with pytest.raises(ProtocolViolation, match=fault):
                check_certificate(certificate, verify_signed, charter=INVITING)
