"""What liars can do to the output by tenure and by number, beside honest members: the table in docs/defence.md."""

from functools import partial

import numpy as np
import pytest
import trio
from attacks.voters import founded
from flockstep.collectives.accountability import trust
from flockstep.collectives.accountability.trust import YOUNG_ROUNDS, weigh
from flockstep.collectives.chain.certificate import value_of
from flockstep.collectives.robust.checks import weighed
from flockstep.collectives.robust.gramguard import GramGuard
from flockstep.peer import wire
from flockstep.peer.memory.network import run_virtual
from support.swarm import SimPeer, SimSwarm, identities, with_swarm

SIZE = 4096
OLD, YOUNG, FRESH = wire.Seat(0.99, YOUNG_ROUNDS), wire.Seat(0.98, YOUNG_ROUNDS - 1), wire.Seat(0.2, 0)


def attacked(old: int, young: int, liars: int, seat: wire.Seat, seed: int = 0) -> tuple[float, float, int]:
    """Let liars with such a seat turn the common direction round beside so many honest members, and claim most tokens.

    Returns their weight before the rule, the output along the mean of the honest, and how many of these are flagged.
    """
    honest = old + young
    seats = [OLD] * old + [YOUNG] * young + [seat] * liars
    tokens = [100 + 3 * index for index in range(honest)] + [1 << 40] * liars
    voices, masses = (weigh(each, [1.0] * len(seats), seats, earned=True) for each in ([1] * len(seats), tokens))
    normal = np.random.default_rng(seed).standard_normal
    common = normal(SIZE) * np.repeat([1.0, -1.0], [honest, liars])[:, None]
    x = common + normal((len(seats), SIZE))
    gram = x @ x.T
    result = weighed(GramGuard().weights(gram, gram[None], np.asarray(voices)), voices, masses)
    mean = x[:honest].mean(0)
    along = float(result.weights[0] @ x @ mean / (mean @ mean))
    return sum(masses[honest:]), along, sum(index < honest for index in result.flagged)


@pytest.mark.parametrize(
    ("old", "young", "liars", "seat", "weight"),
    [
        (0, 10, 1, OLD, 0.09),  # There a round before all others: no more than its share of heads.
        (0, 40, 3, OLD, 0.07),
        (1, 20, 2, OLD, 0.10),
        (5, 30, 3, OLD, 0.39),  # Of tenure like others.
        (10, 0, 5, OLD, 0.44),
        (10, 0, 6, OLD, 0.49),
        (10, 0, 9, OLD, 0.60),  # Claims of tokens weigh, and enter no bound: heads of tenure decide.
        (3, 20, 4, OLD, 0.60),
        (4, 0, 60, FRESH, 0.20),  # Free keys, in any number, beside four of tenure.
        (4, 0, 60, YOUNG, 0.20),
        (10, 20, 30, YOUNG, 0.13),
        (3, 0, 2, FRESH, 0.40),  # Beside fewer than four they count by heads.
    ],
)
def test_few_of_tenure_and_many_without_it_turn_no_output_round(
    old: int, young: int, liars: int, seat: wire.Seat, weight: float
) -> None:
    masses, along, flagged = attacked(old, young, liars, seat)
    assert masses == pytest.approx(weight, abs=0.01)
    assert along > 0.9
    assert not flagged


@pytest.mark.parametrize(
    ("old", "young", "liars", "seat"),
    [
        (10, 0, 10, OLD),  # As many of tenure lie as do not.
        (3, 0, 24, FRESH),  # Most keys lie, and three of tenure are too few to say so.
    ],
)
def test_what_is_not_defended(old: int, young: int, liars: int, seat: wire.Seat) -> None:
    masses, along, _ = attacked(old, young, liars, seat)
    assert masses > 0.5
    assert along < 0


def test_one_that_was_there_a_round_before_the_others_is_flagged_and_they_grow_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had 80 % of the weight in its twentieth round: it turned the output round and flagged the others, for good."""
    monkeypatch.setattr(trust, "YOUNG_ROUNDS", 2)
    honest = 6

    async def body(swarm: SimSwarm) -> None:
        keepers, liar, others = swarm.sims[:4], swarm.sims[4], swarm.sims[5:]

        async def made(trainers: list[SimPeer]) -> tuple[wire.Value, dict[str, wire.Seat]]:
            number = keepers[0].averager.round

            async def until_made(sim: SimPeer) -> None:
                while sim.averager.round == number:
                    await sim.round(tokens=100 if sim in trainers else 0)

            async with trio.open_nursery() as nursery:
                for sim in swarm.sims:
                    nursery.start_soon(until_made, sim)
            certificate = keepers[0].averager.certificate
            assert certificate is not None
            value = value_of(certificate)
            return value, dict(zip(value.members, value.seats, strict=True))

        for sim in swarm.sims:
            sim.common = 1.0
        await made([liar])
        await made([liar, *others])
        true = liar.delta
        liar.delta = lambda round_: -true(round_)  # type: ignore[method-assign]  # a liar
        value, seats = await made([liar, *others])
        assert seats[liar.peer].rounds == 2
        assert {seats[sim.peer].rounds for sim in others} == {1}
        assert [value.members[index] for index in value.flagged] == [liar.peer]
        _, seats = await made([liar, *others])
        assert {seats[sim.peer].rounds for sim in others} == {2}

    charter = founded(4, keepers=frozenset(identity.peer_id for identity in identities(4)), earned=True)
    run_virtual(partial(with_swarm, 5 + honest, body, charter=charter, rule="gramguard", codec="int8"))


def test_claims_of_tokens_weigh_and_enter_no_bound() -> None:
    """Four of ten with half of all mass by their claims: they had the median length, and the step was theirs."""

    async def body(swarm: SimSwarm) -> None:
        *honest, fast = swarm.sims[:6]
        liars = swarm.sims[6:]
        for sim in swarm.sims:
            sim.common = 1.0
        for sim in liars:
            true = sim.delta
            sim.delta = lambda round_, true=true: -1e4 * true(round_)  # type: ignore[method-assign, misc]
        before = fast.theta.copy()
        async with trio.open_nursery() as nursery:
            for sim in swarm.sims:
                nursery.start_soon(partial(sim.round, tokens=100 if sim in honest else 10**6))
        outcome = fast.outcomes[0]
        assert outcome.value is not None
        assert {outcome.value.members[index] for index in outcome.value.flagged} == {sim.peer for sim in liars}
        assert np.linalg.norm(fast.theta - before) < 2 * np.linalg.norm(fast.delta(1))

    run_virtual(partial(with_swarm, 10, body, rule="gramguard", codec="int8"))


def test_one_that_has_trained_more_weighs_half_as_much_again() -> None:
    gram = np.ones((4, 4)) + np.eye(4)
    voices, masses = (weigh(tokens, [1.0] * 4, [OLD] * 4, earned=True) for tokens in ([1] * 4, [100, 100, 100, 900]))
    judged = GramGuard().weights(gram, gram[None], np.asarray(voices))
    row = weighed(judged, voices, masses).weights[0]
    assert row[3] / row[0] == pytest.approx(1.5)
    assert row.sum() == pytest.approx(judged.weights.sum())
