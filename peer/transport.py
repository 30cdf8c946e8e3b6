"""What a network must offer: the one seam between protocols and the wires that carry them.

Two things implement it: `memory` (a network in memory, under a virtual clock) and `libp2p_host` (the real one).
Every method runs inside trio. A failure of the road is a `NetworkError`; misuse by the remote end a `RemoteError`.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias, runtime_checkable

PeerId: TypeAlias = str
"""A libp2p peer id of an ed25519 key in base58, such as `12D3KooW…` (52 characters)."""

Address: TypeAlias = str
"""A multiaddr without its `/p2p/…` tail, such as `/ip4/192.0.2.1/tcp/4001`."""


class Rung(StrEnum):
    """How two peers are connected, best first."""

    LAN = "lan"
    DIRECT = "direct"
    PUNCHED = "punched"
    RELAYED = "relayed"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes on the sockets of this transport since it started, encryption and multiplexing included."""

    sent: int
    received: int


class Stream(Protocol):
    """An ordered, reliable stream of bytes in both directions to one authenticated peer."""

    @property
    def remote(self) -> PeerId:
        """The peer at the other end, as proven by the handshake."""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send everything, waiting for the other side's window. Raises `StreamClosed`."""

    async def receive_some(self, max_bytes: int) -> bytes:
        """At least one and at most `max_bytes` bytes; `b""` once the other side has closed. Raises `StreamClosed`."""

    async def aclose(self) -> None:
        """Close in order: what was sent still arrives. Never raises because of the network."""

    async def reset(self) -> None:
        """Drop the stream at once, in both directions. Never raises because of the network."""


@runtime_checkable
class EagerStream(Stream, Protocol):
    """A stream on which small frames come and go without waking a task for each."""

    def send_now(self, data: bytes) -> bool:
        """Send all of `data`, or False and nothing where that would have to wait. Raises `StreamClosed`."""

    def divert(self, sink: Callable[[bytes], bool]) -> None:
        """Offer what arrives to `sink` first, as long as nothing waits to be received; what it refuses is received."""


@runtime_checkable
class Climber(Protocol):
    """A transport on which a peer's connection may become a better one, and which knows how others reach me."""

    @property
    def is_relayed(self) -> bool:
        """Whether most others can reach me through a relay only."""

    def on_climb(self, handler: Callable[[PeerId], None]) -> None:
        """Call `handler(peer)` when a better connection to a peer is there: streams that are opened now are on it."""


StreamHandler: TypeAlias = Callable[[Stream], Awaitable[None]]
"""Serves one incoming stream; the transport resets the stream when it raises and closes it when it returns."""


class Transport(Protocol):
    """One peer's end of a network."""

    @property
    def peer_id(self) -> PeerId:
        """Who I am on this network."""

    def addresses(self) -> tuple[Address, ...]:
        """Where others may dial me, best first."""

    def handle(self, protocol: str, handler: StreamHandler) -> None:
        """Serve incoming streams of `protocol` (such as `/flockstep/control/1`) with `handler`, each in its own task."""

    async def connect(self, peer: PeerId, addresses: Sequence[Address]) -> None:
        """Make sure that a connection to `peer` is open, trying one address after the other. Raises `ConnectFailed`."""

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """A new stream over an open connection. Raises `StreamClosed` when there is none or it is refused."""

    async def disconnect(self, peer: PeerId) -> None:
        """Close every connection to `peer`. Never raises because of the network."""

    def connected(self) -> frozenset[PeerId]:
        """The peers to whom a connection is open."""

    def rung(self, peer: PeerId) -> Rung | None:
        """How `peer` is connected; None when it is not."""

    def traffic(self) -> Traffic:
        """Bytes sent and received so far."""
