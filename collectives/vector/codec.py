"""Flat float32 vectors to few bytes and back, with error feedback: `int8`, `int4`, `lloyd2`, `bf16` and `fp32`. Pure.

Theory of operation. A flat vector consists of cells of `CELL` elements; each tensor is padded to whole cells, so a
block (256 elements of int8, 64 of int4) never crosses tensors and every cell costs the same bytes. An encoded part is
the bf16 scales of all its blocks, little-endian, then the codes (int4: two a byte, the earlier in the low half):

    scale = bf16(absmax / Q)    code = rint(x / scale)    Dec = scale * code        Q = 127 or 7

bf16 keeps 8 significant bits, so absmax / scale lies within Q·(1 ± 2⁻⁸) (126.508 to 127.496, 6.97 to 7.03). Three facts
follow, and the tests hold them: no code needs clamping, the largest element of a block always gets ±Q, and hence
Enc(Dec(Enc(x))) = Enc(x) byte for byte. Dec is a product of 8 and 7 significant bits, exact in float32.

`lloyd2` has two bits, a sign and a size: an element is ±3 or ±10 of its block's scale, the larger one above 0.9816 of the
block's rms. That is Lloyd's and Max's optimum for normal numbers (±0.4528 and ±1.5104 of the rms, whose ratio is 3.336;
Max 1960, table I), in integers, so that Dec stays exact. It leaves 0.117 of the square, 2-bit absmax 0.148. The scale is
the best one for these codes, Σ|x|·level / Σ level², which halves what heavy tails add, and makes every part that `check`
accepts a fixed point: a decoded block has at least one large element, hence 0.9816 of its rms lies between 3 and 10 scales
(3.002 to 9.816), so its codes come out again, and the best scale for them is its own. Sums of float32 may differ in
their last bits between machines, and an element that near to the threshold in its code: only Dec must be the same.

Scales outside 2⁻⁶⁴…2⁶⁴ (`lloyd2`, which squares: 2⁵⁶) are not used. A smaller block becomes zeros (error feedback keeps
it); a larger one, NaN or infinity is a `LocalError`. So neither Dec nor a weighted mean ever meets a subnormal or an
overflow; otherwise their bytes would depend on whether some library has switched the processor to flush-to-zero.
Contributions have scales up to 2³² (`bf16`, `fp32`: values up to 2⁴⁰), whatever their codec: then every codec can carry
their sum, with any weights that a rule gives, and no contribution makes an owner raise.

`check` accepts the image of `encode` and nothing else: a scale belongs to the largest code of its block, so nobody can
state a large one, which passes for rounding error, without the large element that the check of outputs then sees.

Every loop walks in chunks that stay in the cache: 4 to 5 times faster than whole-vector NumPy calls.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ...peer.base.digest import digest
from ...peer.base.errors import LocalError, MalformedMessage, UsageError
from .arrays import Floats

EMPTY = digest(b"")
"""The hash of an empty part."""

CELL = 256
"""Elements of a cell: the larger of the two block sizes."""

CHUNK_CELLS = 1024
"""Cells worked on at a time: 262k elements. Each array is 1 MiB and stays in the second- or third-level cache; with half of
it the fixed cost of some thirty calls of NumPy a chunk takes a tenth of the codec's time."""

_FOLDED = 1 << 13
"""Squares added at a time: 64 KiB of float64 stay in the first-level cache."""

_MIN_SCALE_BITS = (127 - 64) << 7
_MAX_SCALE_BITS = (127 + 64) << 7
"""2⁻⁶⁴ and 2⁶⁴ as bf16: pseudo-gradients are near 1e-4, and 64 binades either way leave room for weights and sums."""

_MAX_SQUARED_SCALE_BITS = (127 + 56) << 7
"""2⁵⁶ as bf16: 256 squares of ten times as much still have a sum in float32."""

_MAX_CONTRIBUTED_SCALE_BITS = (127 + 32) << 7
"""2³² as bf16: 2²⁴ times less than any codec can write, for the weights of a rule that lengthens, and for sums."""

