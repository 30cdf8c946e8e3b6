"""A directory in memory, for the network in memory."""

from dataclasses import dataclass, field

import trio

from ...peer.base.errors import LocalError, NetworkError, RemoteError
from ...peer.base.transport import Address, PeerId
from .interface import Validate


@dataclass(slots=True)
class MemoryBoard:
    """The server that all `MemoryDirectory`s of one network share."""

    latency: float = 0.0
    """The round trip in seconds."""

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
        """Publish a value; one older than that on the board is ignored, as in the real directory."""
        try:
            sequence = self._validate(key, value)
        except RemoteError as error:
            raise LocalError(f"refusing to publish an invalid value under {key}: {error}") from error
        await self._ask()
        held = self._board.values.get(key)
        if held is None or self._validate(key, held) <= sequence:
            self._board.values[key] = value

    async def get(self, key: str) -> bytes | None:
        """Return the value of the highest sequence."""
        await self._ask()
        return self._board.values.get(key)

    async def provide(self, run_id: str) -> None:
        """Publish that I provide a run."""
        await self._ask()
        self._board.providers.setdefault(run_id, {})[self._peer_id] = self._own_addresses

    async def find(self, run_id: str) -> tuple[PeerId, ...]:
        """Return the providers of a run except me."""
        await self._ask()
        found = {peer: where for peer, where in self._board.providers.get(run_id, {}).items() if peer != self._peer_id}
        self._addresses.update(found)
        return tuple(found)

    def addresses(self, peer: PeerId) -> tuple[Address, ...]:
        """Return the addresses that a found peer has published."""
        return self._addresses.get(peer, ())

    async def add_server(self, peer: PeerId) -> None:
        """Do nothing: the board is the only server."""

    async def _ask(self) -> None:
        await trio.sleep(self._board.latency)
        if not self._board.up:
            raise NetworkError("no directory server answered (the board is down)")
