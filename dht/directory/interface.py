"""The interface of a directory of runs: put, get, provide and find."""

from collections.abc import Callable
from typing import Protocol, TypeAlias, runtime_checkable

from ...peer.base.transport import Address, PeerId

Validate: TypeAlias = Callable[[str, bytes], int]
"""Returns the sequence of a valid value under a key; raises `RemoteError` for an invalid one."""


class Directory(Protocol):
    """The rendezvous of runs. Every method raises `NetworkError` if no server answered."""

    async def put(self, key: str, value: bytes) -> None:
        """Publish a value, and keep it published. Raises `LocalError` if it is not valid under its key."""

    async def get(self, key: str) -> bytes | None:
        """Return the valid value of the highest sequence; None if the servers have none."""

    async def provide(self, run_id: str) -> None:
        """Publish that I provide a run (am a member), and keep it published."""

    async def find(self, run_id: str) -> tuple[PeerId, ...]:
        """Find the providers of a run except me; `addresses` then returns where they are."""

    def addresses(self, peer: PeerId) -> tuple[Address, ...]:
        """Return the addresses that a found peer has published."""

    async def add_server(self, peer: PeerId) -> None:
        """Use this connected peer as a server, too."""


@runtime_checkable
class AsksOneServer(Protocol):
    """A directory whose servers can be asked one by one."""

    async def held(self, server: PeerId, key: str) -> bytes | None:
        """Return the value that one server has under a key, valid or not. Raises `NetworkError` or `RemoteError`."""
