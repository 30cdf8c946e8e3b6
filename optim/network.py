"""The trainer's side of the network: its process, the vectors that both share, and its revival when it dies.

Training never stops because of the network: while the network process is dead or unreachable every round is void, and a
thread tries to bring up another one, which then takes the run's state like a newcomer.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from ..collectives.codec import CELL, Floats
from ..dht.run.manifest import SignedManifest
from ..peer.config import PeerConfig
from ..peer.errors import FlockstepError
from ..peer.process.bridge import Cancelled, NetworkDied, NetworkProcess, Payload
from ..peer.process.shared import SharedVectors
from ..peer.telemetry import Telemetry
from .participant import VECTORS

ENTRY = "flockstep.optim.participant:main"
RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Between attempts to revive the network; the last one goes on."""
GOODBYE_SECONDS = 2.0
LEAVE_SECONDS = 0.9
"""For the process's end, once it has said goodbye. Together: Ctrl-C is over in less than three seconds."""


@dataclass(slots=True)
class Pulse:
    """What the network last said of the swarm."""

    round: int = 0
    """The round that it thinks comes next: a pulse from before my last round says another one than I do."""
    ready: tuple[str, ...] = ()
    active: int = 1
    hindrance: str = ""
    """Why there is no use in trying a round now; empty where there is."""
    behind: bool = False
    lagging: int = 0
    kept: int = -1
    """The round of the newest checkpoint on my disk."""
    sent: int = 0
    received: int = 0
    rungs: dict[str, str] = field(default_factory=dict)
    share: Payload | None = None
    """What the members with my data train of it, a `shards.View`."""


