"""Taking a whole state: from many at once, whatever some of them do, only what differs, nothing that is not proved."""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio
from flockstep.collectives.place import Stated, start_of_run
from flockstep.collectives.state import merkle
from flockstep.collectives.state.checkpoint_file import STATE
from flockstep.collectives.state.transfer import STALL_SECONDS, Offer, ask_leaves, ask_offers
from flockstep.dht.run.admission import Charter
from flockstep.peer import wire
from flockstep.peer.errors import NetworkError
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.node.bulk import Blob
from flockstep.peer.transport import Stream
from hypothesis import given, settings
from hypothesis import strategies as st
from support.restoring_peer import Fledgling, all_of, catch_up
from support.swarm import RUN, Flock, with_flock

CELLS = 40
LEAF_BYTES = 4 * 512
NUM_LEAVES = 2 * CELLS * 256 * 4 // LEAF_BYTES
STATE_BYTES = NUM_LEAVES * LEAF_BYTES
Body = Callable[[Flock, list[Fledgling], Fledgling], Awaitable[None]]


@pytest.fixture(autouse=True)
def small_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merkle, "LEAF_ELEMENTS", LEAF_BYTES // 4)


def fly(count: int, body: Body, folder: Path, *, uploads: Sequence[float] = (), seed: int = 0, rounds: int = 1) -> None:
    """All but the last do so many rounds and make a checkpoint of them; then `body(flock, others, newcomer)`."""

    async def main(flock: Flock) -> None:
        *others, late = (Fledgling(bird) for bird in flock.birds)
        flock.birds.remove(late.bird)
        await all_of(others, rounds)
        flock.birds.append(late.bird)
        for other in others:
            await other.serve_state()
        blank(late)
        await late.catch_up.hash_state()
        await body(flock, others, late)

    run_virtual(lambda: with_flock(count, main, cells=CELLS, home=(folder, 100), uploads=uploads, seed=seed))


def blank(bird: Fledgling) -> None:
    """Hold nothing of anybody's state, in any leaf."""
    for vector in bird.state:
        vector[:] = np.arange(vector.size)


async def take(late: Fledgling, others: Sequence[Fledgling]) -> None:
    """As a newcomer for whom replaying is no way."""
    members = [other.member() for other in others]
    await late.catch_up._take_checkpoint(members[0], members)


def leaves_of(bird: Fledgling) -> list[bytes]:
    return merkle.leaves(bird.bird.theta) + merkle.leaves(bird.bird.momentum)


def served(birds: Sequence[Fledgling]) -> Counter[str]:
    """How many leaves each is asked for from now on, by its id."""
    counts: Counter[str] = Counter()
    for bird in birds:
        bulk, keys = bird.bird.node._bulk, set(leaves_of(bird))

        async def send(
            stream: Stream, request: wire.Fetch, *, peer: str, real: Callable[..., Awaitable[None]], keys: set[bytes]
        ) -> None:
            counts[peer] += request.hash in keys
            await real(stream, request)

        bulk._send = partial(send, peer=bird.bird.peer, real=bulk._send, keys=keys)  # type: ignore[method-assign]
    return counts


def spoil(bird: Fledgling, leaves: Sequence[bytes]) -> None:
    """Serve other bytes than those that these hashes promise."""
    for key in leaves:
        bird.bird.node.blobs.put(key, bytes(LEAF_BYTES))


def test_a_newcomer_takes_leaves_from_all_members_at_once_and_keeps_a_checkpoint(tmp_path: Path) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        counts = served(others)
        await catch_up(late, others)
        await trio.sleep(1)
        assert late.place.head == others[0].place.head
        assert leaves_of(late) == leaves_of(others[0])
        assert late.catch_up.num_bytes == STATE_BYTES
        assert sum(counts.values()) == NUM_LEAVES
        assert min(counts.values()) >= NUM_LEAVES // 5
        (offer,) = await ask_offers(others[0].bird.node, [late.bird.peer], RUN)
        assert offer.place == late.place
        told = late.named("state.taking")
        assert (told[0]["bytes"], told[0]["total"], told[0]["givers"]) == (0, STATE_BYTES, 3)
        assert told[-1]["bytes"] == STATE_BYTES

    fly(4, body, tmp_path)


