"""Who comes late, alone, with nothing, or among liars holds the state of the run in the end."""

from dataclasses import replace
from pathlib import Path

import pytest
import trio
from flockstep.collectives.chain.chain import Head
from flockstep.collectives.chain.losses import Losses
from flockstep.collectives.chain.replay import serve_ledger
from flockstep.dht.directory.memory import MemoryBoard, MemoryDirectory
from flockstep.dht.members.body import MemberBody, MemberState
from flockstep.dht.members.gossip import Gossip
from flockstep.dht.members.table import MemberTable
from flockstep.dht.published import validate_published
from flockstep.peer import wire
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import NetworkError, UsageError, sole_error
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.node.node import Node
from flockstep.peer.wire.signed import sign
from support.migrants import PHASE, Town, found, in_town, wait_for
from support.swarm import RUN, identities

run_test = in_town


async def refuse(peer: str, question: wire.LedgerAsk) -> wire.LedgerPage:
    raise NetworkError("busy")


async def test_who_comes_with_nothing_to_a_run_of_which_nobody_is_here_waits_for_who_holds_its_state(
    town: Town, /, tmp_path: Path
) -> None:
    newcomer, holder = town.migrants(2)
    found([holder], newcomer)
    newcomer.published = Head(5, bytes(32), 500)
    town.start(tmp_path, newcomer)
    await trio.sleep(1000)
    assert [event["round"] for event in newcomer.named("state.awaited")] == [5]
    assert newcomer.done == 0
    town.start(tmp_path, holder)
    await wait_for(lambda: newcomer.done > 0 and newcomer.round == holder.round, 1000)


async def test_the_dead_who_are_not_missed_yet_do_not_make_a_newcomer_begin_the_run_anew(
    town: Town, /, tmp_path: Path
) -> None:
    newcomer, *dead = town.migrants(4)
    found(dead, newcomer)
    newcomer.published = Head(5, bytes(32), 500)
    town.start(tmp_path, *dead)
    await trio.sleep(PHASE / 2)  # All train, and their records say so: at round 0, in the state that all begin with.
    for migrant in dead:
        town.network.kill(migrant.identity.peer_id)
    town.start(tmp_path, newcomer)
    await trio.sleep(100)
    assert [event["round"] for event in newcomer.named("state.awaited")] == [5]
    assert newcomer.done == 0


async def test_a_newcomer_to_whom_nobody_can_prove_the_run_yet_decides_nothing_and_follows_it_then(
    town: Town, /, tmp_path: Path
) -> None:
    newcomer, holder = town.migrants(2)
    found([holder], newcomer)

    town.start(tmp_path, holder)
    await trio.sleep(1)
    await wait_for(lambda: holder.round == 2, 1000)
    holder.node.on_ask(wire.LedgerAsk, refuse)
    town.start(tmp_path, newcomer)
    await trio.sleep(PHASE)
    assert {event["peer"] for event in newcomer.named("head.unproven")} == {holder.identity.peer_id}
    assert (newcomer.round, newcomer.done) == (0, 0)
    serve_ledger(holder.node, RUN, holder.ledger, Losses(tmp_path / "losses", holder.node.telemetry))
    await wait_for(lambda: newcomer.done > 0 and newcomer.round == holder.round, 1000)
    assert newcomer.ledger.at(2) == holder.ledger.at(2)


@pytest.mark.parametrize("founds", [False, True])
async def test_a_member_that_states_a_start_state_which_it_does_not_give_keeps_no_run_from_starting(
    town: Town, /, tmp_path: Path, founds: bool
) -> None:
    liar, *honest = town.migrants(4)
    found([*honest, liar] if founds else honest, *([] if founds else [liar]))

    async def lie() -> None:
        liar.gossip.announce(replace(liar.body, state=MemberState.TRAINING))  # With the smallest root of all.

    liar.sync, liar.phase = lie, trio.sleep_forever  # type: ignore[method-assign]
    town.start(tmp_path, liar)
    await trio.sleep(10)
    town.start(tmp_path, *honest)
    await trio.sleep(1)
    await wait_for(lambda: min(migrant.done for migrant in honest) >= 2, 1000)
    assert len({migrant.root for migrant in honest}) == 1
    assert not founds or all(migrant.named("state.retry") for migrant in honest)


