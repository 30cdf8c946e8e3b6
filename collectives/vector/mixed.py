"""A codec of several, of which each sender of a round uses the one that its line allows (`lines.CodecChoice`)."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ...peer.base.errors import MalformedMessage
from .arrays import Floats
from .codec import Codec, Encoded, codec_named

_Bytes: TypeAlias = npt.NDArray[np.uint8]


def codecs_named(names: Sequence[str]) -> Codec:
    """The codec of contributions of a run whose senders choose among these, the usual one first. Raises `UsageError`."""
    codecs = [codec_named(name, contributed=True) for name in names]
    return codecs[0] if len(codecs) == 1 else MixedCodec(codecs)


class MixedCodec(Codec):
    """Several codecs, of which each sender uses one: the length of a part says which, for no two have cells of one size.

    It decodes and checks what any of them has written, and encodes by the first.
    """

    def __init__(self, codecs: Sequence[Codec]) -> None:
        self._codecs = tuple(codecs)
        self.name = " ".join(codec.name for codec in codecs)
        self.most_rounding = max(codec.most_rounding for codec in codecs)
        self.cell_bytes = max(codec.cell_bytes for codec in codecs)
        self.memory_dtype = np.float32 if any(codec.memory_dtype is np.float32 for codec in codecs) else np.uint16

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """See `Codec`."""
        return self._codecs

    def _bytes(self, data: Encoded, num_cells: int) -> _Bytes:
        return self._of(data, num_cells)._bytes(data, num_cells)

    def _of(self, data: Encoded | _Bytes, num_cells: int) -> Codec:
        found = next((codec for codec in self._codecs if codec.num_bytes(num_cells) == len(data)), None)
        if found is None:
            raise MalformedMessage(f"{len(data)} bytes for {num_cells} cells of {self.name}")
        return found

    def encode_chunks(self, chunks: Iterable[Floats], num_cells: int) -> memoryview:
        """As `encode_chunks` of the first codec."""
        return self._codecs[0].encode_chunks(chunks, num_cells)

    def _encode(self, x: Floats, encoded: _Bytes, num_cells: int, first: int) -> None:
        self._of(encoded, num_cells)._encode(x, encoded, num_cells, first)

    def _decode(self, encoded: _Bytes, num_cells: int, first: int, out: Floats, gain: np.float32) -> None:
        self._of(encoded, num_cells)._decode(encoded, num_cells, first, out, gain)

    def _check(self, encoded: _Bytes, num_cells: int, first: int, last: int) -> None:
        self._of(encoded, num_cells)._check(encoded, num_cells, first, last)

    def _rounding(self, encoded: _Bytes, num_cells: int, first: int, last: int) -> float:
        return self._of(encoded, num_cells)._rounding(encoded, num_cells, first, last)
