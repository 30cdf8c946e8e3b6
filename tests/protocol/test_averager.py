"""Rounds on the production path: real signatures, real bytes, the network in memory under a virtual clock."""

from collections import Counter
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import trio
from flockstep.collectives.chain.certificate import check_certificate, drawn_for, ranked, verify
from flockstep.collectives.round import actions as agenda
from flockstep.collectives.round.actions import OutcomeKind
from flockstep.peer import wire
from flockstep.peer.errors import RemoteError
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.telemetry import Event
from flockstep.peer.wire.schema import encode
from support.swarm import RUN, Bird, Flock, all_at_once, with_flock

Body = Callable[[Flock], Awaitable[None]]


def fly(count: int, body: Body, *, seed: int = 0, codec: str = "int4", cells: int = 40) -> None:
    run_virtual(lambda: with_flock(count, body, seed=seed, codec=codec, cells=cells), seed=seed)


def kinds(birds: list[Bird]) -> list[OutcomeKind]:
    return [bird.outcomes[-1].kind for bird in birds]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_every_peer_ends_with_the_same_state(count: int) -> None:
    async def body(flock: Flock) -> None:
        await all_at_once(flock.birds, rounds=2)
        assert {kind for bird in flock.birds for kind in (o.kind for o in bird.outcomes)} == {OutcomeKind.DONE}
        assert len({bird.root for bird in flock.birds}) == 1
        assert {bird.outcomes[-1].root for bird in flock.birds} == {flock.birds[0].root}

    fly(count, body)


def test_the_average_is_the_token_weighted_mean_of_what_was_sent() -> None:
    async def body(flock: Flock) -> None:
        tokens = [100, 50, 100, 120]
        before = flock.birds[0].theta.copy()
        async with trio.open_nursery() as nursery:
            for bird, count in zip(flock.birds, tokens, strict=True):
                nursery.start_soon(lambda bird=bird, count=count: bird.round(tokens=count))
        deltas = np.stack([bird.delta(1) for bird in flock.birds]).astype(np.float64)
        mean = (np.array(tokens) / sum(tokens)) @ deltas
        # The first outer step from m = 0: m = g, t = 0.5 g + g, θ moves by 0.8 · 1.5 g.
        moved = (before - flock.birds[0].theta).astype(np.float64) / 1.2
        np.testing.assert_allclose(moved, mean, atol=2e-7)

    fly(4, body, codec="fp32")


def test_the_certificate_convinces_who_was_not_there() -> None:
    async def body(flock: Flock) -> None:
        await all_at_once(flock.birds)
        certificate = flock.birds[0].averager.certificate
        assert certificate is not None
        roster, _, result = check_certificate(certificate, verify)
        assert set(roster.members) == {bird.peer for bird in flock.birds}
        assert result.next_root == flock.birds[0].root
        fewer = wire.Certificate(certificate.slot, certificate.roster, certificate.cut, certificate.acks[:2])
        twice = wire.Certificate(certificate.slot, certificate.roster, certificate.cut, certificate.acks[:1] * 3)
        forged = certificate.acks[0][:-1] + bytes([certificate.acks[0][-1] ^ 1])
        wrong = wire.Certificate(certificate.slot, certificate.roster, certificate.cut, (forged, *certificate.acks[1:]))
        later = wire.Slot(RUN, 2, 0)
        moved = wire.Certificate(later, certificate.roster, certificate.cut, certificate.acks)
        for bad in (fewer, twice, wrong, moved):
            with pytest.raises(RemoteError):
                check_certificate(bad, verify)

    fly(4, body)


def test_a_round_that_was_given_up_does_nothing_any_more() -> None:
    """Its last tasks end before its caller runs again: what the network brings in between finds nobody."""

    async def body(flock: Flock) -> None:
        first = flock.birds[0]
        given_up = trio.CancelScope()

        async def begin() -> None:
            with given_up:
                await first.round()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(begin)
            for bird in flock.birds[1:]:
                nursery.start_soon(bird.round)
            await trio.sleep(0.05)
            attempt = first.averager._attempt
            assert attempt is not None
            given_up.cancel()
        attempt.act([agenda.FetchPart(0, 1, flock.birds[1].peer, bytes(32), 1, 130)])
        assert given_up.cancelled_caught

    fly(4, body)


@pytest.mark.parametrize("seed", range(40))
def test_whoever_fails_whenever_the_survivors_agree_and_go_on(seed: int) -> None:
    """A peer is killed, stalled or cut off at a moment that the seed chooses; then come more rounds."""

    async def body(flock: Flock) -> None:
        rng = np.random.default_rng(seed)
        victim = flock.birds[int(rng.integers(len(flock.birds)))]
        how = ["kill", "stall", "cut"][seed % 3]

        async def strike() -> None:
            await trio.sleep(float(rng.uniform(0, 0.6)))
            flock.gone.add(victim.peer)
            getattr(flock.network, how)(victim.peer)

        async def fly_on(bird: Bird) -> None:
            while bird.averager.round <= 3 and bird.peer not in flock.gone:
                await bird.round()

        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(strike)
                for bird in flock.birds:
                    if bird is not victim:
                        nursery.start_soon(fly_on, bird)
                with trio.move_on_after(30):
                    await fly_on(victim)
        survivors = [bird for bird in flock.birds if bird is not victim]
        assert {bird.averager.round for bird in survivors} == {4}
        assert len({bird.root for bird in survivors}) == 1
        assert {o.kind for bird in survivors for o in bird.outcomes} <= {OutcomeKind.DONE, OutcomeKind.VOID}

    fly(4 + seed % 2, body, seed=seed, cells=8)


