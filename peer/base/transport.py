"""The transport: the interface between the protocols and the networks that carry them. Pure.

Two networks implement it: `peer.memory` (in memory, under a virtual clock) and `peer.host` (libp2p). What only the
latter has, a listen port and bootstraps, is the interface `Host`. Every method runs inside trio. A failure of a
connection is a `NetworkError`, misuse by the remote end a `RemoteError`.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias, TypeGuard, runtime_checkable

from .troubles import Trouble

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
class Reachability:
    """How others reach me, and why I think so."""

    rung: Rung | None
    """None before a bootstrap has answered."""

    confirmed: tuple[Address, ...] = ()
    """Where bootstraps have reached me when they dialled back."""

    aims: tuple[Address, ...] = ()
    """Where a hole punch should aim; none where that cannot be known."""

    reason: str = ""

    @property
    def needs_relay(self) -> bool:
        """Whether some peers cannot reach me but through a relay."""
        # Peers without IPv6 cannot reach one that is reached by it alone.
        only_by_ipv6 = bool(self.confirmed) and all(one.startswith(("/ip6/", "/dns6/")) for one in self.confirmed)
        return self.rung in (Rung.PUNCHED, Rung.RELAYED) or (self.rung is Rung.DIRECT and only_by_ipv6)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes on the sockets of this transport since it started, encryption and multiplexing included."""

    sent: int
    received: int


class Stream(Protocol):
    """An ordered, reliable byte stream in both directions to one authenticated peer."""

    @property
    def remote(self) -> PeerId:
        """The peer at the remote end, authenticated by the handshake."""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send everything; waits for the remote end's window (backpressure). Raises `StreamClosed`."""

    async def receive_some(self, max_bytes: int) -> bytes:
        """At least one and at most `max_bytes` bytes; `b""` once the remote end has closed. Raises `StreamClosed`."""

    async def aclose(self) -> None:
        """Close gracefully: bytes already sent still arrive. Never raises because of the network."""

    async def reset(self) -> None:
        """Reset the stream in both directions at once. Never raises because of the network."""


@runtime_checkable
class EagerStream(Stream, Protocol):
    """A stream that sends and delivers small frames without waking a task for each."""

    def send_now(self, data: bytes) -> bool:
        """Send all of `data`, or nothing and return False if that would block. Raises `StreamClosed`."""

    def divert(self, sink: Callable[[bytes], bool]) -> None:
        """Offer arriving bytes to `sink` first, while none wait in the buffer; those that it refuses are buffered."""


@runtime_checkable
class SocketStream(Stream, Protocol):
    """A stream over a connection that comes from a known socket."""

    def remote_socket(self) -> tuple[str, int]:
        """The IP address and the port from which the connection comes; the relay's if relayed. Raises `StreamClosed`."""

    def hold_at_most(self, num_bytes: int) -> None:
        """Reset the stream once it has more unread bytes than that: a peer that asks, and waits for no answer."""


@runtime_checkable
class Climber(Protocol):
    """A transport that upgrades connections, and knows whether others reach me through a relay only."""

    @property
    def is_relayed(self) -> bool:
        """Whether most others can reach me through a relay only."""

    def on_climb(self, handler: Callable[[PeerId], None]) -> None:
        """Call `handler(peer)` when the connection to a peer is upgraded: new streams use the better one."""


def is_eager(stream: Stream) -> TypeGuard[EagerStream]:
    """Return True for an `EagerStream`; a look at a protocol takes microseconds, so each class is looked at once."""
    kind = type(stream)
    if kind not in _EAGER:
        _EAGER[kind] = isinstance(stream, EagerStream)
    return _EAGER[kind]


def has_socket(stream: Stream) -> TypeGuard[SocketStream]:
    """Return True for a `SocketStream`; each class is looked at once."""
    kind = type(stream)
    if kind not in _WITH_SOCKET:
        _WITH_SOCKET[kind] = isinstance(stream, SocketStream)
    return _WITH_SOCKET[kind]


