"""A laboratory of network namespaces: bootstraps in public, homes behind routers, on one Linux machine, as root.

    public      a bridge, 44.0.0.1/16; bootstraps 44.0.0.10, .11, …
    home i      router 44.0.<i>.1 outside, 10.<i>.0.1 inside; computers 10.<i>.0.2, .3, …

The addresses are some that count as public (the ranges for documentation do not); nothing leaves the namespaces. Every
router drops what comes from outside unasked, without a word. Kinds of homes, by how the router translates:

    cone        a port of the inside keeps its number outside, for all destinations
    shift       port 4001 becomes 34001, for all destinations
    symmetric   another random port for each destination
    open        no router: the computer itself has the address 44.0.<i>.1

Delay, loss and rates are those of `flockstep.scripts.lab.namespaces`. `LocalError` says why a machine has no laboratory.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from flockstep.peer.base.errors import LocalError
from flockstep.scripts.lab.namespaces import Namespaces, ShapedLine, check_namespaces, run_program

HERE = Path(__file__).parent
KINDS = ("cone", "symmetric", "shift", "open")
PORT = 4001
SHIFTED_PORT = 34001
PROXY_PORT = 3128


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
    lets_out: str = "everything"
    """What the router lets out: `everything`, `nothing`, or a match of nftables such as `tcp dport 443`."""
    proxy: tuple[str, ...] | None = None
    """The options of an HTTP proxy on port 3128 of its router (`support.connect_proxy`); None for no proxy."""

    @property
    def line(self) -> ShapedLine:
        """From its router to the public bridge."""
        return ShapedLine(self.up, self.down, self.delay, self.loss)


def why_not() -> str:
    """What this machine lacks; empty if it has all."""
    try:
        check_namespaces(("ip", "tc", "nft"))
        with Namespaces(Path("/tmp")) as probe:
            probe.add("probe")
            probe.inside("probe", "nft add table ip probe")
    except LocalError as error:
        return f"{error}: {error.remedy}"
    return ""


class Lab(Namespaces):
    """The whole laboratory, as a context. Computers are named `boot0`, `home0`, and the second of a home `home0b`."""

    def __init__(self, homes: Sequence[Home], bootstraps: int = 1, folder: Path = Path("/tmp")) -> None:
        super().__init__(folder)
        self.homes = homes
        self.bootstraps = bootstraps
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        try:
            self._build_public()
            for number, home in enumerate(self.homes):
                self._build_home(number, home)
        except BaseException:
            self.close()
            raise
        return self

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
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        super().close()

    def start(self, computer: str, command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        """Start a process on a computer; it ends with the context."""
        process = subprocess.Popen([*self.command(computer), *command], **options)
        self._processes.append(process)
        return process

    def kill(self, computer: str) -> None:
        """Send SIGKILL to everything that was started on a computer."""
        for process in self._processes:
            if isinstance(process.args, list) and process.args[3] == self.prefix + computer:
                process.kill()
                process.wait()

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
        self.add_bridge("public", "44.0.0.1/16")
        if any(home.ipv6 for home in self.homes):
            self.inside("public", "ip addr add 2a0f:44::1/64 dev bridge nodad")
            self.inside("public", "sysctl -qw net.ipv6.conf.all.forwarding=1")
        for number in range(self.bootstraps):
            self.add(f"boot{number}")
            self.connect(f"boot{number}", "eth0", "public", f"boot{number}", ShapedLine())
            self.address(f"boot{number}", "eth0", f"44.0.0.{10 + number}/16")

    def _build_home(self, number: int, home: Home) -> None:
        router, wan = self._router(number), f"wan{number}"
        self.add(router)
        self.connect(router, wan, "public", f"to{number}", home.line)
        self.address(router, wan, f"{self.public_ip(number)}/16")
        self.inside(router, "nft -f -", text=_rules(home, wan))
        if home.kind == "open":
            return
        self.inside(router, "sysctl -qw net.ipv4.ip_forward=1")
        self.inside(router, "ip link add lan type bridge forward_delay 0 stp_state 0")
        self.address(router, "lan", f"10.{number}.0.1/24")
        for index in range(home.computers):
            computer = self._computer(number, index)
            self.add(computer)
            run_program(*f"ip link add lan{index} netns {self.prefix}{router} type veth".split(),
                        *f"peer name eth0 netns {self.prefix}{computer}".split())  # fmt: skip
            self.inside(router, f"ip link set lan{index} master lan up")
            self.address(computer, "eth0", f"10.{number}.0.{2 + index}/24")
            self.inside(computer, f"ip route add default via 10.{number}.0.1")
        if home.ipv6:
            self._add_ipv6(number, home)
        if home.proxy is not None:
            place = ("--host", f"10.{number}.0.1", "--port", str(PROXY_PORT))
            proxy = [sys.executable, "-m", "support.connect_proxy", *place, *home.proxy]
            process = self.start(router, proxy, stdout=subprocess.PIPE, text=True, env=environment())
            assert process.stdout is not None
            assert process.stdout.readline() == f"{PROXY_PORT}\n"
        if home.upnp:
            upnp = [sys.executable, str(HERE / "upnp_router.py"), f"10.{number}.0.1", wan]
            self.start(router, upnp, env=environment())

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


def _rules(home: Home, wan: str) -> str:
    """What a router translates and drops; an open computer has a chain to cut alone."""
    kind, cut = home.kind, "chain cut { type filter hook forward priority -10; }"
    allowed = {"everything": "", "nothing": None}.get(home.lets_out, home.lets_out)
    outgoing = "" if allowed is None else f'iifname "lan" {allowed} accept'
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
                {outgoing}
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
