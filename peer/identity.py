"""Who I am: an ed25519 key, its libp2p peer id, signatures and their check. The one user of `cryptography`.

A peer id is libp2p's: base58 of the identity multihash (0x00, length) of the public key as protobuf
`{1: KeyType.Ed25519, 2: 32 bytes}`. So the public key can be read back out of the id, and a signature can be checked
with nothing but the sender's name at hand (libp2p specs, peer-ids.md).
"""

import errno
import functools
import os
import secrets
from pathlib import Path
from typing import Self

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from .errors import LocalError
from .transport import PeerId
from .troubles import DISK_SHORT

SEED_BYTES = 32
SIGNATURE_BYTES = 64

_ID_PREFIX = bytes([0x00, 36, 0x08, 0x01, 0x12, 32])
"""Identity multihash of 36 bytes; field 1 (key type) is 1 = Ed25519; field 2 (the key) has 32 bytes."""

_ID_LENGTH = 52
"""Characters of every ed25519 peer id: 38 bytes whose first is a zero, in base58."""


class Identity:
    """One peer's key pair."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.peer_id: PeerId = base58.b58encode(_ID_PREFIX + private.public_key().public_bytes_raw()).decode()

    @classmethod
    def generate(cls) -> Self:
        """A new random identity, kept nowhere."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Self:
        """The identity of a 32-byte seed: the same seed gives the same peer id."""
        if len(seed) != SEED_BYTES:
            raise LocalError(f"an identity's seed has {SEED_BYTES} bytes, not {len(seed)}")
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load_or_create(cls, path: Path) -> Self:
        """The identity kept in a PEM file, made once (mode 0600) if it is missing; racing processes get the same one.

        Raises `LocalError` where the file cannot be read, is garbled, or cannot be written.
        """
        try:
            if not path.exists():
                _write_once(path, cls.generate()._to_pem())
            pem = path.read_bytes()
        except OSError as error:
            full = error.errno == errno.ENOSPC
            remedy = "make its folder readable and writable for you, or choose another --home"
            raise LocalError(
                f"cannot read or create the key file {path}: {error.strerror}",
                remedy=DISK_SHORT.remedy if full else remedy,
            ) from error
        try:
            private = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError) as error:  # TypeError: encrypted with a password, which nobody could type here.
            raise _unusable(path, "it is not an unencrypted PEM private key") from error
        if not isinstance(private, Ed25519PrivateKey):
            raise _unusable(path, "its key is not an ed25519 key")
        return cls(private)

    def sign(self, payload: bytes) -> bytes:
        """The signature of `payload`, 64 bytes; deterministic (RFC 8032)."""
        return self._private.sign(payload)

    def private_bytes(self) -> bytes:
        """The 32-byte seed, for the key pair of the libp2p host."""
        return self._private.private_bytes_raw()

    def _to_pem(self) -> bytes:
        return self._private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def verify(peer_id: PeerId, payload: bytes, signature: bytes) -> bool:
    """Whether `signature` is that of `peer_id` over `payload`; False for a malformed id, too."""
    key = _public_key(peer_id)
    if key is None:
        return False
    try:
        key.verify(signature, payload)
    except InvalidSignature:
        return False
    return True


def is_peer_id(text: str) -> bool:
    """Whether `text` is the peer id of an ed25519 key."""
    return _public_key(text) is not None


@functools.lru_cache(maxsize=1024)  # Far more than the members of a run whom one peer hears; about 1 kB each.
def _public_key(peer_id: str) -> Ed25519PublicKey | None:
    if len(peer_id) != _ID_LENGTH:  # First: base58 takes quadratic time, and the text may come from anyone.
        return None
    try:
        raw = base58.b58decode(peer_id)
    except ValueError:
        return None
    if not raw.startswith(_ID_PREFIX) or len(raw) != len(_ID_PREFIX) + 32:
        return None
    return Ed25519PublicKey.from_public_bytes(raw[len(_ID_PREFIX) :])


def _write_once(path: Path, content: bytes) -> None:
    """Create `path` with all of `content` or not at all; an existing file stays as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)  # Unlike a rename it fails where another process was first, whose key then counts.
        except FileExistsError:
            return
        except OSError:  # exFAT and some network folders have no hard links.
            os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _unusable(path: Path, why: str) -> LocalError:
    return LocalError(
        f"cannot use the key file {path}: {why}",
        remedy="restore it from a copy, or move it away to become a new peer under a new id",
    )