def test_who_begins_to_train_while_another_waits_for_the_rest_is_waited_for_as_well() -> None:
    async def body(flock: Flock) -> None:
        order = ranked(wire.Slot(RUN, 1, 0), [bird.peer for bird in flock.birds])
        newcomer, early, *others = sorted(flock.birds, key=lambda bird: order.index(bird.peer))
        everybody = early.averager._active
        early.averager._active = lambda: everybody() - {newcomer.peer}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(early.round)
            await trio.sleep(0.1)
            early.averager._active = everybody
            nursery.start_soon(newcomer.round)
            await trio.sleep(0.1)
            nursery.start_soon(all_at_once, others)
        outcomes = [bird.outcomes[0] for bird in flock.birds]
        assert {(o.kind, o.slot.attempt, o.members) for o in outcomes} == {(OutcomeKind.DONE, 0, order)}

    fly(5, body)


def test_bytes_that_no_codec_wrote_leave_their_sender_out_and_charge_it() -> None:
    async def body(flock: Flock) -> None:
        liar = flock.birds[2]
        put = liar.node.blobs.put

        def spoil(key: bytes, data: bytes, *, readers: object = None) -> None:
            put(key, bytes(len(data)) if readers != [liar.peer] else data, readers=readers)  # type: ignore[arg-type]

        liar.node.blobs.put = spoil  # type: ignore[method-assign, assignment]
        await all_at_once(flock.birds)
        honest = [bird for bird in flock.birds if bird is not liar]
        charges = [event for bird in honest for event in bird.events if event["event"] == "peer.charged"]
        assert {event["peer"] for event in charges} == {liar.peer}
        assert all("hash" in str(event["reason"]) for event in charges)
        for bird in honest:
            assert bird.outcomes[-1].kind is OutcomeKind.VOID or liar.peer not in bird.outcomes[-1].cut

    fly(4, body)


def test_a_word_with_a_wrong_signature_or_carrier_charges_who_brought_it() -> None:
    async def body(flock: Flock) -> None:
        thief, owner, target = flock.birds[:3]
        ready = wire.Ready(wire.Slot(RUN, 1, 0), bytes(32), 1, 1.0, 1.0, bytes(32))
        payload = encode(ready)
        forged = wire.Signed(thief.peer, wire.code_of(ready), payload, bytes(64))
        stolen = wire.Signed(owner.peer, wire.code_of(ready), payload, bytes(64))
        for signed in (forged, stolen):
            thief.node.tell(target.peer, signed)
            await trio.sleep(1)
        charges = [event for event in target.events if event["event"] == "peer.charged"]
        assert [event["peer"] for event in charges] == [thief.peer] * 2
        assert not target.averager.ready()

    fly(3, body)


def test_who_is_not_drawn_for_a_round_is_told_so_at_once() -> None:
    async def body(flock: Flock) -> None:
        (bird,) = flock.birds
        crowd = frozenset(f"12D3KooW{index:044d}" for index in range(200))
        slot = wire.Slot(RUN, 1, 0)
        assert bird.peer not in drawn_for(slot, crowd | {bird.peer})
        bird.averager._active = lambda: crowd
        outcome = await bird.round()
        assert outcome.kind is OutcomeKind.MISSED
        assert "64 of 201" in outcome.reason
        assert trio.current_time() == 0

    fly(1, body)


def test_too_few_members_go_on_training_at_once() -> None:
    async def body(flock: Flock) -> None:
        await all_at_once(flock.birds)
        assert {outcome.kind for bird in flock.birds for outcome in bird.outcomes} == {OutcomeKind.VOID}
        assert "2 members are here, the run asks for 3" in flock.birds[0].outcomes[0].reason
        assert trio.current_time() == 0

    run_virtual(lambda: with_flock(2, body, min_peers=3))


def test_the_same_seed_gives_the_same_trace() -> None:
    def trace(seed: int) -> list[tuple[str, Event]]:
        events: list[tuple[str, Event]] = []

        async def body(flock: Flock) -> None:
            async def strike() -> None:
                await trio.sleep(0.1)
                flock.kill(1)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(strike)
                for bird in (flock.birds[0], *flock.birds[2:]):
                    nursery.start_soon(bird.round)
                with trio.move_on_after(20):
                    await flock.birds[1].round()
            events.extend((bird.peer, event) for bird in flock.birds for event in bird.events)
            events.extend((bird.peer, {"reason": bird.outcomes[-1].reason}) for bird in flock.living())

        fly(5, body, seed=seed, cells=8)
        return events

    assert trace(7) == trace(7)
    assert Counter(str(event) for _, event in trace(7)) != Counter(str(event) for _, event in trace(8))