def test_one_dies_one_lies_and_one_is_slow_and_the_state_still_comes(tmp_path: Path) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        honest, slow, dying, liar = others
        spoil(liar, leaves_of(liar))
        counts = served(others)

        async def strike() -> None:
            while counts[dying.bird.peer] < 3:  # noqa: ASYNC110  Virtual time, and no event to await.
                await trio.sleep(0.01)
            flock.network.kill(dying.bird.peer)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(strike)
            await take(late, others)
        assert late.place.head == honest.place.head
        assert leaves_of(late) == leaves_of(honest)
        assert late.catch_up.num_bytes == STATE_BYTES
        charges = late.named("peer.charged")
        assert {(charge["peer"], charge["step"]) for charge in charges} == {(liar.bird.peer, "give a leaf")}
        assert len(charges) <= 2  # Two of its leaves were under way; then it was asked for nothing more.
        assert counts[liar.bird.peer] <= 2
        assert {event["peer"] for event in late.named("state.leaf_missed")} == {dying.bird.peer}
        assert {event["peer"] for event in late.named("state.leaf_late")} <= {slow.bird.peer}
        assert counts[honest.bird.peer] > counts[slow.bird.peer] > 0
        assert trio.current_time() < 30  # The slow one alone would need 13 seconds for a tenth of the leaves.

    fly(5, body, tmp_path, uploads=[10 * LEAF_BYTES, LEAF_BYTES / 3, 10 * LEAF_BYTES, 0, 0])


def test_who_is_killed_in_the_middle_fetches_nothing_again_in_its_next_life(tmp_path: Path) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        counts = served(others)
        with trio.move_on_after(3.0):
            await take(late, others)
        (begun,) = (int(str(event["bytes"])) for event in late.named("state.taking")[-1:])
        assert STATE_BYTES // 5 < begun < 4 * STATE_BYTES // 5
        again = Fledgling(await flock.restart(3))
        blank(again)
        first = sum(counts.values())
        await take(again, others)
        assert again.place.head == others[0].place.head
        assert leaves_of(again) == leaves_of(others[0])
        assert again.named("state.taking")[0]["bytes"] == STATE_BYTES - again.catch_up.num_bytes >= begun
        assert sum(counts.values()) - first == again.catch_up.num_bytes // LEAF_BYTES
        # What was under way at the moment of the death had not come: two leaves of each of three givers.
        assert NUM_LEAVES <= sum(counts.values()) <= NUM_LEAVES + 6

    fly(4, body, tmp_path, uploads=[4 * LEAF_BYTES] * 3)


def test_rounds_that_go_by_break_no_transfer_and_are_replayed_behind_it(tmp_path: Path) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        counts = served(others)
        claimed = [other.member() for other in others]
        flock.birds.remove(late.bird)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(all_of, others, 3)
            await late.catch_up._take_checkpoint(claimed[0], claimed)
        assert late.place.round == 1
        assert sum(counts.values()) == NUM_LEAVES
        assert others[0].place.round == 4
        await catch_up(late, others)
        assert late.place.head == others[0].place.head
        assert [event["round"] for event in late.named("round.replayed")] == [2, 3, 4]
        assert sum(counts.values()) == NUM_LEAVES
        blank(late)
        late.catch_up.place = start_of_run(bytes(32))
        await take(late, others)
        assert late.place.head == others[0].place.head
        assert sum(counts.values()) == NUM_LEAVES  # From its own checkpoint this time.

    fly(4, body, tmp_path, uploads=[NUM_LEAVES * LEAF_BYTES / 30] * 3)


