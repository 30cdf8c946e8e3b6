"""Network namespaces as computers, with lines of a given rate, delay and loss between them; as root on Linux.

Theory of operation. A namespace is a computer or a router with a network of its own; `command` runs a process in it. A
line goes from a device there to a bridge in another namespace. Its rate is shaped at both ends, each where packets leave, by
a token bucket (tc-tbf(8)), which delays what is too fast in a queue of `QUEUE_MS` and drops the rest. Its delay and loss are
made by `wire.c` between two TAP devices, since many kernels come without netem. Nothing leaves the namespaces.

Leaving the context ends what runs in the namespaces, then these. Those of a program that was killed are removed by the next
one.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ...peer.base.errors import LocalError

PREFIX = "fs"
"""What the names of all namespaces begin with, before the id of the process that made them."""
QUEUE_MS = 100
"""The queue of a shaped line, as in most home routers; more would hide overload behind delay (bufferbloat)."""
WIRE_SOURCE = Path(__file__).parent / "wire.c"
DEBIAN_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables", "cc": "gcc libc6-dev"}
"""The package of Debian and its children in which each program is."""


@dataclass(frozen=True, slots=True)
class ShapedLine:
    """A line: rates in Mbit/s (0: as fast as it goes), `delay` one way in seconds, `loss` the share of packets lost."""

    up: float = 0.0
    down: float = 0.0
    delay: float = 0.0
    loss: float = 0.0


def run_program(*command: str, text: str | None = None) -> str:
    """Return the output of a command. Raises `LocalError` with its error text."""
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if result.returncode:
        raise LocalError(f"{' '.join(command)}: {result.stderr.strip()}")
    return result.stdout


def check_namespaces(programs: Sequence[str]) -> None:
    """Raise `LocalError` if this system cannot make namespaces, or lacks one of these programs."""
    if sys.platform != "linux":
        raise LocalError("network namespaces are a feature of Linux", remedy="use a Linux machine, or a virtual one")
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        packages = " ".join(dict.fromkeys(DEBIAN_PACKAGES[program] for program in missing))
        raise LocalError(f"{' and '.join(missing)} not found", remedy=f"apt install {packages}")
    if os.geteuid() != 0:
        raise LocalError("only root can make network namespaces", remedy="start it with sudo")
    _remove_orphans()
    probe = f"{PREFIX}{os.getpid()}-probe"
    try:
        run_program("ip", "netns", "add", probe)
    finally:
        with suppress(LocalError):
            run_program("ip", "netns", "del", probe)


def _remove_orphans() -> None:
    """Remove the namespaces of processes that are no more."""
    for name, owner in re.findall(rf"^({PREFIX}(\d+)-\S+)", run_program("ip", "netns", "list"), re.MULTILINE):
        if not Path(f"/proc/{owner}").exists():
            _remove(name)


def _remove(name: str) -> None:
    """Remove a namespace and kill what still runs in it, such as a daemon that outlived the process that started it."""
    with suppress(LocalError):
        for pid in run_program("ip", "netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        run_program("ip", "netns", "del", name)


class Namespaces:
    """Namespaces and lines, as a context. `folder` is for the compiled wire."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prefix = f"{PREFIX}{os.getpid()}-"
        self._names: list[str] = []
        self._wires: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every namespace, with what runs in it."""
        for wire in self._wires:
            wire.kill()
            wire.wait()
            assert wire.stdout is not None
            wire.stdout.close()
        for name in self._names:
            _remove(self.prefix + name)

    def command(self, computer: str) -> list[str]:
        """Return what to write before a command that shall run on a computer; it becomes that command (exec)."""
        return ["ip", "netns", "exec", self.prefix + computer]

    def inside(self, computer: str, command: str, text: str | None = None) -> str:
        """Return the output of a command on a computer or router. Raises `LocalError`."""
        return run_program(*self.command(computer), *command.split(), text=text)

    def add(self, name: str) -> None:
        """Add a namespace."""
        run_program("ip", "netns", "add", self.prefix + name)
        self._names.append(name)
        self.inside(name, "ip link set lo up")
        # Not BBR, which some machines have as default: short of losses it takes 10 s to believe in a faster line.
        self.inside(name, "sysctl -qw net.ipv4.tcp_congestion_control=reno")

    def add_bridge(self, name: str, address: str) -> None:
        """Add a namespace with the bridge at which lines end; `address` has its prefix length."""
        self.add(name)
        self.inside(name, "ip link add bridge type bridge forward_delay 0 stp_state 0")
        self.address(name, "bridge", address)

    def address(self, name: str, device: str, address: str) -> None:
        """Give a device an address with its prefix length."""
        self.inside(name, f"ip addr add {address} dev {device}")
        self.inside(name, f"ip link set {device} up")

    def connect(self, name: str, device: str, bridge: str, port: str, line: ShapedLine) -> None:
        """Lay a line from `device` in namespace `name` to the new `port` of the bridge in namespace `bridge`."""
        if line.delay or line.loss:
            self._lay_wire([self.prefix + bridge, port, self.prefix + name, device], line)
        else:
            run_program(*f"ip link add {port} netns {self.prefix}{bridge} type veth".split(),
                        *f"peer name {device} netns {self.prefix}{name}".split())  # fmt: skip
        self.inside(bridge, f"ip link set {port} master bridge up")
        for end, namespace, rate in ((device, name, line.up), (port, bridge, line.down)):
            if rate:
                # A burst of 12 ms, and at least 32 kB, half an offloaded packet: the kernel cuts those that are larger.
                shaping = f"tbf rate {rate:g}mbit burst {max(32, int(rate * 1.5))}k latency {QUEUE_MS}ms"
                self.inside(namespace, f"tc qdisc add dev {end} root {shaping}")

    def _lay_wire(self, ends: list[str], line: ShapedLine) -> None:
        figures = [str(round(line.delay * 1e6)), str(round(line.loss * 1e6))]
        wire = subprocess.Popen([self._wire_program(), *ends, *figures], stdout=subprocess.PIPE)
        self._wires.append(wire)
        assert wire.stdout is not None
        if wire.stdout.readline() != b"ready\n":
            raise LocalError("wire.c made no TAP devices", remedy="/dev/net/tun is missing or forbidden: modprobe tun")

    def _wire_program(self) -> str:
        program = self.folder / "wire"
        if not program.exists():
            check_compiler()
            run_program("cc", "-O2", "-pthread", "-o", str(program), str(WIRE_SOURCE))
        return str(program)


def check_compiler() -> None:
    """Raise `LocalError` if there is no compiler for the wire, which lines with delay or loss need."""
    if shutil.which("cc") is None:
        remedy = f"apt install {DEBIAN_PACKAGES['cc']}"
        raise LocalError("cc not found, which compiles the lines with delay or loss", remedy=remedy)
