"""Rounds on the production path, with a network in memory and a virtual clock."""

from collections.abc import Awaitable, Callable
from itertools import pairwise
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from flockstep.collectives.agreement.actions import Note
from flockstep.collectives.allreduce import actions
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.collectives.chain.kept_outputs import index_of
from flockstep.collectives.chain.quorum import drawn_for
from flockstep.collectives.driver.contribution import Averaged
from flockstep.collectives.driver.hints import SENDERS
from flockstep.collectives.driver.work import Work
from flockstep.collectives.vector.codec import CELL
from flockstep.dht.run.admission import Charter
from flockstep.peer import wire
from flockstep.peer.log.telemetry import Event
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.node.bulk import Blob
from flockstep.peer.wire.schema import encode
from support.swarm import RUN, SimPeer, SimSwarm, all_at_once, identities, with_swarm

Body = Callable[[SimSwarm], Awaitable[None]]


def run_rounds(count: int, body: Body, *, seed: int = 0, codec: str = "int4", cells: int = 40) -> None:
    run_virtual(lambda: with_swarm(count, body, seed=seed, codec=codec, cells=cells), seed=seed)


def kinds(sims: list[SimPeer]) -> list[OutcomeKind]:
    return [sim.outcomes[-1].kind for sim in sims]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_every_peer_ends_with_the_same_state(count: int) -> None:
    async def body(swarm: SimSwarm) -> None:
        await all_at_once(swarm.sims, rounds=2)
        assert {kind for sim in swarm.sims for kind in (o.kind for o in sim.outcomes)} == {OutcomeKind.DONE}
        assert len({sim.root for sim in swarm.sims}) == 1
        assert {sim.outcomes[-1].value.next_root for sim in swarm.sims} == {swarm.sims[0].root}

    run_rounds(count, body)


def test_the_average_is_the_token_weighted_mean_of_what_was_sent() -> None:
    async def body(swarm: SimSwarm) -> None:
        tokens = [100, 50, 100, 120]
        before = swarm.sims[0].theta.copy()
        async with trio.open_nursery() as nursery:
            for sim, count in zip(swarm.sims, tokens, strict=True):
                nursery.start_soon(lambda sim=sim, count=count: sim.round(tokens=count))
        deltas = np.stack([sim.delta(1) for sim in swarm.sims]).astype(np.float64)
        weights = np.tile(np.array(tokens, np.float64), (4, 1))
        mean, ((bounds, members),) = np.zeros(deltas.shape[1]), {
            (outcome.value.bounds, outcome.members) for sim in swarm.sims for outcome in sim.outcomes
        }
        places = [members.index(sim.peer) for sim in swarm.sims]
        for part, (low, high) in enumerate(pairwise(bounds)):  # What the holder contributes to it itself weighs nothing.
            weights[part, places.index(part)] = 0.0
            mean[low * CELL : high * CELL] = (weights[part] / weights[part].sum() @ deltas)[low * CELL : high * CELL]
        # The first outer step from m = 0: m = g, t = 0.5 g + g, θ moves by 0.8 · 1.5 g.
        moved = (before - swarm.sims[0].theta).astype(np.float64) / 1.2
        np.testing.assert_allclose(moved, mean, atol=2e-7)

    run_rounds(4, body, codec="fp32")


def certificates_at(sim: SimPeer) -> list[str]:
    """Return a list that fills with the carriers of the certificates that a peer receives."""
    carriers: list[str] = []

    def receive(carrier: str, certificate: wire.Certificate) -> None:
        carriers.append(carrier)
        sim.averager._receive_certificate(carrier, certificate)

    sim.node.on_message(wire.Certificate, receive)
    return carriers


def test_a_keeper_that_takes_part_is_sent_no_certificate() -> None:
    """It is in no cut, but all Precommits arrive: it makes the certificate itself."""

    async def body(swarm: SimSwarm) -> None:
        carriers = certificates_at(swarm.sims[-1])
        async with trio.open_nursery() as nursery:
            for number, sim in enumerate(swarm.sims):
                nursery.start_soon(lambda sim=sim, number=number: sim.round(tokens=100 * (number < 5)))
        assert [sim.outcomes[-1].kind for sim in swarm.sims] == [OutcomeKind.DONE] * 6
        assert swarm.sims[-1].peer not in swarm.sims[0].outcomes[-1].cut
        assert carriers == []

    run_rounds(6, body)


