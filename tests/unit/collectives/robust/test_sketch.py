"""CountSketch: order-independent bits, unbiased within its stated error, and false outputs."""

import hashlib

import numpy as np
import numpy.typing as npt
import pytest
from flockstep.collectives.robust import sketch
from flockstep.collectives.robust.sketch import ROWS, SKETCH_BLOCK, CountSketch
from flockstep.collectives.vector.codec import CELL, Codec, codec_named, weighted_mean
from flockstep.dht.run.manifest import CODEC_NAMES
from flockstep.peer.base.errors import LocalError
from hypothesis import given, settings
from hypothesis import strategies as st

Floats = npt.NDArray[np.float32]
SEED = bytes(range(32))


def seed_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@given(
    st.lists(st.integers(1, 3 * SKETCH_BLOCK), min_size=1, max_size=5),
    st.integers(0, 5 * SKETCH_BLOCK),
    st.sampled_from([2, 32, 128]),
)
@settings(max_examples=40, deadline=None)
def test_the_bits_do_not_depend_on_the_chunks(sizes: list[int], offset: int, columns: int) -> None:
    vector = normal(sum(sizes))
    pieces = CountSketch(SEED, columns)
    for start, size in zip(np.cumsum([0, *sizes[:-1]]).tolist(), sizes, strict=True):
        pieces.add(vector[start : start + size], offset + start)
    whole = CountSketch.of(vector, SEED, offset, columns)
    assert whole.shape == (ROWS, columns)
    assert whole.dtype == np.float32
    assert pieces.table().tobytes() == whole.tobytes()


def test_the_bits_are_those_of_every_other_machine() -> None:
    # Multiples of 1/8 below 2⁹ make every sum exact, so that this holds Philox, signs, turns and buckets, not rounding.
    vector = (np.arange(3 * SKETCH_BLOCK) % 4093 / 8).astype(np.float32)
    digest = hashlib.sha256(CountSketch.of(vector, SEED, 1000).astype("<f4").tobytes()).hexdigest()
    assert digest == "b9f5431c559e4a7da4f95faa0122d99e43602734fb69cb9d2f4a67d2d12420d8"


@pytest.mark.parametrize("codec_name", CODEC_NAMES)
def test_a_part_has_the_sketch_of_what_it_decodes_to(codec_name: str) -> None:
    codec = codec_named(codec_name)
    vector = normal(1030 * CELL)
    data = codec.encode(vector)
    codec.decode(data, vector)
    assert CountSketch.of_part(codec, data, 1030, SEED, 512).tobytes() == CountSketch.of(vector, SEED, 512).tobytes()


def test_it_is_linear() -> None:
    x, y = normal(2, 3 * SKETCH_BLOCK + 5)
    left = CountSketch.of(np.float32(0.25) * x - np.float32(3) * y, SEED)
    right = 0.25 * CountSketch.of(x, SEED) - 3 * CountSketch.of(y, SEED)
    assert np.abs(left - right).max() < 1e-5 * np.abs(right).max()


def test_every_byte_of_the_seed_matters() -> None:
    vector = normal(1000)
    for position in range(32):
        other = bytearray(SEED)
        other[position] ^= 1
        assert not np.array_equal(CountSketch.of(vector, bytes(other)), CountSketch.of(vector, SEED))


@pytest.mark.parametrize("kind", ["dense", "one residue", "one element", "one block"])
def test_inner_products_are_unbiased_and_within_the_stated_error(kind: str) -> None:
    x = normal(2, 4 * SKETCH_BLOCK)
    x[1] += x[0] / 2
    if kind == "one residue":  # All in one slot, were blocks not turned.
        x[:, np.arange(4 * SKETCH_BLOCK) % 64 != 5] = 0
    elif kind == "one element":
        x[:, 1:] = 0
    elif kind == "one block":
        x[:, SKETCH_BLOCK:] = 0
    wide = x.astype(np.float64)
    exact, scale = wide[0] @ wide[1], np.linalg.norm(wide[0]) * np.linalg.norm(wide[1])
    errors = np.asarray(
        [(sketch.gram(np.stack([CountSketch.of(row, seed_of(i)) for row in x]))[0, 1] - exact) / scale for i in range(150)]
    )
    assert np.abs(errors.mean()) < 0.03  # A standard deviation of the mean of 150 is 0.007.
    assert errors.std() < 1.1 * np.sqrt(2 / sketch.SKETCH_COLUMNS)


def test_inner_products_are_symmetric() -> None:
    tables = np.stack([CountSketch.of(row, SEED) for row in normal(4, 2000)])
    gram = sketch.gram(tables)
    assert (gram == gram.T).all()


def test_overflow_spoils_the_sketch_without_a_sound() -> None:
    tables = np.stack([CountSketch.of(np.full(SKETCH_BLOCK * 4, 3e38, np.float32), SEED), CountSketch.of(normal(100), SEED)])
    gram = sketch.gram(tables)
    assert not np.isfinite(gram[0, 0])
    assert np.isfinite(gram[1, 1])


@pytest.mark.parametrize(("seed", "columns"), [(b"short", 128), (SEED, 100), (SEED, 256), (SEED, 0)])
def test_odd_settings_are_refused(seed: bytes, columns: int) -> None:
    with pytest.raises(LocalError, match="sketch"):
        CountSketch(seed, columns)


def owners_case(codec: Codec, num_cells: int, number: int) -> tuple[list[memoryview], npt.NDArray[np.float64], Floats]:
    """Contributions to a part, the weights of a rule, and the honest output before it is encoded."""
    shared = normal(num_cells * CELL, seed=2 * number)
    own = normal(6, num_cells * CELL, seed=2 * number + 1)
    parts = [codec.encode(shared + row) for row in own]
    weights = np.asarray([0.3, 0.2, 0.2, 0.2, 0.1, 0.0])
    return parts, weights, weighted_mean(codec, parts, weights.tolist(), num_cells)


