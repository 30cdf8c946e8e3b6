"""Members that propose, or are Ready, and do nothing more: what they cost is bounded by their turns."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio
from attacks.voters import founded, in_turn, until_done
from flockstep.collectives.chain.certificate import value_of
from flockstep.peer import wire
from flockstep.peer.memory.network import run_virtual
from support.deeds import VOTE, Step
from support.liars import Lie, banned, events_of, lies, only, silent
from support.swarm import SimPeer, SimSwarm, with_swarm


def run(count: int, lie: Lie, liars_of: Callable[[list[SimPeer]], list[SimPeer]], attempts: int, rounds: int = 2) -> None:
    """Run rounds with these liars: in the first one at most so many attempts fail, later one more than liars."""

    async def body(swarm: SimSwarm) -> None:
        order = in_turn(swarm.sims)
        liars = liars_of(order)
        others = [sim for sim in order if sim not in liars]
        for liar in liars:
            lies(liar, lie)
        for round_ in range(1, rounds + 1):
            await until_done(others, round_, *liars)
            made = {sim.averager.certificate for sim in others}
            attempted = {certificate.slot.attempt for certificate in made if certificate is not None}
            most = attempts if round_ == 1 else len(liars) + 1  # By then the deadlines of the honest differ.
            assert max(attempted) <= most
        assert not any({sim.peer for sim in others} & found for found in banned(others))
        assert not {event["peer"] for event in events_of(others, "peer.charged")} & {sim.peer for sim in others}

    run_virtual(partial(with_swarm, count, body, cells=12, charter=founded(count)))


SAID = {
    "only ready": only("ready"),
    "only a roster": only("ready", "roster"),
    "up to the cut": only("ready", "roster", "commit", "word", "cut"),
    "all but the vote": silent(*VOTE),
}


@pytest.mark.parametrize(
    ("count", "liars", "lie"),
    [
        pytest.param(
            *sizes, lie, id=f"{name}-{sizes[0]}", marks=[pytest.mark.explore] * (sizes[0] > (7 if "roster" in name else 4))
        )
        for name, lie in SAID.items()
        for sizes in ((4, 1), (7, 2), (10, 3))
    ],
)
def test_proposers_that_waste_every_attempt_of_theirs_cost_only_those(count: int, liars: int, lie: Lie) -> None:
    run(count, lie, lambda order: order[:liars], attempts=liars)


@pytest.mark.parametrize(("count", "liars"), [(4, 1), (7, 2), pytest.param(10, 3, marks=pytest.mark.explore)])
@pytest.mark.parametrize("steps", [(), ("commit",), ("word",)])
def test_members_that_are_ready_and_then_silent_cost_no_attempt_of_another_proposer(
    count: int, liars: int, steps: tuple[Step, ...]
) -> None:
    run(count, only("ready", *steps), lambda order: order[-liars:], attempts=0, rounds=1)


@pytest.mark.parametrize("count", [4, 7, pytest.param(10, marks=pytest.mark.explore)])
def test_voters_that_never_come_cost_their_turns(count: int) -> None:
    run(count, lambda peer, message: None, lambda order: order[: (count - 1) // 3], attempts=(count - 1) // 3)


@pytest.mark.parametrize("sends_results", [False, True])
@pytest.mark.parametrize("count", [5, 7])
def test_an_owner_that_withholds_its_output_costs_a_deadline_once_in_ten_rounds(count: int, sends_results: bool) -> None:
    """It sends all else, its Result too if `sends_results`, but not the bytes."""

    async def body(swarm: SimSwarm) -> None:
        liar, *others = reversed(in_turn(swarm.sims))
        send = liar.node._bulk._send_memory

        async def hold_back(stream: Any, blob: Any, request: wire.Fetch) -> None:
            attempt = liar.averager._work
            if attempt is None or not any(blob is part for part in attempt.mine):
                await trio.sleep_forever()
            await send(stream, blob, request)

        if sends_results:
            liar.node._bulk._send_memory = hold_back  # type: ignore[method-assign]
        else:
            lies(liar, silent("result"))
        for round_ in (1, 2, 3):
            await until_done(others, round_, liar)
            value = value_of(others[0].averager.certificate)  # type: ignore[arg-type]
            owners = {peer for peer, low, high in zip(value.members, value.bounds, value.bounds[1:]) if low < high}  # noqa: B905
            assert (liar.peer in owners) is (round_ == 1)
        assert not any(banned(others))

    run_virtual(partial(with_swarm, count, body, cells=40, charter=founded(count)))


def test_a_have_that_only_the_deputies_receive_reaches_the_proposer() -> None:
    async def body(swarm: SimSwarm) -> None:
        proposer, liar, *others = in_turn(swarm.sims)
        lies(liar, silent("word", to=proposer.peer.__eq__))
        await until_done([proposer, *others], 1, liar)
        assert {sim.outcomes[0].slot.attempt for sim in (proposer, *others)} == {0}
        assert not events_of([proposer, *others], "round.silent")
        assert liar.peer in proposer.outcomes[0].cut

    run_virtual(partial(with_swarm, 5, body, cells=12, charter=founded(5)))


SLOW = 30.0
"""The seconds of an inner phase. Voters that are here are waited for two of them, or the ceiling, which is as long."""


def silent_in_some(rounds: Callable[[int], bool]) -> Lie:
    """Return a lie: nothing in some rounds, and the truth in others."""
    return lambda peer, message: None if rounds(message.slot.round) else message


def catch_up(liar: SimPeer, other: SimPeer) -> None:
    """Give a liar what it would fetch: the state and the certificate of another one."""
    if liar.averager.round < other.averager.round:
        liar.theta[:], liar.momentum[:] = other.theta, other.momentum
        liar.averager.expect(other.averager.round, other.averager.certificate)


def test_a_silent_voter_shortens_nobody_elses_time() -> None:
    """One that trains for longer than others give a silent voter is waited for beside it, and decides with them."""

    async def body(swarm: SimSwarm) -> None:
        first, late, liar = in_turn(swarm.sims)
        lies(liar, silent_in_some(lambda round_: round_ % 2 == 0))
        for sim in swarm.sims:
            sim.phase_seconds = SLOW
        for round_ in (1, 2, 3):
            await until_done([first, late], round_, liar)
            catch_up(liar, first)

        async def come_late() -> None:
            await trio.sleep(SLOW)
            await until_done([late], 4)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(come_late)
            await until_done([first], 4, liar)
        assert {first.peer, late.peer} == set(late.outcomes[-1].members) == set(first.outcomes[-1].members)

    run_virtual(partial(with_swarm, 3, body, cells=12, charter=founded(3)))
