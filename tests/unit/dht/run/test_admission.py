"""Admission: lists, invitations bound to a peer or to a count, and where they are checked."""

from dataclasses import replace

import pytest
from flockstep.collectives.chain.certificate import check_certificate
from flockstep.collectives.chain.packed import checked
from flockstep.dht.members.body import MemberBody, MemberState
from flockstep.dht.members.table import MemberTable, Merge, MergeOutcome
from flockstep.dht.run.admission import BINDING_CONTEXT, OPEN, Charter, Credential, Invitation, Ticket
from flockstep.dht.run.statements import OwnerStatement, OwnerStatements
from flockstep.peer.base.errors import ProtocolViolation, UsageError
from flockstep.peer.identity import Identity
from flockstep.peer.wire import MAX_INVITE_BYTES
from flockstep.peer.wire.schema import decode, encode
from flockstep.peer.wire.signed import verify_signed
from hypothesis import given
from hypothesis import strategies as st
from support.certificates import certify, grow

RUN = "a" * 52
OWNER, ANNA, BERT = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
SEED = bytes([9]) * 32
KEY = Identity.from_seed(SEED).peer_id
INVITING = Charter(RUN, OWNER.peer_id, "invite")


def ticket(peer: str = "", count: int = 1, *, run: str = RUN, by: Identity = OWNER, expires: int = 1000) -> Ticket:
    if peer:
        return Ticket(Invitation.sign(by, run, peer, expires=expires), b"")
    return Ticket(Invitation.sign(by, run, KEY, count=count, expires=expires), SEED)


def entering(identity: Identity, invite: bytes, table: MemberTable) -> Merge:
    body = MemberBody(state=MemberState.TRAINING, invite=invite)
    return table.merge(MemberTable(RUN, identity.peer_id).update_own(identity, body, 0.0), 0.0)


def test_an_open_run_takes_everybody_and_a_list_those_on_it() -> None:
    listing = Charter(RUN, OWNER.peer_id, "allow", frozenset({ANNA.peer_id}))
    assert OPEN.admits(BERT.peer_id, b"")
    assert listing.admits(ANNA.peer_id, b"")
    assert listing.why_not_admit(BERT.peer_id, b"").startswith("the run's manifest does not list it")


def test_the_owners_invitation_by_id_adds_a_peer_to_a_list() -> None:
    listing = Charter(RUN, OWNER.peer_id, "allow", frozenset({OWNER.peer_id, ANNA.peer_id}))
    added = ticket(BERT.peer_id).credential(BERT.peer_id)
    assert listing.admits(BERT.peer_id, added)
    forged = ticket(BERT.peer_id, by=ANNA).credential(BERT.peer_id)
    elsewhere, anybodys = ticket(BERT.peer_id, run="b" * 52), ticket()
    for other in (forged, elsewhere.credential(BERT.peer_id), anybodys.credential(BERT.peer_id), b"x"):
        assert not listing.admits(BERT.peer_id, other)  # By somebody else, for another run, or for anybody.
    assert not listing.admits(OWNER.peer_id[:-1] + "x", added)
    assert "expired" in listing.why_not_enter(BERT.peer_id, added, [], 1001.0)
    assert not listing.why_not_enter(ANNA.peer_id, ticket(ANNA.peer_id).credential(ANNA.peer_id), [], 1001.0)
    log = OwnerStatements(RUN, OWNER.peer_id).sign(OWNER, OwnerStatement("revoke", BERT.peer_id))
    assert "withdrawn" in listing.amended(log).why_not_admit(BERT.peer_id, added)


def test_an_invitation_is_for_one_peer_or_for_holders_of_its_key_and_only_from_the_owner() -> None:
    assert INVITING.admits(ANNA.peer_id, ticket(ANNA.peer_id).credential(ANNA.peer_id))
    assert INVITING.admits(BERT.peer_id, ticket().credential(BERT.peer_id))
    assert INVITING.admits(OWNER.peer_id, b"")
    assert "somebody else's" in INVITING.why_not_admit(BERT.peer_id, ticket(ANNA.peer_id).credential(BERT.peer_id))
    good = ticket().credential(ANNA.peer_id)
    wrong = [b"", b"\x00", ticket(by=ANNA).credential(ANNA.peer_id), ticket(run="b" * 52).credential(ANNA.peer_id), good[:-1]]
    raised = Ticket(replace(ticket().invitation, count=9), SEED).credential(ANNA.peer_id)
    later = Ticket(replace(ticket().invitation, expires=9999), SEED).credential(ANNA.peer_id)
    for invite in [*wrong, raised, later]:
        assert "no invitation" in INVITING.why_not_admit(ANNA.peer_id, invite)


