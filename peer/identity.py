"""A peer's identity: an ed25519 key, its libp2p peer id, signing and verification.

A peer id is libp2p's: base58 of the identity multihash (0x00, length) of the public key as protobuf
`{1: KeyType.Ed25519, 2: 32 bytes}`. So the public key can be decoded from the id, and a signature can be verified by the
sender's id alone (libp2p specs, peer-ids.md). The one user of `cryptography`.
"""

import functools
from pathlib import Path
from typing import Self

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from .base.disk import disk_errors, private_folder, write_whole
from .base.errors import LocalError
from .base.transport import PeerId

KEY_SEED_BYTES = 32
SIGNATURE_BYTES = 64

_ID_PREFIX = bytes([0x00, 36, 0x08, 0x01, 0x12, 32])
"""Identity multihash of 36 bytes; field 1 (key type) is 1 = Ed25519; field 2 (the key) has 32 bytes."""

_ID_LENGTH = 52
"""The length of every ed25519 peer id: 38 bytes whose first is a zero, in base58."""


class Identity:
    """One peer's key pair."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.peer_id: PeerId = base58.b58encode(_ID_PREFIX + private.public_key().public_bytes_raw()).decode()

    @classmethod
    def generate(cls) -> Self:
        """Generate a random identity, stored nowhere."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Self:
        """Derive the identity of a 32-byte seed: the same seed gives the same peer id."""
        if len(seed) != KEY_SEED_BYTES:
            raise LocalError(f"an identity's seed has {KEY_SEED_BYTES} bytes, not {len(seed)}")
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load_or_create(cls, path: Path) -> Self:
        """Load the identity from a PEM file, or create it (mode 0600); racing processes get the same one.

        Raises `LocalError` if the file cannot be read, is damaged, or cannot be written.
        """
        with disk_errors(f"read the key file {path}"):
            if not path.exists():
                # Of racing processes the first one's key counts.
                write_whole(path, cls.generate()._to_pem(), private=True, replace=False)
            private_folder(path.parent, holds=path.name)
            pem = path.read_bytes()
        try:
            private = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError) as error:  # TypeError: it is encrypted with a password.
            raise _unusable(path, "it is not an unencrypted PEM private key") from error
        if not isinstance(private, Ed25519PrivateKey):
            raise _unusable(path, "its key is not an ed25519 key")
        return cls(private)

    def sign(self, payload: bytes) -> bytes:
        """Sign `payload`; the signature has 64 bytes and is deterministic (RFC 8032)."""
        return self._private.sign(payload)

    def private_bytes(self) -> bytes:
        """Return the 32-byte seed, for the key pair of the libp2p host."""
        return self._private.private_bytes_raw()

    def _to_pem(self) -> bytes:
        return self._private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def verify(peer_id: PeerId, payload: bytes, signature: bytes) -> bool:
    """Return True if `signature` is that of `peer_id` over `payload`; False also for a malformed id."""
    key = _public_key(peer_id)
    if key is None:
        return False
    try:
        key.verify(signature, payload)
    except InvalidSignature:
        return False
    return True


def peer_of(binary: bytes) -> PeerId:
    """Return the peer id with this binary form; empty if it is that of no ed25519 key.

    Checked first, as it may come from anybody: base58 of 64 kB takes 3 s.
    """
    is_one = len(binary) == len(_ID_PREFIX) + 32 and binary.startswith(_ID_PREFIX)
    return base58.b58encode(binary).decode() if is_one else ""


def is_peer_id(text: str) -> bool:
    """Return True if `text` is the peer id of an ed25519 key."""
    return _public_key(text) is not None


@functools.lru_cache(maxsize=1024)  # Far more than the members that one peer communicates with; about 1 kB each.
def _public_key(peer_id: str) -> Ed25519PublicKey | None:
    if len(peer_id) != _ID_LENGTH:  # Checked first: base58 takes quadratic time, and the text may come from anybody.
        return None
    try:
        raw = base58.b58decode(peer_id)
    except ValueError:
        return None
    if not raw.startswith(_ID_PREFIX) or len(raw) != len(_ID_PREFIX) + 32:
        return None
    return Ed25519PublicKey.from_public_bytes(raw[len(_ID_PREFIX) :])


def identity_path(home: Path) -> Path:
    """Return the key file of a home folder: my identity, which signs my runs."""
    return home / "identity.key"


def _unusable(path: Path, why: str) -> LocalError:
    return LocalError(
        f"cannot use the key file {path}: {why}",
        remedy="restore it from a copy, or move it away to become a new peer under a new id",
    )
