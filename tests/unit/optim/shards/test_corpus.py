"""A corpus that no volunteer's disk holds: 100 GB of shards through bounded caches, and over a thin line."""

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import pytest
from flockstep.optim.shards.cache import PART, Shards
from flockstep.optim.shards.index import ShardIndex, read_index, shard_name, write_index
from flockstep.optim.shards.places import Place
from flockstep.optim.shards.reader import TokenShards
from flockstep.optim.shards.seeding import SHARD, shards_folder
from flockstep.peer.base.digest import digest
from support.lease_swarm import NEWS, Peer, SimSwarm, found

LENGTH = 64
PIECE_BYTES = 16
FILES = (SHARD, PART)


@dataclass
class Corpus:
    """Shards that are computed when they are read: of number n all tokens are n, `sequences` sequences of them."""

    num_shards: int
    sequences: int

    def content(self, number: int) -> bytes:
        return np.full(self.sequences * LENGTH + 1, number, "<u2").tobytes()

    @cached_property
    def index(self) -> ShardIndex:
        shards = [(self.sequences * LENGTH + 1, digest(self.content(number))) for number in range(self.num_shards)]
        written = write_index(
            dtype="uint16", vocab_size=1 << 16, tokenizer="bytes", tokenizer_bytes=0, tokenizer_config=None, masked=False,
            num_documents=1, shards=shards, held_out=None,
        )  # fmt: skip
        return read_index(written, "the corpus")

    @property
    def shard_bytes(self) -> int:
        return len(self.content(0))


class Server(Place):
    """A place that has the corpus, and counts which shards a peer asks for."""

    name = "a server"

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._numbers = {shard_name(number, "uint16"): number for number in range(corpus.num_shards)}
        self.asked = Counter[int]()

    def open(self, file: str, start: int, end: int) -> tuple[int, Iterator[bytes]]:
        self.asked[self._numbers[file]] += 1
        return start, self.pieces(self._corpus.content(self._numbers[file])[start:end])

    def pieces(self, content: bytes) -> Iterator[bytes]:
        yield content

    def whole(self, file: str, most: int) -> bytes:
        raise NotImplementedError


def source_of(corpus: Corpus, place: Place, home: Path, limit: int) -> TokenShards:
    index = corpus.index
    return TokenShards(index, Shards(place, index.dtype, home, limit), place, name="corpus", sequence_length=LENGTH)


