"""PeerConfig: the settings of one peer. Settings that the whole run shares are in its manifest. Pure."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from .errors import UsageError

DEFAULT_PORT = 4001
"""The port of IPFS and most libp2p daemons, which firewall guides name."""
LEAST_MBIT = 0.5
"""Mbit/s: below that a heartbeat behind a piece of a vector comes too late, and a round takes hours."""


MAX_NAME_BYTES = 64
"""The limit of the name that a peer gives itself, in UTF-8: it is in every member's record of it."""

PRECISIONS = ("auto", "bf16", "fp16", "fp32")
"""The settings of `PeerConfig.precision`."""


def default_home() -> Path:
    """Return the folder of this computer's identity and runs: `$FLOCKSTEP_HOME`, else `~/.flockstep`."""
    return Path(os.environ.get("FLOCKSTEP_HOME") or user_home() / ".flockstep")


def user_home() -> Path:
    """Return the home folder of this user. Raises `UsageError` if the system names none, as for an id without an entry."""
    try:
        return Path.home()
    except RuntimeError as error:
        raise UsageError(
            "this user has no home folder: no $HOME, and no entry in /etc/passwd", remedy="name one with --home, or set $HOME"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """The settings of one peer. Raises `UsageError` if one is out of its range."""

    home: Path = field(default_factory=default_home)
    """The folder of the key file, the event log and the runs; created if it is missing."""

    host: str = "0.0.0.0"
    """The address to listen on: `0.0.0.0` for all, including IPv6; `127.0.0.1` for this computer only."""

    port: int = DEFAULT_PORT
    """The TCP port to listen on; the next free one of the following 100 if it is taken; 0 lets the system choose."""

    announce: tuple[str, ...] = ()
    """Multiaddrs to announce instead of the detected ones, for hosts behind a load balancer or in a container."""

    upnp: bool = True
    """Ask the home's router for a port (UPnP) if strangers cannot reach me otherwise."""

    device: str = "auto"
    """The device to train on: `auto` (cuda, else mps, else cpu), or any name that torch knows."""

    allow_model: str = ""
    """A `pkg.module:function` that I allow a run to build its model with, since nothing else is ever imported; or a model
    `hf:…` that is a folder here, or for which my token of the hub may be used."""

    invite: str = ""
    """The invitation to a run, as its owner sent it."""

    name: str = ""
    """How this peer is called where a run's contributors are listed; empty: by its id alone."""

    threads: int = 0
    """The processor threads of the training; 0: as many as train fastest, by measurement."""

    shard: bool = False
    """Shard one model over the ranks that `torchrun` starts (FSDP2), instead of one copy per rank."""

    micro_batch: int = 0
    """Samples that pass through the model at once; 0: found by measuring. Halved wherever memory runs out."""

    checkpoint_activations: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, a third more work."""

    precision: str = "auto"
    """The precision of the passes: `bf16` or `fp16` (autocast), `fp32`, or `auto`, what the device computes fastest."""

    load_in_4bit: bool = False
    """Hold the frozen base of a LoRA run in 4 bits a weight (bitsandbytes)."""

    optimizer_8bit: bool = False
    """Hold the states of AdamW in 8 bits (bitsandbytes)."""

    compile_model: bool = False
    """Compile the model with torch.compile; where that fails, it trains as it is."""

    data: str = ""
    """A folder of packed data in place of the manifest's."""

    data_cache: float = 4.0
    """The disk space in GB (10^9 bytes) for shards of packed data that are read from elsewhere."""

    resume: bool = True
    """Resume from the state in the home folder; else that state is ignored."""

    state_upload: float = 0.0
    """The rate limit of state uploads to newcomers, in bytes/s; 0: half of the measured upload, unlimited before."""

    max_up: float = 0.0
    """The rate limit of everything that this peer sends, in Mbit/s; 0: none."""

    max_down: float = 0.0
    """The rate limit of everything that this peer receives, in Mbit/s; 0: none."""

    beat_in_round: float = 1.0
    """Seconds between heartbeats during a round; a peer that misses three is lost."""

    beat_outside: float = 5.0
    """Seconds between heartbeats outside of a round."""

    dial_timeout: float = 10.0
    """The timeout of one dial in seconds, including the handshake."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port {self.port} is not between 0 and 65535", remedy="choose another --port")
        if self.micro_batch < 0:
            raise UsageError(f"micro_batch must not be negative, got {self.micro_batch}", remedy="0 finds the best one")
        if self.precision not in PRECISIONS:
            raise UsageError(f"there is no precision {self.precision!r}", remedy=f"choose one of {', '.join(PRECISIONS)}")
        if self.shard and self.optimizer_8bit:
            raise UsageError("--optimizer-8bit does not work on a sharded model", remedy="leave out --shard, or it")
        if not self.state_upload >= 0:
            raise UsageError(f"state_upload must not be negative, got {self.state_upload}", remedy="0 chooses it for you")
        if not 0 <= self.data_cache < 1e9:
            raise UsageError(f"data_cache must be 0 or more GB, got {self.data_cache}", remedy="4 is the default")
        if not self.name.isprintable() or self.name != self.name.strip():
            remedy = "write it without control characters, and without spaces around it"
            raise UsageError(f"{self.name!r} cannot be a name", remedy=remedy)
        if len(self.name.encode()) > MAX_NAME_BYTES:
            remedy = f"choose one of {MAX_NAME_BYTES} bytes at most"
            raise UsageError(f"the name {self.name[:20]!r}… is too long", remedy=remedy)
        for name in ("max_up", "max_down"):
            value = getattr(self, name)
            if not (value == 0 or LEAST_MBIT <= value < float("inf")):
                option, remedy = "--" + name.replace("_", "-"), f"at least {LEAST_MBIT} Mbit/s; 0 sets no limit"
                raise UsageError(f"{option} {value:g} is too slow to take part", remedy=remedy)
        for name in ("beat_in_round", "beat_outside", "dial_timeout"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be positive, got {getattr(self, name)}")


def bytes_per_second(mbit: float) -> float:
    """Return a rate in Mbit/s as bytes/s."""
    return mbit * 1e6 / 8
