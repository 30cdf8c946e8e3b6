"""What moves the head that a bootstrap follows, and what does not."""

from dataclasses import replace

import pytest
from flockstep.collectives.chain.certificate import value_of
from flockstep.collectives.light.followed import (
    FollowedRun,
    before_first_round,
    charter_followed,
    decode_followed,
    encode_followed,
    followed_on,
    started_at,
)
from flockstep.collectives.spec import charter_of
from flockstep.dht.run.manifest import SignedManifest
from flockstep.peer import wire
from flockstep.peer.base.errors import RemoteError
from flockstep.peer.wire.signed import verify_signed
from hypothesis import given
from hypothesis import strategies as st
from support.certificates import decided
from support.keepers import key
from support.light import KEEPERS, SIGNED, chain_of, mark_of

CHARTER = charter_of(SIGNED)
RUN = SIGNED.run_id
CHAIN = chain_of(2)
STRANGERS = [key(number) for number in range(10, 14)]


def follow(followed: FollowedRun, page: list[wire.Certificate]) -> tuple[FollowedRun, RemoteError | None]:
    return followed_on(followed, page, "net", verify_signed, CHARTER)


def followed_to(chain: list[wire.Certificate]) -> FollowedRun:
    followed, error = follow(before_first_round(RUN, ""), chain)
    assert error is None
    return followed


def test_it_follows_from_the_first_round_what_a_quorum_of_the_founders_decides() -> None:
    chain = chain_of(3, signers=KEEPERS[1:])
    followed = followed_to(chain)
    assert followed.chain.marks == (*before_first_round(RUN, "").chain.marks, *map(mark_of, chain))
    assert followed.newest() == chain[-1]
    assert followed.network == "net"


def test_fewer_than_a_quorum_move_nothing() -> None:
    first = chain_of(1)
    followed = followed_to(first)
    (good,) = chain_of(1, first[0])
    lone = decided(value_of(good), good.slot, KEEPERS[:2])
    found, error = follow(followed, [lone])
    assert found == followed
    assert "2 of 3 votes" in str(error)


def test_strangers_move_nothing_also_before_the_first_round() -> None:
    found, error = follow(before_first_round(RUN, ""), chain_of(1, keepers=STRANGERS))
    assert found.head.round == 0
    assert "no vote" in str(error)


def test_it_never_parts_from_its_head_not_even_for_a_quorum() -> None:
    first = chain_of(1)
    followed = followed_to([*first, *chain_of(1, first[0])])
    found, error = follow(followed, chain_of(3, first[0], mark=b"fork"))
    assert found == followed
    assert "does not continue the chain" in str(error)
    found, error = follow(followed, chain_of(1, chain_of(1, first[0], mark=b"fork")[0]))
    assert found == followed
    assert error is not None


def test_of_a_page_it_takes_what_is_valid_and_says_why_not_the_rest() -> None:
    chain = chain_of(4)
    broken = replace(chain[2], signatures=(bytes(64), *chain[2].signatures[1:]))
    found, error = follow(before_first_round(RUN, ""), [*chain[:2], broken, chain[3]])
    assert found.head == mark_of(chain[1])
    assert "signature" in str(error)


def test_it_starts_from_the_certificate_that_its_operator_names_and_no_other() -> None:
    chain = chain_of(3)
    followed = started_at(chain[1], mark_of(chain[1]), "net", verify_signed, CHARTER)
    assert followed.chain.marks == (mark_of(chain[1]),)
    assert follow(followed, chain[2:])[0].head == mark_of(chain[2])
    with pytest.raises(RemoteError, match="not the one"):
        started_at(chain_of(2, mark=b"fork")[1], mark_of(chain[1]), "", verify_signed, CHARTER)


def with_rules(**rules: object) -> SignedManifest:
    manifest = replace(SIGNED.manifest, admission=replace(SIGNED.manifest.admission, **rules))  # type: ignore[arg-type]
    return SignedManifest.sign(manifest, KEEPERS[0])


def test_it_follows_no_run_that_hides_its_certificates() -> None:
    assert charter_followed(SIGNED) == CHARTER
    assert charter_followed(with_rules(kind="invite")) is None


@given(st.data())
def test_a_damaged_file_is_refused(data: st.DataObject) -> None:
    good = encode_followed(followed_to(CHAIN))
    assert decode_followed(good, RUN).newest() == CHAIN[-1]
    cut = data.draw(st.integers(0, len(good) - 1))
    with pytest.raises(RemoteError):
        decode_followed(good[:cut], RUN)
    with pytest.raises(RemoteError):
        decode_followed(good, "b" * 52)
    head = good.rindex(mark_of(CHAIN[-1]).hash)
    with pytest.raises(RemoteError):
        decode_followed(good[:head] + bytes(32), RUN)

