"""The owner's statements reach every member: by the directory, by other members, over restarts."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from flockstep.dht.directory.memory import MemoryBoard, MemoryDirectory
from flockstep.dht.keys import statements_key
from flockstep.dht.members.body import MemberBody, MemberState
from flockstep.dht.members.gossip import Gossip
from flockstep.dht.members.owner_log import OWNER_PERIOD, OwnerLog, publish_pages, read_pages
from flockstep.dht.members.remembered import Remembered
from flockstep.dht.members.table import MemberTable
from flockstep.dht.published import validate_published
from flockstep.dht.run.admission import OPEN, Charter, Invitation, Ticket
from flockstep.dht.run.statements import STATEMENTS_PER_PAGE, OwnerStatement, OwnerStatements, pages_of
from flockstep.peer import wire
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import LocalError, NetworkError
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.memory.network import MemoryNetwork, run_virtual
from flockstep.peer.node.node import Node
from support.recorded import recorded

RUN = "a" * 52
OWNER, ANNA, BERT, CARL = (Identity.from_seed(bytes([seed]) * 32) for seed in (1, 2, 3, 4))
NONE = OwnerStatements(RUN, OWNER.peer_id)
INVITING = Charter(run=RUN, owner=OWNER.peer_id, kind="invite")


def stated(*decisions: tuple[str, str], log: OwnerStatements = NONE) -> OwnerStatements:
    for verb, about in decisions:
        log = log.sign(OWNER, OwnerStatement(verb, about))
    return log


ONE = stated(("ban", CARL.peer_id))


class Member:
    """A peer that does nothing but be a member, and follow the owner."""

    def __init__(self, identity: Identity, folder: Path, charter: Charter = OPEN, invite: bytes = b"") -> None:
        self.identity, self.charter = identity, charter
        self.folder = folder / identity.peer_id
        self.body = MemberBody(state=MemberState.TRAINING, invite=invite)
        self.events: list[Event] = []

    async def live(self, network: MemoryNetwork, board: MemoryBoard, statements_board: MemoryBoard) -> None:
        me = self.identity.peer_id
        telemetry = Telemetry(clock=trio.current_time)
        telemetry.subscribe(self.events.append)
        transport = network.transport(me, telemetry=telemetry)
        async with Node(transport, self.identity, PeerConfig(), telemetry, inline=True) as self.node:
            own = [
                MemoryDirectory(shared, me, transport.addresses(), validate_published)
                for shared in (board, statements_board)
            ]
            remembered = Remembered(self.folder, RUN, telemetry)
            self.table = MemberTable(RUN, me, charter=self.charter, sequence=int(trio.current_time() * 1000))
            self.gossip = Gossip(self.node, self.table, own[0], RUN, seed=0)
            self.body = replace(self.body, addresses=transport.addresses())
            held = remembered.statements(NONE)
            self.log = OwnerLog(self.node, self.gossip.presence, own[1], held, seed=0, remembered=remembered)
            self.log.on_change(self.follow)
            self.gossip.announce(self.body)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.gossip.run)
                nursery.start_soon(self.log.run)

    def follow(self, statements: OwnerStatements) -> None:
        self.gossip.follow(self.charter.amended(statements))
        if statements.records:
            self.body = replace(self.body, statements=statements.hash, statements_bytes=len(statements.packed))
            self.gossip.announce(self.body)

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]


class World:
    def __init__(self, nursery: trio.Nursery) -> None:
        self.network, self.board = MemoryNetwork(latency=0.01), MemoryBoard()
        self.nursery = nursery

    def start(self, member: Member, statements_board: MemoryBoard | None = None) -> None:
        """Start a member; its directory of statements may be another one than that of the others."""
        self.nursery.start_soon(member.live, self.network, self.board, statements_board or self.board)

    async def publish(self, statements: OwnerStatements) -> None:
        directory = MemoryDirectory(self.board, OWNER.peer_id, (), validate_published)
        await publish_pages(directory, statements, NONE)


def run_test(body: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            world = World(nursery)
            async with world.network.open():
                await body(world)
                nursery.cancel_scope.cancel()

    run_virtual(main)


async def test_an_owners_peer_that_has_lost_its_disk_gives_no_number_twice(world: World, /, tmp_path: Path) -> None:
    owner, anna = Member(OWNER, tmp_path), Member(ANNA, tmp_path)

    world.start(owner)
    world.start(anna)
    await trio.sleep(1)
    await world.publish(ONE)  # By an earlier process, which held it on a disk that is gone.
    await owner.log.state([OwnerStatement("vouch", ANNA.peer_id), OwnerStatement("vouch", BERT.peer_id)])
    assert [(made.verb, made.peer) for made in owner.log.statements.statements] == [
        ("ban", CARL.peer_id),
        ("vouch", ANNA.peer_id),
        ("vouch", BERT.peer_id),
    ]
    await trio.sleep(10)
    assert anna.log.statements == owner.log.statements
    with pytest.raises(LocalError, match="only the owner"):
        await anna.log.state([OwnerStatement("vouch", BERT.peer_id)])


async def test_a_statement_reaches_members_by_the_directory_and_by_each_other(world: World, /, tmp_path: Path) -> None:
    anna, bert = Member(ANNA, tmp_path), Member(BERT, tmp_path)

    world.start(anna)
    world.start(bert, MemoryBoard())  # A directory from which the statement is withheld.
    await trio.sleep(5)
    await world.publish(ONE)
    await trio.sleep(OWNER_PERIOD + 5)
    assert anna.log.statements == bert.log.statements == ONE
    for member in (anna, bert):
        (event,) = member.named("owner.stated")
        assert (event["peer"], event["step"]) == (CARL.peer_id, "ban")
        assert not member.named("peer.charged")


async def test_a_newcomer_and_a_restarted_member_know_all_statements(world: World, /, tmp_path: Path) -> None:
    long = stated(*[("ban", BERT.peer_id)] * (2 * STATEMENTS_PER_PAGE + 3))

    await world.publish(long)
    anna = Member(ANNA, tmp_path)
    world.start(anna)
    await trio.sleep(1)
    assert anna.log.statements == long
    world.network.kill(ANNA.peer_id)
    await trio.sleep(1)
    again, nowhere = Member(ANNA, tmp_path), MemoryBoard()
    world.start(again, nowhere)
    await trio.sleep(1)
    assert again.log.statements == long
    directory = MemoryDirectory(nowhere, OWNER.peer_id, (), validate_published)
    assert await read_pages(directory, NONE) == long  # And publishes them where they are unknown.
    bert = Member(BERT, tmp_path)
    world.start(bert, MemoryBoard())
    await trio.sleep(5)
    assert bert.log.statements == long  # And serves them to members.


async def test_an_old_copy_rolls_nothing_back(world: World, /, tmp_path: Path) -> None:
    newer = stated(("pardon", CARL.peer_id), log=ONE)

    await world.publish(newer)
    anna, bert, old = Member(ANNA, tmp_path), Member(BERT, tmp_path), MemoryBoard()
    Remembered(bert.folder, RUN, Telemetry()).keep_statements(ONE)
    old.values[statements_key(RUN, OWNER.peer_id, 0)] = dict(pages_of(ONE))[0]
    world.start(anna)
    await trio.sleep(2)
    world.start(bert, old)
    await trio.sleep(OWNER_PERIOD + 5)
    assert anna.log.statements == bert.log.statements == newer
    assert [event["step"] for event in bert.named("owner.stated")] == ["pardon"]
    assert not anna.named("peer.charged") + bert.named("peer.charged")
    assert old.values[statements_key(RUN, OWNER.peer_id, 0)] == dict(pages_of(newer))[0]


def test_the_command_and_the_owners_peer_share_one_file(tmp_path: Path) -> None:
    kept = Remembered(tmp_path, RUN, Telemetry())
    kept.keep_statements(stated(("vouch", BERT.peer_id), log=ONE))
    kept.keep_statements(ONE)
    assert len(kept.statements(NONE)) == 2


@pytest.mark.parametrize("junk", [b"", b"junk", ONE.packed[:-70] + bytes(70)])
def test_a_damaged_file_of_statements_is_an_event_and_no_more(tmp_path: Path, junk: bytes) -> None:
    telemetry, events = recorded()
    (tmp_path / "statements").write_bytes(junk)
    assert Remembered(tmp_path, RUN, telemetry).statements(NONE) == NONE
    assert [event["event"] for event in events] == ["run.forgotten"] * bool(junk)


FORGED = OwnerStatements(RUN, BERT.peer_id).sign(BERT, OwnerStatement("ban", ANNA.peer_id))
CHANGED = ONE.packed[:-1] + bytes([ONE.packed[-1] ^ 1])


@pytest.mark.parametrize("lie", [FORGED.packed, CHANGED, b"junk"], ids=["forged", "changed", "junk"])
async def test_who_serves_what_the_owner_never_stated_is_charged_once_in_a_period(
    world: World, /, tmp_path: Path, lie: bytes
) -> None:
    anna, bert = Member(ANNA, tmp_path), Member(BERT, tmp_path)

    world.start(anna)
    world.start(bert, MemoryBoard())
    await trio.sleep(1)
    for number in range(20):
        bert.node.blobs.put(digest(lie), lie)
        bert.body = replace(bert.body, statements=digest(lie), statements_bytes=len(lie), step=number)
        bert.gossip.announce(bert.body)
        await trio.sleep(1)
    assert anna.log.statements == NONE
    (charged,) = anna.named("peer.charged")
    assert charged["peer"] == BERT.peer_id
    await world.publish(ONE)
    await trio.sleep(OWNER_PERIOD)
    assert anna.log.statements == ONE  # The directory is not asked in vain meanwhile.


async def test_who_names_statements_that_it_does_not_serve_is_passed_over(world: World, /, tmp_path: Path) -> None:
    anna, bert = Member(ANNA, tmp_path), Member(BERT, tmp_path)

    world.start(anna)
    world.start(bert, MemoryBoard())
    await trio.sleep(1)
    bert.gossip.announce(replace(bert.body, statements=bytes(range(32)), statements_bytes=1_000_000))
    await trio.sleep(10)
    (event,) = anna.named("owner.unheard")
    assert event["peer"] == BERT.peer_id
    assert not anna.named("peer.charged")


def invited(identity: Identity, count: int = 0) -> tuple[Ticket, bytes]:
    seed = bytes([count + 50]) * 32
    key = Identity.from_seed(seed).peer_id if count else identity.peer_id
    ticket = Ticket(Invitation.sign(OWNER, RUN, key, count=count), seed if count else b"")
    return ticket, ticket.credential(identity.peer_id)


@pytest.mark.parametrize("by_key", [False, True], ids=["the peer", "its invitation"])
async def test_a_closed_run_drops_whom_its_owner_revokes_and_gives_it_nothing(
    world: World, /, tmp_path: Path, by_key: bool
) -> None:
    ticket, credential = invited(BERT, count=2)
    subject = ticket.invitation.key if by_key else BERT.peer_id
    anna = Member(ANNA, tmp_path, INVITING, invited(ANNA)[1])
    bert, carl = (
        Member(BERT, tmp_path, INVITING, credential),
        Member(CARL, tmp_path, INVITING, ticket.credential(CARL.peer_id)),
    )

    for member in (anna, bert, carl):
        world.start(member)
    await trio.sleep(5)
    assert set(anna.gossip.presence.others()) == {BERT.peer_id, CARL.peer_id}
    revoked = stated(("revoke", subject))
    await world.publish(revoked)
    await trio.sleep(OWNER_PERIOD + 5)
    assert set(anna.gossip.presence.others()) == (set() if by_key else {CARL.peer_id})
    assert BERT.peer_id not in anna.node.watched
    assert any(
        event["peer"] == BERT.peer_id and "the run's owner has withdrawn" in str(event["reason"])
        for event in anna.named("peer.lost")
    )  # A round that waits for it goes on.
    assert anna.table.get(BERT.peer_id) is None
    with pytest.raises(
        NetworkError,
        match=r"this run is for its members only: (the run.s owner has withdrawn|it shows no invitation)",
    ):
        await bert.node.ask(ANNA.peer_id, wire.StateAsk(RUN))
    assert not anna.named("peer.charged")
    await world.publish(stated(("vouch", subject), log=revoked))
    await trio.sleep(3 * OWNER_PERIOD)
    assert BERT.peer_id in anna.gossip.presence.others()
