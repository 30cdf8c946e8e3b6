"""Follows the heads of a bootstrap's runs by their certificates, and keeps them on disk.

Theory of operation. Members publish the newest certificate of their run in the directory (`chain.head`). It is a hint:
where it continues my chain it moves my head, and where it is of a later round still, I ask members that are connected to me
for the pages between. The voters of the round that I am at come first, so that strangers who claim to be in the run delay
nothing. What moves the head is a quorum alone (`chain.reader`), whoever sent it.

A run that costs me anything is one whose manifest I hold and of which a head is published, and both are signed. Keys are
free, so there are limits: signatures a turn in all, seconds, pages and questions for each run, and a longer pause after each
turn without progress. Runs take turns by the network that published them, and those that waited longest go first. Of too
many runs the one that has been silent for longest gives way, of the network that has most. A flood of runs therefore evicts
itself.

A head is on disk before it is named. Nothing here raises: what fails is an event, and the old head stays.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeVar

import trio

from ...dht.directory.store import Entry, Store
from ...dht.keys import head_key, named_key, run_key
from ...dht.run.admission import Charter
from ...dht.run.manifest import SignedManifest
from ...peer import wire
from ...peer.base.disk import write_whole
from ...peer.base.errors import LocalError, NetworkError, RemoteError, sole_error
from ...peer.base.transport import PeerId, Transport
from ...peer.log.telemetry import Telemetry
from ...peer.node.session import Visitor
from ...peer.quota.origins import Origins
from ...peer.wire.schema import encode
from ...peer.wire.signed import verify_signed
from ..chain.fork_choice import Relation
from ..chain.packed import continued, unpack_certificate
from ..chain.reader import ChainReader
from .followed import (
    FollowedRun,
    before_first_round,
    charter_followed,
    decode_followed,
    encode_followed,
    followed_on,
    named_by_operator,
    num_signatures,
)
from .marks import Mark

_T = TypeVar("_T")

TURN_PERIOD = 10.0
"""Seconds between turns; a member publishes its run's head twice a minute at most."""
TURN_SECONDS = 15.0
"""The longest turn of one run: three members that do not answer."""
AT_ONCE_FOLLOWED = 8
"""Runs that are asked about at a time."""
SIGNATURES_A_TURN = 4_000
"""Checked in all: 0.4 s of a core in ten. A hundred runs with seven voters and rounds of a minute take 150."""
PAGES_A_TURN = 16
"""Pages of one run: 256 rounds."""
MEMBERS_ASKED = 3
FIRST_PAUSE = 30.0
LONGEST_FOLLOW_PAUSE = 300.0
"""Seconds until a run is asked about again that has not moved, each time twice as many."""
MAX_FOLLOWED_RUNS = 256
MAX_FOLLOWED_IN_ALL = 16 << 20
"""Runs that are kept, and the bytes of their files together."""
MAX_FAILED = 1024
"""Members that are not asked for a while, the oldest forgotten first."""
FORGOTTEN_SECONDS = 3600.0
"""Seconds until a run is followed again that gave way: else too many runs would take turns in one place."""
SUFFIX = ".head"
NO_LOSSES: Mapping[int, float] = {}


@dataclass(slots=True)
class _Hint:
    """The published head of a run."""

    entry: Entry
    round: int
    charter: Charter
    tried: float = -math.inf
    due: float = -math.inf
    pause: float = 0.0
    told: int = -1
    """The round of the last event: one for each head that is kept."""


