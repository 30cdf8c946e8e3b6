"""The interface of a directory of runs: put, get, provide and find."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from ...peer.transport import Address, PeerId

Validate: TypeAlias = Callable[[str, bytes], int]
"""Returns the sequence of a value that may stand under a key; raises `RemoteError` for one that may not."""


class Directory(Protocol):
    """The rendezvous of runs. Every method raises `NetworkError` when no server answered."""

    async def put(self, key: str, value: bytes) -> None:
        """Publish a value, and keep it published. Raises `LocalError` if it may not stand under its key."""

    async def get(self, key: str) -> bytes | None:
        """The valid value of the highest sequence; None if the servers have none."""

    async def provide(self, run_id: str) -> None:
        """Publish that I provide a run (am a member), and keep it published."""

    async def find(self, run_id: str) -> tuple[PeerId, ...]:
        """The providers of a run but me; `addresses` then knows where they are."""

    def addresses(self, peer: PeerId) -> tuple[Address, ...]:
        """The addresses that a found peer has published."""

    async def add_server(self, peer: PeerId) -> None:
        """Use this connected peer as a server, too."""