class CorpusSwarm(SimSwarm):
    """A simulated swarm whose peers read a corpus, each with a cache of its own; an item of a unit is a shard of it."""

    def __init__(self, seed: int, corpus: Corpus, folder: Path, limit: int) -> None:
        super().__init__(seed, num_units=1024, unit_items=corpus.num_shards // 1024)
        self._open = partial(source_of, corpus, limit=limit)
        self._corpus, self._folder = corpus, folder
        self.most_kept = 0
        """Bytes in one cache."""
        self.read = Counter[tuple[int, int]]()
        """How many times a shard was trained on in an epoch."""
        self.leased: dict[str, set[int]] = {}
        self.servers: dict[str, Server] = {}
        self._sources: dict[str, TokenShards] = {}

    def source(self, peer: Peer) -> TokenShards:
        if peer.name not in self._sources:
            self.servers[peer.name], self.leased[peer.name] = Server(self._corpus), set()
            self._sources[peer.name] = self._open(self.servers[peer.name], self._folder / peer.name)
        return self._sources[peer.name]

    def look_ahead(self, peer: Peer) -> None:
        pending = [unit for _, unit in peer.leases.pending()]
        source = self.source(peer)
        self.leased[peer.name].update(pending)
        source.expect(pending)

    def train(self, peer: Peer, epoch: int, unit: int, item: int) -> None:
        (first, *_) = next(self.source(peer).read(epoch, unit, item)).tolist()
        assert first == unit + 1024 * item
        self.leased[peer.name].add(unit)
        self.read[epoch, first] += 1
        self.most_kept = max(self.most_kept, self._kept(shards_folder(self._folder / peer.name)))

    def _kept(self, folder: Path) -> int:
        sizes = dict[str, int]()  # By the hash, since a part may take its name meanwhile.
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                sizes[path.stem] = path.stat().st_size if path.suffix in FILES else 0
        return sum(sizes.values())


def test_a_hundred_gigabytes_go_through_bounded_caches_and_every_token_once_an_epoch(tmp_path: Path) -> None:
    """2,048 shards of 48 MiB, cut to a sequence each, and caches of 4 GB, cut alike, while peers come and leave."""
    corpus = Corpus(num_shards=2048, sequences=1)
    limit = int(4e9 / (48 << 20)) * corpus.shard_bytes
    swarm = CorpusSwarm(0, corpus, tmp_path, limit)

    def shard_seconds() -> float:
        return swarm.random.uniform(100, 600)

    found(swarm, 6, shard_seconds, met=True)
    for number in range(6):
        swarm.run(4 * 3600)
        swarm.join(f"joiner {number}", shard_seconds())
        swarm.run(4 * 3600)
        here = [name for name, peer in swarm.peers.items() if peer.here]
        swarm.depart(swarm.random.choice(here), gone_after=NEWS[1] + 0.1, last_message=True)
    while swarm.oldest < 2:
        swarm.run(3600)
    assert all(swarm.read[epoch, number] == 1 for epoch in range(swarm.oldest) for number in range(corpus.num_shards))
    assert limit / 2 < swarm.most_kept <= limit
    for name, server in swarm.servers.items():
        assert {number % 1024 for number in server.asked} <= swarm.leased[name]
        assert len(server.asked) < corpus.num_shards


class PacedLine(Server):
    """A server behind a line of so many bytes a second, of virtual time, of which all who fetch have equal parts."""

    def __init__(self, corpus: Corpus, rate: int) -> None:
        super().__init__(corpus)
        self._rate = rate
        self._left = Counter[threading.Thread]()
        self._waiting = set[threading.Thread]()
        self._changed = threading.Condition()
        self._others = set(threading.enumerate())

    def pieces(self, content: bytes) -> Iterator[bytes]:
        me = threading.current_thread()
        for at in range(0, len(content), PIECE_BYTES):
            with self._changed:
                self._waiting.add(me)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._left[me] >= PIECE_BYTES)
                self._waiting.remove(me)
                self._left[me] -= PIECE_BYTES
            yield content[at : at + PIECE_BYTES]

    def second(self) -> None:
        """Let a second pass: until the prefetcher has used what the line carries in it, or has nothing left to fetch."""
        with self._changed:
            self._settle()
            for each in self._waiting:
                self._left[each] += self._rate // len(self._waiting)
            self._changed.notify_all()
            self._settle()

    def _settle(self) -> None:
        while self._num_fetchers() > sum(self._left[each] < PIECE_BYTES for each in self._waiting):
            self._changed.wait(0.01)  # No fetcher says that it ends.

    def end(self) -> None:
        """Let all that is being fetched arrive, so that the prefetcher's threads end."""
        while self._num_fetchers():
            self.second()

    def _num_fetchers(self) -> int:
        return sum(thread.name == "shards" for thread in threading.enumerate() if thread not in self._others)


@pytest.mark.parametrize(("mbits", "hides"), [(50, True), (2, True), (0.5, False)])
def test_the_prefetcher_hides_a_thin_line_behind_the_training(mbits: float, hides: bool, tmp_path: Path) -> None:
    """150M parameters, of which a step takes a second and 64 x 1,024 tokens; here 64 tokens, and all else as much less."""
    scale = 64 * 1024 // LENGTH
    corpus = Corpus(num_shards=12, sequences=64)
    line = PacedLine(corpus, int(mbits * 1e6 / 8 / scale))
    home = tmp_path / "home"
    source = source_of(corpus, line, home, 6 * corpus.shard_bytes)
    shards, waits = source.index.shards, []
    for unit in range(8):
        source.expect(range(unit, unit + 4))
        seconds = itertools.count()
        while not (shards_folder(home) / f"{shards[unit].hash.hex()}{SHARD}").is_file():
            line.second()
            next(seconds)
        waits.append(next(seconds))
        for sequence in source.read(0, unit, 0):
            line.second()
            assert sequence[0] == unit
    line.end()
    assert waits[0] > 0  # Nobody trains before the first shard is here.
    assert (sum(waits[1:]) == 0) == hides
