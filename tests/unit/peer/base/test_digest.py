"""Digests."""

from flockstep.peer.base.digest import RunningDigest, digest


def test_a_hash_in_pieces_is_the_hash_of_the_whole() -> None:
    running = RunningDigest()
    for piece in (b"ab", b"", memoryview(b"cde")):
        running.add(piece)
    assert running.value() == digest(b"abcde")
