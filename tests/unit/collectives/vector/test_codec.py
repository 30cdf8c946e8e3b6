"""The codec: error bounds, canonical bytes, refusal of malformed ones, and error feedback."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flockstep.collectives.vector import codec as codec_module
from flockstep.collectives.vector.arrays import Floats
from flockstep.collectives.vector.codec import (
    CELL,
    CHUNK_CELLS,
    Codec,
    FlatSum,
    FlatVector,
    codec_named,
    feedback,
    feedback_chunks,
    mean_chunks,
    round_into,
    weighted_mean,
)
from flockstep.collectives.vector.mixed import codecs_named
from flockstep.dht.run.manifest import CODEC_NAMES
from flockstep.peer.base.errors import LocalError, MalformedMessage
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

GOLDEN = Path(__file__).parents[3] / "golden" / "codec.txt"
BLOCKS = {"int8": (256, 127), "int4": (64, 7)}

every_codec = pytest.mark.parametrize("codec", [codec_named(name) for name in CODEC_NAMES], ids=CODEC_NAMES)
block_codec = pytest.mark.parametrize("codec", [codec_named(name) for name in BLOCKS], ids=list(BLOCKS))
scaled_codec = pytest.mark.parametrize("codec", [codec_named(name) for name in (*BLOCKS, "lloyd2")])

vectors = st.integers(1, 3).flatmap(
    lambda cells: arrays.arrays(
        np.float32,
        cells * CELL,
        elements=st.floats(-(2.0**50), 2.0**50, width=32),
        fill=st.floats(-(2.0**-10), 2.0**-10, width=32),
    )
)


def roundtrip(codec: Codec, x: Floats) -> Floats:
    out = np.full_like(x, np.nan)
    codec.decode(codec.encode(x), out)
    return out


def normal(cells: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(cells * CELL, np.float32)


@block_codec
@settings(max_examples=60, deadline=None)
@given(x=vectors)
def test_error_is_at_most_half_a_step(codec: Codec, x: Floats) -> None:
    block, limit = BLOCKS[codec.name]
    error = np.abs(roundtrip(codec, x).astype(np.float64) - x).reshape(-1, block).max(axis=1)
    absmax = np.abs(x).astype(np.float64).reshape(-1, block).max(axis=1)
    # Half a step of a scale that bf16 moved by 2^-8, and what a block below the least scale loses.
    assert (error <= np.maximum(0.5 * absmax / limit * (1 + 2.0**-8), limit * 2.0**-64)).all()


@every_codec
@settings(max_examples=60, deadline=None)
@given(x=vectors)
def test_encoding_is_canonical_and_idempotent(codec: Codec, x: Floats) -> None:
    encoded = codec.encode(x)
    codec.check(encoded, x.size // CELL)
    assert len(encoded) == codec.num_bytes(x.size // CELL)
    assert codec.encode(roundtrip(codec, x)) == encoded == codec.encode(x.copy())


@block_codec
def test_largest_element_gets_the_largest_code_at_every_rounding_of_the_scale(codec: Codec) -> None:
    block, limit = BLOCKS[codec.name]
    x: Floats = np.zeros((CELL * 64 // block, block), np.float32)
    x[:, 0] = -np.linspace(1, 2, len(x), dtype=np.float32)  # The whole binade: bf16 rounds the scale up and down.
    scale = np.frombuffer(codec.encode(x.reshape(-1)), "<u2")[: len(x)].astype(np.uint32) << 16
    decoded = roundtrip(codec, x.reshape(-1)).reshape(x.shape)
    assert (decoded[:, 0] == -limit * scale.view(np.float32)).all()
    assert not decoded[:, 1:].any()


@settings(max_examples=100, deadline=None)
@given(x=vectors)
def test_the_scale_of_two_bits_is_the_best_one_for_their_codes(x: Floats) -> None:
    rows = x.astype(np.float64).reshape(-1, CELL)
    decoded = roundtrip(codec_named("lloyd2"), x).astype(np.float64).reshape(-1, CELL)
    squares = np.square(decoded).sum(axis=1)
    # The error of the best scale is orthogonal to what was decoded; bf16 moves the scale by 2^-8 at most.
    assert (np.abs(((rows - decoded) * decoded).sum(axis=1)) <= 2.0**-8 * squares).all()
    sizes = np.abs(decoded)
    is_large = np.abs(rows) > 0.9816 * np.sqrt(np.square(rows).mean(axis=1, keepdims=True))
    assert (is_large == (sizes == sizes.max(axis=1, keepdims=True)))[squares > 0].all()
    assert ((np.signbit(decoded) == np.signbit(rows)) | (decoded == 0)).all()


@pytest.mark.parametrize(("shape", "error", "explained"), [("normal", 0.117, 0.221), ("laplace", 0.187, 0.203)])
def test_two_bits_err_as_lloyd_and_max_say_and_less_than_rounding_explains(
    shape: str, error: float, explained: float
) -> None:
    codec, cells = codec_named("lloyd2"), 400
    random = np.random.default_rng(0)
    x = (random.standard_normal(cells * CELL) if shape == "normal" else random.laplace(size=cells * CELL)).astype(np.float32)
    square = float(np.square(x, dtype=np.float64).sum())
    assert np.square(x - roundtrip(codec, x), dtype=np.float64).sum() / square == pytest.approx(error, abs=0.002)
    assert codec.rounding(codec.encode(x), cells) / square == pytest.approx(explained, abs=0.002)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_whatever_two_bits_are_accepted_is_what_encode_makes_of_them(data: st.DataObject) -> None:
    codec = codec_named("lloyd2")
    # From one large element, the least that a block has, to all.
    count = data.draw(st.integers(0, 256))
    planes = np.packbits(np.arange(512) % 256 < count, bitorder="little")
    np.random.default_rng(count).shuffle(planes)
    scale = data.draw(st.one_of(st.just(0), st.integers(0, (1 << 16) - 1), st.integers(63 << 7, 183 << 7)))
    encoded = scale.to_bytes(2, "little") + planes.tobytes()
    try:
        codec.check(encoded, 1)
    except MalformedMessage:
        assert scale == 0 or not planes[32:].any() or not 63 << 7 <= scale <= 183 << 7
        return
    decoded = np.empty(CELL, np.float32)
    codec.decode(encoded, decoded)
    assert codec.encode(decoded) == encoded


@every_codec
def test_bytes_are_those_of_the_golden_file(codec: Codec) -> None:
    i = np.arange(CELL)
    x: Floats = ((i * 37 % 101 - 50) * np.exp2(-(i // 32))).astype(np.float32)
    x[128:192] = 0
    golden = dict(line.split() for line in GOLDEN.read_text().splitlines())
    assert golden.get(codec.name) == codec.encode(x).hex()


@every_codec
def test_ranges_decode_like_the_whole_whatever_the_chunks(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(21)
    encoded = codec.encode(x)
    whole = roundtrip(codec, x)
    mean = weighted_mean(codec, [encoded, codec.encode(normal(21, 1))], [1, 2], 21)
    monkeypatch.setattr(codec_module, "CHUNK_CELLS", 4)
    assert codec.encode(x) == encoded
    part = np.empty(11 * CELL, np.float32)
    codec.decode_range(encoded, 21, 3, 14, part)
    assert np.array_equal(part, whole[3 * CELL : 14 * CELL])
    assert np.array_equal(weighted_mean(codec, [encoded, codec.encode(normal(21, 1))], [1, 2], 21), mean)


@every_codec
def test_an_owner_of_nothing_has_an_empty_part(codec: Codec) -> None:
    encoded = codec.encode(np.empty(0, np.float32))
    codec.check(encoded, 0)
    assert len(encoded) == 0
    assert weighted_mean(codec, [encoded], [1.0], 0).size == 0


@every_codec
@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF])
def test_values_that_are_not_finite_are_my_fault(codec: Codec, bits: int) -> None:
    x = normal(1)
    x.view(np.uint32)[17] = bits
    with pytest.raises(LocalError, match="not finite"):
        codec.encode(x)


@pytest.mark.parametrize(
    ("name", "value"),
    [("int8", 3e21), ("int4", 2e20), ("lloyd2", 8e17), ("lloyd2", 2e18), ("bf16", 3.4e38)],
)
def test_values_beyond_the_largest_scale_are_my_fault(name: str, value: float) -> None:
    with pytest.raises(LocalError, match="not finite, or beyond"):
        codec_named(name).encode(np.full(CELL, value, dtype=np.float32))


@scaled_codec
def test_blocks_too_small_for_a_scale_become_zeros_that_feedback_keeps(codec: Codec) -> None:
    x: Floats = np.full(CELL, 1e-20, dtype=np.float32)
    x[:64] = 1e-40  # Subnormal: a processor that flushes them must see the same bytes.
    encoded = codec.encode(x)
    assert encoded == bytes(codec.num_bytes(1))
    residual = np.empty_like(x)
    feedback(x, codec, encoded, residual)
    assert np.array_equal(residual, x)


@every_codec
def test_arrays_of_another_kind_are_my_fault(codec: Codec) -> None:
    wrong: list[Floats] = [np.zeros(CELL - 1, np.float32), np.zeros((1, CELL), np.float32)]
    for x in [*wrong, np.zeros(CELL).astype(np.float64)]:
        with pytest.raises(LocalError, match="whole cells"):
            codec.encode(x)  # type: ignore[arg-type]


@every_codec
def test_wrong_length_is_malformed(codec: Codec) -> None:
    encoded = codec.encode(normal(2))
    for data in (encoded[:-1], bytes(encoded) + b"\0", b""):
        with pytest.raises(MalformedMessage, match="bytes for 2 cells"):
            codec.check(data, 2)
        with pytest.raises(MalformedMessage, match="bytes for 2 cells"):
            codec.decode(data, np.empty(2 * CELL, np.float32))


@scaled_codec
@pytest.mark.parametrize("bits", [0x7F80, 0x7FC0, 0x8000, 0xBF80, 0xFF80, 0x0001, 0x1F7F, 0x5F81])
def test_scales_that_no_encoder_writes_are_malformed(codec: Codec, bits: int) -> None:
    encoded = bytearray(codec.encode(normal(1)))
    encoded[:2] = bits.to_bytes(2, "little")
    with pytest.raises(MalformedMessage, match="scale"):
        codec.check(encoded, 1)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_codes_are_rounded_to_nearest_even(name: str) -> None:
    codec, (block, limit) = codec_named(name), BLOCKS[name]
    ties = np.arange(-limit, limit + 0.5, 0.5, dtype=np.float32)
    values = np.concatenate([ties, np.nextafter(ties, np.float32(-1e9)), np.nextafter(ties, np.float32(1e9))])
    values = values[np.abs(values) < limit]
    x = np.full((-(-values.size // (block - 1)), block), limit, np.float32)  # One of each block makes its scale 1.
    x[:, 1:].flat[: values.size] = values
    x = np.resize(x, -(-x.size // CELL) * CELL)
    decoded = np.empty_like(x)
    codec.decode(codec.encode(x), decoded)
    assert np.array_equal(decoded, np.rint(x))


@every_codec
@settings(max_examples=60, deadline=None)
@given(x=vectors, places=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=4), data=st.data())
def test_what_is_accepted_is_what_encode_makes_of_it(
    codec: Codec, x: Floats, places: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Whatever bytes are changed: scales that do not fit the codes, codes that do not fit the scale, and all else."""
    encoded, cells = bytearray(codec.encode(x)), x.size // CELL
    for place, value in places:
        encoded[place % len(encoded)] = value
    if data.draw(st.booleans()):  # Scales and codes of two vectors.
        other = codec.encode(x[::-1].copy())
        half = data.draw(st.integers(0, len(encoded)))
        encoded[:half] = other[:half]
    try:
        codec.check(encoded, cells)
    except MalformedMessage:
        return
    decoded = np.empty_like(x)
    codec.decode(encoded, decoded)
    assert codec.encode(decoded) == encoded