def test_a_late_member_is_answered_by_a_few_with_the_certificate() -> None:
    async def body(swarm: SimSwarm) -> None:
        late, others = swarm.sims[-1], swarm.sims[:-1]
        late.node.on_message(wire.Signed, lambda carrier, signed: None)  # Nothing of the round reaches it.
        await all_at_once(others)
        await trio.sleep(1.0)
        late.node.on_message(wire.Signed, late.averager._receive)
        carriers = certificates_at(late)
        await late.round()
        assert len(carriers) == len(set(carriers)) == SENDERS < len(others)
        assert late.outcomes[-1].kind is OutcomeKind.DONE
        assert late.root == others[0].root

    run_virtual(lambda: with_swarm(8, body))


def test_a_certificate_that_arrives_while_no_attempt_runs_is_kept_for_the_replay() -> None:
    async def body(swarm: SimSwarm) -> None:
        late, others = swarm.sims[-1], swarm.sims[:-1]
        late.node.on_message(wire.Signed, lambda carrier, signed: None)  # Nothing of the round reaches it.
        await all_at_once(others)
        certificate = others[0].averager.certificate
        assert certificate is not None
        others[0].node.send(late.peer, certificate)
        await trio.sleep(1.0)
        assert late.averager.behind
        assert late.averager.decided == certificate

    run_rounds(4, body)


def test_a_round_that_was_given_up_does_nothing_any_more() -> None:
    """Its last tasks end before its caller runs again: what the network brings in between finds nobody."""

    async def body(swarm: SimSwarm) -> None:
        first = swarm.sims[0]
        given_up = trio.CancelScope()

        async def begin() -> None:
            with given_up:
                await first.round()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(begin)
            for sim in swarm.sims[1:]:
                nursery.start_soon(sim.round)
            await trio.sleep(0.2)  # It has a roster.
            attempt = first.averager._work
            assert attempt is not None
            attempt.nursery.start_soon(report_late, attempt)
            given_up.cancel()
        assert not [event for event in first.events if event["event"] == "round.silent"]
        attempt.act([actions.FetchPart(0, swarm.sims[1].peer, bytes(32), 1, 130, contributor=1)])
        assert given_up.cancelled_caught

    run_rounds(4, body)


async def compute() -> None:
    """Computes in a thread, which nobody can cancel: the attempt that it is for ends when the others are in the next one."""
    with trio.CancelScope(shield=True):
        await trio.sleep(1.0)


async def report_late(attempt: Work) -> None:
    await compute()
    attempt._done(lambda exchange: [Note("round.silent", attempt.node.peer_id, "reduce", "a result for nobody")])


async def rounds(sim: SimPeer, count: int) -> None:
    for _ in range(count):
        await sim.round()


def test_readys_that_come_while_the_work_of_a_void_attempt_ends_count_in_the_next() -> None:
    async def body(swarm: SimSwarm) -> None:
        proposer = swarm.sims[0].averager.electorate.proposer(1, 1)
        async with trio.open_nursery() as nursery:
            for sim in swarm.sims:
                nursery.start_soon(rounds, sim, 2)
            await trio.sleep(0.05)
            for sim in swarm.sims:
                attempt = sim.averager._work
                assert attempt is not None
                if sim.peer == proposer:
                    attempt.nursery.start_soon(compute)
                attempt.act(attempt.machine.give_up("a fault", trio.current_time()))
        assert kinds(swarm.sims) == [OutcomeKind.DONE] * 4
        assert {sim.outcomes[-1].slot.attempt for sim in swarm.sims} == {1}

    run_rounds(4, body)


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("slow", [0, 1])
def test_readys_that_come_while_the_work_of_the_last_round_ends_count_in_the_next(count: int, slow: int) -> None:
    async def body(swarm: SimSwarm) -> None:
        async with trio.open_nursery() as nursery:
            for sim in swarm.sims:
                nursery.start_soon(rounds, sim, 3)
            await trio.sleep(0.01)
            attempt = swarm.sims[slow].averager._work
            assert attempt is not None
            attempt.nursery.start_soon(compute)
        slots = [(outcome.slot.round, outcome.slot.attempt) for sim in swarm.sims for outcome in sim.outcomes]
        assert slots == [(1, 0), (2, 0), (3, 0)] * count

    run_rounds(count, body)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.explore) for seed in range(6, 40))])
