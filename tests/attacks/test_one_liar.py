"""One member that signs well-formed messages with any content: what it costs is the attempts in which it proposes itself."""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio
from attacks.voters import founded, in_turn, until_done
from flockstep.collectives.accountability.statements import MAX_WORDS
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.collectives.chain.certificate import value_of
from flockstep.peer import wire
from flockstep.peer.memory.network import run_virtual
from support.deeds import ABOUT, Step, step_of
from support.liars import Lie, banned, events_of, lies, lies_about, silent
from support.rounds import PEERS, ConnectedRounds, Mail, order_of, signed
from support.swarm import SimPeer, SimSwarm, identities, with_swarm


def explored(*sizes: int) -> Any:
    return pytest.param(*sizes, marks=pytest.mark.explore)


SIZES = [4, explored(7), explored(10)]
"""One liar of each."""


def run(count: int, lie: Lie, *, proposes: int, rule: str = "mean", attempts: int = 0) -> list[SimPeer]:
    """Make two rounds with a liar that proposes in this attempt of the first; at most so many attempts of it fail."""
    found: list[SimPeer] = []

    async def body(swarm: SimSwarm) -> None:
        order = in_turn(swarm.sims)
        liar = order.pop(proposes)
        lies(liar, lie)
        for round_ in (1, 2):
            await until_done(order, round_, liar, within=120.0)
            attempted = {it.averager.certificate.slot.attempt for it in order if it.averager.certificate is not None}
            assert max(attempted) <= (attempts if round_ == 1 else attempts + 1)
        honest = {sim.peer for sim in order}
        assert not honest & {event["peer"] for event in events_of(order, "peer.charged")}
        assert not any(honest & names for names in banned(order))
        found.extend(order)

    run_virtual(partial(with_swarm, count, body, cells=12, charter=founded(count), rule=rule))
    return found


@pytest.mark.parametrize("count", SIZES)
def test_a_nonce_that_its_owner_has_not_committed_to_voids_no_attempt(count: int) -> None:
    others = run(count, lies_about("nonce", "word", "second word"), proposes=count - 1)
    assert {event["step"] for event in events_of(others, "round.refused")} == {"Have"}
    run(count, lies_about("nonce", "ready"), proposes=count - 1)


@pytest.mark.parametrize("count", SIZES)
def test_a_voter_that_states_another_state_voids_no_attempt(count: int) -> None:
    run(count, lies_about("state", "ready"), proposes=count - 1)


@pytest.mark.parametrize(("voters", "count"), [(4, 10), explored(4, 13), explored(7, 20)])
def test_free_keys_that_own_all_parts_and_are_silent_prevent_no_round(voters: int, count: int) -> None:
    """They claim the fastest lines, and send nothing but their Ready."""

    async def body(swarm: SimSwarm) -> None:
        others = [sim for sim in swarm.sims if sim.peer in charter.founders]
        strangers = [sim for sim in swarm.sims if sim.peer not in charter.founders]
        for sim in strangers:
            lies(sim, lambda peer, message: ABOUT["line"](message) if step_of(message) == "ready" else None)
        await until_done(others, 1, *strangers, within=60.0)
        silent = {event["peer"] for event in events_of(others, "round.silent")}
        assert silent
        await until_done(others, 2, *strangers, within=60.0)
        value = value_of(others[0].averager.certificate)  # type: ignore[arg-type]
        owners = {peer for peer, low, high in zip(value.members, value.bounds, value.bounds[1:]) if low < high}  # noqa: B905
        assert not owners & silent

    keepers = frozenset(identity.peer_id for identity in identities(voters))
    charter = founded(voters, keepers=keepers)
    run_virtual(partial(with_swarm, count, body, cells=40, charter=charter))


WITHHELD = "sketch", "second sketch"
"""What one contributor says no more: sketches after the cut, or those after the outputs."""