@every_codec
def test_a_contribution_has_less_range_than_a_result(codec: Codec) -> None:
    name, x = codec.name, np.zeros(CELL, np.float32)
    contributed = codec_named(name, contributed=True)
    most = {"int8": 127 * 2.0**32, "int4": 7 * 2.0**32, "lloyd2": 2.0**35, "bf16": 2.0**40, "fp32": 2.0**40}[name]
    x[5] = most
    contributed.check(contributed.encode(x), 1)
    x[5] = -most * 64
    with pytest.raises(LocalError, match="beyond"):
        contributed.encode(x)
    with pytest.raises(MalformedMessage):
        contributed.check(codec.encode(x), 1)


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_a_mean_that_is_encoded_as_it_comes_has_the_same_bytes(name: str) -> None:
    codec, num_cells = codec_named(name), 2 * CHUNK_CELLS + 3
    parts = [codec.encode(normal(num_cells, seed)) for seed in range(3)]
    chunks = mean_chunks(codec, parts, [1, 2, 3], num_cells)
    whole = weighted_mean(codec, parts, [1, 2, 3], num_cells)
    assert codec.encode_chunks(chunks, num_cells) == codec.encode(whole)


def test_weighted_mean_is_near_the_exact_one_and_depends_on_order_only() -> None:
    codec = codec_named("fp32")
    xs = [normal(2, seed) for seed in range(5)]
    parts, weights = [codec.encode(x) for x in xs], [0.0, 1.0, 2.5, 7.0, 0.25]
    mean = weighted_mean(codec, parts, weights, 2)
    exact = np.average(np.stack(xs).astype(np.float64), axis=0, weights=weights)
    np.testing.assert_allclose(mean, exact, rtol=0, atol=1e-6)
    assert np.array_equal(mean, weighted_mean(codec, parts, weights, 2))
    assert not np.array_equal(mean, weighted_mean(codec, parts[::-1], weights[::-1], 2))


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -0.5], [np.nan, 1.0], [np.inf, 1.0]])
def test_weights_that_weigh_nothing_are_refused(weights: list[float]) -> None:
    part = codec_named("int8").encode(normal(1))
    with pytest.raises(LocalError, match="weights"):
        weighted_mean(codec_named("int8"), [part, part], weights, 1)