def test_only_leaves_that_differ_are_fetched(tmp_path: Path) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        for mine, theirs in zip(late.state, others[0].state, strict=True):
            mine[:] = theirs
        late.bird.theta[0] += 1
        late.bird.momentum[-1] += 1
        counts = served(others)
        await take(late, others)
        assert leaves_of(late) == leaves_of(others[0])
        assert sum(counts.values()) == 2
        assert late.catch_up.num_bytes == 2 * LEAF_BYTES

    fly(3, body, tmp_path)


def test_what_a_giver_finds_damaged_on_its_disk_comes_from_another_and_is_nobodys_guilt(tmp_path: Path) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        path = tmp_path / others[0].bird.peer / "checkpoints" / "1" / STATE
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data[: len(data) // 2] + data[-LEAF_BYTES:])
        await take(late, others)
        assert leaves_of(late) == leaves_of(others[1])
        assert not late.named("peer.charged")
        assert {event["reason"] for event in others[0].named("fetch.refused")} == {"damaged on the disk"}
        assert {event["peer"] for event in late.named("state.leaf_missed")} == {others[0].bird.peer}

    fly(3, body, tmp_path)


def test_where_nobody_has_all_leaves_it_is_said_and_tried_again_with_what_came(tmp_path: Path) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        gone = leaves_of(others[0])[3]
        kept = others[0].bird.node.blobs.find(gone, "anybody")
        for other in others:
            other.bird.node.blobs.drop([gone])
        with pytest.raises(NetworkError, match=f"nobody gives 1 of {NUM_LEAVES} leaves"):
            await take(late, others)
        assert kept is not None
        others[1].bird.node.blobs.put(gone, kept)
        counts = served(others)
        await take(late, others)
        assert leaves_of(late) == leaves_of(others[0])
        assert sum(counts.values()) <= 2  # Of the first one, who has it no more, and of the second.

    fly(3, body, tmp_path)


def test_a_giver_that_stops_in_the_middle_is_replaced_at_once(tmp_path: Path) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        counts = served(others)

        async def strike() -> None:
            while counts[others[1].bird.peer] < 5:  # noqa: ASYNC110  Virtual time, and no event to await.
                await trio.sleep(0.01)
            flock.network.stall(others[1].bird.peer)

        late.bird.node.watch([])  # No heartbeat tells that it is gone.
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(strike)
            await take(late, others)
        assert leaves_of(late) == leaves_of(others[0])
        assert trio.current_time() - began < STALL_SECONDS
        assert {event["peer"] for event in late.named("state.leaf_late")} == {others[1].bird.peer}

    fly(3, body, tmp_path, uploads=[8 * LEAF_BYTES] * 2)


def test_a_giver_that_falls_silent_is_not_waited_for(tmp_path: Path) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        late.bird.node.watch([])
        with trio.move_on_after(2.0):
            await take(late, others)
        flock.network.stall(others[0].bird.peer)
        (offer,) = await ask_offers(late.bird.node, [other.bird.peer for other in others[1:]], RUN)
        with pytest.raises(NetworkError, match="has sent nothing for 20 s"):
            await late.bird.node.fetch(others[0].bird.peer, leaves_of(others[0])[5], LEAF_BYTES, patience=20)
        assert offer.givers == (others[1].bird.peer,)

    fly(3, body, tmp_path, uploads=[LEAF_BYTES] * 2)


def test_offers_that_are_not_proved_are_charged_and_not_taken(tmp_path: Path) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        honest, liar = others
        node, members = late.bird.node, [honest.bird.peer, liar.bird.peer]
        (offer,) = await ask_offers(node, members, RUN)
        assert offer.givers == tuple(members)
        ((round_, root, certificate),) = (await node.ask(honest.bird.peer, wire.StateAsk(RUN))).checkpoints
        lies = [
            (round_, bytes(32), certificate),
            (round_ + 1, root, certificate),
            (round_ + 1, bytes(32), b"no certificate"),
        ]
        for count, lie in enumerate(lies, 1):

            async def say(peer: str, question: wire.StateAsk, lie: Stated = lie) -> wire.StateOffer:
                return wire.StateOffer((lie,))

            liar.bird.node.on_ask(wire.StateAsk, say)
            assert [offer.givers for offer in await ask_offers(node, members, RUN)] == [(honest.bird.peer,)]
            assert len(late.named("peer.charged")) == count
        assert not await ask_offers(node, members, RUN, charter=Charter(authority="somebody else"))

        async def other_leaves(peer: str, question: wire.LeavesAsk) -> wire.Leaves:
            return wire.Leaves((bytes(32),))

        liar.bird.node.on_ask(wire.LeavesAsk, other_leaves)
        assert await ask_leaves(node, Offer(offer.place, tuple(reversed(members))), RUN) == tuple(leaves_of(honest))
        assert late.named("peer.charged")[-1]["step"] == "ask for leaves"
        with pytest.raises(NetworkError, match="nobody tells the leaves"):
            await ask_leaves(node, Offer(start_of_run(bytes(32)), tuple(members)), RUN)
        assert not await ask_offers(node, members, "b" * 52)

    fly(3, body, tmp_path)


def test_the_state_that_most_hold_is_taken_and_of_these_the_newest(tmp_path: Path) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        flock.birds.remove(late.bird)
        await all_of(others, 1)
        others[0].archive.checkpoints._owed = True
        await others[0].serve_state()
        node, peers = late.bird.node, [other.bird.peer for other in others]
        offers = await ask_offers(node, peers, RUN)
        assert [(offer.place.round, len(offer.givers)) for offer in offers] == [(1, 3), (2, 1)]
        for other in others[1:]:
            other.archive.checkpoints._owed = True
            await other.serve_state()
        assert [offer.place.round for offer in await ask_offers(node, peers, RUN)] == [2, 1]

    fly(4, body, tmp_path)


@settings(max_examples=15)
@given(data=st.data())
def test_whatever_givers_do_an_honest_one_is_enough_and_no_leaf_is_kept_twice(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    behaviours = data.draw(st.lists(st.sampled_from(["honest", "slow", "liar", "forgetful", "dying"]), max_size=5))
    delay = data.draw(st.floats(0.0, 2.0))

    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        leaves = leaves_of(others[0])
        for other, behaviour in zip(others[1:], behaviours, strict=True):
            some = data.draw(st.lists(st.sampled_from(leaves)))
            if behaviour == "liar":
                spoil(other, some)
            elif behaviour == "forgetful":
                other.bird.node.blobs.drop(some)
        kept: Counter[bytes] = Counter()
        put = late.bird.node.blobs.get

        def count(key: bytes, reader: str) -> Blob | None:
            kept[key] += 1
            return put(key, reader)

        late.bird.node.blobs.get = count  # type: ignore[method-assign]

        async def strike() -> None:
            await trio.sleep(delay)
            for other, behaviour in zip(others[1:], behaviours, strict=True):
                if behaviour == "dying":
                    flock.network.kill(other.bird.peer)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(strike)
            await take(late, others)
        assert leaves_of(late) == leaves
        assert late.catch_up.num_bytes == STATE_BYTES
        liars = {other.bird.peer for other, what in zip(others[1:], behaviours, strict=True) if what == "liar"}
        assert {charge["peer"] for charge in late.named("peer.charged")} <= liars

    uploads = [4 * LEAF_BYTES] + [LEAF_BYTES / 2 if what == "slow" else 4 * LEAF_BYTES for what in behaviours]
    folder = tmp_path_factory.mktemp("flock")
    fly(len(behaviours) + 2, body, folder, uploads=uploads, seed=data.draw(st.integers(0, 100)))
