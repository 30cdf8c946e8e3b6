"""A child of the bridge for its tests: answers, fails, waits and dies as it is told."""

import gc
import os
import signal
from dataclasses import dataclass

import trio
from flockstep.peer.base.errors import ConnectFailed, UsageError
from flockstep.peer.process.bridge import Channel, Command, Notice


@dataclass(frozen=True, slots=True)
class Echo(Command[bytes]):
    """Answer with these bytes, once they have been noticed."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Fail(Command[None]):
    """Raise an error: `UsageError`, or `ConnectFailed` inside of a nursery's group."""

    in_nursery: bool


@dataclass(frozen=True, slots=True)
class Wait(Command[None]):
    """Never answer."""


@dataclass(frozen=True, slots=True)
class Collects(Command[str]):
    """Answer whether garbage was collected while this module was loaded, and whether it is now."""


@dataclass(frozen=True, slots=True)
class Die(Command[None]):
    """Be killed, without an answer."""


@dataclass(frozen=True, slots=True)
class Echoed(Notice):
    """Some bytes were echoed."""

    data: bytes


COLLECTED = gc.isenabled()


class LocalUsageError(UsageError):
    """A class that only this process knows."""


async def main(channel: Channel) -> None:
    """The child's entry point."""

    async def echo(command: Echo) -> bytes:
        channel.post(Echoed(command.data))
        return command.data

    async def fail(command: Fail) -> None:
        if not command.in_nursery:
            raise LocalUsageError("no such file", remedy="name another one")
        async with trio.open_nursery():
            raise ConnectFailed("Q", [], remedy="ask Q")

    async def wait(command: Wait) -> None:
        await trio.sleep_forever()

    async def collects(command: Collects) -> str:
        return f"{COLLECTED}, {gc.isenabled()}"

    async def die(command: Die) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    channel.handle(Echo.handled_by(echo), Fail.handled_by(fail), Wait.handled_by(wait), Die.handled_by(die))
    channel.handle(Collects.handled_by(collects))
    print("a line of a library")  # noqa: T201 - must not stand between the messages
    await channel.serve()
