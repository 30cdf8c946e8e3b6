"""Cheap attacks: each costs its author its contribution, and the others at most one attempt."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio
from attacks.voters import founded, in_turn, until_done
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.dht.run.admission import Invitation, Ticket
from flockstep.peer import wire
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import NetworkError
from flockstep.peer.identity import Identity
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.wire.signed import sign
from support.liars import banned, events_of, lies
from support.swarm import RUN, SimPeer, SimSwarm, identities, with_swarm

Body = Callable[[SimSwarm], Awaitable[None]]


def run_rounds(count: int, body: Body, *, codec: str = "int4", seed: int = 0, **options: Any) -> None:
    charter = options.pop("charter", founded(count))
    run_virtual(partial(with_swarm, count, body, cells=12, codec=codec, seed=seed, charter=charter, **options), seed=seed)


def test_words_of_another_run_charge_who_carries_them() -> None:
    async def body(swarm: SimSwarm) -> None:
        attacker, author, target, *_ = swarm.sims
        word = wire.Ready(wire.Slot("b" * 52, 1, bytes(32)), bytes(32), 1, 1.0, 1.0, bytes(32))
        attacker.node.send(target.peer, sign(author.identity, word))
        await trio.sleep(1)
        assert [event["peer"] for event in events_of([target], "peer.charged")] == [attacker.peer]
        assert not target.averager.ready()

    run_rounds(4, body)


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
            while not (held and victim.averager._work and victim.averager._work.mine):  # noqa: ASYNC110
                await trio.sleep(0.01)  # Virtual time.
            stolen.extend(digest(part) for part in victim.averager._work.mine)
            for peer, message in held:
                told(peer, sign(thief.identity, replace(message, parts=tuple(stolen))))
            got = 0
            for key, part in zip(stolen, victim.averager._work.mine, strict=True):
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


@pytest.mark.parametrize("withholding", [1, 3])
def test_who_gets_no_output_from_its_owner_gets_it_from_a_deputy_or_from_who_has_accepted_it(withholding: int) -> None:
    """Its owner withholds it, or its owner and both deputies do: then one that accepts the value provides it."""

    async def body(swarm: SimSwarm) -> None:
        owner, other, two, denied, one = in_turn(swarm.sims)
        liars = [owner, one, two][:withholding]

        def withhold(liar: SimPeer) -> None:
            find = liar.node.blobs.find

            def of_a_part_only(key: bytes, reader: str) -> Any:
                attempt = liar.averager._work
                mine = {digest(part) for part in attempt.mine} if attempt is not None else set()
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
