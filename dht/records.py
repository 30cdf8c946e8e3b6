"""Records: small signed statements that any peer may carry and no other can forge. Pure.

Theory of operation. A record means "peer P states BODY about RUN, as its SEQUENCE-th statement of this KIND, valid for
LIFETIME seconds". The signature covers the canonical encoding of the whole record with the signature itself blanked. It
has a context of its own (domain separation), so that a signature made for anything else is never a record's. Of two
records of one peer and kind the higher sequence wins. The lifetime counts from receipt and not from a date, because the
clocks of volunteers' computers are wrong by minutes. A record that fails `check` is charged to its carrier.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from ..peer.base.errors import BadSignature
from ..peer.base.transport import PeerId
from ..peer.identity import SIGNATURE_BYTES, Identity, verify
from ..peer.wire.schema import Between, Size, decode, encode

RECORD_CONTEXT = b"flockstep 1 record\0"
MAX_BODY_BYTES = 64_000
"""Members and directory servers keep thousands of records; one must stay small beside the DHT's limit of 100 kB."""
MAX_RECORD_BYTES = MAX_BODY_BYTES + 1_000
MAX_SEQUENCE = 2**53 - 1
"""The limit of a sequence: a count of milliseconds fits for 285 000 years, and every language's JSON holds it exactly."""
MAX_LIFETIME = 30 * 86_400.0
"""Seconds: no peer must keep a statement for more than a month."""


@dataclass(frozen=True, slots=True)
class Record:
    """One signed statement. Make it with `sign`, or take it from a peer with `decode` and then `check` it."""

    run: Annotated[str, Size(64)]
    kind: Annotated[str, Size(16, least=1)]
    peer: Annotated[PeerId, Size(64, least=1)]
    sequence: Annotated[int, Between(0, MAX_SEQUENCE)]
    lifetime: Annotated[float, Between(0.0, MAX_LIFETIME)]
    body: Annotated[bytes, Size(MAX_BODY_BYTES)]
    signature: Annotated[bytes, Size(SIGNATURE_BYTES, least=SIGNATURE_BYTES)]

    @classmethod
    def sign(cls, identity: Identity, *, run: str, kind: str, sequence: int, lifetime: float, body: bytes) -> "Record":
        """Sign a statement of `identity`. Raises `LocalError` if a field breaks its limit."""
        blank = cls(run, kind, identity.peer_id, sequence, lifetime, body, bytes(SIGNATURE_BYTES))
        return replace(blank, signature=identity.sign(RECORD_CONTEXT + encode(blank)))

    def encode(self) -> bytes:
        """Return the canonical encoding of this record, at most `MAX_RECORD_BYTES` long."""
        return encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "Record":
        """Decode a record, its signature not yet checked. Raises `MalformedMessage`."""
        return decode(cls, data, max_bytes=MAX_RECORD_BYTES)

    def check(self) -> None:
        """Raise `BadSignature` unless `peer` made this statement."""
        blank = replace(self, signature=bytes(SIGNATURE_BYTES))
        if not verify(self.peer, RECORD_CONTEXT + encode(blank), self.signature):
            raise BadSignature(f"the {self.kind!r} record of {self.peer!r} is not signed by that peer")
