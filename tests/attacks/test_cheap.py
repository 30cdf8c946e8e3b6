"""Cheap attacks: each costs its author its contribution, and the others at most one attempt."""

import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio
from attacks.voters import founded, in_turn, until_done
from flockstep.collectives.allreduce import actions
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.collectives.vector.codec import EMPTY
from flockstep.dht.run.admission import Charter, Invitation, Ticket
from flockstep.peer import wire
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import NetworkError, ProtocolViolation, StreamClosed
from flockstep.peer.identity import Identity
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.node import bulk, session
from flockstep.peer.node.guard import BURST, MAX_BUDGETS, Cost, Guard, Standing
from flockstep.peer.quota.origins import NOWHERE
from flockstep.peer.wire.signed import sign
from support.liars import banned, events_of, lies, to_some
from support.recorded import recorded
from support.swarm import RUN, SimPeer, SimSwarm, all_at_once, identities, with_swarm

Body = Callable[[SimSwarm], Awaitable[None]]


def run_rounds(count: int, body: Body, *, codec: str = "int4", seed: int = 0, **options: Any) -> None:
    charter = options.pop("charter", founded(count))
    run_virtual(partial(with_swarm, count, body, cells=12, codec=codec, seed=seed, charter=charter, **options), seed=seed)


@pytest.mark.parametrize("protocol", [session.SESSION_PROTOCOL, bulk.BULK_PROTOCOL])
@pytest.mark.parametrize(
    "garbage", [os.urandom(3000), b"\xff\xff\xff\xff", b"\x00\x00\x00\x01", b"\x00\x00\x00\x06\x00\x00\x00\x00\x00\xff"]
)
def test_garbage_and_huge_lengths_end_a_stream_and_nothing_else(protocol: str, garbage: bytes) -> None:
    async def body(swarm: SimSwarm) -> None:
        attacker, target, *_ = swarm.sims
        await attacker.node.transport.connect(target.peer, target.node.transport.addresses())
        for _ in range(3):
            stream = await attacker.node.transport.open_stream(target.peer, protocol)
            await stream.send_all(garbage)
            await trio.sleep(1)
        await until_done(swarm.sims[1:], 1, attacker)

    run_rounds(4, body)


def test_a_budget_grows_again_and_strangers_take_a_bounded_memory() -> None:
    telemetry, events = recorded(clock=lambda: 0.0)
    keeper = Guard(telemetry)
    for _ in range(BURST):
        keeper.take("peer", Cost(messages=1), 0.0, NOWHERE, Standing.MEMBER)
    with pytest.raises(ProtocolViolation):
        keeper.take("peer", Cost(messages=1), 0.0, NOWHERE, Standing.MEMBER)
    for _ in range(9):
        with pytest.raises(StreamClosed):
            keeper.take("peer", Cost(messages=1), 0.0, NOWHERE, Standing.MEMBER)
    keeper.take("peer", Cost(messages=1), 1.0, NOWHERE, Standing.MEMBER)
    keeper.take("other", Cost(messages=1), 1.0, NOWHERE, Standing.MEMBER)
    for number in range(3 * MAX_BUDGETS):
        keeper.take(str(number), Cost(messages=1), 2.0, NOWHERE, Standing.MEMBER)
    assert len(keeper._budgets) <= MAX_BUDGETS
    keeper.ban("peer", "why")
    with pytest.raises(StreamClosed, match="banned"):
        keeper.take("peer", Cost(messages=1), 100.0, NOWHERE, Standing.MEMBER)
    assert keeper.refuses("peer")
    assert keeper.refuses("peer")
    assert not keeper.refuses("other")
    assert [event["event"] for event in events] == ["peer.refused"]


def test_words_of_another_run_charge_who_carries_them() -> None:
    async def body(swarm: SimSwarm) -> None:
        attacker, author, target, *_ = swarm.sims
        word = wire.Ready(wire.Slot("b" * 52, 1, bytes(32)), bytes(32), 1, 1.0, 1.0, bytes(32))
        attacker.node.send(target.peer, sign(author.identity, word))
        await trio.sleep(1)
        assert [event["peer"] for event in events_of([target], "peer.charged")] == [attacker.peer]
        assert not target.averager.ready()

    run_rounds(4, body)


