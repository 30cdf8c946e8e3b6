"""A directory over a hivemind DHT: a run that is published in one is found there, too.

Theory of operation. `via=hivemind:<multiaddr>` in a link names a peer of any hivemind DHT (extra `hivemind`). The same
signed records that Kademlia servers keep are stored there as values with subkeys, so that each member adds its own and
none replaces another's. That DHT validates nothing: its peers can flood a run's keys or hide them, but forge nothing, since
every value found passes `validate`. Addresses are those of the member records. hivemind itself runs in a process of its
own (`node`), which is started with the network and asked line by line; it needs a correct clock.

`JoinedDirectories` is the directory of a run with both: values from its bootstraps come first.
"""

import importlib.util
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from subprocess import DEVNULL, PIPE
from typing import Any, TypeVar

import trio

from ...peer.base.background import background
from ...peer.base.errors import LocalError, NetworkError, RemoteError, UsageError
from ...peer.base.install import how_to_install
from ...peer.base.transport import Address, PeerId
from ...peer.log.telemetry import Telemetry
from ..directory.interface import AsksOneServer, Directory, Validate
from ..keys import member_key
from ..members.body import open_member
from ..records import Record
from ..run.link import HIVEMIND, JoinLink
from . import node
from .node import MAX_HIVEMIND_ANSWER_BYTES

_T = TypeVar("_T")

MANIFEST_SECONDS = 7 * 86_400.0
"""Lifetime of a manifest there; its owner, and every member that has found it there, republish it."""

MEMBER_SECONDS = 1800.0
"""Lifetime of a member's record there."""

HIVEMIND_REPUBLISH_SECONDS = 600.0
"""A third of that: two may fail. Of a member's changes only a new address matters here."""

HIVEMIND_ANSWER_TIMEOUT = 30.0
"""The timeout of an answer in seconds: lookups take some, and hivemind notices a lost node late."""

START_TIMEOUT = 60.0
"""The timeout of joining in seconds: the node imports torch first."""

END_TIMEOUT = 0.5
"""Seconds until the process group is killed, its daemon with it."""

MANIFEST = "manifest"
MAX_LINE = 4 * MAX_HIVEMIND_ANSWER_BYTES


@asynccontextmanager
async def all_directories(
    kademlia: Directory, link: JoinLink, telemetry: Telemetry, validate: Validate
) -> AsyncIterator[Directory]:
    """Open the directories that a link names. Raises `UsageError` if it needs hivemind and that is not installed."""
    if not link.hivemind:
        yield kademlia
        return
    if importlib.util.find_spec("hivemind") is None:
        raise UsageError(f"the link leads through {HIVEMIND}…", remedy=how_to_install("hivemind"))
    async with background() as nursery:
        hivemind = HivemindDirectory(telemetry, validate)
        nursery.start_soon(hivemind.run, link.hivemind)
        yield JoinedDirectories(kademlia, hivemind, telemetry) if link.bootstraps else hivemind