def test_what_a_member_shows_of_its_invitation_admits_nobody_else() -> None:
    shown = ticket(count=50).credential(ANNA.peer_id)
    assert INVITING.admits(ANNA.peer_id, shown)
    assert "somebody else's" in INVITING.why_not_admit(BERT.peer_id, shown)
    invitation = decode(Credential, shown, max_bytes=MAX_INVITE_BYTES).invitation
    for binding in (b"", bytes(64), BERT.sign(BINDING_CONTEXT + BERT.peer_id.encode())):
        assert not INVITING.admits(BERT.peer_id, encode(Credential(invitation, binding)))


def test_no_more_holders_of_an_invitation_than_its_count_take_part_at_a_time() -> None:
    shown = [ticket(count=2).credential(identity.peer_id) for identity in (OWNER, ANNA, BERT)]
    assert INVITING.overbooked([*shown[:2], ticket(ANNA.peer_id).credential(ANNA.peer_id), b""]) == ""
    assert INVITING.overbooked(shown) == "3 peers share an invitation for 2"
    assert OPEN.overbooked(shown) == ""


def test_an_invitation_is_bound_to_the_first_peers_that_use_it() -> None:
    table, shared = MemberTable(RUN, OWNER.peer_id, charter=INVITING), ticket(count=1)
    assert entering(ANNA, shared.credential(ANNA.peer_id), table).outcome is MergeOutcome.NEW
    table.lose(ANNA.peer_id, 1.0, "gone")
    refused = entering(BERT, shared.credential(BERT.peer_id), table)
    assert (refused.outcome, refused.reason) == (MergeOutcome.REFUSED, "its invitation is spent: 1 of 1 peers use it")
    assert entering(BERT, ticket(BERT.peer_id).credential(BERT.peer_id), table).outcome is MergeOutcome.NEW


def test_an_expired_invitation_lets_in_nobody_new() -> None:
    clock = 1000.0
    table = MemberTable(RUN, OWNER.peer_id, charter=INVITING, wall_time=lambda: clock)
    shown = ticket(ANNA.peer_id).credential(ANNA.peer_id)
    author, body = MemberTable(RUN, ANNA.peer_id), MemberBody(state=MemberState.TRAINING, invite=shown)
    assert table.merge(author.update_own(ANNA, body, 0.0), 0.0).outcome is MergeOutcome.NEW
    clock = 1001.0
    assert table.merge(author.update_own(ANNA, body, 0.0), 0.0).outcome is MergeOutcome.UPDATED
    refused = entering(BERT, ticket(BERT.peer_id).credential(BERT.peer_id), table)
    assert (refused.outcome, refused.reason) == (MergeOutcome.REFUSED, "its invitation has expired")


def test_a_restarted_peer_lets_in_known_members_after_the_expiry_and_counts_them_against_the_invitation() -> None:
    table = MemberTable(RUN, OWNER.peer_id, charter=INVITING, wall_time=lambda: 1001.0, known={ANNA.peer_id})
    assert entering(ANNA, ticket().credential(ANNA.peer_id), table).outcome is MergeOutcome.NEW
    assert entering(BERT, ticket().credential(BERT.peer_id), table).reason == "its invitation has expired"
    table = MemberTable(RUN, OWNER.peer_id, charter=INVITING, known={ANNA.peer_id, BERT.peer_id})
    assert entering(ANNA, ticket().credential(ANNA.peer_id), table).outcome is MergeOutcome.NEW
    assert entering(BERT, ticket().credential(BERT.peer_id), table).reason.startswith("its invitation is spent")