def test_whoever_fails_whenever_the_survivors_agree_and_go_on(seed: int) -> None:
    """A peer is killed, stalled or cut off at a moment that the seed chooses; then come more rounds."""

    async def body(swarm: SimSwarm) -> None:
        rng = np.random.default_rng(seed)
        victim = swarm.sims[int(rng.integers(len(swarm.sims)))]
        how = ["kill", "stall", "cut"][seed % 3]

        async def strike() -> None:
            await trio.sleep(float(rng.uniform(0, 0.6)))
            swarm.gone.add(victim.peer)
            getattr(swarm.network, how)(victim.peer)

        async def run_on(sim: SimPeer) -> None:
            while sim.averager.round <= 3 and sim.peer not in swarm.gone:
                await sim.round()

        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(strike)
                for sim in swarm.sims:
                    if sim is not victim:
                        nursery.start_soon(run_on, sim)
                with trio.move_on_after(30):
                    await run_on(victim)
        survivors = [sim for sim in swarm.sims if sim is not victim]
        assert {sim.averager.round for sim in survivors} == {4}
        assert len({sim.root for sim in survivors}) == 1
        assert {o.kind for sim in survivors for o in sim.outcomes} <= {OutcomeKind.DONE, OutcomeKind.VOID}

    run_rounds(4 + seed % 2, body, seed=seed, cells=8)


def test_who_begins_to_train_while_another_waits_for_the_rest_is_waited_for_as_well() -> None:
    async def body(swarm: SimSwarm) -> None:
        newcomer, early, *others = swarm.sims
        everybody = early.averager._active
        early.averager._active = lambda: everybody() - {newcomer.peer}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(early.round)
            await trio.sleep(0.1)
            early.averager._active = everybody
            nursery.start_soon(newcomer.round)
            await trio.sleep(0.1)
            nursery.start_soon(all_at_once, others)
        outcomes = [sim.outcomes[0] for sim in swarm.sims]
        everyone = frozenset(sim.peer for sim in swarm.sims)
        assert {(o.kind, o.slot.attempt, frozenset(o.members)) for o in outcomes} == {
            (OutcomeKind.DONE, 0, everyone)
        }

    run_rounds(5, body)


def test_a_word_with_a_wrong_signature_or_carrier_charges_who_brought_it() -> None:
    async def body(swarm: SimSwarm) -> None:
        thief, owner, target = swarm.sims[:3]
        ready = wire.Ready(wire.Slot(RUN, 1, bytes(32)), bytes(32), 1, 1.0, 1.0, bytes(32))
        payload = encode(ready)
        forged = wire.Signed(thief.peer, wire.code_of(ready), payload, bytes(64))
        stolen = wire.Signed(owner.peer, wire.code_of(ready), payload, bytes(64))
        for signed in (forged, stolen):
            thief.node.send(target.peer, signed)
            await trio.sleep(1)
        charges = [event for event in target.events if event["event"] == "peer.charged"]
        assert [event["peer"] for event in charges] == [thief.peer] * 2
        assert not target.averager.ready()

    run_rounds(3, body)


def test_who_is_not_drawn_for_a_round_is_told_so_at_once() -> None:
    async def body(swarm: SimSwarm) -> None:
        _, sim = swarm.sims  # The founder, which votes, is always drawn.
        crowd = frozenset(f"12D3KooW{index:044d}" for index in range(4000))
        assert sim.peer not in drawn_for(sim.averager._slot, crowd | {sim.peer}, (), ())
        sim.averager._active = lambda: crowd
        outcome = await sim.round()
        assert outcome.kind is OutcomeKind.MISSED
        assert "1000 of 4001" in outcome.reason
        assert trio.current_time() == 0

    run_virtual(lambda: with_swarm(2, body, charter=Charter(founders=frozenset({identities(1)[0].peer_id}))))


