"""Signing, verification and opening of round messages: the only place that signs one."""

from collections.abc import Callable
from functools import lru_cache

from .. import identity
from ..errors import BadSignature
from .direct import Claim
from .messages import RoundMessage, Signed, code_of, opened, signed_bytes
from .schema import encode

Verify = Callable[[Signed], bool]


@lru_cache(maxsize=2048)  # Received messages return inside certificates and Voids; a verification takes 0.1 ms.
def verify_signed(signed: Signed) -> bool:
    """Return True if the signature of a message is valid."""
    return identity.verify(signed.sender, signed_bytes(signed.code, signed.payload), signed.signature)


def sign(me: identity.Identity, message: RoundMessage | Claim) -> Signed:
    """Sign a message of a round, or a claim."""
    code, payload = code_of(message), encode(message)
    return Signed(me.peer_id, code, payload, me.sign(signed_bytes(code, payload)))


@lru_cache(maxsize=2048)  # As above; in a simulation all receivers share one process.
def open_signed(signed: Signed) -> RoundMessage:
    """Verify and decode a signed message. Raises `BadSignature` or `MalformedMessage`."""
    message = opened(signed)
    if not verify_signed(signed):
        raise BadSignature(f"{type(message).__name__} with a wrong signature")
    return message
