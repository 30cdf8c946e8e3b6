"""What a directory offers, and one in memory for the network in memory. Trio's clock only."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import trio

from ...peer.errors import LocalError, NetworkError, RemoteError
from ...peer.transport import Address, PeerId

Validate: TypeAlias = Callable[[str, bytes], int]
"""The sequence of a value that may stand under a key; raises `RemoteError` for one that may not."""


class Directory(Protocol):
    """Where a run is found. Every method raises `NetworkError` when no server answered."""

    async def put(self, key: str, value: bytes) -> None:
        """Publish a value, and keep it published; `LocalError` if it may not stand under its key."""

    async def get(self, key: str) -> bytes | None:
        """The valid value of the highest sequence, None if the servers have none."""

    async def provide(self, run_id: str) -> None:
        """Publish that I am in a run, and keep it published."""

    async def find(self, run_id: str) -> tuple[PeerId, ...]:
        """Who said so, without me; their addresses are then known to `addresses`."""

    def addresses(self, peer: PeerId) -> tuple[Address, ...]:
        """Where a peer that was found said to be."""

    async def add_server(self, peer: PeerId) -> None:
        """Ask this connected peer, too."""


@dataclass(slots=True)
class MemoryBoard:
    """What all `MemoryDirectory`s of one network share."""

    latency: float = 0.0
    """Seconds for a question and its answer."""

    up: bool = True
    values: dict[str, bytes] = field(default_factory=dict)
    providers: dict[str, dict[PeerId, tuple[Address, ...]]] = field(default_factory=dict)


class MemoryDirectory:
    """Implements `Directory` over a `MemoryBoard`."""

    def __init__(self, board: MemoryBoard, peer_id: PeerId, addresses: tuple[Address, ...], validate: Validate) -> None:
        self._board = board
        self._peer_id = peer_id
        self._own_addresses = addresses
        self._validate = validate
        self._addresses: dict[PeerId, tuple[Address, ...]] = {}

    async def put(self, key: str, value: bytes) -> None:
        """Publish a value; an older one than that on the board is left out, as in the real directory."""
        try:
            sequence = self._validate(key, value)
        except RemoteError as error:
            raise LocalError(f"refusing to publish what nobody would accept under {key}: {error}") from error
        await self._ask()
        held = self._board.values.get(key)
        if held is None or self._validate(key, held) <= sequence:
            self._board.values[key] = value

    async def get(self, key: str) -> bytes | None:
        """The value of the highest sequence."""
        await self._ask()
        return self._board.values.get(key)

    async def provide(self, run_id: str) -> None:
        """Publish that I am in a run."""
        await self._ask()
        self._board.providers.setdefault(run_id, {})[self._peer_id] = self._own_addresses

    async def find(self, run_id: str) -> tuple[PeerId, ...]:
        """Who said so, without me."""
        await self._ask()
        found = {peer: where for peer, where in self._board.providers.get(run_id, {}).items() if peer != self._peer_id}
        self._addresses.update(found)
        return tuple(found)

    def addresses(self, peer: PeerId) -> tuple[Address, ...]:
        """Where a peer that was found said to be."""
        return self._addresses.get(peer, ())

    async def add_server(self, peer: PeerId) -> None:
        """The board is the only server."""

    async def _ask(self) -> None:
        await trio.sleep(self._board.latency)
        if not self._board.up:
            raise NetworkError("no directory server answered (the board is down)")