async def test_a_founder_whose_state_did_not_arrive_is_asked_again(town: Town, /, tmp_path: Path) -> None:
    """Else two that failed to reach each other once would start from two states for ever."""

    other, me = town.migrants(2)
    found([other, me])

    async def state_only() -> None:
        other.gossip.announce(replace(other.body, state=MemberState.TRAINING))

    other.sync = state_only  # type: ignore[method-assign]
    other.phase = me.phase = trio.sleep_forever  # type: ignore[method-assign]
    town.start(tmp_path, other)
    await trio.sleep(10)
    town.start(tmp_path, me)
    await trio.sleep(1)
    await wait_for(lambda: me.body.state == MemberState.TRAINING, 100)
    members = me.gossip.presence.active()
    assert me.catch_up.provider(members) is None
    me.catch_up.ask_again()
    provider = me.catch_up.provider(members)
    assert provider is not None
    assert provider.peer == other.identity.peer_id


@pytest.mark.parametrize("changes", [False, True])
async def test_a_stranger_that_states_rounds_which_it_cannot_prove_does_not_keep_a_run_from_starting(
    town: Town, /, tmp_path: Path, changes: bool
) -> None:
    """Keys are free: who waits for a proof of each head that a member states never begins."""

    founder, friend, liar = town.migrants(3)
    found([founder], friend, liar)

    async def lie() -> None:
        liar.node.on_ask(wire.LedgerAsk, refuse)
        mark = 0
        while True:
            head = bytes([mark]) * 32
            claim = replace(liar.body, state=MemberState.TRAINING, round=5, head=head, root=head, chain_tokens=500)
            liar.gossip.announce(claim)
            mark += changes
            await trio.sleep(5.0)

    liar.sync = lie  # type: ignore[method-assign]
    town.start(tmp_path, liar)
    await trio.sleep(10)
    town.start(tmp_path, founder, friend)
    await wait_for(lambda: min(founder.done, friend.done) >= 2, 400)
    assert founder.named("head.unproven")
    assert founder.root == friend.root


@pytest.mark.parametrize(("gone_on", "behind"), [(1, False), (2, True)])
async def test_one_of_four_that_is_ready_for_a_later_round_does_not_make_me_look_for_it(
    town: Town, /, tmp_path: Path, gone_on: int, behind: bool
) -> None:
    swarm = town.migrants(4)
    found(swarm)
    town.start(tmp_path, *swarm)
    await trio.sleep(1.0)
    await wait_for(lambda: all(migrant.round == 1 for migrant in swarm), 1000)
    await trio.sleep(6.0)
    me, *others = swarm
    for other in others[:gone_on]:
        ready = wire.Ready(wire.Slot(RUN, 9, bytes(32)), bytes(32), 1, 1e6, 1e6, bytes(32))
        other.node.send(me.identity.peer_id, sign(other.identity, ready))
    await trio.sleep(0.5)
    assert bool(me.named("agreement.behind")) is behind


def test_who_comes_after_the_last_round_when_all_are_gone_is_told_so(tmp_path: Path) -> None:
    async def body(town: Town) -> None:
        (newcomer,) = town.migrants(1)
        newcomer.published = Head(9, bytes(32), 900)
        await newcomer.live(tmp_path)

    with pytest.raises(BaseExceptionGroup) as raised:
        in_town(body)
    error = sole_error(raised.value)
    assert isinstance(error, NetworkError)
    assert "all 9 rounds of the run are done" in str(error)


async def test_who_cannot_start_a_run_takes_part_once_it_has_the_state_of_another_one(town: Town, /, tmp_path: Path) -> None:
    newcomer, holder = town.migrants(2)
    found([holder], newcomer)
    newcomer.starts = False
    town.start(tmp_path, newcomer)
    await trio.sleep(1000)
    assert newcomer.body.state == MemberState.SYNCING
    assert [event["step"] for event in newcomer.named("state.awaited")] == ["sync"]
    town.start(tmp_path, holder)
    await wait_for(lambda: newcomer.done > 0 and newcomer.round == holder.round, 1000)


SECONDS_TO_SAY = {"nobody's": 12, "nobody's, and one is mute": 60}
"""Virtual seconds until a newcomer has said that no chain has what its link names."""


async def state_a_head_and_answer_nothing(town: Town) -> None:
    mute = identities(7)[6]

    async def answer(peer: str, question: wire.LedgerAsk) -> None:
        await trio.sleep_forever()

    transport = town.network.transport(mute.peer_id)
    async with Node(transport, mute, PeerConfig(), Telemetry(), inline=True) as node:
        node.on_ask(wire.LedgerAsk, answer)
        directory = MemoryDirectory(town.board, mute.peer_id, transport.addresses(), validate_published)
        gossip = Gossip(node, MemberTable(RUN, mute.peer_id), directory, RUN, seed=0)
        body = MemberBody(state=MemberState.TRAINING, round=3, head=b"h" * 32, tokens=300, layout=b"m" * 32)
        gossip.announce(replace(body, addresses=transport.addresses()))
        await gossip.run()


