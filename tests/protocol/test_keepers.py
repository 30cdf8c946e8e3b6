"""Keepers: members that vote and do not train, so that a run outlives everybody who trains."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
from flockstep.collectives.accountability.trust import YOUNG_ROUNDS
from flockstep.collectives.chain.certificate import certificate_hash, value_of
from flockstep.collectives.chain.packed import unpack_certificate
from flockstep.collectives.vector.codec import CELL
from flockstep.dht.keys import head_key
from flockstep.dht.members.body import MEMBER_KIND, MemberBody, MemberState
from flockstep.dht.records import Record
from flockstep.dht.run.layout import UNPINNED
from flockstep.peer import wire
from flockstep.peer.base.digest import digest
from flockstep.peer.base.transport import Rung
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.wire.schema import encode
from support.keepers import CELLS, MODEL, PHASE_SECONDS, KeptRun, Peer, all_at, in_memory, kept_run, key

KEEPER = 10
"""The number of the first keeper's key."""


def live(body: Callable[[KeptRun], Any], folder: Path, keepers: int, **options: Any) -> None:
    run_virtual(partial(in_memory, kept_run(keepers, first=KEEPER, rule="gramguard", **options), folder, body), seed=0)


@pytest.mark.parametrize("count", [4, *(pytest.param(count, marks=pytest.mark.explore) for count in (1, 2))])
def test_a_run_outlives_all_that_train_and_all_keepers_but_one(tmp_path: Path, count: int) -> None:
    async def body(run: KeptRun) -> None:
        keepers = [run.keep(KEEPER + number) for number in range(count)]
        trainers = [run.train(number) for number in range(3)]
        await run.until(lambda: all_at([*keepers, *trainers], 3))
        last = max(keepers, key=lambda keeper: keeper.at[0])
        for trainer in trainers:
            run.kill(trainer)
        await run.until(lambda: len({keeper.at for keeper in keepers}) == 1, 120)
        for keeper in keepers:
            if keeper is not last:
                run.kill(keeper)
        await trio.sleep(300)
        before, kept = last.at, last.keeper
        assert kept is not None
        assert kept.kept is not None
        head = kept.kept.place.head
        back = [run.train(3 + number) for number in range(3)]  # With new keys and empty disks.
        await run.until(lambda: all(peer.named("state.synced") for peer in back), 120)
        assert {event["root"] for peer in back for event in peer.named("state.synced")} >= {before[1]}
        if count > 1:
            await trio.sleep(120)
            assert last.at == before  # One of several keepers decides nothing.
            assert {peer.at for peer in back} == {before}
            returned = [run.keep(KEEPER + number) for number in range(count) if run_of(run, KEEPER + number) is None]
            await run.until(lambda: all_at(returned, before[0]), 120)
            assert all(peer.named("state.restored") for peer in returned)
        await run.until(lambda: all_at([last, *back], before[0] + 2))
        following = kept.kept.archive.ledger.certificate(before[0] + 1)
        assert following is not None
        assert value_of(following).previous == head.hash
        assert certificate_hash(following) != head.hash

    live(body, tmp_path, count)


def test_a_keeper_takes_no_state_of_another_model_than_the_manifest_pins(tmp_path: Path) -> None:
    """It knew no model, and took the size of the first that came, and its state as that of the run."""
    pin = f"{MODEL.hex()}/1/{CELLS * CELL}"

    async def body(run: KeptRun) -> None:
        run.layouts[key(0).peer_id] = digest(b"another model")
        keeper, other = run.keep(KEEPER), run.train(0)
        await run.until(lambda: bool(keeper.named("member.refused")))
        await trio.sleep(120)
        assert [(event["peer"], event["reason"]) for event in keeper.named("member.refused")] == [
            (other.peer, "it trains another model than the run's manifest pins")
        ]
        assert not keeper.named("state.size")
        honest = run.train(1)
        await run.until(lambda: all_at([keeper, honest], 2))
        assert not keeper.named("peer.charged")
        assert other.at[0] == 0
        assert not keeper.named("layout.unpinned")

    live(body, tmp_path, 1, layout=pin)


def run_of(run: KeptRun, number: int) -> Peer | None:
    return run.peers.get(key(number).peer_id)