_MAX_CONTRIBUTED_BITS = (127 + 40) << 7
"""2⁴⁰ as bf16: what codecs without scales may write in a contribution."""

MAX_CONTRIBUTED = 2.0**31
"""The largest element of a pseudo-gradient: with its error feedback every codec can write it in a contribution."""

_MAX_FINITE_BITS = 0x7F7F
"""The largest number of bf16."""
_MAGNITUDE_BITS = np.uint32(0x7FFFFFFF)
"""All bits of a float32 but its sign."""

_SMALL, _LARGE = 3, 10
"""The levels of `lloyd2`."""
_THRESHOLD = np.float32(0.9816)
"""Of a block's rms: the middle between the levels, 6.5 · 0.15104 = 0.9818, at the optimum for normal numbers."""
_TWO_BIT_ERROR = 1 / 4
"""A `lloyd2` block's squared error relative to its decoded square: 0.132 for normal numbers, 0.229 for Laplacian ones."""

Encoded: TypeAlias = bytes | bytearray | memoryview
_Bytes: TypeAlias = npt.NDArray[np.uint8]
_Halves: TypeAlias = npt.NDArray[np.uint16]
FlatVector: TypeAlias = Floats | _Halves
"""A flat vector that stays in memory from round to round: float32, or the bits of bf16."""


class Codec(ABC):
    """One way to write cells as bytes. Stateless, so that any thread may use it."""

    name: str
    cell_bytes: int
    most_rounding: float
    """`rounding` relative to the square of what was encoded is at most this, whatever was encoded."""
    memory_dtype: type[np.float32] | type[np.uint16] = np.uint16
    """How Δ and the residual of error feedback lie in memory: as bf16, whose rounding is far below that of few-bit codes.

    Of 200 int4 contributions the sum that was carried is off by 0.188 % in place of 0.185 %.
    """

    @property
    def codecs(self) -> tuple["Codec", ...]:
        """The codecs that a sender may choose from, the usual one first: this one, unless it is several."""
        return (self,)

    def of(self, name: str) -> "Codec | None":
        """The codec that a sender states, the usual one if it states none; None for one that it may not choose."""
        return next((codec for codec in self.codecs if name in (codec.name, "")), None)

    def num_bytes(self, num_cells: int) -> int:
        """The exact size of an encoded part."""
        return num_cells * self.cell_bytes

    def encode(self, x: Floats) -> memoryview:
        """The canonical bytes of `x` (float32, whole cells). Raises `LocalError` for NaN, infinity and overflow."""
        num_cells = _whole_cells(x)
        return self.encode_chunks((x[first * CELL : last * CELL] for first, last in _chunks(0, num_cells)), num_cells)

    def encode_chunks(self, chunks: Iterable[Floats], num_cells: int) -> memoryview:
        """As `encode` of these chunks (whole cells each, `num_cells` together) one after the other."""
        encoded = np.empty(self.num_bytes(num_cells), np.uint8)
        first = 0
        for chunk in chunks:
            self._encode(chunk, encoded, num_cells, first)
            first += chunk.size // CELL
        return encoded.data

    def decode(self, data: Encoded, out: Floats) -> None:
        """Write Dec(`data`) into `out` (float32, whole cells). Raises `MalformedMessage` for a wrong length."""
        num_cells = _whole_cells(out)
        self.decode_range(data, num_cells, 0, num_cells, out)

    def decode_range(
        self, data: Encoded, num_cells: int, first_cell: int, last_cell: int, out: Floats, gain: float = 1.0
    ) -> None:
        """Write `gain` · Dec of cells `first_cell` to `last_cell` (exclusive) of a part of `num_cells` into `out`."""
        encoded = self._bytes(data, num_cells)
        for first, last in _chunks(first_cell, last_cell):
            chunk = out[(first - first_cell) * CELL : (last - first_cell) * CELL]
            self._decode(encoded, num_cells, first, chunk, np.float32(gain))

    def check(self, data: Encoded, num_cells: int) -> None:
        """Raises `MalformedMessage` unless `data` is a part of `num_cells` that `encode` could have written."""
        encoded = self._bytes(data, num_cells)
        for first, last in _chunks(0, num_cells):
            self._check(encoded, num_cells, first, last)

    def rounding(self, data: Encoded, num_cells: int) -> float:
        """The squared error, summed over a part, that rounding may be expected to have left in its bytes."""
        encoded = self._bytes(data, num_cells)
        return sum(self._rounding(encoded, num_cells, first, last) for first, last in _chunks(0, num_cells))

    def _bytes(self, data: Encoded, num_cells: int) -> _Bytes:
        if len(data) != self.num_bytes(num_cells):
            raise MalformedMessage(f"{self.name}: {len(data)} bytes for {num_cells} cells of {self.cell_bytes}")
        return np.frombuffer(data, np.uint8)

    @abstractmethod
    def _encode(self, x: Floats, encoded: _Bytes, num_cells: int, first: int) -> None: ...

    @abstractmethod
    def _decode(self, encoded: _Bytes, num_cells: int, first: int, out: Floats, gain: np.float32) -> None: ...

    @abstractmethod
    def _check(self, encoded: _Bytes, num_cells: int, first: int, last: int) -> None: ...

    @abstractmethod
    def _rounding(self, encoded: _Bytes, num_cells: int, first: int, last: int) -> float: ...


