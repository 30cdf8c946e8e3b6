"""The lease view that the network process sends to its trainer."""

import pytest
import trio
from flockstep.dht.members.body import MAX_SHARE_BYTES, MemberBody
from flockstep.dht.members.table import MemberTable
from flockstep.optim.data.lease_view import Neighbours
from flockstep.optim.data.leases import MAX_EPOCH, Lease, Ranking, Share
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.wire.schema import encode
from support.recorded import recorded
from trio.testing import MockClock

ME, OTHER, LIAR = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2, 3))
RANKING = Ranking(7, 20)
BEYOND = encode(Share(source=b"data", epoch=MAX_EPOCH)).replace(MAX_EPOCH.to_bytes(4), (MAX_EPOCH + 1).to_bytes(4))
"""A share with an epoch that `encode` refuses to write."""


def part(*leases: Lease) -> Share:
    return Share(source=b"data", leases=leases)


def test_a_member_counts_while_it_is_here_and_what_it_left_half_finished_stays_known() -> None:
    async def see() -> None:
        table = MemberTable("run", ME.peer_id)
        neighbours = Neighbours(table, ME.peer_id, Telemetry())
        assert neighbours.view() is None
        others = MemberTable("run", OTHER.peer_id)
        body = MemberBody(state="training", share=encode(Share(source=b"data", leases=(Lease(0, 3, 5),))))
        table.merge(others.update_own(OTHER, body, trio.current_time()), trio.current_time())
        table.meet(OTHER.peer_id, trio.current_time())
        mine = MemberBody(state="training", share=neighbours.publish(part(), RANKING, 1))
        table.update_own(ME, mine, trio.current_time())
        seen = neighbours.view()
        assert seen is not None
        assert (seen.peers, seen.taken[0], seen.resume) == (2, 1 << 3, ())
        table.lose(OTHER.peer_id, trio.current_time(), "silent")
        seen = neighbours.view()
        assert seen is not None
        assert (seen.peers, seen.taken[0], seen.resume) == (1, 0, ((0, 3, 5),))

    trio.run(see, clock=MockClock())


@pytest.mark.parametrize(
    "junk",
    [b"junk", bytes(MAX_SHARE_BYTES), encode(Share(source=b"data"))[:-1], BEYOND],
)
def test_a_malformed_share_is_ignored_with_one_event_and_hides_nobody_elses(junk: bytes) -> None:
    telemetry, events = recorded()

    async def see() -> None:
        table = MemberTable("run", ME.peer_id)
        neighbours = Neighbours(table, ME.peer_id, telemetry)
        neighbours.publish(part(), RANKING, 1)
        honest, liar = MemberTable("run", OTHER.peer_id), MemberTable("run", LIAR.peer_id)

        def publish(share: bytes) -> None:
            body = MemberBody(state="training", share=share)
            table.merge(liar.update_own(LIAR, body, trio.current_time()), trio.current_time())
            table.meet(LIAR.peer_id, trio.current_time())

        body = MemberBody(state="training", share=encode(Share(source=b"data", leases=(Lease(0, 3, 5),))))
        table.merge(honest.update_own(OTHER, body, trio.current_time()), trio.current_time())
        table.meet(OTHER.peer_id, trio.current_time())
        publish(junk)
        for _ in range(3):
            seen = neighbours.view()
            assert seen is not None
            assert (seen.peers, seen.taken[0], seen.epoch) == (2, 1 << 3, 0)
        assert [(event["event"], event["peer"]) for event in events] == [("share.ignored", LIAR.peer_id)]
        assert events[0]["step"] == "read its share"
        assert events[0]["reason"]
        publish(encode(Share(source=b"data")))
        seen = neighbours.view()
        assert seen is not None
        assert seen.peers == 3
        publish(junk)
        neighbours.view()
        assert len(events) == 2

    trio.run(see, clock=MockClock())


def test_the_share_of_a_peer_that_nobody_has_met_is_not_read() -> None:
    async def see() -> None:
        table = MemberTable("run", ME.peer_id)
        neighbours = Neighbours(table, ME.peer_id, Telemetry())
        neighbours.publish(part(), RANKING, 1)
        body = MemberBody(state="training", share=encode(Share(source=b"data", epoch=7, leases=(Lease(7, 3, 5),))))
        table.merge(MemberTable("run", LIAR.peer_id).update_own(LIAR, body, 0.0), trio.current_time())
        seen = neighbours.view()
        assert seen is not None
        assert (seen.peers, seen.epoch, seen.resume) == (1, 0, ())

    trio.run(see, clock=MockClock())


def test_of_two_messages_that_arrive_out_of_order_the_newer_one_holds() -> None:
    neighbours = Neighbours(MemberTable("run", ME.peer_id), ME.peer_id, Telemetry())
    newer = neighbours.publish(part(Lease(0, 1)), RANKING, 2)
    assert neighbours.publish(part(), RANKING, 1) == newer
    assert neighbours.publish(part(), RANKING, 3) != newer