@scaled_codec
def test_feedback_makes_the_running_sum_track_the_true_one(codec: Codec) -> None:
    rounds, cells = 40, 2
    residual = np.zeros(cells * CELL, np.float32)
    carried, plain, true = np.zeros((3, cells * CELL))
    decoded = np.empty_like(residual)
    for r in range(rounds):
        delta = normal(cells, r) * np.float32(0.1) + np.float32(0.003)
        x: Floats = delta + residual
        encoded = codec.encode(x)
        feedback(x, codec, encoded, residual)
        codec.decode(encoded, decoded)
        true, carried, plain = true + delta, carried + decoded, plain + roundtrip(codec, delta)
    # The sum of everything carried lacks exactly the last residual: errors do not add up over the rounds.
    np.testing.assert_allclose(carried + residual, true, rtol=0, atol=1e-5)
    assert np.abs(true - carried).mean() < 0.5 * np.abs(true - plain).mean()


def test_feedback_may_write_over_its_input() -> None:
    codec, x = codec_named("int4"), normal(3)
    encoded, expected = codec.encode(x), x - roundtrip(codec, x)
    feedback(x, codec, encoded, x)
    assert np.array_equal(x, expected)


@pytest.mark.parametrize("name", ["int4", "int8", "lloyd2"])
def test_feedback_kept_as_bf16_carries_as_much_as_that_of_float32(name: str) -> None:
    codec, cells, rounds = codec_named(name), CHUNK_CELLS + 188, 30
    lacks = []
    dtypes: tuple[Any, ...] = (np.float32, codec.memory_dtype)
    for kept in dtypes:
        residual: FlatVector = np.zeros(cells * CELL, kept)
        part: FlatVector = np.zeros(cells * CELL, kept)
        true, carried = np.zeros((2, cells * CELL))
        decoded = np.empty(cells * CELL, np.float32)
        for r in range(rounds):
            delta = normal(cells, r) * np.float32(1e-4)
            round_into(delta, part)
            x = FlatSum([part, residual], 5)
            encoded = codec.encode_chunks(x.chunks(5, 5 + cells), cells)
            feedback_chunks(x.chunks(5, 5 + cells), codec, encoded, residual)
            codec.decode(encoded, decoded)
            true, carried = true + delta, carried + decoded
        lacks.append(np.linalg.norm(true - carried) / np.linalg.norm(true))
    assert codec.memory_dtype is np.uint16
    assert lacks[1] < lacks[0] + 2.0**-10  # Half of what bf16 may round a single element by.


