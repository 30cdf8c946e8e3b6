"""State transfer from many providers, faulty ones included: only differing, proved leaves."""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio
from flockstep.collectives.chain.chain import NOTHING, StatedPosition, start_of_run
from flockstep.collectives.chain.packed import pack_certificate
from flockstep.collectives.state import merkle
from flockstep.collectives.state.checkpoint_file import STATE
from flockstep.collectives.state.transfer import LEAF_STALL_SECONDS, Offer, ask_leaves, ask_offers
from flockstep.peer import wire
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import NetworkError
from flockstep.peer.base.transport import PeerId, Stream
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.node import file_blob
from flockstep.peer.node.bulk import Blob
from hypothesis import given, settings
from hypothesis import strategies as st
from support.certificates import certify
from support.restoring_peer import RestoringPeer, all_of, catch_up
from support.swarm import RUN, SimSwarm, with_swarm

CELLS = 40
LEAF_BYTES = 4 * 512
NUM_LEAVES = 2 * CELLS * 256 * 4 // LEAF_BYTES
STATE_BYTES = NUM_LEAVES * LEAF_BYTES
Body = Callable[[SimSwarm, list[RestoringPeer], RestoringPeer], Awaitable[None]]


@pytest.fixture(autouse=True)
def small_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merkle, "LEAF_ELEMENTS", LEAF_BYTES // 4)


def run_rounds(
    count: int, body: Body, folder: Path, *, uploads: Sequence[float] = (), seed: int = 0, rounds: int = 1
) -> None:
    """All but the last do so many rounds and make a checkpoint of them; then `body(swarm, others, newcomer)`."""

    async def main(swarm: SimSwarm) -> None:
        *others, late = (RestoringPeer(sim) for sim in swarm.sims)
        swarm.sims.remove(late.sim)
        await all_of(others, rounds)
        swarm.sims.append(late.sim)
        for other in others:
            await other.serve_state()
        blank(late)
        await late.held.hash()
        await body(swarm, others, late)

    run_virtual(lambda: with_swarm(count, main, cells=CELLS, home=(folder, 100), uploads=uploads, seed=seed))


def blank(sim: RestoringPeer) -> None:
    """Hold nothing of anybody's state, in any leaf."""
    for vector in sim.state:
        vector[:] = np.arange(vector.size)


async def take(late: RestoringPeer, others: Sequence[RestoringPeer]) -> None:
    """As a newcomer for whom replaying is no way."""
    members = [other.member() for other in others]
    await late.examine(members)
    await late.catch_up._take_checkpoint(members[0], members)


def leaves_of(sim: RestoringPeer) -> list[bytes]:
    return merkle.leaves(sim.sim.theta) + merkle.leaves(sim.sim.momentum)


def served(sims: Sequence[RestoringPeer]) -> Counter[str]:
    """How many leaves each is asked for from now on, by its id."""
    counts: Counter[str] = Counter()
    for sim in sims:
        bulk, keys = sim.sim.node._bulk, set(leaves_of(sim))

        async def send(
            stream: Stream, request: wire.Fetch, *, peer: str, real: Callable[..., Awaitable[None]], keys: set[bytes]
        ) -> None:
            counts[peer] += request.hash in keys
            await real(stream, request)

        bulk._send = partial(send, peer=sim.sim.peer, real=bulk._send, keys=keys)  # type: ignore[method-assign]
    return counts


def spoil(sim: RestoringPeer, leaves: Sequence[bytes]) -> None:
    """Serve other bytes than those that these hashes promise."""
    for key in leaves:
        sim.sim.node.blobs.put(key, bytes(LEAF_BYTES))