class HivemindDirectory:
    """A `Directory` over a hivemind DHT."""

    def __init__(self, telemetry: Telemetry, validate: Validate) -> None:
        self._telemetry = telemetry
        self._validate = validate
        self._process: trio.Process | None = None
        self._lines = bytearray()
        self._number = 0
        self._ready = trio.Event()
        self._failure = ""
        self._asking = trio.Lock()
        self._addresses: dict[PeerId, tuple[Address, ...]] = {}
        self._published: dict[str, bytes] = {}

    async def run(self, peers: Sequence[Address]) -> None:
        """Run the process, and republish my values, until cancelled."""
        command = [sys.executable, "-m", node.__name__, *peers]
        try:
            process = await trio.lowlevel.open_process(
                command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True
            )
        except OSError as error:
            self._fail(str(error))
            self._ready.set()
            return
        self._process = process
        try:
            with trio.move_on_after(START_TIMEOUT) as limit:
                first = await self._answer_to(0)
            if limit.cancelled_caught or first is not True:
                self._fail("no answer" if limit.cancelled_caught else str(first))
            self._ready.set()
            while not self._failure:
                await trio.sleep(HIVEMIND_REPUBLISH_SECONDS)
                for key, value in tuple(self._published.items()):
                    with suppress(NetworkError):  # `_ask` has emitted an event.
                        await self._store(key, value)
        except NetworkError as error:
            self._fail(str(error))
            self._ready.set()
        finally:
            with trio.CancelScope(shield=True):
                await _end(process)

    async def put(self, key: str, value: bytes) -> None:
        """Publish a value, and keep it published. Raises `LocalError` if it is not valid under its key."""
        try:
            self._validate(key, value)
        except RemoteError as error:
            raise LocalError(f"refusing to publish an invalid value under {key}: {error}") from error
        is_new = key not in self._published
        self._published[key] = value
        if is_new:
            await self._store(key, value)

    async def _store(self, key: str, value: bytes) -> None:
        place, subkey = _place(key)
        seconds = MANIFEST_SECONDS if subkey == MANIFEST else MEMBER_SECONDS
        if await self._ask(["store", place, subkey, value.hex(), seconds]) is not True:
            self._telemetry.emit("directory.outdated", step="put", reason=f"the hivemind DHT has not taken {key}")

    async def get(self, key: str) -> bytes | None:
        """Return the valid value of the highest sequence; None if there is none."""
        place, subkey = _place(key)
        value = (await self._values(place, lambda found: key if found == subkey else "")).get(key)
        if value is not None and subkey == MANIFEST:
            self._published[key] = value
        return value

    async def provide(self, run_id: str) -> None:
        """Do nothing: a member is found by its published record."""

    async def find(self, run_id: str) -> tuple[PeerId, ...]:
        """Find the members whose records are there; `addresses` then returns where they are."""
        place, _ = _place(member_key(run_id, ""))
        values = await self._values(place, lambda peer: member_key(run_id, peer))
        for value in values.values():
            record = Record.decode(value)
            self._addresses[record.peer] = open_member(record).addresses
        return tuple(key.rpartition("/")[2] for key in values)

    def addresses(self, peer: PeerId) -> tuple[Address, ...]:
        """Return the addresses that a found peer has published."""
        return self._addresses.get(peer, ())

    async def add_server(self, peer: PeerId) -> None:
        """Do nothing: the nodes of that DHT are no peers of the run."""

    async def _values(self, place: str, key_of: Callable[[str], str]) -> dict[str, bytes]:
        """Return the valid values that strangers have stored at a place, by their keys."""
        valid: dict[str, bytes] = {}
        found = await self._ask(["get", place])
        for subkey, text in (found if isinstance(found, dict) else {}).items():
            if not (key := key_of(subkey)):
                continue
            try:
                value = bytes.fromhex(text)
                self._validate(key, value)
            except RemoteError as error:
                self._telemetry.emit("directory.junk", step=f"get {key}", reason=str(error))
            else:
                valid[key] = value
        return valid

    async def _ask(self, question: list[Any]) -> Any:
        """Send a request to the process and receive its answer. Raises `NetworkError`."""
        async with self._asking:
            await self._ready.wait()
            if self._failure or self._process is None or self._process.stdin is None:
                raise NetworkError(f"the hivemind DHT is not there: {self._failure}")
            self._number += 1
            line = json.dumps([self._number, *question]).encode() + b"\n"
            is_sent = False
            try:
                with trio.fail_after(HIVEMIND_ANSWER_TIMEOUT):
                    await self._process.stdin.send_all(line)
                    is_sent = True
                    answer = await self._answer_to(self._number)
            except (trio.TooSlowError, trio.BrokenResourceError) as error:
                raise NetworkError(f"the hivemind DHT gave no answer within {HIVEMIND_ANSWER_TIMEOUT:g} s") from error
            finally:
                if not is_sent:  # Perhaps half a line: the process would understand no further one.
                    self._fail("a question was cut short")
        if isinstance(answer, str):
            self._telemetry.emit("directory.unanswered", step=f"hivemind {question[0]}", reason=answer)
            raise NetworkError(f"the hivemind DHT gave no answer: {answer}")
        return answer

    async def _answer_to(self, number: int) -> Any:
        """Receive the answer with this number; those to abandoned requests are skipped. Raises `NetworkError`."""
        assert self._process is not None
        assert self._process.stdout is not None
        while True:
            while b"\n" not in self._lines:
                data = await self._process.stdout.receive_some(1 << 16)
                if not data or len(self._lines) > MAX_LINE:
                    raise NetworkError("the process of the hivemind DHT has ended")
                self._lines += data
            line, _, self._lines = self._lines.partition(b"\n")
            answered, answer = json.loads(line)
            if answered == number:
                return answer

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._telemetry.emit("directory.failed", step="hivemind", reason=reason)


