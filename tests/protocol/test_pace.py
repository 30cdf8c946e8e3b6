"""State provision: from files, rate-limited, after the bytes of rounds, never damaged."""

import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import DeadlineExceeded, NetworkError, UsageError
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.memory.network import MemoryNetwork, run_virtual
from flockstep.peer.node.bulk import ROUND_FIRST_SECONDS
from flockstep.peer.node.file_blob import BLOB_PIECE_BYTES, FileBlob
from flockstep.peer.node.node import Node

ANNA, BERT, CLEO = (Identity.from_seed(bytes([number]) * 32) for number in range(3))
DATA = bytes(range(256)) * (8 * BLOB_PIECE_BYTES // 256)
KEY = digest(DATA)


def meet(body: Callable[[Node, Node, Node], Awaitable[None]], *, rate: float = 0.0, bandwidth: float = 1e7) -> None:
    """Anna gives to Bert and Cleo, states at `rate`, over roads of `bandwidth`, all in bytes/s."""

    async def main() -> None:
        network = MemoryNetwork(latency=0.01)
        async with network.open():
            nodes = [
                Node(
                    network.transport(identity.peer_id, up=bandwidth, down=bandwidth),
                    identity,
                    PeerConfig(state_upload=rate),
                    Telemetry(clock=trio.current_time),
                    inline=True,
                )
                for identity in (ANNA, BERT, CLEO)
            ]
            async with nodes[0], nodes[1], nodes[2]:
                for node in nodes:
                    for other in nodes:
                        node.learn(other.peer_id, (f"/memory/{other.peer_id}",))
                await body(nodes[0], nodes[1], nodes[2])

    run_virtual(main)


def put(node: Node, folder: Path, data: bytes = DATA) -> Path:
    """Serve the data from a file that holds it behind something else."""
    path = folder / "blob"
    path.write_bytes(b"before" + data + b"behind")
    node.blobs.put(digest(data), FileBlob(path, 6, len(data)))
    return path


def test_states_go_at_the_rate_that_was_set_whoever_asks_and_do_not_count_as_a_measure_of_the_road(
    tmp_path: Path,
) -> None:
    async def body(anna: Node, bert: Node, cleo: Node) -> None:
        put(anna, tmp_path)
        began = trio.current_time()

        async def take(node: Node) -> None:
            assert await node.fetch(ANNA.peer_id, KEY, len(DATA), patience=20) == DATA

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take, bert)
            nursery.start_soon(take, cleo)
        seconds = trio.current_time() - began
        assert 14 <= seconds / (BLOB_PIECE_BYTES / 1e6) <= 18  # Sixteen pieces at 1 MB/s, the first of which goes at once.
        assert (anna.upload_rate, bert.download_rate) == (0, 0)

    meet(body, rate=1e6)


def test_half_of_the_measured_upload_is_for_states_and_all_before_anything_was_measured(tmp_path: Path) -> None:
    async def body(anna: Node, bert: Node, cleo: Node) -> None:
        put(anna, tmp_path)
        began = trio.current_time()
        await bert.fetch(ANNA.peer_id, KEY, len(DATA), patience=20)
        assert trio.current_time() - began < 2 * len(DATA) / 1e7
        of_a_round = b"round" * 1_000_000
        anna.blobs.put(digest(of_a_round), of_a_round)
        await bert.fetch(ANNA.peer_id, digest(of_a_round), len(of_a_round))
        rate = anna.upload_rate
        assert rate > 0
        began = trio.current_time()
        await bert.fetch(ANNA.peer_id, KEY, len(DATA), patience=20)
        seconds = trio.current_time() - began
        assert 0.8 * len(DATA) < seconds * rate / 2 < 1.2 * len(DATA)

    meet(body)


def test_what_belongs_to_a_round_goes_first_but_who_does_not_read_holds_up_nobody_for_long(tmp_path: Path) -> None:
    async def body(anna: Node, bert: Node, cleo: Node) -> None:
        put(anna, tmp_path)
        of_a_round = b"round" * 400_000
        anna.blobs.put(digest(of_a_round), of_a_round)
        ended: dict[str, float] = {}

        async def take(node: Node, key: bytes, size: int, name: str) -> None:
            await node.fetch(ANNA.peer_id, key, size, patience=60)
            ended[name] = trio.current_time()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take, bert, digest(of_a_round), len(of_a_round), "round")
            nursery.start_soon(take, cleo, KEY, len(DATA), "state")
        assert ended["round"] < 1.5 * len(of_a_round) / 1e6
        assert ended["state"] > ended["round"]
        with anna._bulk._pace.of_a_round():
            began = trio.current_time()
            await cleo.fetch(ANNA.peer_id, KEY, len(DATA), patience=60)
            assert trio.current_time() - began > ROUND_FIRST_SECONDS

    meet(body, bandwidth=1e6)


