"""Records of keys that are nowhere, and words on them, make nobody a member (holes 10 and 16)."""

import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import trio
from flockstep.collectives.chain.fork_choice import check_model, training
from flockstep.collectives.chain.quorum import drawn_for
from flockstep.dht.directory.memory import MemoryBoard, MemoryDirectory
from flockstep.dht.members import gossip as gossip_module
from flockstep.dht.members import table as table_module
from flockstep.dht.members.body import MemberBody, MemberState, open_member
from flockstep.dht.members.claims import CLAIMS_PER_CARRIER, CLAIMS_PER_NETWORK, room_of
from flockstep.dht.members.gossip import Gossip
from flockstep.dht.members.table import (
    LAPSED,
    LIFETIME,
    MAX_MEMBERS,
    MAX_OVER_RELAY,
    PRESENCE,
    MemberTable,
    MergeOutcome,
)
from flockstep.dht.members.vouchers import tag_of, tags_of
from flockstep.dht.published import validate_published
from flockstep.dht.records import Record
from flockstep.peer import wire
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import UsageError
from flockstep.peer.base.transport import PeerId
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.memory.network import MemoryNetwork, run_virtual
from flockstep.peer.node.guard import BURST_SIGNATURES, SIGNATURES_PER_SECOND
from flockstep.peer.node.node import Node
from flockstep.peer.quota.limits import GateLimits
from flockstep.peer.quota.origins import Origins
from flockstep.peer.wire.schema import encode

RUN = "a" * 52
ORIGINS = Origins(())
ME = Identity.from_seed(b"m" * 32)
TRAINING = MemberBody(state=MemberState.TRAINING, layout=b"m" * 32)


def key(number: int) -> Identity:
    return Identity.from_seed(number.to_bytes(32, "big"))


def record(identity: Identity, sequence: int = 1, body: MemberBody = TRAINING) -> Record:
    return Record.sign(identity, run=RUN, kind="member", sequence=sequence, lifetime=LIFETIME, body=encode(body))


@pytest.fixture(scope="module")
def ghosts() -> tuple[Record, ...]:
    """1,500 records of keys that are nowhere."""
    return tuple(record(key(1000 + number)) for number in range(1500))


class Run:
    """Members that do nothing but be members."""

    def __init__(self) -> None:
        self.network, self.board = MemoryNetwork(latency=0.01), MemoryBoard()
        self.members: dict[Identity, Gossip] = {}
        self.tables: dict[Identity, MemberTable] = {}
        self.nodes: dict[Identity, Node] = {}
        self.events: dict[Identity, list[Event]] = {}

    async def join(self, identity: Identity) -> None:
        telemetry = Telemetry(clock=trio.current_time)
        telemetry.subscribe(self.events.setdefault(identity, []).append)
        transport = self.network.transport(identity.peer_id, telemetry=telemetry)
        async with Node(transport, identity, PeerConfig(), telemetry, inline=True) as node:
            directory = MemoryDirectory(self.board, identity.peer_id, transport.addresses(), validate_published)
            table = MemberTable(RUN, identity.peer_id)
            gossip = Gossip(node, table, directory, RUN, seed=0)
            self.members[identity], self.tables[identity], self.nodes[identity] = gossip, table, node
            gossip.announce(replace(TRAINING, addresses=transport.addresses()))
            await gossip.run()

    def here(self, identity: Identity) -> set[str]:
        return set(self.members[identity].presence.others())


def virtually(count: int, body: Callable[[Run, trio.Nursery], object], seconds: float = 5.0) -> None:
    async def main() -> None:
        run = Run()
        async with run.network.open(), trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(run.join, key(number))
            await trio.sleep(seconds)
            await body(run, nursery)  # type: ignore[misc]
            nursery.cancel_scope.cancel()

    run_virtual(main)


def pages(records: tuple[Record, ...]) -> Iterator[wire.Members]:
    for start in range(0, len(records), 256):
        yield wire.Members(tuple(each.encode() for each in records[start : start + 256]))


def test_1500_ghosts_change_nothing(ghosts: tuple[Record, ...]) -> None:
    async def body(run: Run, nursery: trio.Nursery) -> None:
        liar, target, *honest = run.members
        everybody = {identity.peer_id for identity in run.members}
        for page in pages(ghosts):
            run.nodes[liar].send(target.peer_id, page)
        await trio.sleep(10.0)
        assert run.here(target) == everybody - {target.peer_id}
        presence, slot = run.members[target].presence, wire.Slot(RUN, 1, bytes(32))
        assert drawn_for(slot, {member.peer for member in training(presence.active())}, (), ()) == everybody
        assert not presence.is_crowd
        assert run.nodes[target].watched == everybody - {target.peer_id}
        assert run.tables[target].num_claims == CLAIMS_PER_CARRIER
        refused = [event for event in run.events[target] if event["event"] == "message.refused"]
        assert {str(event["reason"]) for event in refused} == {
            f"its carrier claims more than {CLAIMS_PER_CARRIER} members that nobody has met"
        }
        for other in honest:  # Claims are not handed on.
            assert run.tables[other].num_claims == 0
        newcomer = key(99)
        nursery.start_soon(run.join, newcomer)
        await trio.sleep(2.0)
        assert run.here(newcomer) == everybody
        assert newcomer.peer_id in run.here(target)

    virtually(5, body)


