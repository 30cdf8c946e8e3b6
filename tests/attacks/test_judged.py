"""Rounds with a rule: false sketches and false outputs are detected in the same round."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
from attacks.voters import founded
from flockstep.collectives.accountability.conduct import SILENT_ROUNDS
from flockstep.collectives.allreduce.actions import CompareSketch, OutcomeKind
from flockstep.collectives.robust.checks import tables_of
from flockstep.collectives.vector.codec import CELL, weighted_mean
from flockstep.peer.memory.network import run_virtual
from flockstep.scripts.lab.attacks.protocol import computes, lying_owner
from support.liars import banned, events_of, lies, silent
from support.swarm import SimSwarm, all_at_once, with_swarm

CELLS, PEERS = 40, 5


def run_rounds(
    body: Callable[[SimSwarm], Awaitable[None]], *, rule: str = "gramguard", codec: str = "int8", seed: int = 0
) -> None:
    charter = founded(PEERS)
    run_virtual(partial(with_swarm, PEERS, body, cells=CELLS, codec=codec, rule=rule, seed=seed, charter=charter), seed=seed)


def test_honest_peers_end_alike_and_nobody_is_accused() -> None:
    async def body(swarm: SimSwarm) -> None:
        await all_at_once(swarm.sims, 3)
        assert {sim.outcomes[-1].kind for sim in swarm.sims} == {OutcomeKind.DONE}
        assert len({sim.root for sim in swarm.sims}) == 1
        assert banned(swarm.sims) == [set()] * PEERS
        for name in ("peer.flagged", "round.output_doubted"):
            assert events_of(swarm.sims, name) == []

    run_rounds(body)


def test_who_turns_its_contribution_round_counts_nothing_and_all_say_so() -> None:
    async def body(swarm: SimSwarm) -> None:
        liar, *others = swarm.sims
        turned = liar.delta
        liar.delta = lambda round_: -3 * turned(round_)  # type: ignore[method-assign]
        await all_at_once(swarm.sims)
        assert {event["peer"] for event in events_of(others, "peer.flagged")} == {liar.peer}
        assert len(events_of(others, "peer.flagged")) == len(others)
        records = [others[0].averager._conduct.trust_of(sim.peer) for sim in swarm.sims]
        assert [record.trust for record in records if record is not None] == [0.5, 1.0, 1.0, 1.0, 1.0]

    run_rounds(body)


@pytest.mark.parametrize("strength", [0.02, 1.0])
def test_a_lying_owners_output_is_refused_and_its_deputy_makes_the_right_one(strength: float) -> None:
    async def body(swarm: SimSwarm) -> None:
        liar, *others = swarm.sims
        codec = liar.averager._spec.output
        noise = np.random.default_rng(1).normal(size=CELLS * CELL).astype(np.float32)

        def tampered(self: Any, chunks: Any, num_cells: int) -> Any:
            data = weighted_mean(codec, [codec.encode_chunks(chunks, num_cells)], [1.0], num_cells)
            lie = noise[: data.size] * np.float32(strength * np.linalg.norm(data) / np.linalg.norm(noise[: data.size]))
            return codec.encode(data + lie)

        lying = type("Lying", (type(codec),), {"encode_chunks": tampered})
        changed: Any = object.__new__(lying)
        changed.__dict__.update(codec.__dict__)
        liar.averager._spec = replace(liar.averager._spec, output=changed)
        await all_at_once(swarm.sims)
        assert {sim.outcomes[-1].kind for sim in others} == {OutcomeKind.DONE}
        doubted = events_of(others, "round.output_doubted")
        assert {(event["peer"], event["step"]) for event in doubted} == {(liar.peer, "check")}
        assert len(doubted) == len(others)
        assert len({sim.root for sim in others}) == 1
        assert banned(others) == [set()] * len(others)  # Statistics convict nobody.
        conduct = others[0].averager._conduct
        assert [peer for peer in (sim.peer for sim in swarm.sims) if not conduct.may_own(peer)] == [liar.peer]
        conduct.advance(conduct._slot.round + SILENT_ROUNDS, others[0].averager.certificate)
        assert conduct.may_own(liar.peer)

    run_rounds(body)


@pytest.mark.parametrize("shunned", range(0, 4, 3))
def test_a_false_output_that_is_kept_from_some_is_refused_by_the_others_in_the_same_attempt(shunned: int) -> None:
    async def body(swarm: SimSwarm) -> None:
        liar, *others = swarm.sims
        lying_owner(liar)
        blind = {others[shunned].peer, others[shunned - 1].peer}
        find = liar.node.blobs.find

        def hide(key: bytes, reader: str) -> Any:
            attempt, found = liar.averager._work, find(key, reader)
            mine = attempt is not None and any(found is part for part in attempt.mine)
            return found if mine or reader not in blind else None

        liar.node.blobs.find = hide  # type: ignore[method-assign]
        await all_at_once(swarm.sims)
        assert {(sim.outcomes[0].kind, sim.outcomes[0].slot.attempt) for sim in others} == {(OutcomeKind.DONE, 0)}
        assert len({sim.root for sim in others}) == 1
        assert {event["peer"] for event in events_of(others, "round.output_doubted")} == {liar.peer}
        assert banned(others) == [set()] * len(others)
        assert trio.current_time() < 2.0  # Virtual ones: no deadline has passed.

    run_rounds(body)


def halved(sketch: bytes, *_: object) -> bytes:
    return (tables_of(sketch, PEERS) * 0.5).astype("<f4").tobytes()


def spoiled(sketch: bytes, *_: object) -> bytes:
    tables = tables_of(sketch, PEERS).copy()
    tables[:, 0, 0] = np.nan
    return tables.tobytes()


@pytest.mark.parametrize("change", [halved, spoiled])
def test_a_lying_sender_is_convicted_by_its_bytes_and_the_round_goes_on_without_it(change: Callable[..., Any]) -> None:
    async def body(swarm: SimSwarm) -> None:
        liar, *others = swarm.sims
        computes(liar, "sketch_parts", change)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(liar.round)
            await all_at_once(others)
            nursery.cancel_scope.cancel()
        assert banned(others) == [{liar.peer}] * len(others)
        assert all("not of what it committed to" in str(event["reason"]) for event in events_of(others, "peer.banned"))
        assert {sim.outcomes[-1].kind for sim in others} == {OutcomeKind.DONE}
        assert set(others[0].outcomes[-1].cut) == {sim.peer for sim in others}
        assert [event for event in events_of(others, "round.said") if event["step"] == "Void"] == []

    run_rounds(body)


def test_a_sketch_of_a_cut_that_was_made_again_meanwhile_is_compared_with_nothing() -> None:
    async def body(swarm: SimSwarm) -> None:
        sim = swarm.sims[0]
        asked: list[tuple[int, int]] = []

        def ask(event: dict[str, Any]) -> None:
            if event["event"] == "round.said" and event["step"] == "Sketch" and not asked:
                attempt: Any = sim.averager._work
                asked.extend(attempt.parts)
                sim.node.nursery.start_soon(attempt._compare, CompareSketch(bytes(32), *asked[0]))

        sim.node.telemetry.subscribe(ask)
        await all_at_once(swarm.sims)
        assert asked
        assert {one.outcomes[-1].kind for one in swarm.sims} == {OutcomeKind.DONE}

    run_rounds(body)


def test_who_says_nothing_of_its_contribution_is_cut_out_again() -> None:
    async def body(swarm: SimSwarm) -> None:
        mute, *others = swarm.sims
        lies(mute, silent("sketch", "second sketch"))
        await all_at_once(swarm.sims)
        assert {sim.outcomes[-1].kind for sim in others} == {OutcomeKind.DONE}
        assert set(others[0].outcomes[-1].cut) == {sim.peer for sim in others}

    run_rounds(body)