@pytest.mark.parametrize("how", ["shorter", "other bytes", "gone"])
def test_a_file_that_was_damaged_is_refused_and_nobody_is_charged(tmp_path: Path, how: str) -> None:
    async def body(anna: Node, bert: Node, cleo: Node) -> None:
        path = put(anna, tmp_path)
        if how == "shorter":
            path.write_bytes(path.read_bytes()[: len(DATA)])
        elif how == "other bytes":
            path.write_bytes(bytes(len(DATA) + 12))
        else:
            path.unlink()
        with pytest.raises(NetworkError, match="damaged on the disk"):
            await bert.fetch(ANNA.peer_id, KEY, len(DATA), patience=20)
        assert anna.blobs.get(KEY, BERT.peer_id) is None
        assert anna.telemetry.counts["fetch.refused"] == 1
        assert not bert.telemetry.counts["peer.charged"]

    meet(body)


def test_a_fetch_of_a_file_goes_on_from_its_offset(tmp_path: Path) -> None:
    blob = FileBlob(put_file(tmp_path), 6, len(DATA))
    for offset in (0, 1, BLOB_PIECE_BYTES, len(DATA) - 1, len(DATA)):
        assert b"".join(blob.pieces(offset)) == DATA[offset:]
    assert blob.read(KEY) == DATA


def put_file(folder: Path) -> Path:
    path = folder / "blob"
    path.write_bytes(b"before" + DATA + b"behind")
    return path


def test_a_slow_provider_is_waited_for_as_long_as_something_comes(tmp_path: Path) -> None:
    async def body(anna: Node, bert: Node, cleo: Node) -> None:
        put(anna, tmp_path)
        assert await bert.fetch(ANNA.peer_id, KEY, len(DATA), patience=2) == DATA
        assert trio.current_time() > 6

    meet(body, rate=BLOB_PIECE_BYTES)


def test_who_sends_nothing_is_not_waited_for_longer_than_patience(tmp_path: Path) -> None:
    async def body(anna: Node, bert: Node, cleo: Node) -> None:
        put(anna, tmp_path)
        with pytest.raises(DeadlineExceeded, match="sent nothing for 2 s"):
            await bert.fetch(ANNA.peer_id, KEY, len(DATA), patience=2)

    meet(body, rate=BLOB_PIECE_BYTES / 3)


def test_the_rate_is_checked() -> None:
    with pytest.raises(UsageError, match="state_upload"):
        PeerConfig(state_upload=-1.0)


def test_bytes_of_a_round_that_nobody_waits_for_go_evenly_to_all_readers_together() -> None:
    async def body(anna: Node, bert: Node, cleo: Node) -> None:
        rate, seconds = 1e6, 4
        parts = [bytes([number]) * int(rate * seconds / 2) for number in (1, 2)]
        for part in parts:
            anna.blobs.put(digest(part), part)
        anna.pace_round(rate)
        sent: list[int] = []

        async def take(node: Node, part: bytes) -> None:
            assert await node.fetch(ANNA.peer_id, digest(part), len(part)) == part

        async def watch() -> None:
            while True:
                sent.append(anna.transport.traffic().sent)
                await trio.sleep(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            async with trio.open_nursery() as readers:
                readers.start_soon(take, bert, parts[0])
                readers.start_soon(take, cleo, parts[1])
            nursery.cancel_scope.cancel()
        each = [after - before for before, after in itertools.pairwise(sent)]
        assert len(each) >= seconds - 1
        assert max(each) < 1.15 * rate
        anna.pace_round(0.0)
        began = trio.current_time()
        await take(cleo, parts[0])
        assert trio.current_time() - began < 1  # At the rate of the line, ten times as fast.

    meet(body)


def test_who_gives_up_its_turn_has_used_none_of_the_rate_and_a_limited_rate_measures_no_line() -> None:
    async def body(anna: Node, bert: Node, cleo: Node) -> None:
        part = b"part" * 50_000
        anna.blobs.put(digest(part), part)
        anna.pace_round(1e5)
        for _ in range(50):
            with trio.move_on_after(0.1):
                await bert.fetch(ANNA.peer_id, digest(part), len(part))
        began = trio.current_time()
        await cleo.fetch(ANNA.peer_id, digest(part), len(part))
        assert trio.current_time() - began < 4
        assert anna.upload_rate == 0
        assert cleo.rate_from(ANNA.peer_id) == 0  # Though its own rounds are not limited: a keeper's never are.
        anna.pace_round(0.0)
        began = trio.current_time()
        await cleo.fetch(ANNA.peer_id, digest(part), len(part))
        assert trio.current_time() - began < 1
        assert anna.upload_rate > 1e5
        assert cleo.rate_from(ANNA.peer_id) > 1e5

    meet(body)


def test_newcomers_are_served_while_the_bytes_of_a_round_are_spread(tmp_path: Path) -> None:
    async def body(anna: Node, bert: Node, cleo: Node) -> None:
        put(anna, tmp_path)
        part = b"part" * 500_000
        anna.blobs.put(digest(part), part)
        anna.pace_round(1e5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bert.fetch, ANNA.peer_id, digest(part), len(part))
            began = trio.current_time()
            await cleo.fetch(ANNA.peer_id, KEY, len(DATA), patience=20)
            assert trio.current_time() - began < ROUND_FIRST_SECONDS
            nursery.cancel_scope.cancel()

    meet(body)