@pytest.mark.parametrize(
    "named", ["the run's", "an older one of the run's", "the others'", "nobody's", "nobody's, and one is mute"]
)
def test_a_newcomer_takes_the_chain_that_its_link_names_however_many_are_on_another_one(
    tmp_path: Path, named: str
) -> None:
    async def body(town: Town) -> None:
        elsewhere, swarm = MemoryBoard(), town.migrants(6)
        run, others, newcomer = swarm[:2], swarm[2:5], swarm[5]
        found(run, newcomer)
        found(others)
        names = [[migrant.identity.peer_id for migrant in group] for group in (run, others)]
        town.network.partition(*names)  # From the start: they share no certificate.
        for migrant in (*run, *others):
            migrant.board = town.board if migrant in run else elsewhere
            town.start(tmp_path, migrant)
        await trio.sleep(1)
        await wait_for(lambda: all(migrant.round >= 3 for migrant in (*run, *others)), 1000)
        town.network.heal()
        for migrant in others:
            migrant.directory._board = town.board
        await trio.sleep(2 * PHASE)  # All are in the directory, and each keeps its own chain.
        of_run, of_others = run[0].ledger, others[0].ledger
        assert of_run.at(1) != of_others.at(1)
        newcomer.anchor = {
            "the run's": of_run.head,
            "an older one of the run's": of_run.at(1),
            "the others'": of_others.at(2),
            "nobody's": Head(2, b"nobody's".ljust(32, b"\0"), 0),
        }[named.partition(",")[0]]
        assert newcomer.anchor is not None
        newcomer.anchor = replace(newcomer.anchor, tokens=0)  # A link names none.
        if named.endswith("mute"):
            town.nursery.start_soon(state_a_head_and_answer_nothing, town)
        town.start(tmp_path, newcomer)
        await trio.sleep(1)
        await wait_for(lambda: newcomer.round >= 4, SECONDS_TO_SAY.get(named, 1000))
        on_run = newcomer.ledger.at(newcomer.round) == of_run.at(newcomer.round)
        assert on_run is named.endswith("the run's")

    if named.startswith("nobody's"):
        with pytest.raises(BaseExceptionGroup) as raised:
            in_town(body)
        error = sole_error(raised.value)
        assert isinstance(error, UsageError)
        assert "has the certificate that this join link or its bootstraps name" in str(error)
        assert error.remedy is not None
        assert "run info" in error.remedy
    else:
        in_town(body)


async def test_strangers_that_state_another_model_keep_newcomers_out_and_throw_no_member_out(
    town: Town, /, tmp_path: Path
) -> None:
    me, other = town.migrants(2)
    found([me, other])

    async def haunt(ghost: Identity) -> None:
        transport, telemetry = town.network.transport(ghost.peer_id), Telemetry()
        async with Node(transport, ghost, PeerConfig(), telemetry, inline=True) as node:
            addresses = transport.addresses()
            directory = MemoryDirectory(town.board, ghost.peer_id, addresses, validate_published)
            gossip = Gossip(node, MemberTable(RUN, ghost.peer_id), directory, RUN, seed=0)
            gossip.announce(MemberBody(state=MemberState.TRAINING, addresses=addresses, layout=b"x" * 32))
            await gossip.run()

    town.start(tmp_path, me, other)
    await trio.sleep(1.0)
    await wait_for(lambda: me.round == 1, 1000)
    for ghost in identities(9)[4:]:
        town.nursery.start_soon(haunt, ghost)
    await wait_for(lambda: len(me.gossip.presence.active()) == 7, 60)
    with pytest.raises(UsageError, match="this model is not that of the run's members"):
        await me.catch_up.reach(me.gossip, 15.0)
    before = me.held.place
    await me.catch_up.reach(me.gossip, 15.0, compare=False)
    assert me.held.place == before


@pytest.mark.parametrize("is_served", [True, False])
async def test_who_is_behind_waits_for_the_proof_of_where_the_others_are_and_not_for_ever(
    town: Town, /, tmp_path: Path, is_served: bool
) -> None:
    holder, late = town.migrants(2)
    found([holder], late)
    late.phase = trio.sleep_forever  # type: ignore[method-assign]

    town.start(tmp_path, holder)
    town.start(tmp_path, late)
    await trio.sleep(1)
    await wait_for(lambda: holder.round == 2, 1000)
    await trio.sleep(PHASE / 2)
    if not is_served:
        holder.node.on_ask(wire.LedgerAsk, refuse)

    def provider() -> object:
        return late.catch_up.provider(late.gossip.presence.active())

    assert provider() is None
    began = trio.current_time()
    await late.catch_up.await_proofs(late.gossip, 2.0)
    assert (provider() is not None) is is_served
    assert (trio.current_time() - began < 1.0) is is_served
    assert trio.current_time() - began <= 2.0