@pytest.mark.parametrize("count", [4, pytest.param(1, marks=pytest.mark.explore)])
def test_keepers_contribute_nothing_vote_alone_and_make_nobody_wait(tmp_path: Path, count: int) -> None:
    async def body(run: KeptRun) -> None:
        keepers = [run.keep(KEEPER + number) for number in range(count)]
        trainers = [run.train(number) for number in range(3)]
        everybody = [*keepers, *trainers]
        await run.until(lambda: all_at(everybody, 4))
        assert [event["reason"] for event in keepers[0].named("layout.unpinned")] == [UNPINNED]
        training, voting = {peer.peer for peer in trainers}, {peer.peer for peer in keepers}
        for peer in everybody:
            for event in peer.named("round.done")[:4]:
                assert set(event["cut"]) == training  # type: ignore[arg-type]  # a list
                assert set(event["roster"]) == training | voting  # type: ignore[arg-type]  # a list
            assert {event["reason"] for event in peer.named("round.void")} <= {"no member that trains is ready"}
            assert len(peer.named("round.void")) <= (peer in keepers)  # Ready before there was a quorum.
            assert not peer.named("round.left_out")
        for keeper in keepers:
            said = {event["step"] for event in keeper.named("round.said")}
            assert {"Ready", "Have", "Result", "Prevote", "Precommit"} <= said
            assert not {"Commit", "Sketch"} & said
            assert keeper.keeper is not None
            assert keeper.keeper.kept is not None
            certificate = keeper.keeper.kept.place.certificate
            assert certificate is not None
            assert set(certificate.voters) <= voting
        # Virtual time: a phase of five seconds, at most one poll of a keeper, and the messages of a round.
        times = [float(event["time"]) for event in trainers[0].named("round.done")]  # type: ignore[arg-type]  # numbers
        assert all(after - before < 6.0 for before, after in pairwise(times))

    live(body, tmp_path, count)


