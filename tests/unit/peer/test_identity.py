"""Keys, peer ids and signatures."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import base58
import pytest
from flockstep.peer.base.errors import LocalError
from flockstep.peer.base.home_lock import home_lock
from flockstep.peer.identity import Identity, is_peer_id, peer_of, verify
from flockstep.peer.log.telemetry import Telemetry

SEED = bytes(range(32))


def test_a_seed_gives_the_peer_id_that_libp2p_gives_its_key() -> None:
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.peer.id import ID

    identity = Identity.from_seed(SEED)
    assert identity.peer_id == str(ID.from_pubkey(create_new_key_pair(SEED).public_key))
    assert identity.private_bytes() == SEED


def test_a_binary_peer_id_is_that_of_an_ed25519_key_or_none() -> None:
    peer = Identity.from_seed(SEED).peer_id
    binary = base58.b58decode(peer)
    assert peer_of(binary) == peer
    for other in (b"", binary[:-1], binary + b"x", b"\x12 " + SEED, b"\x01" + binary[1:], bytes(64_000)):
        assert peer_of(other) == ""


def test_a_seed_of_another_length_is_refused() -> None:
    with pytest.raises(LocalError, match="32 bytes, not 31"):
        Identity.from_seed(SEED[:31])


def test_a_signature_holds_for_its_bytes_and_its_signer_only() -> None:
    mine, other = Identity.from_seed(SEED), Identity.generate()
    signature = mine.sign(b"payload")
    assert len(signature) == 64
    assert verify(mine.peer_id, b"payload", signature)
    assert not verify(mine.peer_id, b"payloaD", signature)
    assert not verify(other.peer_id, b"payload", signature)
    assert not verify(mine.peer_id, b"payload", signature[:-1])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12D3KooW",
        "0" * 52,  # 0 is not in base58's alphabet
        "z" * 52,
        "1" * 52,
        "é" * 52,
        base58.b58encode(bytes([0, 36, 8, 2, 18, 32]) + SEED).decode(),  # a secp256k1 key by its type
    ],
)
def test_a_malformed_id_is_no_peer_id_and_verifies_nothing(text: str) -> None:
    assert not is_peer_id(text)
    assert not verify(text, b"", bytes(64))


def test_the_key_file_is_made_once_for_my_eyes_only(tmp_path: Path) -> None:
    path = tmp_path / "home" / "identity.key"
    first = Identity.load_or_create(path)
    assert is_peer_id(first.peer_id)
    assert Identity.load_or_create(path).peer_id == first.peer_id
    assert [file.name for file in path.parent.iterdir()] == ["identity.key"]
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_racing_processes_get_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        ids = set(pool.map(lambda _: Identity.load_or_create(tmp_path / "identity.key").peer_id, range(64)))
    assert len(ids) == 1


PUBLIC_KEY = b"""-----BEGIN PUBLIC KEY-----
MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=
-----END PUBLIC KEY-----
"""


@pytest.mark.parametrize("content", [b"", b"garbage", PUBLIC_KEY], ids=["empty", "garbage", "a public key"])
def test_a_garbled_key_file_is_named_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(content)
    with pytest.raises(LocalError, match=r"cannot use the key file .*identity\.key") as caught:
        Identity.load_or_create(path)
    assert caught.value.remedy
    assert path.read_bytes() == content


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    path = tmp_path / "identity.key"
    path.write_bytes(
        X25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    with pytest.raises(LocalError, match="not an ed25519 key"):
        Identity.load_or_create(path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(LocalError, match=r"cannot write .*identity\.key") as caught:
        Identity.load_or_create(tmp_path / "file" / "identity.key")
    assert "--home" in caught.value.remedy


def test_a_folder_in_the_place_of_the_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot read the key file"):
        Identity.load_or_create(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="modes of files are of POSIX")
def test_a_home_folder_is_its_users_alone_also_one_that_others_could_read(tmp_path: Path) -> None:
    def mode(folder: Path) -> int:
        return stat.S_IMODE(folder.stat().st_mode)

    homes = [tmp_path / name for name in ("identity", "log", "lock")]
    Identity.load_or_create(homes[0] / "identity.key")
    with closing(Telemetry(homes[1] / "events.jsonl")), home_lock(homes[2], pid=1):
        assert [mode(home) for home in homes] == [0o700] * 3
    homes[0].chmod(0o755)
    Identity.load_or_create(homes[0] / "identity.key")
    assert mode(homes[0]) == 0o700
    homes[1].chmod(0o755)  # It holds no key: somebody's folder.
    with home_lock(homes[1], pid=1):
        assert mode(homes[1]) == 0o755
    homes[0].chmod(0o1777)  # As /tmp is.
    Identity.load_or_create(homes[0] / "identity.key")
    assert mode(homes[0]) == 0o1777
