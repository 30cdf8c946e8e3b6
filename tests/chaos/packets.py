"""Network namespaces for the peers of a group, to drop all packets of one silently.

Each peer has a network namespace with one interface, which is connected to a bridge in another namespace. To cut a peer off,
its port is removed from the bridge, while its interface stays up. The machine's own network is not touched.
"""

import os
import shutil
import subprocess
import sys
from types import TracebackType
from typing import Self


class Unsupported(Exception):
    """This system or this user cannot make network namespaces."""


class Networks:
    """`count` of them. Use as a context. Raises `Unsupported`."""

    def __init__(self, count: int) -> None:
        self._hub = f"chaos-{os.getpid()}-hub"
        self._names = [f"chaos-{os.getpid()}-{index}" for index in range(count)]
        self._made: list[str] = []

    def __enter__(self) -> Self:
        if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
            raise Unsupported("network namespaces need Linux, root and the program ip")
        try:
            self._build()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self._made:
            _ip("netns", "delete", name)

    def launch(self, index: int) -> tuple[list[str], str]:
        """How to start a program in a peer's network, and the address that it has there."""
        return ["ip", "netns", "exec", self._names[index]], _address(index)

    def cut_off(self, index: int, whether: bool) -> None:
        """Drop every packet from and to a peer, or let them pass again."""
        place = ["nomaster"] if whether else ["master", "bridge"]
        _ip("-n", self._hub, "link", "set", f"port{index}", *place)

    def _build(self) -> None:
        for name in (self._hub, *self._names):
            _ip("netns", "add", name)
            self._made.append(name)
        _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "bridge", "up")
        for index, name in enumerate(self._names):
            port = f"port{index}"
            _ip("link", "add", port, "netns", self._hub, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", self._hub, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"{_address(index)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")


def _address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def _ip(*arguments: str) -> None:
    result = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        raise Unsupported(f"ip {' '.join(arguments)}: {result.stderr.strip()}")