def test_members_of_the_certificate_and_all_that_a_newcomer_finds_are_let_in_after_the_expiry() -> None:
    certificates: tuple[tuple[tuple[str, ...] | None, MergeOutcome], ...] = (
        ((ANNA.peer_id,), MergeOutcome.REFUSED),
        (None, MergeOutcome.NEW),
    )
    for certified, outcome in certificates:
        table = MemberTable(RUN, OWNER.peer_id, charter=INVITING, wall_time=lambda: 1001.0)
        table.certified = lambda certified=certified: certified  # type: ignore[misc]
        for peer, expected in ((ANNA, MergeOutcome.NEW), (BERT, outcome)):
            assert entering(peer, ticket(peer.peer_id).credential(peer.peer_id), table).outcome is expected


def test_an_invitation_survives_being_pasted() -> None:
    text = str(ticket(count=5))
    assert Ticket.parse(f"  {text[:40]}\n{text[40:].upper()} ") == ticket(count=5)
    for broken in ("", text[:-3], text + "a", "hello", "ä" * 20):
        with pytest.raises(UsageError, match="not a whole invitation"):
            Ticket.parse(broken)


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
        assert len(table) == (outcome is MergeOutcome.NEW)
        return outcome

    assert outcome_of(ANNA, ticket(ANNA.peer_id).credential(ANNA.peer_id)) is MergeOutcome.NEW
    assert outcome_of(BERT, ticket(ANNA.peer_id).credential(BERT.peer_id)) is MergeOutcome.REFUSED
    assert outcome_of(BERT, b"") is MergeOutcome.REFUSED


def test_a_chain_of_peers_who_were_not_admitted_proves_nothing() -> None:
    """However many tokens it claims: keys are free, so in a closed run a certificate must show who let its peers in."""
    forged = grow(None, 2)
    with pytest.raises(ProtocolViolation, match="no invitation"):
        checked(forged, RUN, verify_signed, replace(INVITING, owner=BERT.peer_id))
    roster = [OWNER, ANNA, BERT]
    for holders, fault in ((3, None), (2, "3 peers share an invitation for 2")):
        certificate = certify(None, 1, roster=roster, invite_of=ticket(count=holders).credential)
        if fault is None:
            check_certificate(certificate, verify_signed, charter=INVITING)
        else:
            with pytest.raises(ProtocolViolation, match=fault):
                check_certificate(certificate, verify_signed, charter=INVITING)


def test_what_the_owner_withdraws_admits_nobody_and_what_it_vouches_for_admits_nobody_new() -> None:
    shared = ticket(count=2)
    log = OwnerStatements(RUN, OWNER.peer_id)
    for verb, key in (("revoke", ANNA.peer_id), ("revoke", shared.invitation.key), ("vouch", BERT.peer_id)):
        log = log.sign(OWNER, OwnerStatement(verb, key))
    later = INVITING.amended(log)
    assert later.why_not_admit(ANNA.peer_id, ticket(ANNA.peer_id).credential(ANNA.peer_id)).endswith("its admission")
    assert later.why_not_admit(BERT.peer_id, shared.credential(BERT.peer_id)).endswith("its invitation")
    assert later.admits(BERT.peer_id, ticket(BERT.peer_id).credential(BERT.peer_id))
    assert not later.admits(BERT.peer_id, b"")
    assert later.vouched == {BERT.peer_id}
    assert later.amended(OwnerStatements(RUN, OWNER.peer_id)) == INVITING  # Which stays what it was.
    listed = Charter(run=RUN, owner=OWNER.peer_id, kind="allow", allowed=frozenset({ANNA.peer_id})).amended(log)
    assert not listed.admits(ANNA.peer_id, b"")
    assert OPEN.amended(log).admits(ANNA.peer_id, b"")


def test_certificates_of_rounds_before_a_revocation_stay_valid() -> None:
    roster = [OWNER, ANNA]
    certificate = certify(None, 1, roster=roster, invite_of=ticket(count=3).credential)
    later = INVITING.amended(OwnerStatements(RUN, OWNER.peer_id).sign(OWNER, OwnerStatement("revoke", ANNA.peer_id)))
    check_certificate(certificate, verify_signed, charter=INVITING)
    with pytest.raises(ProtocolViolation, match="withdrawn its admission"):  # Why rounds of the past are not judged by it.
        check_certificate(certificate, verify_signed, charter=later)
