"""A run that waits for voters goes on once its owner appoints others: from a visitor's poll to the next certificate."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio
from flockstep.collectives.accountability.appointing import AppointmentRecord
from flockstep.collectives.chain.certificate import certificate_hash
from flockstep.collectives.chain.voters import open_appointment
from flockstep.collectives.spec import charter_of
from flockstep.collectives.visit.polls import Appointed, Poll, appoint, ask_poll
from flockstep.collectives.visit.watcher import RunWatcher
from flockstep.dht.run.link import JoinLink
from flockstep.peer import wire
from flockstep.peer.base.errors import NetworkError, UsageError
from flockstep.peer.identity import Identity
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.wire.schema import encode
from flockstep.peer.wire.signed import sign
from support.keepers import KeptRun, Peer, Visitor, all_at, in_memory, kept_run, key

KEEPER = 10
STALLED = 120.0
"""Virtual seconds after which every voter's term has stalled."""


def live(body: Callable[[KeptRun], Awaitable[None]], folder: Path, keepers: int = 4) -> None:
    run_virtual(partial(in_memory, kept_run(keepers, first=KEEPER), folder, body), seed=0)


async def stalled(run: KeptRun, lost: int, keepers: int = 4) -> tuple[list[Peer], Peer]:
    """Start keepers and one that trains, kill the last `lost` keepers after some rounds; return who is left."""
    peers = [run.keep(KEEPER + number) for number in range(keepers)]
    trainer = run.train(0)
    await run.until(lambda: all_at([*peers, trainer], 2))
    for peer in peers[keepers - lost :]:
        run.kill(peer)
    if lost:
        await trio.sleep(STALLED)
    return peers[: keepers - lost], trainer


async def appointed_by(
    visitor: Visitor, run: KeptRun, folder: Path, number: int = KEEPER, voters: tuple[str, ...] = ()
) -> tuple[Poll, Appointed]:
    charter = charter_of(run.signed)
    poll = await ask_poll(visitor.node, list(run.peers), charter)
    assert poll is not None
    return poll, await appoint(visitor.node, poll, charter, AppointmentRecord(key(number), folder), voters)


def ids(peers: list[Peer]) -> tuple[str, ...]:
    return tuple(sorted(peer.peer for peer in peers))