class JoinedDirectories:
    """A `Directory` over two: reads take the first one's answer, or else the second one's; writes go to both."""

    def __init__(self, first: Directory, second: Directory, telemetry: Telemetry) -> None:
        self._both = (first, second)
        self._telemetry = telemetry

    async def put(self, key: str, value: bytes) -> None:
        """Publish at both; one must accept."""
        await self._publish(lambda directory: directory.put(key, value))

    async def get(self, key: str) -> bytes | None:
        """Return a valid value; None if neither has one."""
        return await self._first(lambda directory: directory.get(key))

    async def held(self, server: PeerId, key: str) -> bytes | None:
        """Return the value that one of the first directory's servers has. Raises `NetworkError` or `RemoteError`."""
        first = self._both[0]
        return await first.held(server, key) if isinstance(first, AsksOneServer) else None

    async def provide(self, run_id: str) -> None:
        """Publish at both that I provide a run; one must accept."""
        await self._publish(lambda directory: directory.provide(run_id))

    async def find(self, run_id: str) -> tuple[PeerId, ...]:
        """Return the providers of a run."""
        return await self._first(lambda directory: directory.find(run_id)) or ()

    def addresses(self, peer: PeerId) -> tuple[Address, ...]:
        """Return the addresses that a found peer has published."""
        return next(filter(None, (directory.addresses(peer) for directory in self._both)), ())

    async def add_server(self, peer: PeerId) -> None:
        """Use this connected peer as a server, too."""
        for directory in self._both:
            await directory.add_server(peer)

    async def _first(self, ask: Callable[[Directory], Awaitable[_T]]) -> _T | None:
        failures: list[NetworkError] = []
        for directory in self._both:
            try:
                if answer := await ask(directory):
                    self._report(failures)
                    return answer
            except NetworkError as error:
                failures.append(error)
        self._report(failures)
        return None

    async def _publish(self, publish: Callable[[Directory], Awaitable[None]]) -> None:
        failures: list[NetworkError] = []

        async def one(directory: Directory) -> None:
            try:
                await publish(directory)
            except NetworkError as error:
                failures.append(error)

        async with trio.open_nursery() as nursery:
            for directory in self._both:
                nursery.start_soon(one, directory)
        self._report(failures)

    def _report(self, failures: list[NetworkError]) -> None:
        """Emit an event for each failure. Raises the first one if both have failed."""
        if len(failures) == len(self._both):
            raise failures[0]
        for error in failures:
            self._telemetry.emit("directory.failed", step="one of two directories", reason=str(error))


def _place(key: str) -> tuple[str, str]:
    """Return key and subkey in a hivemind DHT: the members of a run are stored together under one key."""
    _, name, run_id, *rest = key.split("/")
    kind = "members" if rest and rest[0] not in ("head", "owner", "eval") else "run"
    return f"{name}/{run_id}/{kind}", "/".join(rest) or MANIFEST


async def _end(process: trio.Process) -> None:
    """Close its stdin, then kill its whole process group: its daemon would outlive it."""
    assert process.stdin is not None
    await process.stdin.aclose()
    with trio.move_on_after(END_TIMEOUT):
        await process.wait()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