class _Blocks(Codec):
    """Integer codes with one bf16 scale per block."""

    def __init__(self, bits: int, block: int, max_scale_bits: int = _MAX_SCALE_BITS) -> None:
        self.name = f"int{bits}"
        self.bits = bits
        self.block = block
        self.max_scale_bits = max_scale_bits
        self.limit = (1 << (bits - 1)) - 1
        # scale ≤ bf16(absmax / Q), and a block's square is at least absmax².
        self.most_rounding = block / 12 * ((1 + 2.0**-8) / self.limit) ** 2
        self._signs = np.uint8(0x80 if bits == 8 else 0x88)
        """The sign bits of a byte's codes."""
        self._rounder = np.float32(1.5 * 2**23 + (1 << (bits - 1)))
        """Leaves no bits for a fraction: a sum with it is rounded to nearest even, and ends with code + 2ᵇⁱᵗˢ⁻¹."""
        self.cell_bytes = CELL * bits // 8 + CELL // block * 2

    def _sections(self, encoded: _Bytes, num_cells: int, first: int, last: int) -> tuple[_Halves, _Bytes]:
        """The scales and the codes of some cells, as views."""
        per_cell = CELL // self.block
        scales = encoded[: num_cells * per_cell * 2].view("<u2")[first * per_cell : last * per_cell]
        codes = encoded[num_cells * per_cell * 2 :].reshape(num_cells, -1)[first:last].reshape(-1)
        return scales, codes

    def _encode(self, x: Floats, encoded: _Bytes, num_cells: int, first: int) -> None:
        scales, codes = self._sections(encoded, num_cells, first, first + x.size // CELL)
        magnitudes = x.view(np.uint32) & _MAGNITUDE_BITS
        # `reduceat` over the flat array is twice as fast as `max(axis=1)` over rows this short, and over the bits, which are
        # ordered as the magnitudes are, twice as fast as over floats, whose error flags NumPy clears for every block.
        absmax: Floats = np.maximum.reduceat(magnitudes, np.arange(0, x.size, self.block)).view(np.float32)
        scratch = magnitudes.view(np.float32)
        scale_bits = self._scale_bits(np.divide(absmax, np.float32(self.limit)))
        scales[:] = scale_bits
        divisor = _from_bf16(scale_bits)
        divisor[scale_bits == 0] = np.inf  # x / inf = 0: a zero scale has zero codes.
        np.divide(x.reshape(-1, self.block), divisor[:, None], out=scratch.reshape(-1, self.block))
        scratch += self._rounder
        if self.bits == 8:
            np.copyto(codes, scratch.view(np.uint32), casting="unsafe")
        else:
            pairs = scratch.view(np.uint32).astype(np.uint8).view("<u2")
            pairs |= pairs >> 4
            np.copyto(codes, pairs, casting="unsafe")
        codes ^= self._signs

    def _scale_bits(self, scales: Floats) -> _Halves:
        """The scales as they are written. Raises `LocalError` for one beyond the range."""
        scale_bits = _to_bf16(scales)
        if scale_bits.max() > self.max_scale_bits:
            greatest = _number(self.max_scale_bits)
            raise LocalError(f"{self.name}: the values to encode are not finite, or beyond {greatest:.0e}")
        scale_bits[scale_bits < _MIN_SCALE_BITS] = 0
        return scale_bits

    def _decode(self, encoded: _Bytes, num_cells: int, first: int, out: Floats, gain: np.float32) -> None:
        scale_bits, codes = self._sections(encoded, num_cells, first, first + out.size // CELL)
        np.copyto(out, self._integers(codes))
        rows = out.reshape(-1, self.block)
        np.multiply(rows, (_from_bf16(scale_bits) * gain)[:, None], out=rows)

    def _check(self, encoded: _Bytes, num_cells: int, first: int, last: int) -> None:
        scale_bits, codes = self._sections(encoded, num_cells, first, last)
        # Negative scales, infinities and NaN all have greater bits than the greatest scale.
        if scale_bits.max() > self.max_scale_bits or ((scale_bits < _MIN_SCALE_BITS) & (scale_bits != 0)).any():
            raise MalformedMessage(f"{self.name}: a scale is negative, not finite or out of range")
        self._check_codes(codes, scale_bits)

    def _check_codes(self, codes: _Bytes, scale_bits: _Halves) -> None:
        if self.bits == 8:
            sizes = np.abs(codes.view(np.int8)).view(np.uint8)
        else:  # A byte's larger code, 16 times: its sign is then the byte's. 16 · |-8| is 128, as |-128| is.
            sizes = np.abs((codes * np.uint8(16)).view(np.int8)).view(np.uint8)
            np.maximum(sizes, np.abs((codes & 0xF0).view(np.int8)).view(np.uint8), out=sizes)
        most = self.limit << (8 - self.bits)
        block = self.block * self.bits // 8
        # Eight bytes at a time: a reduction over rows this short costs five times as much.
        has_most = reduce(np.bitwise_or, (sizes == most).view(np.uint64).reshape(-1, block // 8).T) != 0
        is_zero = scale_bits == 0
        if sizes.max() > most or (has_most == is_zero).any() or sizes.reshape(-1, block)[is_zero].any():
            raise MalformedMessage(f"{self.name}: the largest code of a block is not ±{self.limit}, or that of zeros not 0")

    def _rounding(self, encoded: _Bytes, num_cells: int, first: int, last: int) -> float:
        scales = _from_bf16(self._sections(encoded, num_cells, first, last)[0])
        return square_of(scales) * self.block / 12

    def _integers(self, codes: _Bytes) -> npt.NDArray[np.int8]:
        if self.bits == 8:
            return codes.view(np.int8)
        pairs = codes.astype("<u2")
        pairs |= pairs << 4
        nibbles = pairs.view(np.uint8)
        nibbles &= 15
        nibbles ^= 8  # Sign extension of a nibble: flip its sign bit, then subtract it.
        nibbles -= 8
        return nibbles.view(np.int8)


class _Lloyd(_Blocks):
    """Two bits an element: the codes of a block are 256 signs, then 256 sizes, the earlier in the lower bits."""

    def __init__(self, max_scale_bits: int = _MAX_SQUARED_SCALE_BITS) -> None:
        super().__init__(2, CELL, max_scale_bits)
        self.name = "lloyd2"
        self.most_rounding = _TWO_BIT_ERROR * (1 + 2.0**-8) ** 2  # What is decoded is no longer than what was encoded.

    def _encode(self, x: Floats, encoded: _Bytes, num_cells: int, first: int) -> None:
        scales, codes = self._sections(encoded, num_cells, first, first + x.size // CELL)
        rows = x.reshape(-1, CELL)
        with np.errstate(over="ignore", invalid="ignore"):
            squares: Floats = np.einsum("ij,ij->i", rows, rows)
        if not squares.max() < np.inf:  # Written so that NaN is not less.
            raise LocalError(f"{self.name}: the values to encode are not finite, or beyond 1e18")
        threshold = np.sqrt(squares / np.float32(CELL)) * _THRESHOLD
        sizes = np.abs(rows)
        planes = codes.reshape(-1, 2, CELL // 8)
        is_large = sizes > threshold[:, None]
        planes[:, 0] = np.packbits(np.signbit(rows), axis=1, bitorder="little")
        planes[:, 1] = np.packbits(is_large, axis=1, bitorder="little")
        levels = is_large.view(np.uint8) * np.uint8(_LARGE - _SMALL)
        levels += _SMALL
        scale_bits = self._scale_bits(np.einsum("ij,ij->i", sizes, levels.astype(np.float32)) / self._squares(planes))
        planes[scale_bits == 0] = 0
        scales[:] = scale_bits

    def _check_codes(self, codes: _Bytes, scale_bits: _Halves) -> None:
        planes = codes.reshape(-1, 2, CELL // 8)
        if planes[scale_bits == 0].any():
            raise MalformedMessage(f"{self.name}: a block of zeros has codes")
        if not planes[scale_bits != 0, 1].any(axis=1).all():
            raise MalformedMessage(f"{self.name}: no element of a block is large")

    def _rounding(self, encoded: _Bytes, num_cells: int, first: int, last: int) -> float:
        scale_bits, codes = self._sections(encoded, num_cells, first, last)
        squares = np.square(_from_bf16(scale_bits), dtype=np.float64) * self._squares(codes.reshape(-1, 2, CELL // 8))
        return float(squares.sum()) * _TWO_BIT_ERROR

    def _squares(self, planes: _Bytes) -> Floats:
        """The sum of squared levels of each block: whole numbers, exact in float32."""
        num_large: Floats = np.bitwise_count(planes[:, 1]).sum(axis=1, dtype=np.float32)
        return num_large * np.float32(_LARGE**2 - _SMALL**2) + np.float32(CELL * _SMALL**2)

    def _integers(self, codes: _Bytes) -> npt.NDArray[np.int8]:
        bits = np.unpackbits(codes, bitorder="little").reshape(-1, 2, CELL)
        signs = np.negative(bits[:, 0])  # 0, or 255: all bits.
        levels = bits[:, 1] * np.uint8(_LARGE - _SMALL)
        levels += _SMALL
        levels ^= signs  # Two's complement: flip all bits, then add one.
        levels -= signs
        return levels.view(np.int8).reshape(-1)


class _Bfloat16(Codec):
    """Every element as bf16, rounded to nearest even."""

    name = "bf16"
    cell_bytes = CELL * 2
    most_rounding = (2.0**-7 * (1 + 2.0**-8)) ** 2 / 12
    memory_dtype = np.float32

    def __init__(self, max_bits: int = _MAX_FINITE_BITS) -> None:
        self._max_bits = max_bits

    def _encode(self, x: Floats, encoded: _Bytes, num_cells: int, first: int) -> None:
        bits = _to_bf16(x)
        if not (np.isfinite(x).all() and ((bits & 0x7FFF) <= self._max_bits).all()):
            raise LocalError(f"{self.name}: the values to encode are not finite, or beyond {_number(self._max_bits):.0e}")
        encoded.view("<u2")[first * CELL :][: x.size] = bits

    def _decode(self, encoded: _Bytes, num_cells: int, first: int, out: Floats, gain: np.float32) -> None:
        np.multiply(_from_bf16(encoded.view("<u2")[first * CELL :][: out.size]), gain, out=out)

    def _check(self, encoded: _Bytes, num_cells: int, first: int, last: int) -> None:
        if not ((encoded.view("<u2")[first * CELL : last * CELL] & 0x7FFF) <= self._max_bits).all():
            raise MalformedMessage(f"{self.name}: a value is not finite, or beyond {_number(self._max_bits):.0e}")

    def _rounding(self, encoded: _Bytes, num_cells: int, first: int, last: int) -> float:
        return square_of(_from_bf16(encoded.view("<u2")[first * CELL : last * CELL])) * 2.0**-14 / 12


class _Float32(Codec):
    """Every element as it is."""

    name = "fp32"
    cell_bytes = CELL * 4
    most_rounding = 2.0**-46 / 12
    memory_dtype = np.float32

    def __init__(self, most: float = float(np.finfo(np.float32).max)) -> None:
        self._most = np.float32(most)

    def _encode(self, x: Floats, encoded: _Bytes, num_cells: int, first: int) -> None:
        if not (np.abs(x) <= self._most).all():  # Written so that NaN is not less.
            raise LocalError(f"{self.name}: the values to encode are not finite, or beyond {self._most:.0e}")
        encoded.view("<f4")[first * CELL :][: x.size] = x

    def _decode(self, encoded: _Bytes, num_cells: int, first: int, out: Floats, gain: np.float32) -> None:
        np.multiply(encoded.view("<f4")[first * CELL :][: out.size], gain, out=out)

    def _check(self, encoded: _Bytes, num_cells: int, first: int, last: int) -> None:
        if not (np.abs(encoded.view("<f4")[first * CELL : last * CELL]) <= self._most).all():
            raise MalformedMessage(f"{self.name}: a value is not finite, or beyond {self._most:.0e}")

    def _rounding(self, encoded: _Bytes, num_cells: int, first: int, last: int) -> float:
        return square_of(encoded.view("<f4")[first * CELL : last * CELL]) * 2.0**-46 / 12


_CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (_Blocks(8, 256), _Blocks(4, 64), _Bfloat16(), _Float32(), _Lloyd())
}
_CONTRIBUTED: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        _Blocks(8, 256, _MAX_CONTRIBUTED_SCALE_BITS),
        _Blocks(4, 64, _MAX_CONTRIBUTED_SCALE_BITS),
        _Bfloat16(_MAX_CONTRIBUTED_BITS),
        _Float32(2.0**40),
        _Lloyd(_MAX_CONTRIBUTED_SCALE_BITS),
    )
}


def codec_named(name: str, *, contributed: bool = False) -> Codec:
    """The codec of a manifest, for results; for contributions it has less range. Raises `UsageError`."""
    codecs = _CONTRIBUTED if contributed else _CODECS
    if name not in codecs:
        raise UsageError(f"there is no codec {name!r}", remedy=f"choose one of {', '.join(codecs)}")
    return codecs[name]


def mean_chunks(codec: Codec, parts: Sequence[Encoded], weights: Sequence[float], num_cells: int) -> Iterator[Floats]:
    """`weighted_mean` in chunks for `encode_chunks`, each overwritten by the next: the whole is never in memory."""
    total = sum(weights)
    if not (0 < total < np.inf and min(weights) >= 0):
        raise LocalError(f"weights must be finite, none negative and one positive, got {list(weights)}")
    mean, scratch = np.empty((2, CHUNK_CELLS * CELL), np.float32)
    for first, last in _chunks(0, num_cells):
        sums, terms = mean[: (last - first) * CELL], scratch[: (last - first) * CELL]
        sums.fill(0)
        for part, weight in zip(parts, weights, strict=True):
            codec.decode_range(part, num_cells, first, last, terms, gain=weight / total)
            sums += terms
        yield sums


def weighted_mean(codec: Codec, parts: Sequence[Encoded], weights: Sequence[float], num_cells: int) -> Floats:
    """Σ wᵢ·Dec(partᵢ) / Σ wᵢ, float32, added in the order given: the same inputs give the same bits on every machine.

    Raises `LocalError` unless the weights are finite, none negative and one positive.
    """
    mean = np.empty(num_cells * CELL, np.float32)
    first = 0
    for chunk in mean_chunks(codec, parts, weights, num_cells):
        mean[first : first + chunk.size] = chunk
        first += chunk.size
    return mean


def feedback(x: Floats, codec: Codec, encoded: Encoded, residual: Floats) -> None:
    """`residual` = `x` - Dec(`encoded`): what the bytes did not carry and the next round adds (EF, arXiv:1901.09847).

    `x` and `residual` may be the same array.
    """
    feedback_chunks(FlatSum([x]).chunks(0, _whole_cells(x)), codec, encoded, residual)


def feedback_chunks(x: Iterable[Floats], codec: Codec, encoded: Encoded, residual: FlatVector) -> None:
    """As `feedback` of these chunks one after the other, which may be made from `residual`."""
    num_cells, first = residual.size // CELL, 0
    scratch = np.empty(CHUNK_CELLS * CELL, np.float32)
    for chunk in x:
        last = first + chunk.size // CELL
        rest = scratch[: chunk.size]
        codec.decode_range(encoded, num_cells, first, last, rest)
        np.subtract(chunk, rest, out=rest)
        round_into(rest, residual[first * CELL : last * CELL])
        first = last


@dataclass(frozen=True, slots=True)
class FlatSum:
    """The sum of flat vectors that all begin with cell `start`: it is added chunk by chunk, and never whole in memory."""

    terms: Sequence[FlatVector]
    start: int = 0

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.terms[0].size

    def whole(self) -> Floats:
        """Return all of it."""
        return np.concatenate([chunk.copy() for chunk in self.chunks(self.start, self.start + self.size // CELL)])

    def chunks(self, low: int, high: int) -> Iterator[Floats]:
        """Yield the cells from `low` to `high` (exclusive), whole cells at a time; the next chunk may overwrite it."""
        sums = np.empty(CHUNK_CELLS * CELL, np.float32)
        for first, last in _chunks(low - self.start, high - self.start):
            piece, size = slice(first * CELL, last * CELL), (last - first) * CELL
            total = _wide(self.terms[0][piece])
            for term in self.terms[1:]:
                total = np.add(total, _wide(term[piece]), out=sums[:size])
            yield total


def square_of(x: Floats) -> float:
    """‖`x`‖² of a flat `x`: exact squares in float64, added in an order that no library chooses, unlike `dot`."""
    sums = np.zeros(min(x.size, _FOLDED))
    for first in range(0, x.size, _FOLDED):
        squares = np.square(x[first : first + _FOLDED], dtype=np.float64)
        sums[: squares.size] += squares
    return float(np.add.accumulate(sums)[-1]) if x.size else 0.0


def round_into(x: Floats, out: FlatVector) -> None:
    """Write `x` into `out`, rounded to nearest even if that is bf16."""
    out[:] = x if out.dtype == np.float32 else _to_bf16(x)


def _chunks(first: int, last: int) -> Iterator[tuple[int, int]]:
    for start in range(first, last, CHUNK_CELLS):
        yield start, min(start + CHUNK_CELLS, last)


def _whole_cells(x: Floats) -> int:
    if x.dtype != np.float32 or x.ndim != 1 or x.size % CELL:
        raise LocalError(f"expected a flat float32 vector of whole cells of {CELL}, got {x.dtype} of shape {x.shape}")
    return x.size // CELL


def _to_bf16(x: Floats) -> _Halves:
    """The bf16 bits of `x`, rounded to nearest even. Not for NaN with its sign bit set: it may wrap round to zero."""
    bits = x.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += bits
    rounded += 0x7FFF
    rounded >>= 16
    return rounded.astype(np.uint16)


def _from_bf16(bits: _Halves) -> Floats:
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _wide(kept: FlatVector) -> Floats:
    return kept.view(np.float32) if kept.dtype == np.float32 else _from_bf16(kept.view(np.uint16))


def _number(bits: int) -> float:
    return float(_from_bf16(np.asarray([bits], np.uint16))[0])
