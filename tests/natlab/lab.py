"""A laboratory of network namespaces: bootstraps in public, homes behind routers, on one Linux machine, as root.

    public      a bridge, 44.0.0.1/16; bootstraps 44.0.0.10, .11, …
    home i      router 44.0.<i>.1 outside, 10.<i>.0.1 inside; computers 10.<i>.0.2, .3, …

The addresses are some that count as public (the ranges for documentation do not); nothing leaves the namespaces. Every
router drops what comes from outside unasked, without a word. Kinds of homes, by how the router translates:

    cone        a port of the inside keeps its number outside, for all destinations
    shift       port 4001 becomes 34001, for all destinations
    symmetric   another random port for each destination
    open        no router: the computer itself has the address 44.0.<i>.1

Delay and loss are made by `wire.c`, rates by `tbf`. `Cannot` says why a machine has no laboratory.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HERE = Path(__file__).parent
KINDS = ("cone", "symmetric", "shift", "open")
PORT = 4001
SHIFTED_PORT = 34001


class Cannot(Exception):
    """This machine has no laboratory; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Home:
    """One household and its line: rates in Mbit/s (0: as fast as it goes), `delay` one way in seconds."""

    kind: str = "cone"
    computers: int = 1
    delay: float = 0.0
    loss: float = 0.0
    up: float = 0.0
    down: float = 0.0
    upnp: bool = False
    ipv6: bool = False


