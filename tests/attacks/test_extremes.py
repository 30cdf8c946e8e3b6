"""Values at the edge of what an encoding can state: nobody writes them into the others' model, and nobody's rounds end."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from attacks.voters import founded
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.collectives.robust.checks import (
    columns_of,
    judge_sketches,
    sketch_parts,
    tables_of,
)
from flockstep.collectives.robust.residual import Output, judge_outputs, residual_of
from flockstep.collectives.robust.rules import rule_named
from flockstep.collectives.robust.sketch import SKETCH_BLOCK, CountSketch
from flockstep.collectives.vector.arrays import Floats
from flockstep.collectives.vector.codec import CELL, Codec, codec_named, weighted_mean
from flockstep.dht.run.manifest import CODEC_NAMES, RULE_NAMES
from flockstep.peer.base.digest import digest
from flockstep.peer.memory.network import run_virtual
from flockstep.scripts.lab.attacks.protocol import computes
from support.liars import banned, events_of
from support.swarm import SimSwarm, all_at_once, identities, with_swarm

PEERS, CELLS = 7, 56
Forgery = Callable[[Codec, Floats], bytes]


def scale_without_element(codec: Any, honest: Floats) -> bytes:
    """A scale of 10⁶ for each block, and codes of -1, 0 and 1: shorter than what that scale explains as rounding."""
    num_blocks = honest.size // codec.block
    scale = (np.float32(1e6).view(np.uint32) >> 16).astype("<u2")
    codes = np.zeros(honest.size, np.int8)
    longest = np.argsort(-np.abs(honest))[: codes.size // 8]
    codes[longest] = -np.sign(honest[longest])
    if codec.bits == 4:
        codes = (codes[::2] & 15) | (codes[1::2] << 4)
    return np.full(num_blocks, scale).tobytes() + codes.tobytes()


def spikes(codec: Any, honest: Floats) -> bytes:
    """One element of each block as long as a scale needs that hides the rest of the block in its rounding."""
    lie = honest.copy()
    rows = lie.reshape(-1, codec.block)
    rows[:, 0] = 4 * np.abs(rows).max(axis=1)
    return bytes(codec.encode(lie))


def thousandfold(codec: Any, honest: Floats) -> bytes:
    return bytes(codec.encode(honest * 1000))


@pytest.mark.parametrize(
    ("forge", "codec", "rule"),
    [
        (scale_without_element, "int4", "gramguard"),
        pytest.param(scale_without_element, "int8", "gramguard", marks=pytest.mark.explore),
        (spikes, "int4", "gramguard"),
        (thousandfold, "lloyd2", "gramguard"),
        (thousandfold, "int4", "gramguard"),
    ],
)
def test_an_owner_writes_nothing_of_its_own_into_the_state(forge: Forgery, codec: str, rule: str) -> None:
    async def body(swarm: SimSwarm) -> None:
        *others, liar = swarm.sims
        await all_at_once(swarm.sims)
        before = others[0].theta.copy()

        def tamper(made: tuple[Any, bytes], *_: Any) -> tuple[bytes, bytes]:
            output = liar.averager._spec.output
            honest = np.empty(len(made[0]) // output.cell_bytes * CELL, np.float32)
            output.decode(bytes(made[0]), honest)
            data = forge(output, honest)
            return data, digest(data)

        computes(liar, "reduce", tamper)
        await all_at_once(swarm.sims)
        assert {sim.outcomes[-1].kind for sim in others} == {OutcomeKind.DONE}
        assert len({sim.root for sim in others}) == 1
        outcome = others[0].outcomes[-1]
        assert outcome.value is not None
        place = outcome.value.members.index(liar.peer)
        low, high = (bound * CELL for bound in outcome.value.bounds[place : place + 2])
        assert low < high
        change = np.abs(others[0].theta - before)
        assert change[low:high].max() < 3 * np.delete(change, slice(low, high)).max()
        is_false = {event["peer"] for event in events_of(others, "round.output_doubted")} == {liar.peer}
        assert is_false or banned(others) == [{liar.peer}] * len(others)

    keepers = frozenset(identity.peer_id for identity in identities(4))
    charter = founded(4, keepers=keepers)
    run_virtual(partial(with_swarm, PEERS, body, cells=CELLS, codec=codec, rule=rule, charter=charter))


def test_a_contribution_beyond_all_range_ends_nobodys_round() -> None:
    """127 · 2⁶⁴ in int8, where an owner writes the mean in int4: it was the end of every honest process."""

    async def body(swarm: SimSwarm) -> None:
        *others, liar = swarm.sims
        choice = liar.averager._choice
        choice.mine = codec_named("int8")  # Of results, which has more range.
        choice.choose = lambda *_: ""  # type: ignore[method-assign]
        huge = np.full(liar.theta.size, 126 * 2.0**64, np.float32)
        liar.delta = lambda round_: huge  # type: ignore[method-assign]

        await all_at_once(swarm.sims)
        assert {sim.outcomes[-1].kind for sim in others} == {OutcomeKind.DONE}
        assert max(float(np.abs(sim.theta).max()) for sim in others) < 2
        assert banned(others) == [{liar.peer}] * len(others)

    keepers = frozenset(identity.peer_id for identity in identities(4))
    charter = founded(4, keepers=keepers)
    run_virtual(partial(with_swarm, PEERS, body, cells=40, codec="int4 int8", rule="mean", charter=charter))


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_whatever_is_accepted_of_contributors_an_owner_can_encode(rule: str) -> None:
    """For each codec of contributions and each of results, with contributions at the limit and at nothing."""
    bounds, n = (0, 1, 2), 5
    draw = np.random.default_rng(0)
    most = {"int8": 127 * 2.0**32, "int4": 7 * 2.0**32, "lloyd2": 2.0**35, "bf16": 2.0**40, "fp32": 2.0**40}
    for name in CODEC_NAMES:
        contributed = codec_named(name, contributed=True)
        for large in (1, 2, n):
            vectors = [np.zeros(2 * CELL, np.float32) for _ in range(n)]
            for vector in vectors[:large]:
                vector[:] = most[name] * draw.choice([-1, 1], vector.size)
            vectors[-1][:CELL] = most[name]
            parts = [[contributed.encode(vector[:CELL]), contributed.encode(vector[CELL:])] for vector in vectors]
            for each in parts:
                for data in each:
                    contributed.check(data, 1)
            with np.errstate(all="raise", under="ignore"):
                sketches = [sketch_parts(contributed, each, bounds, bytes(32), columns_of(n)) for each in parts]
            weighting = judge_sketches(rule_named(rule), sketches, [1.0] * n, [1.0] * n, 2)
            assert np.isfinite(weighting.weights).all()
            for result in map(codec_named, CODEC_NAMES):
                for part in range(2):
                    held = [each[part] for each in parts]
                    data = result.encode_chunks(rule_named(rule).chunks(contributed, held, weighting, part, 1), 1)
                    result.check(data, 1)


def test_what_an_owner_hides_from_the_sketch_by_search_makes_no_output_longer_than_its_inputs() -> None:
    """Of 1,400 pairs of elements one cancels in two of three rows; an owner searches as many seeds in a second."""
    codec, seed, cells = codec_named("int4"), bytes(32), 2 * SKETCH_BLOCK // CELL
    random = np.random.default_rng(0)
    shared = random.standard_normal(cells * CELL, np.float32)
    parts = [codec.encode(shared + random.standard_normal(shared.size, np.float32)) for _ in range(4)]
    weights, sum_ = np.full((1, 4), 0.25), weighted_mean(codec, parts, [0.25] * 4, cells)
    first = [sketch_parts(codec, [part], (0, cells), b"1" * 32, 128) for part in parts]
    second = [sketch_parts(codec, [part], (0, cells), seed, 128) for part in parts]

    def false(output: Floats, after: list[bytes]) -> tuple[int, ...]:
        return judge_outputs(codec, {0: codec.encode(output)}, (0, cells), weights, first, after, (), seed).false

    def unit(at: int) -> Floats:
        block = np.zeros(SKETCH_BLOCK, np.float32)
        block[at % SKETCH_BLOCK] = 1.0
        return CountSketch.of(block, seed, at - at % SKETCH_BLOCK, 128)

    one = unit(5)
    places = ((at, sign) for at in range(SKETCH_BLOCK, 2 * SKETCH_BLOCK) for sign in (-1.0, 1.0))
    other, sign = next((at, sign) for at, sign in places if np.count_nonzero((one + sign * unit(at)).any(axis=1)) < 2)
    hidden = sum_.copy()
    hidden[[5, other]] = np.array([1.0, sign], np.float32) * np.float32(1e4 * np.linalg.norm(sum_))
    assert false(hidden, second) == (0,)
    assert false(sum_, second) == ()


def test_a_contributor_that_hides_its_length_from_one_seed_blames_no_owner() -> None:
    """Who commits last may search for a cut under whose seed two long elements cancel, as if they were not there."""
    codec, seed, cells = codec_named("int4"), bytes(32), 2 * SKETCH_BLOCK // CELL
    honest = np.random.default_rng(0).standard_normal((4, cells * CELL), np.float32)
    hidden = honest.copy()
    hidden[0, [5, SKETCH_BLOCK + 9]] += 10 * np.linalg.norm(honest[0])
    parts = [codec.encode(row) for row in hidden]
    first = [sketch_parts(codec, [codec.encode(row)], (0, cells), b"1" * 32, 128) for row in honest]
    second = [sketch_parts(codec, [part], (0, cells), seed, 128) for part in parts]
    output = {0: codec.encode(weighted_mean(codec, parts, [0.25] * 4, cells))}
    verdict = judge_outputs(codec, output, (0, cells), np.full((1, 4), 0.25), first, second, (), seed)
    assert verdict.false == (0,)  # Voters that make it again find the same, and that counts.


@pytest.mark.parametrize("turn", [-1.0, 0.0])
def test_who_contributes_something_else_than_it_has_sketched_is_doubtful_and_no_honest_member_is(turn: float) -> None:
    """Four of ten whose owner vouches for both: they were judged by one vector and added another one of the same length."""
    draw = np.random.default_rng(0)
    common = draw.standard_normal(4 * CELL)
    vectors = [(common + 0.3 * draw.standard_normal(common.size)).astype(np.float32) for _ in range(10)]
    aside = (1 - turn**2) ** 0.5
    said: list[Floats] = [np.asarray(turn * it + aside * draw.permutation(it), np.float32) for it in vectors[6:]]
    first = [CountSketch.of(it, b"1" * 32, 0, columns_of(10)).astype("<f4").tobytes() for it in vectors]
    second = [CountSketch.of(it, b"2" * 32, 0, columns_of(10)).astype("<f4").tobytes() for it in [*vectors[:6], *said]]
    weights = np.full(10, 0.1)
    before, after = (np.stack([tables_of(it, 1)[0] for it in each]) for each in (first, second))
    found = residual_of(Output(np.zeros(before[0].size), 0.0, 0.0, 1.0), weights, before, after, np.ones(10, bool))
    assert found.voices.tolist() == [True] * 6 + [False] * 4
