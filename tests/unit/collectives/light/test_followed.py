"""What moves the head that a bootstrap follows, and what does not."""

from dataclasses import replace

import pytest
from flockstep.collectives.light.followed import (
    FollowedRun,
    before_first_round,
    charter_followed,
    decode_followed,
    encode_followed,
    followed_on,
    named_by_operator,
)
from flockstep.collectives.spec import charter_of
from flockstep.dht.run.manifest import SignedManifest
from flockstep.peer import wire
from flockstep.peer.base.errors import RemoteError
from hypothesis import given
from hypothesis import strategies as st
from support.keepers import key
from support.light import KEEPERS, SIGNED, chain_of, mark_of

CHARTER = charter_of(SIGNED)
RUN = SIGNED.run_id
CHAIN = chain_of(2)
STRANGERS = [key(number) for number in range(10, 14)]


def followed_to(chain: list[wire.Certificate]) -> FollowedRun:
    return followed_on(before_first_round(RUN, ""), chain, "net")


def test_it_names_the_rounds_that_it_has_followed() -> None:
    chain = chain_of(3, signers=KEEPERS[1:])
    followed = followed_to(chain)
    assert followed.chain.marks == (*before_first_round(RUN, "").chain.marks, *map(mark_of, chain))
    assert (followed.newest(), followed.held().head.hash) == (chain[-1], followed.head.hash)
    assert followed.network == "net"


def test_it_starts_from_the_certificate_that_its_operator_names() -> None:
    chain = chain_of(3)
    started = named_by_operator(RUN, mark_of(chain[1]), "net")
    assert (started.held().head.hash, started.newest()) == (mark_of(chain[1]).hash, None)
    assert followed_on(started, chain[2:], "").chain.marks == tuple(map(mark_of, chain[1:]))


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