def why_not() -> str:
    """What this machine lacks; empty if it has all."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    missing = [tool for tool in ("ip", "tc", "nft") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: apt install iproute2 nftables"
    probe = f"fsprobe{os.getpid()}"
    try:
        run("ip", "netns", "add", probe)
        run("ip", "netns", "exec", probe, "nft", "add", "table", "ip", "probe")
    except Cannot as error:
        return str(error)
    finally:
        with suppress(Cannot):
            run("ip", "netns", "del", probe)
    return ""


def run(*command: str, text: str | None = None) -> str:
    """The output of a command. Raises `Cannot` with its words where it fails."""
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if result.returncode:
        raise Cannot(f"{' '.join(command)}: {result.stderr.strip()}")
    return result.stdout


@dataclass(slots=True)
class Lab:
    """The whole laboratory, as a context. Computers are named `boot0`, `home0`, and the second of a home `home0b`."""

    homes: Sequence[Home]
    bootstraps: int = 1
    folder: Path = Path("/tmp")
    prefix: str = field(default_factory=lambda: f"fs{os.getpid()}-")
    _names: list[str] = field(default_factory=list)
    _processes: list[subprocess.Popen[Any]] = field(default_factory=list)
    _wires: list[subprocess.Popen[Any]] = field(default_factory=list)

    def __enter__(self) -> Self:
        try:
            self._build_public()
            for number, home in enumerate(self.homes):
                self._build_home(number, home)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process, then every namespace."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            try:
                process.wait(3)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for wire in self._wires:
            wire.kill()
            wire.wait()
        for process in (*self._processes, *self._wires):
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        for name in self._names:
            with suppress(Cannot):
                run("ip", "netns", "del", self.prefix + name)

    def start(self, computer: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """A process on a computer; it ends with the laboratory."""
        inside = ["ip", "netns", "exec", self.prefix + computer, *command]
        process = subprocess.Popen(inside, **options)
        self._processes.append(process)
        return process

    def kill(self, computer: str) -> None:
        """SIGKILL for everything that was started on a computer."""
        for process in self._processes:
            if isinstance(process.args, list) and process.args[3] == self.prefix + computer:
                process.kill()
                process.wait()

    def inside(self, computer: str, command: str, text: str | None = None) -> str:
        """The output of a command on a computer or router."""
        return run("ip", "netns", "exec", self.prefix + computer, *command.split(), text=text)

    def public_ip(self, number: int) -> str:
        """The address by which the world knows a home at first."""
        return f"44.0.{number + 1}.1"

    def cut(self, number: int) -> None:
        """From now on all of a home's packets vanish, both ways, without a word."""
        self.inside(self._router(number), "nft add rule ip filter cut drop")

    def mend(self, number: int) -> None:
        """The end of `cut`."""
        self.inside(self._router(number), "nft flush chain ip filter cut")

    def move(self, number: int, address: str) -> None:
        """A home's provider gives it another public address: every mapping of its router is forgotten."""
        router = self._router(number)
        self.inside(router, f"ip addr flush dev wan{number}")
        self.inside(router, f"ip addr add {address}/16 dev wan{number}")

    def _router(self, number: int) -> str:
        return f"home{number}" if self.homes[number].kind == "open" else f"router{number}"

    def _computer(self, number: int, index: int) -> str:
        return f"home{number}" + ("" if index == 0 else chr(ord("a") + index))

    def _build_public(self) -> None:
        self._add("public")
        self.inside("public", "ip link add bridge type bridge forward_delay 0 stp_state 0")
        self.inside("public", "ip addr add 44.0.0.1/16 dev bridge")
        self.inside("public", "ip link set bridge up")
        if any(home.ipv6 for home in self.homes):
            self.inside("public", "ip addr add 2a0f:44::1/64 dev bridge nodad")
            self.inside("public", "sysctl -qw net.ipv6.conf.all.forwarding=1")
        for number in range(self.bootstraps):
            self._add(f"boot{number}")
            self._wire(f"boot{number}", "eth0", f"boot{number}", Home())
            self._address(f"boot{number}", "eth0", f"44.0.0.{10 + number}/16")

    def _build_home(self, number: int, home: Home) -> None:
        router, wan = self._router(number), f"wan{number}"
        self._add(router)
        self._wire(router, wan, f"to{number}", home)
        self._address(router, wan, f"{self.public_ip(number)}/16")
        self.inside(router, "nft -f -", text=_rules(home.kind, wan))
        for device, namespace, rate in ((wan, router, home.up), (f"to{number}", "public", home.down)):
            if rate:
                shaping = f"tbf rate {rate}mbit burst {max(32, int(rate * 1.5))}k latency 100ms"
                self.inside(namespace, f"tc qdisc add dev {device} root {shaping}")
        if home.kind == "open":
            return
        self.inside(router, "sysctl -qw net.ipv4.ip_forward=1")
        self.inside(router, "ip link add lan type bridge forward_delay 0 stp_state 0")
        self._address(router, "lan", f"10.{number}.0.1/24")
        for index in range(home.computers):
            computer = self._computer(number, index)
            self._add(computer)
            run(*f"ip link add lan{index} netns {self.prefix}{router} type veth".split(),
                *f"peer name eth0 netns {self.prefix}{computer}".split())  # fmt: skip
            self.inside(router, f"ip link set lan{index} master lan up")
            self._address(computer, "eth0", f"10.{number}.0.{2 + index}/24")
            self.inside(computer, f"ip route add default via 10.{number}.0.1")
        if home.ipv6:
            self._add_ipv6(number, home)
        if home.upnp:
            self.start(router, [sys.executable, str(HERE / "upnp_router.py"), f"10.{number}.0.1", wan])

    def _add_ipv6(self, number: int, home: Home) -> None:
        router, wan, prefix = self._router(number), f"wan{number}", f"2a0f:44:{number + 1}:"
        self.inside(router, "sysctl -qw net.ipv6.conf.all.forwarding=1")
        self.inside(router, f"ip addr add 2a0f:44::{number + 2}/64 dev {wan} nodad")
        self.inside(router, "ip route add default via 2a0f:44::1")
        self.inside("public", f"ip route add {prefix}:/64 via 2a0f:44::{number + 2}")
        self.inside(router, f"ip addr add {prefix}:1/64 dev lan nodad")
        for index in range(home.computers):
            computer = self._computer(number, index)
            self.inside(computer, f"ip addr add {prefix}:{2 + index}/64 dev eth0 nodad")
            self.inside(computer, f"ip route add default via {prefix}:1")

    def _add(self, name: str) -> None:
        run("ip", "netns", "add", self.prefix + name)
        self._names.append(name)
        self.inside(name, "ip link set lo up")
        # Not BBR, which some machines have as default: short of losses it takes 10 s to believe in a faster road.
        self.inside(name, "sysctl -qw net.ipv4.tcp_congestion_control=reno")

    def _address(self, name: str, device: str, address: str) -> None:
        self.inside(name, f"ip addr add {address} dev {device}")
        self.inside(name, f"ip link set {device} up")

    def _wire(self, name: str, device: str, port: str, home: Home) -> None:
        """From a namespace to the public bridge."""
        if home.delay or home.loss:
            ends = [self.prefix + "public", port, self.prefix + name, device]
            figures = [str(round(home.delay * 1e6)), str(round(home.loss * 1e6))]
            wire = subprocess.Popen([self._wire_program(), *ends, *figures], stdout=subprocess.PIPE)
            self._wires.append(wire)
            assert wire.stdout is not None
            if wire.stdout.readline() != b"ready\n":
                raise Cannot("wire.c made no TAP devices: /dev/net/tun is missing or forbidden")
        else:
            run(*f"ip link add {port} netns {self.prefix}public type veth".split(),
                *f"peer name {device} netns {self.prefix}{name}".split())  # fmt: skip
        self.inside("public", f"ip link set {port} master bridge up")

    def _wire_program(self) -> str:
        program = self.folder / "wire"
        if not program.exists():
            if shutil.which("cc") is None:
                raise Cannot("cc not found, which compiles wire.c: apt install gcc libc6-dev")
            run("cc", "-O2", "-pthread", "-o", str(program), str(HERE / "wire.c"))
        return str(program)


def _rules(kind: str, wan: str) -> str:
    """What a router translates and drops; an open computer has a chain to cut alone."""
    cut = "chain cut { type filter hook forward priority -10; }"
    if kind == "open":
        return """table ip filter {
            chain cut { type filter hook input priority -10; }
        }"""
    shifted = f'oifname "{wan}" tcp sport {PORT} masquerade to :{SHIFTED_PORT}' if kind == "shift" else ""
    return f"""
        table ip nat {{
            chain post {{
                type nat hook postrouting priority 100;
                {shifted}
                oifname "{wan}" masquerade {"fully-random" if kind == "symmetric" else ""}
            }}
        }}
        table ip filter {{
            {cut}
            chain forward {{
                type filter hook forward priority 0; policy drop;
                ct state established,related accept
                ct status dnat accept
                iifname "lan" accept
            }}
            chain input {{
                type filter hook input priority 0; policy drop;
                iifname {{ "lan", "lo" }} accept
                ct state established,related accept
            }}
        }}
        table ip6 filter {{
            chain forward {{
                type filter hook forward priority 0; policy drop;
                ct state established,related accept
                iifname "lan" accept
            }}
        }}
    """


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a peer of the laboratory: this one, and the test folders on the path."""
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, **(extra or {})}