def test_who_delivers_to_all_but_one_splits_nobody() -> None:
    """The one cannot sum its part, so its deputies do; what it then lacks it fetches from who has signed the result."""

    async def body(swarm: SimSwarm) -> None:
        liar, denied, *others = in_turn(swarm.sims)[::-1]
        find = liar.node.blobs.find
        liar.node.blobs.find = lambda key, reader: None if reader == denied.peer else find(key, reader)  # type: ignore[method-assign]
        await until_done(others, 1, liar, denied)
        assert len({sim.outcomes[-1].cut for sim in others}) == 1
        assert not any(banned([denied, *others]))

    run_rounds(5, body)


@pytest.mark.parametrize("delay", [1.9, 3.9, 5.9, 7.9])
def test_who_delivers_at_the_last_moment_splits_nobody(delay: float) -> None:
    async def body(swarm: SimSwarm) -> None:
        liar, *others = in_turn(swarm.sims)[::-1]
        send = liar.node._bulk._send

        async def late(stream: Any, request: wire.Fetch) -> None:
            attempt = liar.averager._attempt
            mine = {digest(part) for part in attempt.work.mine} if attempt is not None else set()
            await trio.sleep(delay if request.hash in mine else 0)
            await send(stream, request)

        liar.node._bulk._send = late  # type: ignore[method-assign]
        await until_done(others, 2, liar)
        assert len({sim.outcomes[0].cut for sim in others}) == 1
        assert not any(banned(others))

    run_rounds(5, body)


def test_another_peers_contribution_cannot_be_had_before_the_cut() -> None:
    """Who commits to a victim's hashes has nothing to deliver: each part is served to its owner and two deputies only."""

    async def body(swarm: SimSwarm) -> None:
        thief, victim, *others = in_turn(swarm.sims)[::-1]
        stolen: list[bytes] = []
        held: list[tuple[str, wire.Commit]] = []

        def lie(peer: str, message: wire.RoundMessage) -> wire.RoundMessage | None:
            if isinstance(message, wire.Commit) and not stolen:
                held.append((peer, message))
                return None
            return message

        told = thief.node.send
        lies(thief, lie)

        async def steal() -> None:
            while not (held and victim.averager._attempt and victim.averager._attempt.work.mine):  # noqa: ASYNC110
                await trio.sleep(0.01)  # Virtual time.
            stolen.extend(digest(part) for part in victim.averager._attempt.work.mine)
            for peer, message in held:
                told(peer, sign(thief.identity, replace(message, parts=tuple(stolen))))
            got = 0
            for key, part in zip(stolen, victim.averager._attempt.work.mine, strict=True):
                try:
                    thief.node.blobs.put(key, await thief.node.fetch(victim.peer, key, len(part)))
                    got += 1
                except NetworkError:
                    pass
            assert got <= 3  # Its own part, and those of the two for whom it stands in: of ten.

        async with trio.open_nursery() as nursery:
            nursery.start_soon(steal)
            await until_done([victim, *others], 1, thief)
        cut = victim.outcomes[-1].cut
        assert victim.peer in cut
        assert thief.peer not in cut

    run_rounds(10, body)


@pytest.mark.parametrize(
    ("seats", "reason"),
    [
        ((wire.Seat(1.0, 20), *[wire.Seat(0.1, 0)] * 4), "states a trust of"),
        ((wire.Seat(1.0, 0, b"another's"),) * 5, "it misquotes the Ready"),
        ((wire.Seat(1.0, 0), *[wire.Seat(1.0, 0, is_leaving=True)] * 4), "it misquotes the Ready"),
    ],
)
def test_a_proposer_that_misstates_what_others_have_or_said_is_not_followed(
    seats: tuple[wire.Seat, ...], reason: str
) -> None:
    async def body(swarm: SimSwarm) -> None:
        liar, *others = in_turn(swarm.sims)
        lies(liar, to_some(others, wire.Roster, seats=seats))
        await until_done(others, 1, liar)
        refused = events_of(others, "round.roster_refused")
        assert {event["peer"] for event in refused} == {liar.peer}
        assert all(reason in str(event["reason"]) for event in refused)

    run_rounds(5, body)


