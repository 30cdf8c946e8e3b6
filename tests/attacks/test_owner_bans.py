"""Bans and pardons by the run's owner: who is refused, who is accused of nothing, and what a pardon lifts."""

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import trio
from attacks.voters import founded, until_done
from flockstep.collectives.accountability.evidence import claim_of
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.collectives.chain.certificate import genesis
from flockstep.dht.run.admission import Charter
from flockstep.dht.run.statements import OwnerStatement, OwnerStatements
from flockstep.peer import wire
from flockstep.peer.identity import Identity
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.wire import Accusations
from flockstep.peer.wire.schema import encode
from flockstep.peer.wire.signed import sign
from support.certificates import signed
from support.liars import banned, events_of
from support.swarm import RUN, SimPeer, SimSwarm, all_at_once, with_swarm

Body = Callable[[SimSwarm], Awaitable[None]]
OWNER = Identity.from_seed(bytes([99]) * 32)


def run_rounds(count: int, body: Body, *, home: tuple[Path, int] | None = None, charter: Charter | None = None) -> None:
    run_virtual(partial(with_swarm, count, body, cells=12, home=home, charter=charter or founded(count, run=RUN)))


def stated(*decisions: tuple[str, SimPeer], reason: str = "", until: int = 0) -> OwnerStatements:
    log = OwnerStatements(RUN, OWNER.peer_id)
    for verb, about in decisions:
        log = log.sign(OWNER, OwnerStatement(verb, about.peer, reason, until))
    return log


def follow(sims: list[SimPeer], statements: OwnerStatements) -> None:
    for sim in sims:
        sim.averager._conduct.follow(statements)


def contradiction(liar: SimPeer, accuser: SimPeer, round_: int = 1) -> bytes:
    slot = wire.Slot(RUN, round_, genesis(RUN))
    pair = [signed(liar.identity, wire.Prevote(slot, bytes([n]) * 32)) for n in (1, 2)]
    return encode(sign(accuser.identity, claim_of(RUN, tuple(pair))))


def rejoin(swarm: SimSwarm) -> None:
    """Do what the exchange of members does after a pardon."""
    for sim in swarm.sims:
        sim.node.watch([other.peer for other in swarm.sims])


def test_who_is_banned_while_it_waits_for_the_others_gives_its_attempt_up() -> None:
    async def body(swarm: SimSwarm) -> None:
        target = swarm.sims[0]
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(target.round)
            await trio.sleep(0.1)
            follow([target], stated(("ban", target)))
        (outcome,) = target.outcomes
        assert (outcome.kind, outcome.reason) == (OutcomeKind.VOID, "this peer is banned from the run")
        assert trio.current_time() - began < target.averager._spec.ceiling

    run_rounds(4, body)


def test_whom_the_owner_bans_is_in_no_round_and_after_a_pardon_in_one_again() -> None:
    async def body(swarm: SimSwarm) -> None:
        target, *others = swarm.sims
        await all_at_once(swarm.sims)
        assert all(target.peer in sim.outcomes[-1].members for sim in others)
        follow(others, stated(("ban", target), reason="sends noise"))
        assert banned(others) == [{target.peer}] * 3
        assert {event["reason"] for event in events_of(others, "peer.banned")} == {"by the run's owner: sends noise"}
        await until_done(others, 2)
        assert all(sim.outcomes[-1].members and target.peer not in sim.outcomes[-1].members for sim in others)
        assert all(target.peer in sim.node.guard.banned for sim in others)
        assert all(target.peer in sim.averager._conduct.bans for sim in others)  # Which every roster and cut asks.
        follow(others, stated(("ban", target), ("pardon", target)))
        assert [event["peer"] for event in events_of(others, "peer.pardoned")] == [target.peer] * 3
        assert not any(sim.node.guard.banned for sim in others)
        assert not any(target.peer in sim.averager._conduct.bans for sim in others)
        heard = others[0]
        rejoin(swarm)
        target.node.send(heard.peer, sign(target.identity, ready_of(heard)))
        await trio.sleep(1)
        assert target.peer in heard.averager.ready()

    run_rounds(4, body)


def ready_of(sim: SimPeer) -> wire.Ready:
    return wire.Ready(wire.Slot(RUN, sim.averager.round, sim.averager._slot.previous), bytes(32), 1, 1e6, 1e6, bytes(32))