def test_keepers_that_leave_in_order_leave_a_run_that_goes_on(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        keepers = [run.keep(KEEPER + number) for number in range(4)]
        trainers = [run.train(number) for number in range(2)]
        await run.until(lambda: all_at([*keepers, *trainers], 3))
        for leaver in keepers[:2]:  # Half of the votes: without them the others would wait for ever.
            assert leaver.keeper is not None
            before = leaver.at[0]
            await leaver.keeper.leave("left", 120.0)
            (stays,) = leaver.named("peer.stays")
            assert stays["round"] in (before + 1, before + 2)  # It ends the round that it had acknowledged.
            run.kill(leaver)
        left = [*keepers[2:], *trainers]
        reached = max(peer.at[0] for peer in left)
        await run.until(lambda: all_at(left, reached + 3), 120)
        assert not [event for peer in left for event in peer.named("agreement.stalled")]

    live(body, tmp_path, 4)


def test_a_keeper_that_leaves_in_the_middle_of_an_attempt_ends_it_before_its_last_one(tmp_path: Path) -> None:
    """The end of the first attempt unhooked the one with which it leaves, which then received nothing."""

    async def body(run: KeptRun) -> None:
        stays, leaver = (run.keep(KEEPER + number) for number in range(2))
        trainers = [run.train(number) for number in range(2)]
        await run.until(lambda: all_at([stays, leaver, *trainers], 2))
        assert leaver.keeper is not None
        kept = leaver.keeper.kept
        assert kept is not None
        await run.until(lambda: kept.averager.busy and not kept.averager.finishing)
        leaving = trio.current_time()
        await leaver.keeper.leave("left", 120.0)
        assert leaver.named("peer.stays")
        assert trio.current_time() - leaving < 2 * PHASE_SECONDS

    live(body, tmp_path, 2)


def test_free_keys_that_are_ready_at_once_make_no_rounds_without_members_of_many_rounds(tmp_path: Path) -> None:
    """They are more than two thirds of those that train, by heads."""

    async def body(run: KeptRun) -> None:
        keeper = run.keep(KEEPER)
        trainers = [run.train(number) for number in range(2)]
        await run.until(lambda: all_at([keeper, *trainers], YOUNG_ROUNDS + 1))
        hasty = [run.train(2 + number, seconds=0.1) for number in range(5)]
        await run.until(lambda: all_at([keeper, *hasty], YOUNG_ROUNDS + 3))
        cuts = [set(event["cut"]) for event in keeper.named("round.done")]  # type: ignore[arg-type]  # lists
        assert any(cut >= {sim.peer for sim in hasty} for cut in cuts)
        assert all(cut >= {sim.peer for sim in trainers} for cut in cuts[1:])

    live(body, tmp_path, 1)


def test_keepers_alone_attempt_no_round_and_stay_when_the_run_is_over(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        keepers = [run.keep(KEEPER + number) for number in range(2)]
        trainers = [run.train(number) for number in range(2)]
        await run.until(lambda: all_at([*keepers, *trainers], 3))
        for trainer in trainers:
            run.kill(trainer)
        await trio.sleep(1)  # At once, whoever proposed the last round: nobody publishes one after it.
        assert unpack_certificate(run.board.values[head_key(run.signed.run_id)]).slot.round == 3
        await trio.sleep(600)
        assert all(keeper.at[0] == 3 for keeper in keepers)
        assert all(len(keeper.named("round.void")) <= 1 for keeper in keepers)
        assert all(len(keeper.named("round.done")) == 3 for keeper in keepers)
        late = run.train(5)  # The run is over: the last state is still here.
        await run.until(lambda: bool(late.named("state.synced")) and late.at[0] == 3, 60)
        assert late.at == keepers[0].at

    live(body, tmp_path, 2, rounds=3)


def test_a_keeper_reports_who_is_here_and_names_who_is_missing(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        keepers = [run.keep(KEEPER + number) for number in range(4)]
        trainers = [run.train(number) for number in range(2)]
        await run.until(lambda: all_at([*keepers, *trainers], 2))
        last = keepers[0].named("run.votes")[-1]
        assert (last["votes"], last["quorum"], last["total"]) == (4, 3, 4)
        for keeper in keepers[2:]:
            run.kill(keeper)
        await trio.sleep(120)
        last = keepers[0].named("run.votes")[-1]
        assert (last["votes"], last["quorum"], last["total"]) == (2, 3, 4)
        assert all(keeper.peer in str(last["reason"]) for keeper in keepers[2:])

    live(body, tmp_path, 4)


def test_the_run_needs_who_votes_and_who_has_a_seat_and_nobody_who_only_calls_itself_a_member(tmp_path: Path) -> None:
    """224 free keys that had said so held all connections of a keeper for good: whoever joined trained alone."""

    async def body(run: KeptRun) -> None:
        keeper, trainer = run.keep(KEEPER), run.train(0)
        async with run.visit() as stranger:
            body = encode(MemberBody(MemberState.TRAINING, stranger.node.transport.addresses(), Rung.DIRECT))
            run_id, me = run.signed.run_id, stranger.node.identity
            record = Record.sign(me, run=run_id, kind=MEMBER_KIND, sequence=1, lifetime=180.0, body=body)
            await run.until(lambda: all_at([keeper, trainer], 1))
            assert keeper.node is not None
            stranger.node.learn(keeper.peer, keeper.node.transport.addresses())
            stranger.node.send(keeper.peer, wire.Members((record.encode(),)))
            await run.until(lambda: keeper.node is not None and keeper.node.is_member(me.peer_id))
            host, seated = run.hosts[keeper.peer], (keeper.peer, trainer.peer)
            assert [peer for peer in (*seated, me.peer_id) if host.votes(peer)] == [keeper.peer]
            assert [peer for peer in (*seated, me.peer_id) if host.needs(peer)] == [*seated]
            await run.until(lambda: all_at([keeper, trainer], YOUNG_ROUNDS))
            run.kill(trainer)
            later = run.train(1)
            await run.until(lambda: all_at([keeper, later], YOUNG_ROUNDS + 2))
            assert keeper.keeper is not None
            assert keeper.keeper.kept is not None
            assert trainer.peer not in (keeper.keeper.kept.archive.conduct.certified or ())
            assert host.needs(trainer.peer)  # Of tenure.

    live(body, tmp_path, 1)