def test_who_only_contributes_has_sessions_with_those_that_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_PARTS", 5)

    async def body(swarm: SimSwarm) -> None:
        everybody = frozenset(sim.peer for sim in swarm.sims)
        partners = {sim.peer: sim.averager.partners() for sim in swarm.sims}
        judges = {peer for peer, mine in partners.items() if mine == everybody}
        assert len(judges) == 5
        assert judges > {sim.peer for sim in swarm.sims[:4]}
        assert {mine for peer, mine in partners.items() if peer not in judges} == {frozenset(judges)}
        await all_at_once(swarm.sims)
        assert {*swarm.sims[0].outcomes[0].members[:5]} == judges

    founders = frozenset(identity.peer_id for identity in identities(4))
    run_virtual(lambda: with_swarm(9, body, charter=Charter(founders=founders)))


def test_too_few_members_go_on_training_at_once() -> None:
    async def body(swarm: SimSwarm) -> None:
        await all_at_once(swarm.sims)
        assert {outcome.kind for sim in swarm.sims for outcome in sim.outcomes} == {OutcomeKind.VOID}
        assert "2 members are here, the run asks for 3" in swarm.sims[0].outcomes[0].reason
        assert trio.current_time() == 0

    run_virtual(lambda: with_swarm(2, body, min_peers=3))


def test_outputs_are_on_the_disk_before_their_value_is_accepted(tmp_path: Path) -> None:
    """Else a power cut may leave the proof of a value and no copy of its bytes, and nothing else may be decided then."""
    written: list[bool] = []

    def hook(swarm: SimSwarm, sim: SimPeer, event: Event) -> None:
        if event["event"] == "round.said" and event["step"] == "Prevote":
            files = (tmp_path / sim.peer / "outputs" / str(event["round"])).glob("[!.]*")  # No drafts.
            written.append([len(index_of(file).keys) for file in files] == [len(swarm.sims)])

    async def body(swarm: SimSwarm) -> None:
        await all_at_once(swarm.sims)
        assert kinds(swarm.sims) == [OutcomeKind.DONE] * 3

    run_virtual(lambda: with_swarm(3, body, home=(tmp_path, 10), hook=hook))
    assert written == [True] * 3


def test_a_value_of_an_earlier_attempt_comes_with_the_parts_that_i_sent_in_it() -> None:
    """Error feedback needs them; the attempt that decides it moves no data."""
    ended: list[Averaged] = []

    async def body(swarm: SimSwarm) -> None:
        for sim in swarm.sims:
            send, average = sim.node.send, sim.averager.average

            def lossy(to: object, message: object, *, send: Callable[..., None] = send) -> None:
                said = wire.opened(message) if isinstance(message, wire.Signed) else None
                if not (isinstance(said, wire.Precommit) and said.slot.attempt == 0):
                    send(to, message)

            async def spied(contribution: Any, root: Any, *, average: Callable[..., Any] = average) -> Averaged:
                ended.append(await average(contribution, root))
                return ended[-1]

            sim.node.send = lossy  # type: ignore[method-assign, assignment]
            sim.averager.average = spied  # type: ignore[assignment, method-assign]
        await all_at_once(swarm.sims)
        assert kinds(swarm.sims) == [OutcomeKind.VOID] * 3
        await all_at_once(swarm.sims)
        assert kinds(swarm.sims) == [OutcomeKind.DONE] * 3
        assert len({sim.root for sim in swarm.sims}) == 1
        assert [len(averaged.mine) for averaged in ended[3:]] == [3] * 3
        commits = [
            event for event in swarm.sims[0].events if (event["event"], event.get("step")) == ("round.said", "Commit")
        ]
        assert len(commits) == 1

    run_rounds(3, body)


def test_contributions_beyond_the_limit_of_an_owner_lie_in_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("flockstep.collectives.driver.work.memory_for_parts", lambda own: own // 2)  # 2.5 parts of 5.
    held: dict[str, dict[tuple[int, int], Blob]] = {}

    def hook(swarm: SimSwarm, sim: SimPeer, event: Event) -> None:
        if event["event"] == "round.said" and sim.averager._work is not None:
            held[sim.peer] = sim.averager._work.parts

    async def body(swarm: SimSwarm) -> None:
        await all_at_once(swarm.sims)
        assert kinds(swarm.sims) == [OutcomeKind.DONE] * 5
        assert len({sim.root for sim in swarm.sims}) == 1

    run_virtual(lambda: with_swarm(5, body, hook=hook, home=(tmp_path, 10)))
    for parts in held.values():
        assert len(parts) == 5
        assert sum(isinstance(data, memoryview) and isinstance(data.obj, mmap) for data in parts.values()) == 2
    assert len(held) == 5
