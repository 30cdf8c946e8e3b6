"""Members that convene, or are Ready, and do nothing more: what they cost is bounded by their turns."""

from collections.abc import Callable
from functools import partial

import pytest
from attacks.voters import founded, in_turn, until_done
from flockstep.peer import wire
from flockstep.peer.memory.network import run_virtual
from support.liars import Lie, banned, events_of, lies
from support.swarm import SimPeer, SimSwarm, with_swarm


def only(*kinds: type) -> Lie:
    """Return a lie: nothing but these messages."""
    return lambda peer, message: message if isinstance(message, kinds) else None


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
            ballots = {certificate.slot.ballot for certificate in made if certificate is not None}
            most = attempts if round_ == 1 else len(liars) + 1  # By then the deadlines of the honest differ.
            assert max(ballots) <= (0, most)
        assert not any({sim.peer for sim in others} & found for found in banned(others))
        assert not {event["peer"] for event in events_of(others, "peer.charged")} & {sim.peer for sim in others}

    run_virtual(partial(with_swarm, count, body, cells=12, charter=founded(count)))


@pytest.mark.parametrize(("count", "liars"), [(4, 1), (7, 2), (10, 3)])
@pytest.mark.parametrize(
    "kinds",
    [
        (wire.Ready,),
        (wire.Ready, wire.Roster),
        (wire.Ready, wire.Roster, wire.Commit, wire.Have, wire.Cut, wire.CutAck),
        (wire.Ready, *wire.ROUND_MESSAGES[1:8]),
    ],
    ids=["only ready", "only a roster", "up to the cut", "all but the vote"],
)
def test_conveners_that_waste_every_attempt_of_theirs_cost_only_those(
    count: int, liars: int, kinds: tuple[type, ...]
) -> None:
    run(count, only(*kinds), lambda order: order[:liars], attempts=liars)


@pytest.mark.parametrize(("count", "liars"), [(4, 1), (7, 2), (10, 3)])
@pytest.mark.parametrize("kinds", [(wire.Ready,), (wire.Ready, wire.Commit), (wire.Ready, wire.Have)])
def test_members_that_are_ready_and_then_silent_cost_no_attempt_of_another_convener(
    count: int, liars: int, kinds: tuple[type, ...]
) -> None:
    run(count, only(*kinds), lambda order: order[-liars:], attempts=0, rounds=1)


@pytest.mark.parametrize("count", [4, 7, 10])
def test_voters_that_never_come_cost_their_turns(count: int) -> None:
    run(count, lambda peer, message: None, lambda order: order[: (count - 1) // 3], attempts=(count - 1) // 3)


def test_a_have_that_only_the_deputies_receive_reaches_the_convener() -> None:
    async def body(swarm: SimSwarm) -> None:
        convener, liar, *others = in_turn(swarm.sims)
        lies(liar, lambda peer, message: None if isinstance(message, wire.Have) and peer == convener.peer else message)
        await until_done([convener, *others], 1, liar)
        assert {sim.outcomes[0].slot.ballot for sim in (convener, *others)} == {(0, 0)}
        assert not events_of([convener, *others], "round.silent")
        assert liar.peer in convener.outcomes[0].cut

    run_virtual(partial(with_swarm, 5, body, cells=12, charter=founded(5)))