def test_a_newcomer_takes_leaves_from_all_members_at_once_and_keeps_a_checkpoint(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        counts = served(others)
        await catch_up(late, others)
        await trio.sleep(1)
        assert late.place.head == others[0].place.head
        assert leaves_of(late) == leaves_of(others[0])
        assert late.held.num_bytes == STATE_BYTES
        assert sum(counts.values()) == NUM_LEAVES
        assert min(counts.values()) >= NUM_LEAVES // 5
        (offer,) = await ask_offers(others[0].sim.node, [late.sim.peer], RUN)
        assert offer.place == late.place
        told = late.named("state.taking")
        assert (told[0]["bytes"], told[0]["total"], told[0]["providers"]) == (0, STATE_BYTES, 3)
        assert told[-1]["bytes"] == STATE_BYTES

    run_rounds(4, body, tmp_path)


def test_one_dies_one_lies_and_one_is_slow_and_the_state_still_comes(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        honest, slow, dying, liar = others
        spoil(liar, leaves_of(liar))
        counts = served(others)

        async def strike() -> None:
            while counts[dying.sim.peer] < 3:  # noqa: ASYNC110  Virtual time, and no event to await.
                await trio.sleep(0.01)
            swarm.network.kill(dying.sim.peer)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(strike)
            await take(late, others)
        assert late.place.head == honest.place.head
        assert leaves_of(late) == leaves_of(honest)
        assert late.held.num_bytes == STATE_BYTES
        charges = late.named("peer.charged")
        assert {(charge["peer"], charge["step"]) for charge in charges} == {(liar.sim.peer, "provide a leaf")}
        assert len(charges) <= 2  # Two of its leaves were under way; then it was asked for nothing more.
        assert counts[liar.sim.peer] <= 2
        assert {event["peer"] for event in late.named("state.leaf_missed")} == {dying.sim.peer}
        assert {event["peer"] for event in late.named("state.leaf_late")} <= {slow.sim.peer}
        assert counts[honest.sim.peer] > counts[slow.sim.peer] > 0
        assert trio.current_time() < 30  # The slow one alone would need 13 seconds for a tenth of the leaves.

    run_rounds(5, body, tmp_path, uploads=[10 * LEAF_BYTES, LEAF_BYTES / 3, 10 * LEAF_BYTES, 0, 0])


@pytest.mark.parametrize("killed", [False, True])
def test_a_state_of_which_a_part_has_come_is_none_of_the_run(tmp_path: Path, killed: bool) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        counts, members = served(others), [other.member() for other in others]
        await late.examine(members)

        async def strike() -> None:
            while counts.total() < 3:  # noqa: ASYNC110  Virtual time, and no event to await.
                await trio.sleep(0.01)
            for other in others if killed else ():
                swarm.network.kill(other.sim.peer)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(strike)
            await late.catch_up.take_from(members[0], members)
        assert late.held.changed
        assert late.held.is_blank is killed
        assert bool(late.named("state.retry")) is killed

    run_rounds(4, body, tmp_path, uploads=[4 * LEAF_BYTES] * 3)


def test_who_is_killed_in_the_middle_fetches_nothing_again_in_its_next_life(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        counts = served(others)
        with trio.move_on_after(2.6):
            await take(late, others)
        (begun,) = (int(str(event["bytes"])) for event in late.named("state.taking")[-1:])
        assert STATE_BYTES // 5 < begun < 4 * STATE_BYTES // 5
        again = RestoringPeer(await swarm.restart(3))
        blank(again)
        await trio.sleep(1.0)  # Until providers have come to what it asked for before its death.
        first = sum(counts.values())
        await take(again, others)
        assert again.place.head == others[0].place.head
        assert leaves_of(again) == leaves_of(others[0])
        assert again.named("state.taking")[0]["bytes"] == STATE_BYTES - again.held.num_bytes >= begun
        twice = len(again.named("state.leaf_late"))  # The last leaves, of which another provider was faster.
        assert sum(counts.values()) - first - twice == again.held.num_bytes // LEAF_BYTES
        # What was under way at the moment of the death had not come: two leaves of each of three providers.
        assert NUM_LEAVES <= sum(counts.values()) - twice <= NUM_LEAVES + 6

    run_rounds(4, body, tmp_path, uploads=[4 * LEAF_BYTES] * 3)


def test_rounds_that_go_by_break_no_transfer_and_are_replayed_behind_it(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        counts = served(others)
        claimed = [other.member() for other in others]
        await late.examine(claimed)
        swarm.sims.remove(late.sim)
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
        late.held.place = start_of_run(bytes(32))
        await take(late, others)
        assert late.place.head == others[0].place.head
        assert sum(counts.values()) == NUM_LEAVES  # From its own checkpoint this time.

    run_rounds(4, body, tmp_path, uploads=[NUM_LEAVES * LEAF_BYTES / 30] * 3)


def test_a_checkpoint_that_moves_on_during_its_transfer_is_nobodys_guilt_and_the_next_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_blob, "BLOB_PIECE_BYTES", LEAF_BYTES // 8)

    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        swarm.sims.remove(late.sim)
        claimed = [other.member() for other in others]
        await late.examine(claimed)

        async def go_on() -> None:
            await trio.sleep(1.3)
            await all_of(others, 1)
            for other in others:
                other.archive.checkpoints._owed = True
                await other.serve_state()
                assert other.named("checkpoint.written")[-1]["round"] == 2

        async with trio.open_nursery() as nursery:
            nursery.start_soon(go_on)
            with pytest.raises(NetworkError, match="no provider is left"):
                await late.catch_up._take_checkpoint(claimed[0], claimed)
        assert late.named("state.leaf_missed")
        await take(late, others)
        assert (late.place.round, leaves_of(late)) == (2, leaves_of(others[0]))
        assert not late.named("peer.charged")

    run_rounds(4, body, tmp_path, uploads=[NUM_LEAVES * LEAF_BYTES / 30] * 3)


def test_only_leaves_that_differ_are_fetched(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        for mine, theirs in zip(late.state, others[0].state, strict=True):
            mine[:] = theirs
        late.sim.theta[0] += 1
        late.sim.momentum[-1] += 1
        counts = served(others)
        await take(late, others)
        assert leaves_of(late) == leaves_of(others[0])
        assert sum(counts.values()) == 2
        assert late.held.num_bytes == 2 * LEAF_BYTES

    run_rounds(3, body, tmp_path)


@pytest.mark.parametrize("owner", ["the member", "the newcomer"])
def test_leaves_that_fit_no_place_of_a_model_end_no_newcomer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    """A start state has no certificate. One hash stands for all its leaves, of which the last is shorter, or for a file."""
    monkeypatch.setattr(merkle, "LEAF_ELEMENTS", 3 * LEAF_BYTES // 4)

    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        member, is_mine = others[0].sim.node, owner == "the newcomer"
        data = bytes([1]) * (100 if is_mine else 3 * LEAF_BYTES)
        (late.sim.node if is_mine else member).blobs.put(digest(data), data)
        hashes = [digest(data), *leaves_of(late)[1:]] if is_mine else [digest(data)] * len(leaves_of(late))

        async def offer(peer: PeerId, question: wire.StateAsk) -> wire.StateOffer:
            return wire.StateOffer(((0, merkle.root(hashes), b""),))

        async def list_leaves(peer: PeerId, question: wire.LeavesAsk) -> wire.Leaves:
            return wire.Leaves(tuple(hashes))

        member.on_ask(wire.StateAsk, offer)
        member.on_ask(wire.LeavesAsk, list_leaves)
        stated = others[0].member(round=0, root=merkle.root(hashes), head=NOTHING.hash, chain_tokens=0)
        await late.catch_up.take_from(stated, [stated])
        assert [event["peer"] for event in late.named("state.retry")] == [others[0].sim.peer]

    run_rounds(3, body, tmp_path)


def test_what_a_provider_finds_damaged_on_its_disk_comes_from_another_and_is_nobodys_guilt(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        path = tmp_path / others[0].sim.peer / "checkpoints" / "1" / STATE
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data[: len(data) // 2] + data[-LEAF_BYTES:])
        await take(late, others)
        assert leaves_of(late) == leaves_of(others[1])
        assert not late.named("peer.charged")
        assert {event["reason"] for event in others[0].named("fetch.refused")} == {"damaged on the disk"}
        assert {event["peer"] for event in late.named("state.leaf_missed")} == {others[0].sim.peer}

    run_rounds(3, body, tmp_path)


def test_where_nobody_has_all_leaves_it_is_said_and_tried_again_with_what_came(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        gone = leaves_of(others[0])[3]
        kept = others[0].sim.node.blobs.find(gone, "anybody")
        for other in others:
            other.sim.node.blobs.drop([gone])
        with pytest.raises(NetworkError, match=f"no provider is left for 1 of {NUM_LEAVES} leaves"):
            await take(late, others)
        assert kept is not None
        others[1].sim.node.blobs.put(gone, kept)
        counts = served(others)
        await take(late, others)
        assert leaves_of(late) == leaves_of(others[0])
        assert sum(counts.values()) <= 2  # Of the first one, who has it no more, and of the second.

    run_rounds(3, body, tmp_path)


def test_a_provider_that_stops_in_the_middle_is_replaced_at_once(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        counts = served(others)

        async def strike() -> None:
            while counts[others[1].sim.peer] < 5:  # noqa: ASYNC110  Virtual time, and no event to await.
                await trio.sleep(0.01)
            swarm.network.stall(others[1].sim.peer)

        late.sim.node.watch([])  # No heartbeat tells that it is gone.
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(strike)
            await take(late, others)
        assert leaves_of(late) == leaves_of(others[0])
        assert trio.current_time() - began < LEAF_STALL_SECONDS
        assert {event["peer"] for event in late.named("state.leaf_late")} == {others[1].sim.peer}

    run_rounds(3, body, tmp_path, uploads=[8 * LEAF_BYTES] * 2)


def test_a_provider_that_falls_silent_is_not_waited_for(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        late.sim.node.watch([])
        with trio.move_on_after(2.6):
            await take(late, others)
        swarm.network.stall(others[0].sim.peer)
        (offer,) = await ask_offers(late.sim.node, [other.sim.peer for other in others[1:]], RUN)
        with pytest.raises(NetworkError, match="has sent nothing for 20 s"):
            await late.sim.node.fetch(others[0].sim.peer, leaves_of(others[0])[5], LEAF_BYTES, patience=20)
        assert offer.providers == (others[1].sim.peer,)

    run_rounds(3, body, tmp_path, uploads=[LEAF_BYTES] * 2)


def test_offers_that_are_not_proved_are_charged_and_not_taken(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        honest, liar = others
        node, members = late.sim.node, [honest.sim.peer, liar.sim.peer]
        (offer,) = await ask_offers(node, members, RUN)
        assert offer.providers == tuple(members)
        ((round_, root, certificate),) = (await node.ask(honest.sim.peer, wire.StateAsk(RUN))).checkpoints
        lies = [
            (round_, bytes(32), certificate),
            (round_ + 1, root, certificate),
            (round_ + 1, bytes(32), b"no certificate"),
        ]
        for count, lie in enumerate(lies, 1):

            async def say(peer: str, question: wire.StateAsk, lie: StatedPosition = lie) -> wire.StateOffer:
                return wire.StateOffer((lie,))

            liar.sim.node.on_ask(wire.StateAsk, say)
            assert [offer.providers for offer in await ask_offers(node, members, RUN)] == [(honest.sim.peer,)]
            assert len(late.named("peer.charged")) == count

        async def other_leaves(peer: str, question: wire.LeavesAsk) -> wire.Leaves:
            return wire.Leaves((bytes(32),))

        liar.sim.node.on_ask(wire.LeavesAsk, other_leaves)
        assert await ask_leaves(node, Offer(offer.place, tuple(reversed(members))), RUN) == tuple(leaves_of(honest))
        assert late.named("peer.charged")[-1]["step"] == "ask for leaves"
        with pytest.raises(NetworkError, match="no provider has the leaves"):
            await ask_leaves(node, Offer(start_of_run(bytes(32)), tuple(members)), RUN)
        assert not await ask_offers(node, members, "b" * 52)

    run_rounds(3, body, tmp_path)


def test_a_certificate_of_another_chain_that_states_the_same_root_hides_nobodys_state(tmp_path: Path) -> None:
    """Anybody can sign one with a key of its own: a certificate alone does not show who had a vote."""

    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        honest, liar = others
        node, members = late.sim.node, [honest.sim.peer, liar.sim.peer]
        ((round_, root, _),) = (await node.ask(honest.sim.peer, wire.StateAsk(RUN))).checkpoints
        other_chain = pack_certificate(certify(None, 100, run=RUN, mark=root))

        async def lie(peer: str, question: wire.StateAsk) -> wire.StateOffer:
            return wire.StateOffer(((round_, root, other_chain),))

        liar.sim.node.on_ask(wire.StateAsk, lie)
        assert {offer.providers for offer in await ask_offers(node, members, RUN)} == {(peer,) for peer in members}
        await take(late, others)
        assert late.place.head == honest.place.head
        assert leaves_of(late) == leaves_of(honest)

    run_rounds(3, body, tmp_path)


def test_the_state_that_most_hold_is_taken_and_of_these_the_newest(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        swarm.sims.remove(late.sim)
        await all_of(others, 1)
        others[0].archive.checkpoints._owed = True
        await others[0].serve_state()
        node, peers = late.sim.node, [other.sim.peer for other in others]
        offers = await ask_offers(node, peers, RUN)
        assert [(offer.place.round, len(offer.providers)) for offer in offers] == [(1, 2), (2, 1)]
        for other in others[1:]:
            other.archive.checkpoints._owed = True
            await other.serve_state()
        assert [offer.place.round for offer in await ask_offers(node, peers, RUN)] == [2]

    run_rounds(4, body, tmp_path)


@settings(max_examples=15)
@given(data=st.data())
def test_whatever_providers_do_an_honest_one_is_enough_and_no_leaf_is_kept_twice(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kinds = st.sampled_from(["honest", "slow", "liar", "forgetful", "dying"])
    behaviours = data.draw(st.lists(kinds, min_size=1, max_size=5))
    delay = data.draw(st.floats(0.0, 2.0))

    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        leaves = leaves_of(others[0])
        for other, behaviour in zip(others[1:], behaviours, strict=True):
            some = data.draw(st.lists(st.sampled_from(leaves)))
            if behaviour == "liar":
                spoil(other, some)
            elif behaviour == "forgetful":
                other.sim.node.blobs.drop(some)
        kept: Counter[bytes] = Counter()
        put = late.sim.node.blobs.get

        def count(key: bytes, reader: str) -> Blob | None:
            kept[key] += 1
            return put(key, reader)

        late.sim.node.blobs.get = count  # type: ignore[method-assign]

        async def strike() -> None:
            await trio.sleep(delay)
            for other, behaviour in zip(others[1:], behaviours, strict=True):
                if behaviour == "dying":
                    swarm.network.kill(other.sim.peer)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(strike)
            await take(late, others)
        assert leaves_of(late) == leaves
        assert late.held.num_bytes == STATE_BYTES
        liars = {other.sim.peer for other, what in zip(others[1:], behaviours, strict=True) if what == "liar"}
        assert {charge["peer"] for charge in late.named("peer.charged")} <= liars

    uploads = [4 * LEAF_BYTES] + [LEAF_BYTES / 2 if what == "slow" else 4 * LEAF_BYTES for what in behaviours]
    folder = tmp_path_factory.mktemp("swarm")
    run_rounds(len(behaviours) + 2, body, folder, uploads=uploads, seed=data.draw(st.integers(0, 100)))