class Network:
    """One peer's network process and what is known of it. Use from one thread."""

    def __init__(self, link: str, config: PeerConfig, telemetry: Telemetry, stopped: Callable[[], bool]) -> None:
        self.config = config
        self.pulse = Pulse()
        self.round = 0
        """Rounds that my state has behind it."""
        self.root = ""
        self.tokens = 0
        self._certificate = ""
        self._link = link
        self._telemetry = telemetry
        self._stopped = stopped
        self._vectors: SharedVectors | None = None
        self._membership: Payload | None = None
        self._part: Payload = {}
        self._revived: NetworkProcess | None = None
        self._reviver: threading.Thread | None = None
        self._process = NetworkProcess(ENTRY)

    def open(self) -> SignedManifest:
        """Reach the run; its manifest. Raises `FlockstepError`."""
        try:
            answer = self._open(self._process)
        finally:
            self._drain()
        self.peer_id: str = answer["peer_id"]
        return SignedManifest.decode(bytes.fromhex(answer["manifest"]))

    def attach(self, num_cells: int, tensors: Sequence[Payload]) -> None:
        """Share the vectors of a model of that many cells; `tensors` tells what is where in them (see `TensorAt`)."""
        self._tensors = list(tensors)
        self._vectors = SharedVectors.create(VECTORS, num_cells * CELL)
        self._share(self._process)

    def vector(self, name: str) -> Floats:
        """One of the shared vectors: `theta`, `momentum`, `exchange`, `residual`."""
        assert self._vectors is not None
        return self._vectors[name]

    def join(self, **who: str) -> bool:
        """Become a member and take the run's state; whether (θ, m) changed.

        `who`: device, version, and in hex the fingerprints `layout` and `frozen` of the model.
        """
        self._membership = dict(who)
        return self._enter()

    def sync(self) -> bool:
        """Take the run's newest state, if mine is not it; whether (θ, m) changed."""
        try:
            return bool(self._standing(self._call("sync"))["changed"])
        except NetworkDied as error:
            self._revive(str(error))
            return False

    def average(self, **contribution: int | float) -> Payload:
        """One attempt of a round with what is in `exchange`; a dead network process makes it void."""
        try:
            if self._reviver is not None:
                return {"kind": "void", "reason": "the network process is being revived"}
            return self._standing(self._call("average", dict(contribution)))
        except NetworkDied as error:
            self._revive(str(error))
            return {"kind": "void", "reason": str(error)}

    def applied(self) -> bool:
        """I have made the outer step; whether it led elsewhere than what was certified."""
        try:
            return bool(self._standing(self._call("applied"))["drifted"])
        except NetworkDied as error:
            self._revive(str(error))
            return False

    def progress(self, **figures: int | float | None) -> None:
        """What others may know of my training."""
        self._process.post("progress", figures)

    def share_first(self, part: Payload) -> Payload | None:
        """Tell which part of the data I train (see `Neighbours.tell`); a `shards.View`, None if the network is away."""
        try:
            return None if self._reviver is not None else self._call("share", self._next_part(part, urgent=True))
        except NetworkDied as error:
            self._revive(str(error))
        except Cancelled:
            pass  # Whoever leaves needs no view.
        return None

    def share(self, part: Payload, *, urgent: bool) -> None:
        """Tell which part of the data I train now; what is not urgent goes with other news."""
        self._process.post("share", self._next_part(part, urgent=urgent))

    def _next_part(self, part: Payload, *, urgent: bool) -> Payload:
        self._part = {**part, "urgent": urgent, "number": self._part.get("number", 0) + 1}
        return self._part

    def poll(self) -> bool:
        """Take in what the network has posted; whether a revived one waits for `reenter`."""
        self._drain()
        if self._process.died and self._reviver is None:
            self._revive("its process has ended")
        return self._revived is not None

    def reenter(self) -> bool:
        """Go on with the revived network process as a newcomer that holds my vectors; whether (θ, m) changed."""
        assert self._revived is not None
        assert self._reviver is not None
        assert self._vectors is not None
        self._reviver.join()
        self._process, self._revived, self._reviver = self._revived, None, None
        old = self._vectors
        self._vectors = SharedVectors.create(VECTORS, old.size)
        for name in VECTORS:
            self._vectors[name][:] = old[name]
        self._telemetry.emit("network.restarted", step="network process")
        try:
            self._share(self._process)
            return self._enter()
        except NetworkDied as error:
            self._revive(str(error))
            return False

    def close(self, reason: str) -> None:
        """Say goodbye and end the process; in less than three seconds."""
        if self._reviver is None and not self._process.died:
            try:
                self._process.call("leave", {"reason": reason}, timeout=GOODBYE_SECONDS)
            except FlockstepError as error:
                self._telemetry.emit("peer.leave_failed", step="say goodbye", reason=str(error))
        self._process.stop(LEAVE_SECONDS)
        self._drain()
        if self._revived is not None:
            self._revived.stop(LEAVE_SECONDS)
        if self._vectors is not None:
            self._vectors.unlink()

    def _open(self, process: NetworkProcess) -> Payload:
        settings = asdict(self.config)
        settings["home"] = str(self.config.home.absolute())
        return process.call("open", {"link": self._link, "config": settings}, cancel=self._stopped)

    def _share(self, process: NetworkProcess) -> None:
        assert self._vectors is not None
        about = {"num_cells": self._vectors.size // CELL, "tensors": self._tensors}
        process.call("attach", {"path": str(self._vectors.path), **about})
        self._vectors.unlink()

    def _enter(self) -> bool:
        place = {
            "round": self.round,
            "root": self.root or "00" * 32,
            "tokens": self.tokens,
            "certificate": self._certificate,
        }
        self._call("join", {**place, **(self._membership or {})})
        if self._part:  # A revived process knows nothing of it.
            self._process.post("share", {**self._part, "urgent": True})
        return self.sync()

    def _call(self, name: str, payload: Payload | None = None) -> Payload:
        answer = self._process.call(name, payload, cancel=self._waiting)
        self._drain()
        return answer

    def _waiting(self) -> bool:
        """While a command takes its time: pass on what is said meanwhile; whether to give it up."""
        self._drain()
        return self._stopped()

    def _standing(self, answer: Payload) -> Payload:
        self.round, self.root, self.tokens = answer["at_round"], answer["at_root"], answer["at_tokens"]
        self._certificate = answer["at_certificate"]
        return answer

    def _drain(self) -> None:
        events = self._process.events
        while not events.empty():
            name, payload = events.get()
            if name == "event":
                self._telemetry.take(payload["event"])
            elif name == "pulse":
                self.pulse = Pulse(**payload)

    def _revive(self, reason: str) -> None:
        if self._reviver is None:
            self._telemetry.emit("network.died", step="network process", reason=reason)
            self._process.stop(LEAVE_SECONDS)
            self._reviver = threading.Thread(target=self._bring_up, name="network revival", daemon=True)
            self._reviver.start()

    def _bring_up(self) -> None:
        turn = 0
        while not self._stopped():
            process = NetworkProcess(ENTRY)
            try:
                self._open(process)
            except FlockstepError as error:
                process.stop(LEAVE_SECONDS)
                self._telemetry.emit("network.retry", step="revive", reason=str(error))
                time.sleep(RETRY_SECONDS[min(turn, len(RETRY_SECONDS) - 1)])
                turn += 1
                continue
            self._revived = process
            return
