"""Ten keys without a vote, each of which may lie, fall silent, be late or leave at any step of an attempt of four voters.

Keys are free: whatever runs out by what they do, such as namings of outputs, words, deadlines or attempts, could be used up.
A seeded search over the machines of a round alone (`support.deeds`): each key has one deed at one step, and a moment for
it, some virtual milliseconds after another's or long after. In each case all honest members end with one certified value of
the first attempt, all honest contributors are in it, none of them is charged, and it takes a bounded number of deadlines.
"""

import random
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import pytest
import trio
from attacks.test_silent import catch_up
from attacks.voters import founded, until_done
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.peer import wire
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.wire.schema import encode
from flockstep.peer.wire.signed import sign
from support.deeds import ALONE, Deed, Lied, Lies, Step, step_of
from support.liars import lies
from support.rounds import PEERS, TIMING
from support.swarm import SimPeer, SimSwarm, identities, with_swarm

VOTERS, HONEST, KEYS = PEERS[:4], PEERS[4:6], PEERS[6:]
DEEDS = "silent", "to some", "twice", "false", "late", "leave", "void", "flap"
GAP = 0.05
DEADLINES = 6 * (TIMING.control + TIMING.transfer) + TIMING.gather
"""The bound on an attempt, in seconds: a deadline, and what follows from it, in GATHER and in each of five phases."""


def deeds_of(seed: int, steps: Collection[str], kinds: Collection[str]) -> Iterator[tuple[str, dict[Step, Deed]]]:
    """Draw what each key does: at one step all of them, at two, or at any; one after the other, or at any moment."""
    draw = random.Random(seed)
    some = draw.sample([*steps], min(draw.choice([1, 1, 2, len(steps)]), len(steps)))
    same = draw.sample(sorted(kinds), min(draw.choice([1, 2, len(kinds)]), len(kinds)))
    for place, key in enumerate(KEYS):
        after = draw.choice([GAP * place, GAP * (1 + place), draw.uniform(0, TIMING.control + TIMING.transfer)])
        yield key, {draw.choice(some): Deed(draw.choice(same), after)}


def run(lies: Lies, *, keep: bool, seed: int = 0) -> Lied:
    """Run one case; with `keep` the voters train nothing. Raises `AssertionError` if the others suffer from it."""
    setups: dict[str, dict[str, Any]] = {peer: {"num_cells": 4 * len(PEERS)} for peer in PEERS}
    for voter in VOTERS if keep else ():
        setups[voter]["tokens"] = 0
    rounds = Lied(PEERS, seed=seed, voters=VOTERS, attempts=2, lies=lies, setups=setups, bans_within=GAP)
    rounds.start(*HONEST)
    rounds.deliver_all()  # Else voters that keep may be Ready before anybody that trains.
    rounds.start(*VOTERS, *KEYS)
    rounds.settle()
    honest = [*VOTERS, *HONEST]
    outcomes = [it for peer in honest if (it := rounds.machines[peer].outcome) is not None]
    reasons = {it.reason for peer in honest for it in rounds.ended[peer] if it.kind is not OutcomeKind.DONE}
    assert {it.kind for it in outcomes} == {OutcomeKind.DONE}, reasons
    assert len({encode(it.value) for it in outcomes}) == 1
    assert outcomes[0].slot.attempt == 0, reasons
    left_out = {*honest} - {*outcomes[0].cut} - ({*VOTERS} if keep else set())
    assert not left_out, f"it left out {left_out}"
    charged = {note.peer for note in rounds.notes if note.event == "peer.charged"} & {*honest}
    assert not charged, f"honest members were charged: {charged}"
    assert rounds.now < DEADLINES, f"it took {rounds.now:.1f} s"
    return rounds


@pytest.mark.parametrize("keep", [False, True], ids=["voters train", "voters keep"])
@pytest.mark.parametrize("seed", [19, 50, *(pytest.param(seed, marks=pytest.mark.explore) for seed in range(19))])
def test_ten_keys_end_no_attempt_whatever_they_do_and_when(seed: int, keep: bool) -> None:
    run(dict(deeds_of(seed, ALONE, DEEDS)), keep=keep, seed=seed)


@pytest.mark.parametrize(
    ("step", "field"),
    [("ready", "idle"), ("commit", "idle"), ("result", "late"), ("second sketch", "unsketched")],
)
def test_who_leaves_is_remembered_like_who_is_silent(step: str, field: str) -> None:
    """A moment before a deadline it costs as much, and it could come back in each round."""
    for kind in ("silent", "leave"):
        key = KEYS[0]
        rounds = run({key: {step: Deed(kind, GAP)}}, keep=False)
        blamed = [getattr(it, field) for peer in VOTERS if (it := rounds.machines[peer].outcome) is not None]
        assert [key in each for each in blamed] == [True] * len(VOTERS), kind


def test_eight_keys_that_give_up_one_after_the_other_use_up_no_naming_and_are_remembered() -> None:
    """None of them sketches after the outputs, and each gives up 50 ms after another one: no round was ever made."""
    ends: list[float] = []

    async def body(swarm: SimSwarm) -> None:
        keeper, honest, liars = swarm.sims[0], swarm.sims[1:6], swarm.sims[6:]
        keeper.trains = False

        async def give_up(liar: SimPeer, place: int, slot: wire.Slot) -> None:
            await trio.sleep(GAP * place)
            liar.node.send([keeper.peer], sign(liar.identity, wire.Void(slot, "it gives up")))

        def begin(liar: SimPeer, place: int, nursery: trio.Nursery) -> None:
            done: set[wire.Slot] = set()

            def lie(peer: str, message: wire.RoundMessage) -> wire.RoundMessage | None:
                if step_of(message) != "second sketch":
                    return message
                if message.slot not in done:
                    done.add(message.slot)
                    nursery.start_soon(give_up, liar, place, message.slot)
                return None

            lies(liar, lie)

        async with trio.open_nursery() as nursery:
            for place, liar in enumerate(liars):
                begin(liar, place, nursery)
            for round_ in (1, 2):
                began = trio.current_time()
                await until_done([*honest, keeper], round_, *liars, within=4.0)
                ends.append(trio.current_time() - began)
                for liar in liars:
                    catch_up(liar, keeper)
            nursery.cancel_scope.cancel()
        assert all({sim.peer for sim in honest} <= {*outcome.cut} for outcome in keeper.outcomes if outcome.certificate)

    charter = founded(1, keepers=frozenset(it.peer_id for it in identities(1)))
    run_virtual(partial(with_swarm, 14, body, cells=17, charter=charter, rule="gramguard"))
    assert ends[0] < 2.0
    assert ends[1] < 1.2