def test_a_run_that_waits_goes_on_with_those_that_its_owner_appoints(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        left, trainer = await stalled(run, 2)
        before = trainer.at
        assert all(peer.named("agreement.stalled") for peer in left)
        async with run.visit() as visitor:
            poll, made = await appointed_by(visitor, run, tmp_path / "owner")
            assert (poll.slot.round, poll.slot.term) == (before[0] + 1, 0)
            assert tuple(sorted(poll.ready)) == made.appointment.voters == ids(left)
            assert poll.electorate.votes_of(poll.here) == 2
            assert set(made.holders) == {trainer.peer, *ids(left)}
            await run.until(lambda: all_at([*left, trainer], before[0] + 3), 300)
        for peer in left:
            (event,) = peer.named("agreement.appointed")
            assert (event["peer"], event["step"]) == (key(KEEPER).peer_id, "term 1")
            assert event["round"] == before[0] + 1
        kept = left[0].keeper
        assert kept is not None
        assert kept.kept is not None
        certificate = kept.kept.archive.ledger.certificate(before[0] + 1)
        assert certificate is not None
        assert open_appointment(certificate.appointment)[1] == made.appointment

    live(body, tmp_path)


def test_a_member_that_the_command_did_not_reach_gets_the_appointment_from_others(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        left, trainer = await stalled(run, 2)
        before, charter = trainer.at, charter_of(run.signed)
        async with run.visit() as visitor:
            poll = await ask_poll(visitor.node, list(run.peers), charter)
            assert poll is not None
            signed, _ = AppointmentRecord(key(KEEPER), tmp_path / "owner").sign(poll.slot.at(1, 0), ids(left))
            await visitor.node.ask(left[0].peer, wire.VoteAsk(run.signed.run_id, encode(signed)))
            await run.until(lambda: all_at([*left, trainer], before[0] + 2), 300)

    live(body, tmp_path)


def test_a_second_appointment_for_a_term_is_never_signed(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        left, _ = await stalled(run, 2, 5)
        folder = tmp_path / "owner"
        async with run.visit() as visitor:
            poll = await ask_poll(visitor.node, list(run.peers), charter_of(run.signed))
            assert poll is not None
            record = AppointmentRecord(key(KEEPER), folder)
            first = record.sign(poll.slot.at(1, 0), ids(left[:2]))  # And died before it was sent.
            with pytest.raises(UsageError, match="appointed otherwise already"):
                await appointed_by(visitor, run, folder, voters=ids(left))
            _, made = await appointed_by(visitor, run, folder)
            assert (made.is_again, made.signed) == (True, first[0])
            # With its disk lost, what the voters hold is the record, as long as they have not entered that term.
            charter = charter_of(run.signed)
            held = await ask_poll(visitor.node, list(run.peers), charter)
            assert held is not None
            outside = replace(poll, appointments=held.appointments)
            again = await appoint(visitor.node, outside, charter, AppointmentRecord(key(KEEPER), tmp_path / "lost"))
            assert again.is_again
            assert again.signed == first[0]

    live(body, tmp_path, 5)


def test_a_lost_appointed_voter_is_replaced_in_a_later_term(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        left, trainer = await stalled(run, 3, 5)
        before = trainer.at
        async with run.visit() as visitor:
            lost = left.pop()
            lost_id = lost.peer
            # It is lost between the poll and the appointment.
            charter, record = charter_of(run.signed), AppointmentRecord(key(KEEPER), tmp_path / "owner")
            poll = await ask_poll(visitor.node, list(run.peers), charter)
            assert poll is not None
            run.kill(lost)
            made = await appoint(visitor.node, poll, charter, record)
            assert lost_id in made.appointment.voters
            await trio.sleep(STALLED)
            assert trainer.at == before
            watcher = RunWatcher(visitor.node, visitor.directory, run.signed, JoinLink(run.signed.run_id, ()))
            await watcher.look()
            votes = watcher.picture().votes
            assert votes is not None
            assert (votes.term, votes.appointed_by) == (1, key(KEEPER).peer_id)
            appointer = key(KEEPER).peer_id[-8:]
            assert str(votes).startswith(f"term 1 of round {before[0] + 1}, appointed by {appointer}; waits for ")
            poll, made = await appointed_by(visitor, run, tmp_path / "owner")
            assert (poll.slot.term, poll.appointed_by) == (1, key(KEEPER).peer_id)
            assert lost_id in poll.electorate.votes
            assert (made.appointment.slot.term, made.appointment.voters) == (2, ids(left))
            await run.until(lambda: all_at([*left, trainer], before[0] + 2), 300)

    live(body, tmp_path, 5)


def test_what_cannot_be_appointed_is_refused_with_the_reason(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        left, _ = await stalled(run, 0)
        async with run.visit() as visitor:
            with pytest.raises(UsageError, match="has not stalled: 4 of 4 votes are here"):
                await appointed_by(visitor, run, tmp_path / "owner")
            gone = [left.pop(), left.pop()]
            for peer in gone:
                run.kill(peer)
            await trio.sleep(STALLED)
            with pytest.raises(UsageError, match=f"{gone[0].peer} is not ready"):
                await appointed_by(visitor, run, tmp_path / "owner", voters=ids([*left, gone[0]]))
            for number in (KEEPER + 1, 0, 99):
                with pytest.raises(UsageError, match="only the run's owner may make it"):
                    await appointed_by(visitor, run, tmp_path / "other", number)
            assert not (tmp_path / "other").exists()

    live(body, tmp_path)


def test_what_a_stranger_signs_or_forges_as_an_appointment_moves_nobody(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        left, trainer = await stalled(run, 2)
        before, run_id = trainer.at, run.signed.run_id
        async with run.visit() as visitor:
            poll = await ask_poll(visitor.node, list(run.peers), charter_of(run.signed))
            assert poll is not None
            liar = Identity.generate()
            message = wire.Appointment(poll.slot.at(1, 0), (liar.peer_id,))
            own = sign(liar, message)
            forged = wire.Signed(key(KEEPER).peer_id, own.code, own.payload, own.signature)
            for peer in (*left, trainer):
                assert not (await visitor.node.ask(peer.peer, wire.VoteAsk(run_id, encode(own)))).appointments
                with pytest.raises(NetworkError):
                    await visitor.node.ask(peer.peer, wire.VoteAsk(run_id, encode(forged)))
            await trio.sleep(STALLED)
            assert trainer.at == before
            assert not [event for peer in left for event in peer.named("agreement.appointed")]

    live(body, tmp_path)


def test_a_ready_that_others_show_of_a_dead_voter_does_not_count(tmp_path: Path) -> None:
    """Its Ready for the round is in everybody's hands; who does not answer is missing all the same."""

    async def body(run: KeptRun) -> None:
        left, trainer = await stalled(run, 2)
        lost = left.pop()
        run.kill(lost)
        await trio.sleep(STALLED)
        async with run.visit() as visitor:
            poll = await ask_poll(visitor.node, [lost.peer, *run.peers], charter_of(run.signed))
            assert poll is not None
            assert set(poll.ready) == {left[0].peer}
            shown = await visitor.node.ask(left[0].peer, wire.VoteAsk(run.signed.run_id))
            assert (shown.round, shown.previous) == (poll.slot.round, poll.slot.previous)
            assert trainer.peer in poll.here - poll.ready.keys()
            kept = left[0].keeper
            assert kept is not None
            assert kept.kept is not None
            assert kept.kept.place.certificate is not None
            assert certificate_hash(kept.kept.place.certificate) == poll.slot.previous

    live(body, tmp_path)