class Follower:
    """The light client of one bootstrap. `starts`: the certificates that its operator names, for runs to follow from."""

    def __init__(
        self,
        folder: Path,
        transport: Transport,
        store: Store,
        telemetry: Telemetry,
        *,
        exempt: tuple[str, ...],
        starts: Mapping[str, Mark],
        inline: bool = False,
    ) -> None:
        self._inline = inline
        self._folder = folder
        self._transport = transport
        self._visitor = Visitor(transport)
        self._store = store
        self._telemetry = telemetry
        self._origins = Origins(exempt)
        self._starts = starts
        self._runs: dict[str, FollowedRun] = {}  # The one that moved last is the last.
        self._named: dict[str, bytes] = {}  # Encoded: it is asked for more often than it changes.
        self._sizes: Counter[str] = Counter()
        self._hints: dict[str, _Hint | None] = {}
        self._failed: dict[PeerId, float] = {}
        self._signatures = 0
        self._is_failing = False

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def num_bytes(self) -> int:
        """The bytes of what is kept on disk."""
        return self._sizes.total()

    def head(self, run: str) -> Mark | None:
        """Return the head of a run that is followed; None if there is none."""
        followed = self._runs.get(run)
        return followed.head if followed is not None else None

    def answer(self, key: str) -> bytes | None:
        """Return what this bootstrap names under a key of the directory; None where it knows nothing of a run.

        A run of which no head was ever published has its beginning for a head.
        """
        run = key.removeprefix(run_key("")).partition("/")[0]
        if key != named_key(run):
            return None
        if (named := self._named.get(run)) is not None:
            return named
        is_new = run not in self._starts and self._value(run_key(run)) is not None and self._value(head_key(run)) is None
        return encode(before_first_round(run, "").chain) if is_new else None

    async def load(self) -> None:
        """Take up the heads of an earlier process; before that nothing may be named."""
        await self.compute(self._load)

    async def run(self) -> None:
        """Follow all runs until cancelled."""
        while True:
            await self.follow_all()
            await trio.sleep(TURN_PERIOD)

    async def follow_all(self) -> None:
        """Follow each run that is due, for one turn."""
        self._signatures = SIGNATURES_A_TURN
        slots = trio.Semaphore(AT_ONCE_FOLLOWED)

        async def follow(run: str, hint: _Hint) -> None:
            try:
                await self._turn(run, hint)
            finally:
                slots.release()

        async with trio.open_nursery() as nursery:
            for run, hint in await self.compute(self._due, list(self._store), trio.current_time()):
                await slots.acquire()  # Here, since trio starts tasks in any order.
                if self._signatures <= 0:
                    break
                hint.tried = trio.current_time()
                nursery.start_soon(follow, run, hint)

    def _due(self, entries: list[Entry], now: float) -> list[tuple[str, _Hint]]:
        """Return the runs with a later published head than mine: networks in turns, those that waited longest first."""
        ending = head_key("").rpartition("/")[2].encode()
        heads = [entry for entry in entries if not entry.peer and entry.key.endswith(b"/" + ending)]
        published = {entry.key.decode().split("/")[2]: entry for entry in heads}
        self._hints = {
            run: self._hint(run, entry, manifest)
            for run, entry in published.items()
            if (manifest := self._value(run_key(run))) is not None
        }
        networks: dict[str, list[tuple[str, _Hint]]] = {}
        for run, hint in self._hints.items():
            if hint is not None and now >= hint.due and hint.round > self._round(run):
                networks.setdefault(self._network(hint), []).append((run, hint))
        for runs in networks.values():
            runs.sort(key=lambda item: item[1].tried)
        in_turns = zip_longest(*sorted(networks.values(), key=lambda runs: runs[0][1].tried))
        return [item for item in chain.from_iterable(in_turns) if item is not None]

    def _hint(self, run: str, entry: Entry, manifest: bytes) -> _Hint | None:
        """Return the published head of a run; None if I cannot follow that run. What is known of it already is kept."""
        try:
            if run in self._hints:
                known = self._hints[run]
                if known is not None and known.entry.value != entry.value:
                    known.round = unpack_certificate(entry.value).slot.round
                if known is not None:
                    known.entry = entry
                return known
            charter = charter_followed(SignedManifest.decode(manifest, run))
            return None if charter is None else _Hint(entry, unpack_certificate(entry.value).slot.round, charter)
        except RemoteError:  # It was stored by a server of another protocol number: entries on disk are not validated again.
            return None

    async def _turn(self, run: str, hint: _Hint) -> None:
        """Follow one run, and pause where its head has not moved."""
        before, reason = self._round(run), f"no connected member answered within {TURN_SECONDS:g} s"
        with trio.move_on_after(TURN_SECONDS):
            try:
                reason = await self._follow(run, hint)
            except (NetworkError, RemoteError, LocalError) as error:
                reason = str(error)
        has_moved = self._round(run) > before
        if not has_moved and hint.told != before:
            hint.told = before
            self._telemetry.emit("head.kept", step="follow", reason=f"{run}: {reason}", round=before)
        hint.pause = 0.0 if has_moved else min(LONGEST_FOLLOW_PAUSE, max(FIRST_PAUSE, 2 * hint.pause))
        hint.due = max(hint.due, trio.current_time() + hint.pause)

    async def _follow(self, run: str, hint: _Hint) -> str:
        """Move the head of a run as far as its members show; returns why not further. Raises `FlockstepError`."""
        followed, network = self._runs.get(run), self._network(hint)
        start = self._starts.get(run)
        if start is not None and (followed is None or followed.head.round < start.round):
            followed = named_by_operator(run, start, network)
        elif followed is None:
            followed = before_first_round(run, network)
        published = unpack_certificate(hint.entry.value)
        if published.slot.previous == followed.head.hash:
            self._spend([published])
            check = partial(continued, [published], followed.newest(), run, verify_signed, hint.charter)
            if (await self.compute(check))[0]:
                await self._take(followed, network, [published])
                return ""
        reason = f"no member of the run is connected to give the certificates from round {followed.head.round + 1} on"
        for peer in self._askable(run, followed, hint.charter)[:MEMBERS_ASKED]:
            reason = await self._ask(peer, followed, hint)
            followed = self._runs.get(run, followed)
            if followed.head.round >= hint.round or self._signatures <= 0:
                break
        return reason

    async def _ask(self, peer: PeerId, followed: FollowedRun, hint: _Hint) -> str:
        """Move a run's head by what one member gives. Returns why not to the published one."""
        run, before = followed.chain.run, followed.head.round
        reader = ChainReader(self, run, hint.charter, self._spend)
        until = min(hint.round, before + PAGES_A_TURN * wire.MAX_PAGE)
        try:
            how = await reader.follow(followed.held(), peer, until, partial(self._take, followed, self._network(hint)))
        except (NetworkError, RemoteError, BaseExceptionGroup) as raised:
            failure = sole_error(raised)
            if not isinstance(failure, NetworkError | RemoteError):
                raise
            is_false = isinstance(failure, RemoteError)
            self._pause_for(peer, LONGEST_FOLLOW_PAUSE if is_false else FIRST_PAUSE)
            if is_false:
                self._telemetry.emit("peer.charged", peer=peer, step="follow a head", reason=str(failure))
            return f"{peer}: {failure}"
        if how is Relation.EXTENDS and self._round(run) > before:
            return ""
        self._pause_for(peer, FIRST_PAUSE)
        what = "has no certificate after" if how is Relation.EXTENDS else "is on another chain after"
        return f"{peer} {what} round {before}"

    def _pause_for(self, peer: PeerId, seconds: float) -> None:
        self._failed.pop(peer, None)
        self._failed[peer] = trio.current_time() + seconds
        if len(self._failed) > MAX_FAILED:
            del self._failed[next(iter(self._failed))]

    async def ask(self, peer: PeerId, message: object, *, timeout: float) -> Any:
        """Ask a connected peer. Raises `NetworkError` or `RemoteError`."""
        return await self._visitor.ask(peer, message, timeout=timeout)

    async def compute(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run long work beside the event loop; inline in simulations (determinism)."""
        return function(*args) if self._inline else await trio.to_thread.run_sync(function, *args)

    def _spend(self, page: Sequence[wire.Certificate]) -> None:
        self._signatures -= sum(map(num_signatures, page))

    async def _take(
        self, begun: FollowedRun, network: str, page: list[wire.Certificate], _losses: Mapping[int, float] = NO_LOSSES
    ) -> bool:
        """Keep where verified certificates lead; returns whether this turn has signatures left to check."""
        followed = self._runs.get(begun.chain.run, begun)
        followed = followed if followed.head.round >= begun.head.round else begun
        await self._keep(followed_on(followed, page, network))
        return self._signatures > 0

    def _askable(self, run: str, followed: FollowedRun, charter: Charter) -> list[PeerId]:
        """Return the connected members of a run: its voters first, then its last roster, then who claims to be one."""
        connected, now = self._transport.connected(), trio.current_time()
        claims = (entry.peer for entry in self._store.providers(run_key(run).encode()))
        known = dict.fromkeys((*followed.voters(charter), *claims))
        return [peer for peer in known if peer in connected and self._failed.get(peer, -math.inf) <= now]

    def _network(self, hint: _Hint) -> str:
        return self._origins.of(hint.entry.ip).network

    def _round(self, run: str) -> int:
        followed = self._runs.get(run)
        return followed.head.round if followed is not None else 0

    def _value(self, key: str) -> bytes | None:
        entry = self._store.value(key.encode())
        return entry.value if entry is not None else None

    async def _keep(self, followed: FollowedRun) -> None:
        """Write a head to the disk, then name it; of too many runs the oldest gives way."""
        run, data = followed.chain.run, encode_followed(followed)
        try:
            await self.compute(write_whole, self._folder / f"{run}{SUFFIX}", data)
            self._is_failing = False
        except LocalError as error:
            if not self._is_failing:  # Once: otherwise each round would emit it while the disk is full.
                self._telemetry.emit("head.unwritten", step="follow", reason=str(error), round=followed.head.round)
            self._is_failing = True
        if run not in self._runs:
            self._telemetry.emit("head.followed", step="follow", reason=run, round=followed.head.round)
        self._put(followed, len(data))
        for gone in list(self._giving_way()):
            if (hint := self._hints.get(gone)) is not None:
                hint.due = trio.current_time() + FORGOTTEN_SECONDS
            await self.compute(self._remove, gone, "other runs need its place")

    def _put(self, followed: FollowedRun, size: int) -> None:
        self._runs.pop(followed.chain.run, None)
        self._runs[followed.chain.run] = followed
        self._named[followed.chain.run] = encode(followed.chain)
        self._sizes[followed.chain.run] = size

    def _giving_way(self) -> Iterator[str]:
        """Drop runs beyond the limits, and yield them."""
        while len(self._runs) > MAX_FOLLOWED_RUNS or self.num_bytes > MAX_FOLLOWED_IN_ALL:
            networks = Counter(followed.network for followed in self._runs.values())
            largest = max(networks, key=networks.__getitem__)
            gone = next(run for run, followed in self._runs.items() if followed.network == largest)
            del self._runs[gone], self._named[gone], self._sizes[gone]
            yield gone

    def _remove(self, run: str, reason: str) -> None:
        try:
            (self._folder / f"{run}{SUFFIX}").unlink(missing_ok=True)
        except OSError as error:
            reason += f"; its file stays: {error}"
        self._telemetry.emit("head.forgotten", step="follow", reason=f"{run}: {reason}")

    def _load(self) -> None:
        """Read the heads of an earlier process, the one that moved last at the end."""
        try:
            files = sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
        except OSError as error:
            self._telemetry.emit("head.unwritten", step="open", reason=str(error))
            return
        for path in files:
            run = path.name.removesuffix(SUFFIX)
            try:
                data = path.read_bytes()
                self._put(decode_followed(data, run), len(data))
            except OSError as error:  # It stays: the next start may be able to read it.
                self._telemetry.emit("head.unwritten", step="open", reason=str(error))
            except RemoteError as error:
                self._remove(run, f"{path} cannot be used: {error}")
        for gone in list(self._giving_way()):
            self._remove(gone, "other runs need its place")
