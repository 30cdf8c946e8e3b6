"""The owner's revision in certificates: only its own counts, and no number goes down along a chain."""

import pytest
from flockstep.collectives.chain.certificate import certificate_hash, check_certificate, settings_after
from flockstep.collectives.chain.head import validate_run_value
from flockstep.collectives.chain.packed import checked, pack_certificate, why_not_next
from flockstep.collectives.spec import charter_of
from flockstep.dht.keys import head_key
from flockstep.dht.run.manifest import Data, Manifest, SignedManifest
from flockstep.dht.run.statements import OwnerStatement, OwnerStatements
from flockstep.peer import wire
from flockstep.peer.base.errors import ProtocolViolation
from flockstep.peer.identity import Identity
from flockstep.peer.wire.signed import verify_signed
from support.certificates import LONE, certify

ANNA = Identity.from_seed(bytes([3]) * 32)
SIGNED = SignedManifest.sign(Manifest(owner=LONE.peer_id, name="run", data=Data(source="own")), LONE)
CHARTER, RUN = charter_of(SIGNED), SIGNED.run_id
LOG = OwnerStatements(RUN, LONE.peer_id)
FIRST = LOG.sign(LONE, OwnerStatement("revise", LONE.peer_id, settings='{"inner.lr":0.5}'))
SECOND = FIRST.sign(LONE, OwnerStatement("revise", LONE.peer_id, settings='{"inner.lr":0.25}'))
FORGED = FIRST.revision[:-1] + bytes([FIRST.revision[-1] ^ 1])
OTHER = FIRST.sign(LONE, OwnerStatement("revise", LONE.peer_id, settings='{"inner.lr":0.75}'))


def grown(*revisions: bytes) -> list[wire.Certificate]:
    """Certificates of consecutive rounds that name these revisions."""
    chain: list[wire.Certificate] = []
    for revision in revisions:
        chain.append(certify(chain[-1] if chain else None, 10, run=RUN, revision=revision))
    return chain


def why_not(before: wire.Certificate, after: wire.Certificate) -> str:
    """Why a member that holds the one does not take the other."""
    return why_not_next(after, (RUN, after.slot.round, certificate_hash(before)), before, CHARTER)


def test_each_certificate_says_what_holds_in_the_next_round() -> None:
    chain = grown(b"", FIRST.revision, FIRST.revision, SECOND.revision)
    assert len(checked(chain, RUN, verify_signed, CHARTER)) == 4
    rates = [settings_after(certificate, SIGNED).inner.lr for certificate in (None, *chain)]
    assert rates == [0.02, 0.02, 0.5, 0.5, 0.25]


@pytest.mark.parametrize(
    ("before", "after"),
    [(SECOND.revision, FIRST.revision), (FIRST.revision, b""), (SECOND.revision, OTHER.revision)],
)
def test_a_number_that_does_not_grow_is_refused_by_members_newcomers_and_light_clients(before: bytes, after: bytes) -> None:
    chain = grown(before, after)
    with pytest.raises(ProtocolViolation, match=r"it names revision \d after revision \d"):
        checked(chain, RUN, verify_signed, CHARTER)
    with pytest.raises(ProtocolViolation, match=r"it names revision \d after revision \d"):
        checked(chain[1:], RUN, verify_signed, CHARTER, before=chain[0])
    assert "it names revision" in why_not(*chain)
    assert why_not(*grown(before, before)) == ""


def test_what_the_owner_has_not_signed_is_in_no_certificate_whoever_confirms_it() -> None:
    strangers = OwnerStatements(RUN, ANNA.peer_id).sign(ANNA, OwnerStatement("revise", ANNA.peer_id, settings="{}"))
    elsewhere = OwnerStatements("b" * 52, LONE.peer_id).sign(LONE, OwnerStatement("revise", LONE.peer_id, settings="{}"))
    banning = LOG.sign(LONE, OwnerStatement("ban", ANNA.peer_id)).records[0].encode()
    for revision in (strangers.revision, elsewhere.revision, banning, FORGED, b"junk"):
        with pytest.raises(ProtocolViolation, match="names a revision that is none"):
            check_certificate(grown(revision)[0], verify_signed, charter=CHARTER)
    check_certificate(grown(FIRST.revision)[0], verify_signed, charter=CHARTER)


@pytest.mark.parametrize("settings", ['{"inner.lr":99.0}', '{"outer.lr":0.0}', '{"inner.future":1}'])
def test_settings_that_make_no_valid_run_are_in_no_certificate_whoever_confirms_it(settings: str) -> None:
    """Members, keepers and watchers take over the settings of a valid certificate without a check of their own."""
    revision = LOG.sign(LONE, OwnerStatement("revise", LONE.peer_id, settings=settings)).revision
    with pytest.raises(ProtocolViolation, match="names a revision that is none"):
        check_certificate(grown(revision)[0], verify_signed, charter=CHARTER)


def test_who_does_not_know_the_manifest_checks_the_signature() -> None:
    """A directory server takes heads, and `flockstep export` checkpoints, of any run."""
    (certificate,) = grown(FIRST.revision)
    assert validate_run_value(head_key(RUN), pack_certificate(certificate)) == 1
    (forged,) = grown(FORGED)
    with pytest.raises(ProtocolViolation, match="names a revision that is none"):
        validate_run_value(head_key(RUN), pack_certificate(forged))