_EAGER: dict[type, bool] = {}
_WITH_SOCKET: dict[type, bool] = {}

StreamHandler: TypeAlias = Callable[[Stream], Awaitable[None]]
"""Serves one incoming stream; the transport resets the stream if it raises and closes it when it returns."""


class Transport(Protocol):
    """One peer's end of a network."""

    @property
    def peer_id(self) -> PeerId:
        """My peer id on this network."""

    def addresses(self) -> tuple[Address, ...]:
        """Where others may dial me, best first."""

    def handle(self, protocol: str, handler: StreamHandler) -> None:
        """Serve incoming streams of `protocol` (such as `/flockstep/control/1`) with `handler`, each in its own task."""

    async def connect(self, peer: PeerId, addresses: Sequence[Address]) -> None:
        """Ensure that a connection to `peer` is open; tries one address after the other. Raises `ConnectFailed`."""

    async def open_stream(self, peer: PeerId, protocol: str) -> Stream:
        """Open a stream over an open connection. Raises `StreamClosed` if there is none or the stream is refused."""

    async def disconnect(self, peer: PeerId) -> None:
        """Close every connection to `peer`. Never raises because of the network."""

    def connected(self) -> frozenset[PeerId]:
        """The peers with an open connection to me."""

    def rung(self, peer: PeerId) -> Rung | None:
        """How `peer` is connected; None if it is not."""

    def traffic(self) -> Traffic:
        """The bytes sent and received so far."""


class HeldBootstraps(Protocol):
    """The bootstraps to which a host holds a connection, and what it has learned from them."""

    @property
    def clock_offsets(self) -> Mapping[PeerId, float]:
        """Seconds that the clock of each bootstrap is ahead of mine."""

    @property
    def reserved(self) -> frozenset[PeerId]:
        """The relays that hold a reservation for me."""

    @property
    def refusals(self) -> Mapping[PeerId, str]:
        """Why relays that I need refused a reservation."""

    @property
    def relay_trouble(self) -> Trouble | None:
        """What is wrong where I need a relay and none holds a reservation for me."""

    @property
    def over_https(self) -> Mapping[PeerId, str]:
        """The bootstraps that are held over a WebSocket, and how: "directly", or through which proxy."""

    async def enter(self, peer: PeerId, *addresses: Address, stated: bool = False) -> None:
        """Connect to a bootstrap and hold the connection. Raises `ConnectFailed`, with the diagnosis of each attempt.

        A WebSocket is used where no other of its addresses works.

        `stated`: a member has named it, not my link. Then it is dialled where a member's own address would be.
        """

    async def examine(self, peer: PeerId, address: Address, seconds: float) -> str:
        """Diagnose why a bootstrap does not answer at this very address; empty if it does. The connection is closed."""

    async def first_check(self, peer: PeerId) -> None:
        """Wait until an entered bootstrap has said all it can: my address, the dialback, a reservation or its refusal."""

    def on_return(self, handler: Callable[[], None]) -> None:
        """Call `handler()` when a lost bootstrap is back: it may have forgotten what was published there."""


class Host(Transport, Protocol):
    """One peer's end of the internet: it listens on a port and finds out from bootstraps how others reach it."""

    @property
    def port(self) -> int:
        """The TCP port that I listen on."""

    @property
    def reachability(self) -> Reachability:
        """How others reach me, as far as bootstraps have found out."""

    @property
    def bootstraps(self) -> HeldBootstraps:
        """My bootstraps."""

    def why_not_dial(self, address: Address, theirs: Sequence[Address] = ()) -> str:
        """Return why I do not dial an address that a member states among `theirs`; empty if I do. It spends my budget."""

    def prefer(self, needs: Callable[[PeerId], bool], votes: Callable[[PeerId], bool]) -> None:
        """Keep places for the peers that a run needs; never close the connection of a voter for the sake of another."""

    def dialled(self, peer: PeerId) -> tuple[Address, ...]:
        """Where `peer` answered my dials, as far as these connections are still open."""