@pytest.mark.parametrize("withholding", [1, 3])
def test_who_gets_no_output_from_its_owner_gets_it_from_a_deputy_or_from_who_has_accepted_it(withholding: int) -> None:
    """Its owner withholds it, or its owner and both deputies do: then one that accepts the value provides it."""

    async def body(swarm: SimSwarm) -> None:
        owner, other, two, denied, one = in_turn(swarm.sims)
        liars = [owner, one, two][:withholding]

        def withhold(liar: SimPeer) -> None:
            find = liar.node.blobs.find

            def of_a_part_only(key: bytes, reader: str) -> Any:
                attempt = liar.averager._attempt
                mine = {digest(part) for part in attempt.work.mine} if attempt is not None else set()
                return find(key, reader) if reader != denied.peer or key in mine else None

            liar.node.blobs.find = of_a_part_only  # type: ignore[method-assign]

        for liar in liars:
            withhold(liar)
        async with trio.open_nursery() as nursery:
            for sim in swarm.sims:
                nursery.start_soon(sim.round)
        assert {sim.outcomes[0].kind for sim in [denied, other]} == {OutcomeKind.DONE}
        roster = tuple(sim.peer for sim in (owner, one, two, denied, other))
        assert denied.outcomes[0].members == roster  # The deputies come after the owner.
        assert trio.current_time() < 2.0  # Virtual ones: no deadline has passed.
        asked = {event["peer"] for event in events_of([denied], "fetch.retry")}
        missing = {event["peer"] for event in events_of([denied], "round.output_missing")}
        if withholding == 1:
            assert (asked, missing) == ({owner.peer, one.peer}, set())
        else:
            assert {owner.peer, one.peer, two.peer} <= asked  # And others, for the outputs of the deputies.

    run_rounds(5, body)


def ticket_for(count: int, *, by: Identity) -> Ticket:
    seed = bytes(31) + b"\x63"
    return Ticket(Invitation.sign(by, RUN, Identity.from_seed(seed).peer_id, count=count), seed)


def test_who_is_not_invited_is_in_no_roster_even_of_its_own_making() -> None:
    async def body(swarm: SimSwarm) -> None:
        stranger, *others = in_turn(swarm.sims)
        assert stranger is swarm.sims[index]

        def at_any_price(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
            return message

        lies(stranger, at_any_price)
        uninviting = replace(stranger.averager._spec.charter, kind="open")
        stranger.averager._spec = replace(stranger.averager._spec, charter=uninviting)
        await until_done(others, 1, stranger)
        assert all(stranger.peer not in outcome.members for sim in others for outcome in sim.outcomes)
        assert not any(banned(others))

    first = sorted(identity.peer_id for identity in identities(5))[1]
    index = next(number for number, identity in enumerate(identities(5)) if identity.peer_id == first)
    owner = identities(5)[(index + 1) % 5]
    ticket = ticket_for(4, by=owner)
    invites = {number: ticket.credential(one.peer_id) for number, one in enumerate(identities(5)) if number != index}
    run_rounds(5, body, charter=founded(5, run=RUN, owner=owner.peer_id, kind="invite"), invites=invites)


def test_no_more_holders_than_its_count_are_in_a_roster() -> None:
    owner = identities(5)[0]
    ticket = ticket_for(2, by=owner)
    invites = {number: ticket.credential(identities(5)[number].peer_id) for number in (1, 2, 3)}

    async def body(swarm: SimSwarm) -> None:
        await all_at_once(swarm.sims)
        members = {outcome.members for sim in swarm.sims for outcome in sim.outcomes if outcome.kind is OutcomeKind.DONE}
        assert [len(found) for found in members] == [3]
        assert owner.peer_id in next(iter(members))

    run_rounds(4, body, charter=Charter(RUN, owner.peer_id, "invite"), invites=invites)


def test_the_fetch_of_a_part_that_no_codec_wrote_is_the_machines_to_explain() -> None:
    """What convicts the author is what bound it: the driver asks the machine for it, and it is there."""

    async def body(swarm: SimSwarm) -> None:
        seen: list[tuple[wire.Signed, ...]] = []
        first = swarm.sims[0]

        async def ask() -> None:
            while not (first.averager._attempt and first.averager._attempt.work.outputs.keys() - {EMPTY}):  # noqa: ASYNC110
                await trio.sleep(0.005)  # Virtual time.
            machine = first.averager._attempt.machine
            exchange = machine._exchange
            assert exchange is not None
            assert exchange._outputs is not None
            part, output = next(iter(exchange._outputs[0].outputs.items()))
            source = exchange.members[part]
            seen.append(machine.exchange.bound_to(actions.FetchOutput(part, source, output, 1, 1)))
            seen.append(machine.exchange.bound_to(actions.FetchPart(part, source, bytes(32), 1, 1, contributor=0)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await all_at_once(swarm.sims)
        kinds = [[type(wire.opened(signed)) for signed in statements] for statements in seen]
        assert kinds == [[wire.Result, wire.Cut, wire.Roster], [wire.Commit, wire.Roster]]

    run_rounds(4, body)
