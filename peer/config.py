"""PeerConfig: every dial that is mine. What the whole run must agree on stands in its manifest instead."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from .errors import UsageError

DEFAULT_PORT = 4001
"""What IPFS and most libp2p daemons listen on, so that firewalls' guides name it."""


def default_home() -> Path:
    """Where this computer keeps its identity and its runs: `$FLOCKSTEP_HOME`, else `~/.flockstep`."""
    return Path(os.environ.get("FLOCKSTEP_HOME") or Path.home() / ".flockstep")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """The settings of one peer. Raises `UsageError` where one is out of its range."""

    home: Path = field(default_factory=default_home)
    """Folder of the key file, the event log and what is kept of runs; made if it is missing."""

    host: str = "0.0.0.0"
    """The address to listen on: `0.0.0.0` for all, those of IPv6 too; `127.0.0.1` keeps a peer on this computer."""

    port: int = DEFAULT_PORT
    """The TCP port to listen on; the next free one of the following 100 if it is taken; 0 lets the system choose."""

    announce: tuple[str, ...] = ()
    """Multiaddrs to tell others instead of those found, for hosts behind a load balancer or in a container."""

    upnp: bool = True
    """Whether to ask the home's router for a port when strangers cannot reach me without."""

    device: str = "auto"
    """Where to train: `auto` (cuda, else mps, else cpu), or any name that torch knows."""

    allow_model: str = ""
    """`pkg.module:function` that I allow to build the model of a run which names it; nothing else is ever imported."""

    invite: str = ""
    """The invitation that a run asks for, as its owner sent it."""

    shard: bool = False
    """Whether the ranks of a peer that `torchrun` starts share one model (FSDP2) instead of holding a copy each."""

    data: str = ""
    """A data source of my own instead of the manifest's, such as `text:/corpus/*.txt`."""

    tokenizer: str = ""
    """Where the file of the run's tokenizer is, if not here or beside the data."""

    resume: bool = True
    """Whether to go on from the state that the home folder holds; else it is as if nothing were there."""

    state_upload: float = 0.0
    """Bytes/s at which I give states to newcomers; 0: half of the upload that rounds have measured, free before."""

    beat_in_round: float = 1.0
    """Seconds between heartbeats during a round; a peer is lost after three silent beats."""

    beat_outside: float = 5.0
    """Seconds between heartbeats outside of a round."""

    dial_timeout: float = 10.0
    """Seconds for one address to answer a dial, handshake included."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port {self.port} is not between 0 and 65535", remedy="choose another --port")
        if not self.state_upload >= 0:
            raise UsageError(f"state_upload must not be negative, got {self.state_upload}", remedy="0 chooses it for you")
        for name in ("beat_in_round", "beat_outside", "dial_timeout"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be positive, got {getattr(self, name)}")