def test_ghosts_that_do_not_fit_cost_no_signature_and_beyond_the_budget_are_not_read(
    monkeypatch: pytest.MonkeyPatch, ghosts: tuple[Record, ...]
) -> None:
    read, verified = Counter[PeerId](), Counter[PeerId]()
    opened = gossip_module._opened

    def noted_opened(data: bytes) -> Record:
        record = opened(data)
        read[record.peer] += 1
        return record

    def noted_checked(record: Record) -> MemberBody:
        verified[record.peer] += 1
        return open_member(record)

    async def body(run: Run, nursery: trio.Nursery) -> None:
        liar, target = run.members
        monkeypatch.setattr(gossip_module, "_opened", noted_opened)
        monkeypatch.setattr(gossip_module, "open_member", noted_checked)
        for _ in range(8):
            for page in pages(ghosts):
                run.nodes[liar].send(target.peer_id, page)
            await trio.sleep(1.0)
        ids = {ghost.peer for ghost in ghosts}
        assert sum(verified[peer] for peer in ids) == CLAIMS_PER_CARRIER
        # The budget pays for what is read and for what is verified.
        assert sum(read[peer] for peer in ids) <= BURST_SIGNATURES - CLAIMS_PER_CARRIER + 8 * SIGNATURES_PER_SECOND
        assert [event["peer"] for event in run.events[target] if event["event"] == "peer.charged"] == [liar.peer_id]

    virtually(2, body)


def test_a_question_for_members_reads_no_claim(monkeypatch: pytest.MonkeyPatch, ghosts: tuple[Record, ...]) -> None:
    """A table of claims took 2 ms of the event loop for each question, and one address may ask 256 times a second."""
    table, looked = table_with(key(1)), list[str]()
    for ghost in ghosts[:100]:
        table.merge(ghost, 0.0, carrier="a carrier")

    def noted(peer: PeerId) -> bytes:
        looked.append(peer)
        return tag_of(peer)

    monkeypatch.setattr(table_module, "tag_of", noted)
    assert {record.peer for record in table.newer_than(b"", 1.0)} == {ME.peer_id, key(1).peer_id}
    assert set(looked) == {ME.peer_id, key(1).peer_id}


def test_keys_without_a_vote_vouch_for_nobody_however_many_have_sessions(ghosts: tuple[Record, ...]) -> None:
    """Three free keys beside three honest members are half of the heads: enough to make 1,000 ghosts members."""

    async def body(run: Run, nursery: trio.Nursery) -> None:
        first, second, third, *honest = run.members
        liars, voter = (first, second, third), honest[0]
        for gossip in run.members.values():
            gossip.presence.follow_chain(lambda: {voter.peer_id: 1}, lambda: None)
        everybody = {identity.peer_id for identity in run.members}
        claimed, lie = ghosts[:1000], tags_of(each.peer for each in ghosts[:1000])
        for other in honest:
            for page in pages(claimed):
                run.nodes[liars[0]].send(other.peer_id, page)
        await trio.sleep(2.0)
        for _ in range(3):
            for liar in liars:
                run.nodes[liar].send([other.peer_id for other in honest], wire.Met(lie))
            await trio.sleep(2.0)
            for other in honest:
                assert run.here(other) == everybody - {other.peer_id}

    virtually(6, body)


def test_one_liars_word_on_ghosts_is_not_enough_and_that_of_a_third_and_one_is(ghosts: tuple[Record, ...]) -> None:
    async def body(run: Run, nursery: trio.Nursery) -> None:
        target, *others = run.members  # Six others: more than two must say so.
        ghost = ghosts[0]
        run.nodes[others[0]].send(target.peer_id, next(pages((ghost,))))
        await trio.sleep(3.0)  # Their true words have been said; the next ones come later than these.
        for number, liar in enumerate(others[:3]):
            assert ghost.peer not in run.here(target), number
            run.nodes[liar].send(target.peer_id, wire.Met(tags_of([ghost.peer])))
            await trio.sleep(1.5)
        assert "enough members vouch for it" in {event.get("reason") for event in run.events[target]}

    virtually(7, body)