@pytest.mark.parametrize(("count", "liars"), [(7, 2), explored(10, 3), explored(13, 4)])
def test_contributors_that_fall_silent_one_in_each_exchange_void_no_attempt(count: int, liars: int) -> None:
    async def body(swarm: SimSwarm) -> None:
        order = in_turn(swarm.sims)
        others, liars_ = order[:-liars], order[-liars:]
        for number, liar in enumerate(liars_):
            lies(liar, silent(WITHHELD[number % len(WITHHELD)]))
        for round_ in (1, 2):
            await until_done(others, round_, *liars_, within=120.0)
        assert {sim.averager.certificate.slot.attempt for sim in others if sim.averager.certificate} == {0}

    run_virtual(partial(with_swarm, count, body, cells=12, charter=founded(count), rule="gramguard"))


@pytest.mark.parametrize(
    "steps", [("word", "second word"), ("sketch",), ("second sketch",)]
)
def test_what_a_key_without_a_vote_tells_the_proposer_alone_costs_the_others_no_deadline(steps: tuple[Step, ...]) -> None:
    """The cut names its word, the words of others its first sketches, and a proposal needs the second: they ask at once."""
    keepers = frozenset(identity.peer_id for identity in identities(4))

    async def body(swarm: SimSwarm) -> None:
        *others, liar = swarm.sims

        def lie(peer: str, message: wire.RoundMessage) -> wire.RoundMessage | None:
            proposer = liar.averager.electorate.proposer(message.slot.round, 0)
            return None if step_of(message) in steps and peer != proposer else message

        lies(liar, lie)
        for round_ in (1, 2):
            began = trio.current_time()
            await until_done(others, round_, liar, within=60.0)
            assert trio.current_time() - began < 2.0  # The shortest deadline, of a virtual clock.

    run_virtual(partial(with_swarm, 7, body, cells=12, charter=founded(4, keepers=keepers), rule="gramguard"))


@pytest.mark.parametrize("floods", [False, True])
@pytest.mark.parametrize("step", ["word", "second word"])
def test_an_owner_that_takes_its_word_back_from_all_but_its_deputy_voids_no_attempt(step: Step, floods: bool) -> None:
    """`floods`: it has said to the others as much as they keep of it, and its true word to the deputy alone."""
    _, _, liar, deputy = order_of(PEERS[:4])

    class OneLiar(ConnectedRounds):
        def post(self, to: Collection[str], mail: Mail, sender: str) -> None:
            have = wire.opened(mail) if isinstance(mail, wire.Signed) and mail.sender == sender == liar else None
            if not isinstance(have, wire.Have) or step_of(have) != step:
                return super().post(to, mail, sender)
            most = 2 * MAX_WORDS if floods else 1
            false = [replace(have, names=bytes([byte]) * len(have.names)) for byte in range(most)]
            if floods:  # Those of another nonce look fit.
                false += [replace(have, nonce=bytes([byte]) * 32) for byte in range(1, 1 + MAX_WORDS)]
            super().post([deputy] if floods else to, mail, sender)
            for word in false:
                super().post([peer for peer in to if peer != deputy], signed(liar, word), sender)
            return None

    for seed in range(2):
        rounds = OneLiar(PEERS[:4], attempts=2, seed=seed)
        rounds.start()
        rounds.settle()
        assert {(it.kind, it.slot.attempt) for it in rounds.outcomes()} == {(OutcomeKind.DONE, 0)}
        assert not rounds.noted("peer.charged")


@pytest.mark.parametrize("place", range(1, 4))
def test_sketches_of_another_size_hide_no_true_ones(place: int) -> None:
    """All but the proposer hear them first: of two statements on one subject the first counts."""
    liar = order_of(PEERS[:4])[place]

    class OneLiar(ConnectedRounds):
        def post(self, to: Collection[str], mail: Mail, sender: str) -> None:
            sketch = wire.opened(mail) if isinstance(mail, wire.Signed) and mail.sender == sender == liar else None
            if isinstance(sketch, wire.Sketch):
                some = [peer for peer in to if peer != order_of(PEERS[:4])[0]]
                super().post(some, signed(liar, replace(sketch, tables=sketch.tables[:-4])), sender)
            super().post(to, mail, sender)

    for seed in range(3):
        rounds = OneLiar(PEERS[:4], attempts=2, seed=seed)
        rounds.start()
        rounds.settle()
        assert {(it.kind, it.slot.attempt) for it in rounds.outcomes()} == {(OutcomeKind.DONE, 0)}
        assert rounds.noted("round.refused") == {liar}
