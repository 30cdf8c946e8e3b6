"""Works around bugs of py-libp2p 0.8.1: one small function per bug, all applied by `apply_fixes`.

Each replaces or wraps functions of the library, names the lines that it mends, and was written for one version, which
pyproject.toml pins; another version is refused. A patch can go when its test passes without it (delete the function, run the
test). "Upstream" is an issue of github.com/libp2p/py-libp2p, where one is known.

    patch                  upstream  the test that tells when it is no longer needed, in tests/integration
    tune_sockets           -         every test over sockets: they are counted and limited by the same class
    keep_quiet             -         test_libp2p_fixes: test_the_library_keeps_quiet
    listen_alone           -         test_gate:
                                     test_the_kernel_drops_further_attempts_of_who_connects_too_fast_and_of_nobody_else
    free_inbound_slots     -         test_libp2p_host: test_accepted_connections_that_ended_make_room_for_others
    contain_errors         -         test_libp2p_fixes: test_an_error_in_one_connection_ends_that_connection_only
    dial_nobody_unasked    #1451     test_libp2p_fixes: test_nobody_is_dialled_unasked
    limit_greetings        -         test_strangers: test_nobody_comes_in_with_a_key_that_is_not_ed25519,
                                     test_a_line_of_negotiation_is_refused_by_its_length,
                                     test_a_stream_may_propose_so_many_protocols
    limit_identify         -         test_strangers:
                                     test_little_is_kept_of_an_identify_message_and_nothing_once_its_peer_has_gone

Nothing else of the library is patched. Its Yamux is not used at all (`peer/yamux`; #1270 and #1271 mended some of what was
wrong with it); of its Noise, TCP and choice of a multiplexer there are subclasses (`packets`, `tcp`, `settings`).
"""

import functools
import importlib.metadata
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

import libp2p.network.auto_connector
import libp2p.network.connection.swarm_connection
import libp2p.network.swarm
import libp2p.transport.tcp.tcp
import trio
from libp2p.network.connection.raw_connection import RawConnection

from ..base.errors import LocalError
from ..strangers.greeting import limit_greetings
from ..strangers.identify import limit_identify
from .listen import ACCEPT_QUEUE, SelectiveListener
from .tcp import TunedStream

# A type checker forbids an assignment to a class, which is all that this file does.
auto_connector: Any = libp2p.network.auto_connector
swarm_connection: Any = libp2p.network.connection.swarm_connection
swarm: Any = libp2p.network.swarm
tcp: Any = libp2p.transport.tcp.tcp

WRITTEN_FOR = "0.8.1"

_fixes: list[Callable[[], None]] = []


def _fix(patch: Callable[[], None]) -> Callable[[], None]:
    _fixes.append(patch)
    return patch


def apply_fixes() -> None:
    """Apply every fix, once per process. Raises `LocalError` if the library is not the version that they were written for."""
    version = importlib.metadata.version("libp2p")
    if version != WRITTEN_FOR:
        raise LocalError(
            f"libp2p {version} is installed, and this flockstep knows {WRITTEN_FOR} alone",
            remedy=f"pip install libp2p=={WRITTEN_FOR}",
        )
    _apply_once()


@functools.cache
def _apply_once() -> None:
    for patch in _fixes:
        patch()
    limit_greetings()
    limit_identify()


@_fix
def tune_sockets() -> None:
    """`io/trio.py:28`: no keepalive, no user timeout, so that a silent drop is never noticed."""
    tcp.TrioTCPStream = TunedStream


@_fix
def keep_quiet() -> None:
    """`utils/logging.py:98`: no handler, so Python prints warnings on stderr; `swarm_connection.py` logs to the root."""
    logging.getLogger("libp2p").addHandler(logging.NullHandler())
    swarm_connection.logging = logging.getLogger(swarm_connection.__name__)


@_fix
def listen_alone() -> None:
    """`transport/tcp/tcp.py:60`: SO_REUSEPORT before bind lets two peers share a port, each getting half the dials.

    Bound without it, the second peer gets "address in use"; set afterwards it still lets hole punching dial from
    this port, because the system looks at the flag of both sockets at the time of the later bind. And the library's
    listeners refuse nobody (`SelectiveListener`).
    """

    async def open_listeners(host: str | None, port: int) -> Sequence[SelectiveListener]:
        opened = await trio.open_tcp_listeners(port, host=host, backlog=ACCEPT_QUEUE)
        listeners = [SelectiveListener(each.socket) for each in opened]
        if hasattr(socket, "SO_REUSEPORT"):
            for listener in listeners:
                listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        return listeners

    tcp._open_reuseport_listeners = open_listeners


@_fix
def free_inbound_slots() -> None:
    """`network/swarm.py:2061`: an accepted connection holds its slot and its task until the host ends, not its own end.

    After `max_connections` accepted connections a host refuses every further one, until it is restarted.
    """

    async def handle(self: Any, stream: Any, maddr: Any, _event: Any) -> None:
        raw = RawConnection(stream, False, stream.kind)
        try:
            muxed = await self.upgrade_inbound_raw_conn(raw, maddr)
            stream.peer = str(muxed.peer_id)
            stream.welcome(stream.peer)
            await muxed.event_closed.wait()
        finally:
            with trio.CancelScope(deadline=trio.current_time() + 1, shield=True):
                await raw.close()

    swarm.Swarm._do_handle_inbound_connection = handle


@_fix
def contain_errors() -> None:
    """`network/swarm.py:2638`: an unexpected error in one connection's task ends the whole host."""
    start = swarm_connection.SwarmConn.start

    async def run(self: Any) -> None:
        try:
            await start(self)
        except Exception as error:  # noqa: BLE001  The boundary of one peer: only its connection may end.
            logging.getLogger(__name__).debug("connection ends: %r", error)
            await self.close()

    swarm_connection.SwarmConn.start = run


@_fix
def dial_nobody_unasked() -> None:
    """`network/auto_connector.py:313`: below half of `max_connections` it dials every peer that it knows of."""

    async def stay_put(self: Any) -> None:
        pass

    auto_connector.AutoConnector.maybe_connect = stay_put