def test_a_stranger_vouches_for_nobody() -> None:
    async def body(run: Run, nursery: trio.Nursery) -> None:
        target, *_ = run.members
        stranger = key(77)
        transport, telemetry = run.network.transport(stranger.peer_id), Telemetry()
        async with Node(transport, stranger, PeerConfig(), telemetry, inline=True) as node:
            node.learn(target.peer_id, (f"/memory/{target.peer_id}",))
            node.send(target.peer_id, wire.Met(tags_of([stranger.peer_id])))
            await trio.sleep(1.0)
        refused = [event for event in run.events[target] if event["event"] == "message.refused"]
        assert [event["reason"] for event in refused] == ["the word of a stranger on whom it has met"]

    virtually(2, body)


@pytest.mark.parametrize("tags", [bytes(7), b"b" * 8 + b"a" * 8, b"a" * 16])
def test_a_malformed_word_is_charged(tags: bytes) -> None:
    async def body(run: Run, nursery: trio.Nursery) -> None:
        liar, target = run.members
        run.nodes[liar].send(target.peer_id, wire.Met(tags))
        await trio.sleep(1.0)
        assert [event["peer"] for event in run.events[target] if event["event"] == "peer.charged"] == [liar.peer_id]

    virtually(2, body)


def table_with(*met: Identity) -> MemberTable:
    table = MemberTable(RUN, ME.peer_id)
    table.update_own(ME, TRAINING, 0.0)
    for identity in met:
        table.merge(record(identity), 0.0, met=True)
        assert table.meet(identity.peer_id, 0.0) == ""
    return table


def test_ghosts_of_another_model_end_no_newcomer(ghosts: tuple[Record, ...]) -> None:
    honest = [key(number) for number in range(3)]
    table = table_with(*honest)
    others = replace(TRAINING, layout=b"x" * 32)
    liars = [key(100 + number) for number in range(8)]
    for liar in liars:
        table.merge(record(liar, body=others), 0.0, carrier=honest[0].peer_id)
    check_model(table.active(1.0), ME.peer_id)
    for liar in liars:
        table.meet(liar.peer_id, 1.0)
    with pytest.raises(UsageError, match="than 8 of 11 members have: ") as raised:
        check_model(table.active(1.0), ME.peer_id)
    assert sum(liar.peer_id in str(raised.value) for liar in liars) == 3


def test_fresh_keys_of_one_carrier_take_a_quarter_of_the_table(ghosts: tuple[Record, ...]) -> None:
    table = table_with(*(key(number) for number in range(3)))
    one = ghosts[0]
    tracemalloc.start()
    try:
        for each in ghosts:
            table.merge(each, 1.0, carrier="liar")
        assert (table.num_claims, len(table)) == (CLAIMS_PER_CARRIER, 4 + CLAIMS_PER_CARRIER)
        full, _ = tracemalloc.get_traced_memory()
        for number in range(20_000):  # Their signatures are wrong: what does not fit is not even verified.
            merge = table.merge(replace(one, peer=f"12D3KooW{number:044d}"), 1.0, carrier="liar")
            assert merge.outcome is MergeOutcome.FULL
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(table) == 4 + CLAIMS_PER_CARRIER
    assert full < 4_000_000
    assert after - full < 100_000
    assert len(table.active(1.0)) == 4
    assert len(table.newer_than(b"", 1.0)) == 4


def test_the_longest_records_take_no_more_memory_than_usual_ones() -> None:
    """4,096 of them took 120 MB, with the caches of decoded records."""
    long = replace(TRAINING, share=bytes(1024), addresses=tuple(f"/dns4/{'a' * 60}.{'b' * 60}.x{n}/tcp/1" for n in range(16)))
    records = [record(key(9000 + number), body=long).encode() for number in range(3000)]
    table = table_with()
    tracemalloc.start()
    try:
        for number, data in enumerate(records):
            origin = ORIGINS.of(f"198.51.{number % 8}.1")
            table.merge(gossip_module._opened(data), 1.0, carrier=f"liar {number % 64}", origin=origin)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    room = room_of(len(Record.decode(records[0]).body))
    assert table.num_claims == MAX_MEMBERS // room
    assert num_bytes < 16_000_000


def test_a_claim_that_grows_takes_its_room() -> None:
    long = replace(TRAINING, share=bytes(1024), device="d" * 64, addresses=(f"/dns4/{'a' * 60}.{'b' * 60}.x/tcp/1",) * 9)
    table = table_with()
    for number in range(CLAIMS_PER_CARRIER):
        table.merge(record(key(9000 + number)), 1.0, carrier="liar")
    grown = table.merge(record(key(9000), 2, long), 1.0, carrier="another")
    assert (grown.outcome, table.num_claims) == (MergeOutcome.FULL, CLAIMS_PER_CARRIER)
    assert table.merge(record(key(9000), 2), 1.0, carrier="another").outcome is MergeOutcome.UPDATED


