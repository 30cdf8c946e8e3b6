"""Signing, verification and opening of round messages: the only place that signs one."""

from collections.abc import Callable
from functools import lru_cache

from .. import identity
from ..base.errors import BadSignature
from .direct import Claim
from .messages import RoundMessage, Signed, code_of, opened, signed_bytes
from .schema import encode

MAX_CACHED_BYTES = 1 << 15
"""Longer messages (Voids) are verified each time: a cache of them would be what a liar makes of it, 400 MB."""

Verify = Callable[[Signed], bool]


def verify_signed(signed: Signed) -> bool:
    """Return True if the signature of a message is valid."""
    return (_verify_cached if len(signed.payload) <= MAX_CACHED_BYTES else _verify)(signed)


def _verify(signed: Signed) -> bool:
    return identity.verify(signed.sender, signed_bytes(signed.code, signed.payload), signed.signature)


def sign(me: identity.Identity, message: RoundMessage | Claim) -> Signed:
    """Sign a message of a round, or a claim."""
    return sign_encoded(me, code_of(message), encode(message))


def sign_encoded(me: identity.Identity, code: int, payload: bytes) -> Signed:
    """Sign an encoded message of a round."""
    return Signed(me.peer_id, code, payload, me.sign(signed_bytes(code, payload)))


def open_signed(signed: Signed) -> RoundMessage:
    """Verify and decode a signed message. Raises `BadSignature` or `MalformedMessage`."""
    return (_open_cached if len(signed.payload) <= MAX_CACHED_BYTES else _open)(signed)


def _open(signed: Signed) -> RoundMessage:
    message = opened(signed)
    if not verify_signed(signed):
        raise BadSignature(f"{type(message).__name__} with a wrong signature")
    return message


# Received messages return inside certificates and Voids, and a verification takes 0.1 ms; in a simulation all receivers
# share one process.
_verify_cached = lru_cache(maxsize=2048)(_verify)
_open_cached = lru_cache(maxsize=2048)(_open)
