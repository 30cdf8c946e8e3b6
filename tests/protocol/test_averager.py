"""Rounds on the production path, with a network in memory and a virtual clock."""

from collections import Counter
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import trio
from flockstep.collectives.chain.certificate import check_certificate
from flockstep.collectives.chain.quorum import drawn_for, ranked
from flockstep.collectives.round import actions
from flockstep.collectives.round.actions import OutcomeKind
from flockstep.peer import wire
from flockstep.peer.errors import RemoteError
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.telemetry import Event
from flockstep.peer.wire.schema import encode
from flockstep.peer.wire.signed import verify_signed
from support.swarm import RUN, SimPeer, SimSwarm, all_at_once, with_swarm

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
        assert {sim.outcomes[-1].root for sim in swarm.sims} == {swarm.sims[0].root}

    run_rounds(count, body)


def test_the_average_is_the_token_weighted_mean_of_what_was_sent() -> None:
    async def body(swarm: SimSwarm) -> None:
        tokens = [100, 50, 100, 120]
        before = swarm.sims[0].theta.copy()
        async with trio.open_nursery() as nursery:
            for sim, count in zip(swarm.sims, tokens, strict=True):
                nursery.start_soon(lambda sim=sim, count=count: sim.round(tokens=count))
        deltas = np.stack([sim.delta(1) for sim in swarm.sims]).astype(np.float64)
        mean = (np.array(tokens) / sum(tokens)) @ deltas
        # The first outer step from m = 0: m = g, t = 0.5 g + g, θ moves by 0.8 · 1.5 g.
        moved = (before - swarm.sims[0].theta).astype(np.float64) / 1.2
        np.testing.assert_allclose(moved, mean, atol=2e-7)

    run_rounds(4, body, codec="fp32")


def test_the_certificate_convinces_who_was_not_there() -> None:
    async def body(swarm: SimSwarm) -> None:
        await all_at_once(swarm.sims)
        certificate = swarm.sims[0].averager.certificate
        assert certificate is not None
        roster, _, result = check_certificate(certificate, verify_signed)
        assert set(roster.members) == {sim.peer for sim in swarm.sims}
        assert result.next_root == swarm.sims[0].root
        fewer = wire.Certificate(certificate.slot, certificate.roster, certificate.cut, certificate.acks[:2])
        twice = wire.Certificate(certificate.slot, certificate.roster, certificate.cut, certificate.acks[:1] * 3)
        forged = certificate.acks[0][:-1] + bytes([certificate.acks[0][-1] ^ 1])
        wrong = wire.Certificate(certificate.slot, certificate.roster, certificate.cut, (forged, *certificate.acks[1:]))
        later = wire.Slot(RUN, 2, 0)
        moved = wire.Certificate(later, certificate.roster, certificate.cut, certificate.acks)
        for bad in (fewer, twice, wrong, moved):
            with pytest.raises(RemoteError):
                check_certificate(bad, verify_signed)

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
            await trio.sleep(0.05)
            attempt = first.averager._attempt
            assert attempt is not None
            given_up.cancel()
        attempt.act([actions.FetchPart(0, 1, swarm.sims[1].peer, bytes(32), 1, 130)])
        assert given_up.cancelled_caught

    run_rounds(4, body)


@pytest.mark.parametrize("seed", range(40))
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
        order = ranked(wire.Slot(RUN, 1, 0), [sim.peer for sim in swarm.sims])
        newcomer, early, *others = sorted(swarm.sims, key=lambda sim: order.index(sim.peer))
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
        assert {(o.kind, o.slot.attempt, o.members) for o in outcomes} == {(OutcomeKind.DONE, 0, order)}

    run_rounds(5, body)


def test_bytes_that_no_codec_wrote_leave_their_sender_out_and_charge_it() -> None:
    async def body(swarm: SimSwarm) -> None:
        liar = swarm.sims[2]
        put = liar.node.blobs.put

        def spoil(key: bytes, data: bytes, *, readers: object = None) -> None:
            put(key, bytes(len(data)) if readers != [liar.peer] else data, readers=readers)  # type: ignore[arg-type]

        liar.node.blobs.put = spoil  # type: ignore[method-assign, assignment]
        await all_at_once(swarm.sims)
        honest = [sim for sim in swarm.sims if sim is not liar]
        charges = [event for sim in honest for event in sim.events if event["event"] == "peer.charged"]
        assert {event["peer"] for event in charges} == {liar.peer}
        assert all("hash" in str(event["reason"]) for event in charges)
        for sim in honest:
            assert sim.outcomes[-1].kind is OutcomeKind.VOID or liar.peer not in sim.outcomes[-1].cut

    run_rounds(4, body)


def test_a_word_with_a_wrong_signature_or_carrier_charges_who_brought_it() -> None:
    async def body(swarm: SimSwarm) -> None:
        thief, owner, target = swarm.sims[:3]
        ready = wire.Ready(wire.Slot(RUN, 1, 0), bytes(32), 1, 1.0, 1.0, bytes(32))
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
        (sim,) = swarm.sims
        crowd = frozenset(f"12D3KooW{index:044d}" for index in range(200))
        slot = wire.Slot(RUN, 1, 0)
        assert sim.peer not in drawn_for(slot, crowd | {sim.peer})
        sim.averager._active = lambda: crowd
        outcome = await sim.round()
        assert outcome.kind is OutcomeKind.MISSED
        assert "64 of 201" in outcome.reason
        assert trio.current_time() == 0

    run_rounds(1, body)


def test_too_few_members_go_on_training_at_once() -> None:
    async def body(swarm: SimSwarm) -> None:
        await all_at_once(swarm.sims)
        assert {outcome.kind for sim in swarm.sims for outcome in sim.outcomes} == {OutcomeKind.VOID}
        assert "2 members are here, the run asks for 3" in swarm.sims[0].outcomes[0].reason
        assert trio.current_time() == 0

    run_virtual(lambda: with_swarm(2, body, min_peers=3))


def test_the_same_seed_gives_the_same_trace() -> None:
    def trace(seed: int) -> list[tuple[str, Event]]:
        events: list[tuple[str, Event]] = []

        async def body(swarm: SimSwarm) -> None:
            async def strike() -> None:
                await trio.sleep(0.1)
                swarm.kill(1)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(strike)
                for sim in (swarm.sims[0], *swarm.sims[2:]):
                    nursery.start_soon(sim.round)
                with trio.move_on_after(20):
                    await swarm.sims[1].round()
            events.extend((sim.peer, event) for sim in swarm.sims for event in sim.events)
            events.extend((sim.peer, {"reason": sim.outcomes[-1].reason}) for sim in swarm.living())

        run_rounds(5, body, seed=seed, cells=8)
        return events

    assert trace(7) == trace(7)
    assert Counter(str(event) for _, event in trace(7)) != Counter(str(event) for _, event in trace(8))