def test_what_a_full_table_refuses_is_not_verified_first(ghosts: tuple[Record, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each such record cost 4 ms: its signature, and a look at all rows."""
    monkeypatch.setattr("flockstep.dht.members.table.MAX_MEMBERS", 100)
    table = table_with()
    for number, each in enumerate(ghosts[:99]):
        assert table.merge(each, 1.0, carrier=f"liar {number}").outcome is MergeOutcome.NEW
    false = replace(ghosts[200], signature=bytes(64))
    assert table.merge(false, 1.0, carrier="liar 1").outcome is MergeOutcome.FULL


def test_carriers_of_one_network_share_half_of_the_table_and_others_get_theirs(ghosts: tuple[Record, ...]) -> None:
    table, origin = table_with(), ORIGINS.of("198.51.100.7")
    for number, each in enumerate(record(key(number)) for number in range(5000, 5000 + CLAIMS_PER_NETWORK + 10)):
        table.merge(each, 1.0, carrier=f"liar {number % 8}", origin=origin)
    assert table.num_claims == CLAIMS_PER_NETWORK
    merge = table.merge(ghosts[0], 1.0, carrier="honest", origin=ORIGINS.of("203.0.113.7"))
    assert merge.outcome is MergeOutcome.NEW
    assert table.merge(ghosts[1], 1.0, carrier="liar 1", origin=origin).outcome is MergeOutcome.FULL


def test_a_full_table_drops_claims_first_and_never_who_holds_a_session(
    monkeypatch: pytest.MonkeyPatch, ghosts: tuple[Record, ...]
) -> None:
    monkeypatch.setattr("flockstep.dht.members.table.MAX_MEMBERS", 8)
    honest = [key(number) for number in range(3)]
    table = table_with(*honest)
    for each in ghosts[:10]:
        table.merge(each, 1.0, carrier="liar")
    assert len(table) == 8
    # A carrier that takes less gets a row of the one that takes the most.
    assert table.merge(ghosts[20], 1.0, carrier="honest").outcome is MergeOutcome.NEW
    for number in range(3, 12):
        assert table.merge(record(key(number)), 2.0 + number, met=True).outcome is MergeOutcome.NEW
        assert table.meet(key(number).peer_id, 2.0 + number) == ""
        assert len(table) == 8
        if number < 7:
            assert {identity.peer_id for identity in honest} <= {row.peer for row in table}
    assert table.num_claims == 0
    assert table.merge(ghosts[30], 20.0, carrier="liar").outcome is MergeOutcome.FULL


def test_of_one_address_so_many_members_count_as_connections() -> None:
    gate, table = GateLimits(), table_with()
    keys = [key(number) for number in range(gate.per_address + 2)]
    for identity in keys:
        table.merge(record(identity), 0.0, met=True)
    why = [table.meet(identity.peer_id, 0.0, ORIGINS.of("198.51.100.7")) for identity in keys]
    assert why == [""] * gate.per_address + ["too many members from one address or network"] * 2
    assert len(table.active(1.0)) == gate.per_address + 1
    assert table.meet(keys[-1].peer_id, 0.0, ORIGINS.of("203.0.113.9")) == ""
    table.expire(PRESENCE)  # Their places are free again once they are silent.
    assert table.meet(keys[0].peer_id, PRESENCE, ORIGINS.of("198.51.100.7")) == ""


def test_members_of_one_office_and_over_one_relay_are_not_counted_as_one_host() -> None:
    keys = [key(number) for number in range(200)]
    for ip, relayed in (("192.168.{0}.{1}", False), ("198.51.100.7", True)):
        table = table_with()
        for number, identity in enumerate(keys):
            table.merge(record(identity), 0.0, met=True)
            origin = ORIGINS.of(ip.format(number % 4, number))
            assert table.meet(identity.peer_id, 0.0, origin, relayed=relayed) == ""
        assert len(table.active(1.0)) == 201
    assert MAX_OVER_RELAY < MAX_MEMBERS


def test_who_is_silent_for_a_minute_lapses_and_is_back_with_its_next_message() -> None:
    table = table_with(key(1))
    peer = key(1).peer_id
    assert table.counts(peer, PRESENCE - 1)
    assert not table.counts(peer, PRESENCE)
    assert table.expire(PRESENCE) == ((peer, LAPSED),)
    assert table.meet(peer, PRESENCE + 1) == ""
    assert table.counts(peer, PRESENCE + 1)
    table.lose(peer, PRESENCE + 2, "its heartbeat failed")
    table.vouch([peer])
    assert not table.counts(peer, PRESENCE + 2)  # My own failure detector is not overruled.
