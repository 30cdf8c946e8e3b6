"""What stands in the way, and what to do about it: the words of `join` and of `doctor` in one place. Pure.

Theory of operation. Whoever fails says so in a text that begins with the `cause` of one of the troubles below and goes on
with what is particular to it (a port, a peer id). So the remedy of any such text is found by its beginning, wherever it
was carried to, by an error or an event: `remedy_for`.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MAX_CLOCK_OFFSET = 300.0
"""Seconds that a clock may be off: what Kerberos (RFC 4120) tolerates, and most certificates of servers, too."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Which thing is in the way, and what its user can do; each a text without a full stop."""

    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.cause} — {self.remedy}" if self.remedy else self.cause

    def with_details(self, details: str) -> "Trouble":
        """The same, of this very case."""
        return Trouble(f"{self.cause}: {details}", self.remedy)


NO_NAME = Trouble("no such host name", "check the name in the link, or ask for a new link")
NO_RESOLVER = Trouble(
    "no name server answers", "check this computer's network and its DNS settings, or use a link with numbers (/ip4/…)"
)
REFUSED = Trouble("connection refused: nothing listens there", "check that it runs, and its port")
DOWN = Trouble(
    "the bootstrap is down", "start it again if it is yours, else tell whoever gave you the link, or ask for a new one"
)
WRONG_PORT = Trouble("the link has a wrong port", "correct the port in the link, or ask for a new one")
NOT_NOISE = Trouble(
    "something listens there that does not speak libp2p with Noise",
    "the link has a wrong port, or another program has taken the bootstrap's: ask for a new link",
)
WRONG_PEER = Trouble(
    "another peer id answered", "the link is old or mistyped: ask for a new one, do not correct it by yourself"
)
SILENT = Trouble("timed out", "check that it runs, and that no firewall blocks its port")
MUTE = Trouble(
    "connections are taken, and nothing comes over them", "check that what listens there is a peer, and start it again"
)
STUCK = Trouble(
    "the bootstrap hangs", "start it again if it is yours, else tell whoever gave you the link, or ask for a new one"
)
BLOCKED = Trouble(
    "a firewall blocks the port",
    "allow outgoing TCP to this port in the firewall of your computer or network, or use another network",
)
GONE = Trouble(
    "nothing comes back from that host",
    "check that other sites can be reached from here; if so it is down: ask for a new link",
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
    "do not join it: tell the run's owner, and ask for a link with other bootstraps",
)
NO_RELAY = Trouble(
    "no relay has a place for this peer",
    "forward the listen port in your router, or ask for a link with another bootstrap; until then only peers with an "
    "open port meet this one",
)
CLOCK_OFF = Trouble(
    "this computer's clock", "let it set its time from the network; if it is right, tell who runs the bootstrap"
)
MEMORY_SHORT = Trouble(
    "too little memory", "close other programs, take a computer or a device with more, or join a run with a smaller model"
)
LINE_SLOW = Trouble("the line is too slow", "use a faster line, or join a run with a smaller model")
DISK_SHORT = Trouble(
    "too little disk",
    "free some room, or name another folder with --home; without its checkpoints a peer cannot go on after a restart",
)

_OF_THE_ROAD = (
    *(NO_NAME, NO_RESOLVER, REFUSED, DOWN, WRONG_PORT, NOT_NOISE, WRONG_PEER, SILENT, MUTE, STUCK),
    *(BLOCKED, GONE, FORBIDDEN, OFFLINE, NO_ROUTE),
)


def trouble_of(cause: str) -> Trouble:
    """The trouble that a cause of a failed dial tells of, in its own words; without a remedy where it is a new one."""
    found = next((trouble for trouble in _OF_THE_ROAD if cause.startswith(trouble.cause)), None)
    return Trouble(cause, found.remedy if found else "")


def remedy_for(causes: Iterable[str]) -> str:
    """What to do about several failed dials, each remedy once."""
    return "; or ".join(dict.fromkeys(filter(None, (trouble_of(cause).remedy for cause in causes))))


def clock_trouble(offsets: Iterable[float]) -> Trouble | None:
    """What the clocks of bootstraps, each so many seconds ahead of mine, say about mine: their median counts."""
    found = list(offsets)
    offset = statistics.median(found) if found else 0.0
    if abs(offset) <= MAX_CLOCK_OFFSET:
        return None
    way = "behind" if offset > 0 else "ahead of"
    return Trouble(f"{CLOCK_OFF.cause} is {duration(abs(offset))} {way} that of the bootstraps", CLOCK_OFF.remedy)


def relay_trouble(refusals: Mapping[str, str], reason: str) -> Trouble:
    """What it means that every relay that was asked refused, each for its reason; `reason`: why I need one."""
    reasons = "; ".join(dict.fromkeys(refusals.values()))
    return NO_RELAY.with_details(f"{reasons} ({reason})")


def duration(seconds: float) -> str:
    """A time in the unit that people would use."""
    for name, size in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}s"
    return f"{seconds:.0f} seconds" if seconds >= 10 else f"{seconds:.1f} seconds"
