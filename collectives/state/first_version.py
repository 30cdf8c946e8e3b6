"""The certificate of version 0.1, read only for the position that it states. Pure.

Version 0.1 had no voters: a quorum of a round's members acknowledged its result, and these signed acknowledgements were the
certificate. No certificate of this version can follow such a one, so here it proves nothing to anybody, and no signature is
verified. It says which root the state on this peer's own disk must have, and after which round. All that it is read from
is the user's own disk; it never comes from the network.
"""

from dataclasses import dataclass
from typing import Annotated

from ...peer import wire
from ...peer.digest import DIGEST_BYTES
from ...peer.errors import MalformedMessage, ProtocolViolation
from ...peer.wire.schema import Between, Size, decode
from ..chain.chain import ChainPosition
from ..chain.packed import MAX_PLAIN_BYTES

FIRST = "0.1"
RESULT_CODE = 35
"""The code of `FirstResult`."""
MAX_FIRST_SIGNED_BYTES = 200_000
"""The limit of a signed message in version 0.1."""

_Hash = Annotated[bytes, Size(DIGEST_BYTES, DIGEST_BYTES)]
_Bytes = Annotated[bytes, Size(MAX_FIRST_SIGNED_BYTES)]


@dataclass(frozen=True, slots=True)
class FirstSlot:
    """One attempt of a round, as version 0.1 named it."""

    run: wire.RunId
    round: Annotated[int, Between(1, wire.MAX_COUNT)]
    attempt: Annotated[int, Between(0, 1 << 20)]


@dataclass(frozen=True, slots=True)
class FirstCertificate:
    """A round's certificate in version 0.1: roster, cut, and a quorum of equal results, all signed."""

    slot: FirstSlot
    roster: _Bytes
    cut: _Bytes
    results: Annotated[tuple[_Bytes, ...], Size(wire.MAX_ROSTER, 1)]


@dataclass(frozen=True, slots=True)
class FirstSigned:
    """A signed message of version 0.1."""

    sender: wire.Peer
    code: Annotated[int, Between(0, 255)]
    payload: _Bytes
    signature: Annotated[bytes, Size(64, 64)]


@dataclass(frozen=True, slots=True)
class FirstResult:
    """What a member of version 0.1 acknowledged: the outputs, and the state that they lead to."""

    slot: FirstSlot
    cut: _Hash
    outputs: Annotated[tuple[_Hash, ...], Size(wire.MAX_ROSTER, 1)]
    next_root: _Hash
    previous: _Hash
    tokens: Annotated[int, Between(0, wire.MAX_COUNT)]
    flagged: Annotated[tuple[Annotated[int, Between(0, wire.MAX_ROSTER - 1)], ...], Size(wire.MAX_ROSTER)]


def is_first(certificate: bytes) -> bool:
    """Return True for an encoded certificate of version 0.1."""
    return _decoded(certificate) is not None


def position_in(certificate: bytes, run: str) -> ChainPosition | None:
    """Return the position that an encoded certificate of version 0.1 states; None for any other bytes.

    It has no certificate that this version could prove it with. Raises `RemoteError` if it contradicts itself, or is of
    another run.
    """
    first = _decoded(certificate)
    if first is None:
        return None
    signed = [decode(FirstSigned, data, max_bytes=MAX_FIRST_SIGNED_BYTES) for data in first.results]
    if len({message.payload for message in signed}) != 1 or any(message.code != RESULT_CODE for message in signed):
        raise ProtocolViolation(f"a certificate of version {FIRST} whose results differ")
    result = decode(FirstResult, signed[0].payload, max_bytes=MAX_FIRST_SIGNED_BYTES)
    if result.slot != first.slot:
        raise ProtocolViolation(f"a certificate of version {FIRST} with the result of another round")
    if first.slot.run != run:
        raise ProtocolViolation("a certificate of another run")
    return ChainPosition(result.slot.round, result.next_root, result.tokens, None)


def _decoded(certificate: bytes) -> FirstCertificate | None:
    try:
        return decode(FirstCertificate, certificate, max_bytes=MAX_PLAIN_BYTES)
    except MalformedMessage:
        return None