def test_a_sum_of_vectors_begins_with_its_first_cell() -> None:
    cells = CHUNK_CELLS + 88
    terms = [normal(cells, seed) for seed in (0, 1)]
    pieces = [piece.copy() for piece in FlatSum(terms, 10).chunks(12, 10 + cells)]
    assert [piece.size // CELL for piece in pieces] == [CHUNK_CELLS, 86]
    np.testing.assert_array_equal(np.concatenate(pieces), (terms[0] + terms[1])[2 * CELL :])


def test_a_mixed_codec_reads_each_part_by_its_length() -> None:
    names, x = ("int4", "lloyd2", "int8", "bf16", "fp32"), normal(3, seed=4)
    mixed, out, again = codecs_named(names), np.empty_like(x), np.empty_like(x)
    parts = [codec_named(name).encode(x) for name in names]
    assert [mixed.of(name) for name in names] == [codec_named(name, contributed=True) for name in names]
    assert (mixed.of(""), mixed.of("zstd"), mixed.encode(x)) == (mixed.codecs[0], None, parts[0])
    for name, data in zip(names, parts, strict=True):
        mixed.check(data, 3)
        mixed.decode(data, out)
        codec_named(name).decode(data, again)
        assert out.tobytes() == again.tobytes()
        assert mixed.rounding(data, 3) == codec_named(name).rounding(data, 3)
    mean = weighted_mean(mixed, parts, [1, 2, 3, 4, 5], 3)
    assert np.abs(mean - x).max() < 0.5
    for bad in (b"", bytes(3 * 257), bytes(parts[0]) + b"!"):
        with pytest.raises(MalformedMessage, match="int4 lloyd2"):
            mixed.check(bad, 3)


def test_no_two_codecs_have_cells_of_one_size() -> None:
    assert len({codec_named(name).cell_bytes for name in CODEC_NAMES}) == len(CODEC_NAMES)
