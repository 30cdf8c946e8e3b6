"""One member that signs well-formed messages with any content: what it costs is the attempts in which it proposes itself."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio
from attacks.voters import founded, in_turn, until_done
from flockstep.collectives.chain.certificate import open_value, value_hash, value_of
from flockstep.collectives.round import collect
from flockstep.dht.run.admission import Charter
from flockstep.peer import wire
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.wire.schema import encode
from support.liars import Lie, banned, events_of, lies
from support.rounds import PEERS, SLOT, Rounds, a_ready, electorate, order_of, signed
from support.swarm import SimPeer, SimSwarm, identities, with_swarm

JUNK = b"x" * 32


def changed(kind: type, change: Callable[[Any], Any] | None = None, **fields: Any) -> Lie:
    """Return a lie: all messages of a kind are changed."""

    def lie(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
        if not isinstance(message, kind):
            return message
        return replace(message, **fields) if change is None else change(message)

    return lie


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
            ballots = {it.averager.certificate.slot.ballot for it in order if it.averager.certificate is not None}
            assert max(ballots) <= (0, attempts if round_ == 1 else attempts + 1)
        honest = {sim.peer for sim in order}
        assert not honest & {event["peer"] for event in events_of(order, "peer.charged")}
        assert not any(honest & names for names in banned(order))
        found.extend(order)

    run_virtual(partial(with_swarm, count, body, cells=12, charter=founded(count), rule=rule))
    return found


@pytest.mark.parametrize("count", SIZES)
def test_a_nonce_that_its_owner_has_not_committed_to_voids_no_attempt(count: int) -> None:
    others = run(count, changed(wire.Have, nonce=JUNK), proposes=count - 1)
    assert {event["step"] for event in events_of(others, "round.refused")} == {"Have"}
    run(count, changed(wire.Ready, nonce_hash=JUNK), proposes=count - 1)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("rule", ["mean", "gramguard"])
def test_an_owner_that_states_other_weights_voids_no_attempt(count: int, rule: str) -> None:
    lie = changed(wire.Result, lambda result: replace(result, weights=(0.0,) * len(result.weights)))
    others = run(count, lie, proposes=count - 1, rule=rule)
    assert {event["step"] for event in events_of(others, "round.refused")} == {"Result"}


@pytest.mark.parametrize("count", SIZES)
def test_a_voter_that_states_another_state_voids_no_attempt(count: int) -> None:
    run(count, changed(wire.Ready, base_root=JUNK), proposes=count - 1)


@pytest.mark.parametrize(("voters", "count"), [(4, 10), explored(4, 13), explored(7, 20)])
def test_free_keys_that_own_all_parts_and_are_silent_prevent_no_round(voters: int, count: int) -> None:
    """They claim the fastest lines, and send nothing but their Ready."""

    async def body(swarm: SimSwarm) -> None:
        others = [sim for sim in swarm.sims if sim.peer in charter.founders]
        strangers = [sim for sim in swarm.sims if sim.peer not in charter.founders]
        for sim in strangers:
            lies(sim, lambda peer, message: replace(message, upload=1e15) if isinstance(message, wire.Ready) else None)
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


def silent_after_cut(liar: SimPeer, number: int) -> None:
    """Let a contributor withhold its sketches of the cut of this version."""

    def lie(peer: str, message: wire.RoundMessage) -> Any:
        if not isinstance(message, wire.Sketch) or message.outputs or liar.averager._attempt is None:
            return message
        cut = liar.averager._attempt.machine.exchange.cut
        return None if cut is not None and cut.version == number else message

    lies(liar, lie)


@pytest.mark.parametrize(("count", "liars"), [(7, 2), explored(10, 3), explored(13, 4)])
def test_contributors_that_fall_silent_one_after_each_cut_void_one_attempt_and_not_all(count: int, liars: int) -> None:
    async def body(swarm: SimSwarm) -> None:
        order = in_turn(swarm.sims)
        others, liars_ = order[:-liars], order[-liars:]
        for number, liar in enumerate(liars_):
            silent_after_cut(liar, number)
        for round_ in (1, 2):
            await until_done(others, round_, *liars_, within=120.0)
        assert {sim.averager.certificate.slot.attempt for sim in others if sim.averager.certificate} == {0}

    run_virtual(partial(with_swarm, count, body, cells=12, charter=founded(count), rule="gramguard"))


def test_keys_that_were_in_one_cut_use_up_no_recuts_beside_members_of_many_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collect, "KNOWN_ROUNDS", (3, 1))

    async def body(swarm: SimSwarm) -> None:
        order = in_turn(swarm.sims)
        others, liars = order[:-3], order[-3:]
        for round_ in (1, 2, 3, 4):
            async with trio.open_nursery() as nursery:
                for liar in liars[: 3 * (round_ < 4)]:
                    nursery.start_soon(lambda liar=liar, round_=round_: liar.round(tokens=100 * (round_ == 3)))
                await until_done(others, round_, *liars[3 * (round_ < 4) :], within=120.0)
            if round_ == 3:
                for number, liar in enumerate(liars):
                    silent_after_cut(liar, number)
        certificate = others[0].averager.certificate
        assert certificate is not None
        value = value_of(certificate)
        rounds = {peer: seat.rounds for peer, seat in zip(value.members, value.seats, strict=True)}
        assert {rounds[liar.peer] for liar in liars} == {1}
        assert {sim.averager.certificate.slot.attempt for sim in others if sim.averager.certificate} == {0}
        assert len(value.contributors) == len(others)

    run_virtual(partial(with_swarm, 10, body, cells=12, charter=founded(10), rule="gramguard"))


def test_a_false_output_that_nobody_offers_and_one_accepts_is_refused_and_ends_no_process() -> None:
    """A proposer withholds the output of its part, and accepts a value with a false one: the others fetch it there."""
    liar, false = order_of(PEERS[:4])[0], b"f" * 32

    def lie(peer: str, message: Any) -> Any:
        if peer == liar and isinstance(message, wire.Propose):
            value = open_value(message.value)
            return replace(message, value=encode(replace(value, outputs=(false, *value.outputs[1:]))))
        if peer == liar and isinstance(message, wire.Prevote):
            return replace(message, value=next(value_hash(said.value) for said in rounds.messages(wire.Propose)))
        return message

    def lost(target: str, mail: Any) -> bool:
        message = wire.opened(mail) if isinstance(mail, wire.Signed) else mail
        return isinstance(message, wire.Result) and message.part == 0 and target != liar

    rounds = Rounds(PEERS[:4], false={false}, tampered=lie, lost=lost)
    rounds.start()
    rounds.settle()
    assert rounds.noted("round.output_false") == {liar}


@pytest.mark.parametrize("count", [4, 7, 10])
def test_a_ready_for_a_later_term_spoils_no_proposal_of_a_proven_value(count: int) -> None:
    """The value of attempt 0 has a proof and no decision. The next proposer shows the Readys of its own attempt."""
    peers = PEERS[:count]
    liar = electorate(peers).proposer(1, count - 1)

    def lost(target: str, mail: Any) -> bool:
        message = wire.opened(mail) if isinstance(mail, wire.Signed) else None
        return isinstance(message, wire.Precommit) and message.slot.attempt == 0

    rounds = Rounds(list(peers), attempts=count, lost=lost, charter=Charter(stall="wait"))
    rounds.start()
    rounds.post(peers, signed(liar, a_ready(slot=SLOT.at(1, 0))), liar)
    rounds.settle()
    assert {outcome.slot.ballot for outcome in rounds.outcomes() if outcome.certificate} == {(0, 1)}
    honest = [rounds.machines[peer].outcome for peer in peers if peer != liar]
    assert all(outcome is not None and outcome.certificate for outcome in honest)
    assert not rounds.noted("peer.charged")