def test_a_ban_in_the_middle_of_a_round_costs_the_others_no_ban_and_no_charge() -> None:
    """Some know of it and some do not: those refuse the peer, and nobody accuses anybody."""

    async def body(swarm: SimSwarm) -> None:
        target, *others = swarm.sims
        statements = stated(("ban", target))
        async with trio.open_nursery() as nursery:
            for sim in swarm.sims:
                nursery.start_soon(sim.round)
            await trio.sleep(0.15)
            follow(others[:2], statements)
            await trio.sleep(30)
            nursery.cancel_scope.cancel()
        assert banned(others[:2]) == [{target.peer}] * 2
        assert banned([*others[2:], target]) == [set()] * 3
        follow(others[2:], statements)
        last = max(sim.averager.round for sim in others)
        await until_done([sim for sim in others if sim.averager.round == last], last)
        assert banned(others) == [{target.peer}] * 4
        assert events_of(swarm.sims, "peer.charged") == []
        assert not any(sim.averager._conduct.bans.mine for sim in others)

    run_rounds(5, body)


def test_who_is_banned_itself_stops_trying_until_it_is_pardoned() -> None:
    async def body(swarm: SimSwarm) -> None:
        target, _ = swarm.sims
        follow([target], stated(("ban", target), reason="noise"))
        assert target.averager.why_not_average == "this peer is banned from the run: by the run's owner: noise"
        assert (await target.round()).kind is OutcomeKind.VOID
        follow([target], stated(("ban", target), ("pardon", target)))
        assert target.averager.why_not_average == ""

    run_rounds(2, body)


def test_whose_admission_is_withdrawn_is_told_why_it_waits() -> None:
    async def body(swarm: SimSwarm) -> None:
        target, other = swarm.sims
        follow(swarm.sims, stated(("revoke", target)))
        assert "the run's owner has withdrawn its admission" in target.averager.why_not_average
        assert other.averager.why_not_average == ""

    everybody = frozenset({OWNER.peer_id, *(Identity.from_seed(bytes([n]) * 32).peer_id for n in (1, 2))})
    run_rounds(2, body, charter=Charter(run=RUN, owner=OWNER.peer_id, kind="allow", allowed=everybody))


def test_a_pardon_lifts_a_ban_by_evidence_on_the_disk_too_and_voids_that_evidence(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        liar, accuser, other = swarm.sims
        accuser.node.send(other.peer, Accusations((contradiction(liar, accuser),)))
        await trio.sleep(2)
        assert banned([other]) == [{liar.peer}]
        follow([other], stated(("pardon", liar), until=3))
        await trio.sleep(1)
        assert liar.peer not in other.averager._conduct.bans
        assert liar.peer not in other.node.guard.banned
        again = await swarm.restart(2)
        assert banned([again]) == [set()]
        follow([again], stated(("pardon", liar), until=3))
        await trio.sleep(20)  # The accuser's session with the process before is noticed to be dead.
        accuser.node.send(again.peer, Accusations((contradiction(liar, accuser, 3),)))
        await trio.sleep(2)
        assert banned([again]) == [set()]
        (dropped,) = events_of([again], "evidence.dropped")
        assert dropped["reason"] == "the run's owner has pardoned what it did up to round 3"

    run_rounds(3, body, home=(tmp_path, 10))


def test_what_a_pardoned_peer_does_later_convicts_it() -> None:
    async def body(swarm: SimSwarm) -> None:
        liar, accuser, other = swarm.sims
        follow([other], stated(("pardon", liar), until=3))
        accuser.node.send(other.peer, Accusations((contradiction(liar, accuser, 4),)))
        await trio.sleep(2)
        assert banned([other]) == [{liar.peer}]
        follow([other], stated(("pardon", liar), ("vouch", liar), until=3))
        assert liar.peer in other.averager._conduct.bans

    run_rounds(3, body)


def test_a_pardon_of_the_owners_ban_leaves_later_evidence_in_force() -> None:
    async def body(swarm: SimSwarm) -> None:
        liar, accuser, other = swarm.sims
        accuser.node.send(other.peer, Accusations((contradiction(liar, accuser, 4),)))
        await trio.sleep(2)
        follow([other], stated(("ban", liar)))
        follow([other], stated(("ban", liar), ("pardon", liar), until=3))
        assert liar.peer in other.averager._conduct.bans
        assert liar.peer in other.node.guard.banned
        assert events_of([other], "peer.pardoned") == []

    run_rounds(3, body)


def test_a_ban_of_a_key_that_nobody_knows_holds_when_it_comes() -> None:
    async def body(swarm: SimSwarm) -> None:
        other, late = swarm.sims
        other.node.watch([])
        other.node._addresses.clear()
        follow([other], stated(("ban", late)))
        late.node.send(other.peer, sign(late.identity, ready_of(other)))
        await trio.sleep(2)
        assert len(events_of([other], "peer.refused")) == 1
        assert not other.averager.ready()
        log = stated(("ban", late), ("pardon", late))
        follow([other], log)
        follow([other], log.sign(OWNER, OwnerStatement("ban", late.peer)))
        for _ in range(2):  # The first one finds that its session is closed.
            late.node.send(other.peer, sign(late.identity, ready_of(other)))
            await trio.sleep(10)
        assert len(events_of([other], "peer.refused")) == 2  # A new ban is told anew.

    run_rounds(2, body)
