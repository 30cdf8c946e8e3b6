"""Troubles that users meet, each with its remedy: the texts of `join` and `doctor` in one place. Pure.

Theory of operation. The text of a failure begins with the `cause` of one of the troubles below, followed by its details
(a port, a peer id). So the remedy of any such text is found by its prefix (`remedy_for`), whether an error or an event
carries it.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MAX_CLOCK_OFFSET = 300.0
"""The tolerated clock offset in seconds: that of Kerberos (RFC 4120), and of most server certificates."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A cause of failure, and its remedy; each is a text without a full stop."""

    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.cause} — {self.remedy}" if self.remedy else self.cause

    def with_details(self, details: str) -> "Trouble":
        """Return this trouble with details of the case."""
        return Trouble(f"{self.cause}: {details}", self.remedy)


NO_NAME = Trouble("no such host name", "check the name in the link, or ask for a new link")
NO_RESOLVER = Trouble(
    "no name server answers", "check this computer's network and its DNS settings, or use a link with numbers (/ip4/…)"
)
REFUSED = Trouble("connection refused: nothing listens there", "check that it runs, and its port")
DOWN = Trouble(
    "the bootstrap is down", "restart it if it is yours, else report it to the sender of the link, or ask for a new one"
)
WRONG_PORT = Trouble("the link has a wrong port", "correct the port in the link, or ask for a new one")
NOT_NOISE = Trouble(
    "something listens there that does not speak libp2p with Noise",
    "the link has a wrong port, or another program has taken the bootstrap's: ask for a new link",
)
WRONG_PEER = Trouble(
    "another peer id answered", "the link is old or mistyped: ask for a new one, do not correct it yourself"
)
SILENT = Trouble("timed out", "check that it runs, and that no firewall blocks its port")
MUTE = Trouble(
    "it accepts connections, but sends nothing", "check that a peer listens there, and restart it"
)
STUCK = Trouble(
    "the bootstrap hangs", "restart it if it is yours, else report it to the sender of the link, or ask for a new one"
)
BLOCKED = Trouble(
    "a firewall blocks the port",
    "allow outgoing TCP to this port in the firewall of your computer or network, or use another network",
)
GONE = Trouble(
    "nothing comes back from that host",
    "check that other sites can be reached from here; if so, the host is down: ask for a new link",
)
NO_TLS = Trouble(
    "something listens there that does not speak TLS",
    "the link has a wrong port, or something on the way breaks TLS: try another network, or ask for a new link",
)
UNTRUSTED = Trouble(
    "the host's certificate is not trusted",
    "if a proxy opens TLS here, name its root certificate in SSL_CERT_FILE; if not, ask the bootstrap's operator to renew it",
)
NO_WEBSOCKET = Trouble(
    "the host gives no WebSocket", "report it to the bootstrap's operator: its reverse proxy may not reach the bootstrap"
)
BAD_PROXY = Trouble("HTTPS_PROXY cannot be used", "write it as http://HOST:PORT, or http://NAME:PASSWORD@HOST:PORT")
PROXY_GONE = Trouble(
    "the HTTPS proxy does not answer", "check the address in HTTPS_PROXY; without a proxy here, leave HTTPS_PROXY empty"
)
PROXY_WANTS_LOGIN = Trouble(
    "the HTTPS proxy wants another user name and password", "write them into HTTPS_PROXY=http://NAME:PASSWORD@HOST:PORT"
)
PROXY_REFUSES = Trouble(
    "the HTTPS proxy refuses the connection",
    "ask its operator to allow CONNECT to that host and port, or ask for a link with a bootstrap on port 443",
)
FORBIDDEN = Trouble(
    "this computer forbids the connection", "allow flockstep to connect in this computer's firewall or security settings"
)
OFFLINE = Trouble("network is unreachable", "connect this computer to a network")
NO_ROUTE = Trouble(
    "no route to host", "check this computer's network; if other sites can be reached, ask for a new link"
)
NO_DIRECTORY = Trouble(
    "the directory of the bootstrap does not answer", "update flockstep here and there, or use another bootstrap"
)
RUN_UNKNOWN = Trouble(
    "the bootstraps know no run", "check the run id, or ask the run's owner to publish it with `flockstep run create`"
)
FALSE_MANIFEST = Trouble(
    "the bootstraps hold a false manifest of the run",
    "do not join it: report it to the run's owner, and ask for a link with other bootstraps",
)
NO_RELAY = Trouble(
    "no relay has a place for this peer",
    "forward the listen port in your router, or ask for a link with another bootstrap; until then only peers with an "
    "open port meet this one",
)
CLOCK_OFF = Trouble(
    "this computer's clock", "let it set its time from the network; if it is right, report it to the bootstrap's operator"
)
MEMORY_SHORT = Trouble(
    "too little memory", "close other programs, take a computer or a device with more, or join a run with a smaller model"
)
NEEDS_PROGRAM = Trouble(
    "this run is joined by a program and not by `flockstep join`: its members bring model, data and loop",
    "write Swarm(link, model, optimizer): README.md, Train a model of your own with others",
)
DISK_SHORT = Trouble(
    "too little disk",
    "free some space, or name another folder with --home; without its checkpoints a peer cannot go on after a restart",
)

_DIAL_TROUBLES = (
    *(NO_NAME, NO_RESOLVER, REFUSED, DOWN, WRONG_PORT, NOT_NOISE, WRONG_PEER, SILENT, MUTE, STUCK),
    *(BLOCKED, GONE, FORBIDDEN, OFFLINE, NO_ROUTE, NO_TLS, UNTRUSTED, NO_WEBSOCKET),
    *(BAD_PROXY, PROXY_GONE, PROXY_WANTS_LOGIN, PROXY_REFUSES),
)


def trouble_of(cause: str) -> Trouble:
    """Return the trouble of a failed dial's cause, with its text; without a remedy if it is unknown."""
    found = next((trouble for trouble in _DIAL_TROUBLES if cause.startswith(trouble.cause)), None)
    return Trouble(cause, found.remedy if found else "")


def remedy_for(causes: Iterable[str]) -> str:
    """Return the remedies of several failed dials, each once."""
    return "; or ".join(dict.fromkeys(filter(None, (trouble_of(cause).remedy for cause in causes))))


def clock_trouble(offsets: Iterable[float]) -> Trouble | None:
    """Return the trouble of my clock by the bootstraps' offsets, in seconds ahead of mine; their median counts."""
    found = list(offsets)
    offset = statistics.median(found) if found else 0.0
    if abs(offset) <= MAX_CLOCK_OFFSET:
        return None
    way = "behind" if offset > 0 else "ahead of"
    return Trouble(f"{CLOCK_OFF.cause} is {duration(abs(offset))} {way} that of the bootstraps", CLOCK_OFF.remedy)


def relay_trouble(refusals: Mapping[str, str], reason: str) -> Trouble:
    """Return the trouble that every relay refused, each for its reason; `reason`: why I need one."""
    reasons = "; ".join(dict.fromkeys(refusals.values()))
    return NO_RELAY.with_details(f"{reasons} ({reason})")


def duration(seconds: float) -> str:
    """Format a duration in the largest fitting unit."""
    for name, size in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}s"
    return f"{seconds:.0f} seconds" if seconds >= 10 else f"{seconds:.1f} seconds"
