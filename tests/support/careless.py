"""A codec as an attacker uses it."""

from collections.abc import Iterable
from copy import copy

from flockstep.collectives.vector.arrays import Floats
from flockstep.collectives.vector.codec import Codec
from flockstep.peer.base.errors import LocalError


def careless(codec: Codec) -> Codec:
    """Return a codec that encodes even what is not finite, as bytes that no honest codec writes."""
    encode, careless = codec.encode_chunks, copy(codec)

    def write(chunks: Iterable[Floats], num_cells: int) -> memoryview:
        try:
            return encode(chunks, num_cells)
        except LocalError:
            return memoryview(b"\xff" * codec.num_bytes(num_cells))

    careless.encode_chunks = write  # type: ignore[method-assign]
    return careless
