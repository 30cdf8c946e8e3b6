"""What tests over sockets of loopback have in common: a configuration, a protocol that echoes, and a wait."""

from collections.abc import Callable
from pathlib import Path

import trio
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.transport import Stream

LOOPBACK = PeerConfig(home=Path("unused"), host="127.0.0.1", port=0)
ECHO = "/test/echo/1"


async def echo(stream: Stream) -> None:
    while data := await stream.receive_some(1 << 20):
        await stream.send_all(data)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await trio.lowlevel.checkpoint()
