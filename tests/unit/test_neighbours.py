"""What the network process tells its trainer of the others' parts in the data."""

import trio
from flockstep.dht.members.table import Lease, MemberBody, MemberTable, Share
from flockstep.optim.neighbours import Neighbours
from flockstep.peer.identity import Identity
from flockstep.peer.process.bridge import Payload
from flockstep.peer.wire.schema import encode
from trio.testing import MockClock

ME, OTHER = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2))


def part(number: int, *leases: Lease) -> Payload:
    share = Share(source=b"data", leases=leases)
    return {"share": encode(share).hex(), "seed": 7, "num_units": 20, "number": number}


def test_a_member_counts_while_it_is_here_and_what_it_left_half_finished_stays_known() -> None:
    async def see() -> None:
        table = MemberTable("run", ME.peer_id)
        neighbours = Neighbours(table, ME.peer_id)
        assert neighbours.view() is None
        others = MemberTable("run", OTHER.peer_id)
        body = MemberBody(state="training", share=Share(source=b"data", leases=(Lease(0, 3, 5),)))
        table.merge(others.update_own(OTHER, body, trio.current_time()), trio.current_time())
        table.update_own(ME, MemberBody(state="training", share=neighbours.tell(part(1))), trio.current_time())
        seen = neighbours.view()
        assert seen is not None
        assert (seen["peers"], seen["taken"][0], seen["resume"]) == (2, 1 << 3, ())
        table.lose(OTHER.peer_id, trio.current_time(), "silent")
        seen = neighbours.view()
        assert seen is not None
        assert (seen["peers"], seen["taken"][0], seen["resume"]) == (1, 0, ((0, 3, 5),))

    trio.run(see, clock=MockClock())


def test_of_two_words_that_come_out_of_order_the_newer_one_holds() -> None:
    neighbours = Neighbours(MemberTable("run", ME.peer_id), ME.peer_id)
    newer = neighbours.tell(part(2, Lease(0, 1)))
    assert neighbours.tell(part(1)) == newer
    assert neighbours.tell(part(3)) != newer
