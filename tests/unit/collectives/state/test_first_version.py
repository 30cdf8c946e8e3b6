"""The certificate of version 0.1: the position in it is read, and nothing else is believed."""

from dataclasses import replace
from pathlib import Path

import pytest
from flockstep.collectives.chain.chain import ChainPosition
from flockstep.collectives.state.first_version import (
    FirstCertificate,
    FirstResult,
    FirstSigned,
    is_first,
    position_in,
)
from flockstep.peer.errors import RemoteError
from flockstep.peer.wire.schema import decode, encode
from support.certificates import grow
from support.first_version import ROOT, ROUND, TOKENS, certificate_in, manifest_in, unpack_home


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_home(tmp_path_factory.mktemp("home"))


def test_the_position_in_a_certificate_of_version_0_1_is_read(run: Path) -> None:
    assert position_in(certificate_in(run), manifest_in(run).run_id) == ChainPosition(ROUND, ROOT, TOKENS, None)


def test_a_certificate_of_this_version_is_none_of_version_0_1() -> None:
    certificate = encode(grow(None, 1)[0])
    assert not is_first(certificate)
    assert position_in(certificate, "any run") is None


def test_one_of_another_run_is_refused(run: Path) -> None:
    with pytest.raises(RemoteError, match="another run"):
        position_in(certificate_in(run), "a" * 52)


def test_one_that_contradicts_itself_is_refused(run: Path) -> None:
    first = decode(FirstCertificate, certificate_in(run), max_bytes=10_000)
    signed = decode(FirstSigned, first.results[0], max_bytes=10_000)
    result = decode(FirstResult, signed.payload, max_bytes=10_000)
    other = encode(replace(signed, payload=encode(replace(result, next_root=bytes(32)))))
    later = replace(result, slot=replace(result.slot, round=6))
    for results, flaw in (
        ((first.results[0], other), "results differ"),
        ((encode(replace(signed, code=22)),), "results differ"),
        ((encode(replace(signed, payload=encode(later))),), "another round"),
    ):
        with pytest.raises(RemoteError, match=flaw):
            position_in(encode(replace(first, results=results)), manifest_in(run).run_id)


def test_no_damaged_byte_raises_anything_else(run: Path) -> None:
    whole = certificate_in(run)
    for place in range(len(whole)):
        for data in (whole[:place], whole[:place] + bytes((whole[place] ^ 0x81,)) + whole[place + 1 :]):
            try:
                position_in(data, manifest_in(run).run_id)
            except RemoteError:
                continue
