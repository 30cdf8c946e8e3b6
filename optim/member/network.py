"""Runs the network process for the trainer: sends its commands, keeps what it reports, restarts it when it dies.

Training never stops because of the network: while the network process is dead or unreachable every round is void, and a
thread starts another one, which then takes the run's state like a newcomer. Once this peer is a member, a command that
the network process cannot carry out raises nothing here either: what others send can be the cause.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ...collectives.allreduce.actions import OutcomeKind
from ...collectives.codec import CELL
from ...collectives.state.checkpoint_file import TensorAt
from ...peer.config import PeerConfig
from ...peer.errors import FlockstepError
from ...peer.process.bridge import Cancelled, Command, NetworkDied, NetworkProcess, PendingAnswer
from ...peer.process.shared import SharedVectors
from ...peer.telemetry import Telemetry
from ...peer.transport import PeerId
from ..data.leases import Ranking, Share, View
from .border import (
    BLANK,
    NO_PULSE,
    AttachVectors,
    AverageDelta,
    FetchFile,
    JoinRun,
    LeaveRun,
    OpenRun,
    PublishEvaluation,
    PublishLeases,
    Pulse,
    ReportProgress,
    RoundEnded,
    RunOpened,
    SyncState,
    TelemetryNotice,
    TrainingVectors,
)

_A = TypeVar("_A")

ENTRY = "flockstep.optim.member.participant:main"
RESTART_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Backoff between attempts to restart the network process; the last one repeats."""
GOODBYE_SECONDS = 2.0
NETWORK_LEAVE_SECONDS = 0.9
"""For the process to exit once it has sent its goodbyes. Together: Ctrl-C is over in less than three seconds."""


class Network:
    """One peer's network process and what it has reported. Use from one thread."""

    def __init__(self, link: str, config: PeerConfig, telemetry: Telemetry, stopped: Callable[[], bool]) -> None:
        self.config = config
        self.pulse = NO_PULSE
        self.position = BLANK
        """Where my state stands in the run; kept here for the next network process, should this one die."""
        self._link = link
        self._telemetry = telemetry
        self._stopped = stopped
        self._shared: SharedVectors | None = None
        self._tensors: tuple[TensorAt, ...] = ()
        self._join: JoinRun | None = None
        self._joined = False
        self._leases: PublishLeases | None = None
        self._restarted: NetworkProcess | None = None
        self._restarter: threading.Thread | None = None
        self._round: PendingAnswer[RoundEnded] | None = None
        self._why_void = ""
        self.round_ended_at = time.monotonic()
        """When the last round that I began ended, by the monotonic clock."""
        self.is_torn = False
        """Whether the network process died in a round, so that θ may have made a part of its outer step."""
        self.ready_at: dict[PeerId, float] = {}
        """When the members that are ready for the pulse's round became so, by the monotonic clock."""
        self._process = _spawn()

    def open(self) -> RunOpened:
        """Reach the run. Raises `FlockstepError`."""
        try:
            opened = self._open(self._process)
        finally:
            self._drain()
        self.peer_id = opened.peer_id
        return opened

    def attach(self, shared: SharedVectors, tensors: tuple[TensorAt, ...]) -> None:
        """Share these vectors, in which these tensors lie, with the process."""
        self._tensors, self._shared = tensors, shared
        self._attach(shared)

    @property
    def vectors(self) -> TrainingVectors:
        """The shared vectors; on some systems other ones after `reenter`."""
        assert self._shared is not None
        return TrainingVectors.of(self._shared)

    def join(self, *, device: str, version: str, layout: bytes, frozen: bytes) -> bool:
        """Become a member and take the run's state. Returns whether (θ, m) changed.

        `layout` and `frozen` are the fingerprints of what is trained and of what is not.
        """
        self._join = JoinRun(self.position, device, version, layout, frozen)
        changed = self._enter(self._join)
        self._joined = True
        return changed

    def sync(self) -> bool:
        """Take the run's newest state, unless mine is it. Returns whether (θ, m) changed."""
        try:
            synced = self._call(SyncState())
        except FlockstepError as error:
            self._fail("take the run's state", error)
            return False
        self.position = synced.position
        return synced.changed

    def begin_round(self, command: AverageDelta) -> None:
        """Begin an attempt of a round with what `delta` holds; `end_round` tells how it ended."""
        self._round, self._why_void = None, "the network process is being restarted"
        if self._restarter is not None:
            return
        try:
            self._round = self._process.start(command)
        except NetworkDied as error:
            self._why_void = str(error)
            self._fail("average", error)

    @property
    def round_is_over(self) -> bool:
        """Whether `end_round` would not wait."""
        self._drain()
        return self._round is None or self._round.is_here

    def end_round(self) -> RoundEnded:
        """Wait for the end of the round that I began; a dead network process makes it void."""
        pending, self._round = self._round, None
        if pending is None:
            return RoundEnded(self.position, OutcomeKind.VOID, self._why_void)
        try:
            ended = pending.wait(cancel=self._waiting)
        except FlockstepError as error:
            self.is_torn = isinstance(error, NetworkDied)
            self._fail("average", error)
            return RoundEnded(self.position, OutcomeKind.VOID, str(error))
        self._drain()
        self.round_ended_at = pending.arrived
        self.position = ended.position
        return ended

    def report_progress(self, progress: ReportProgress) -> None:
        """Publish what I have trained so far."""
        self._process.post(progress)

    def publish_evaluation(self, evaluation: PublishEvaluation) -> None:
        """Publish what I have measured of the shared model."""
        self._process.post(evaluation)

    def publish_first(self, share: Share, ranking: Ranking) -> View | None:
        """Publish which units of the data I lease. Returns what is known of the others', None without the network."""
        try:
            return None if self._restarter is not None else self._call(self._next_leases(share, ranking, urgent=True))
        except Cancelled:
            return None  # A peer that leaves needs no view.
        except FlockstepError as error:
            self._fail("publish leases", error)
            return None

    def publish_leases(self, share: Share, ranking: Ranking, *, urgent: bool) -> None:
        """Publish which units of the data I lease now; unless `urgent`, with the next news."""
        self._process.post(self._next_leases(share, ranking, urgent=urgent))

    def _next_leases(self, share: Share, ranking: Ranking, *, urgent: bool) -> PublishLeases:
        number = 1 if self._leases is None else self._leases.number + 1
        self._leases = PublishLeases(share, ranking, number, urgent)
        return self._leases

    def fetch_file(self, hash_: bytes, size: int, path: Path) -> None:
        """Write a file of the run's data to a path. From any thread. Raises `FlockstepError` if nobody here has it."""
        self._process.call(FetchFile(hash_, size, path), cancel=self._stopped)

    def await_file(self) -> None:
        """Take in what has happened meanwhile, while the trainer waits for a file."""
        self._drain()

    def poll(self) -> bool:
        """Process the notices that have arrived. Returns whether a restarted network process waits for `reenter`."""
        self._drain()
        if self._process.died and self._restarter is None:
            self._restart("its process has ended")
        return self._restarted is not None

    def reenter(self) -> bool:
        """Continue with the restarted network process as a newcomer with my vectors. Returns whether (θ, m) changed."""
        assert self._restarted is not None
        assert self._restarter is not None
        assert self._shared is not None
        assert self._join is not None
        self._restarter.join()
        self._process, self._restarted, self._restarter = self._restarted, None, None
        if self._shared.path is None:  # This system cannot name a file that has no name any more.
            self._shared = self._shared.copy()
        self._telemetry.emit("network.restarted", step="network process")
        try:
            self._attach(self._shared)
            return self._enter(self._join)
        except Cancelled:
            raise
        except FlockstepError as error:  # Half entered, the new process is of no use either.
            self._restart(str(error))
            return False

    def close(self, reason: str) -> None:
        """Send a goodbye and end the process; in less than three seconds."""
        if self._restarter is None and not self._process.died:
            try:
                self._process.call(LeaveRun(reason), timeout=GOODBYE_SECONDS)
            except FlockstepError as error:
                self._telemetry.emit("peer.leave_failed", step="send goodbye", reason=str(error))
        self._process.stop(NETWORK_LEAVE_SECONDS)
        self._drain()
        if self._restarted is not None:
            self._restarted.stop(NETWORK_LEAVE_SECONDS)
        if self._shared is not None:
            self._shared.unlink()

    def _open(self, process: NetworkProcess) -> RunOpened:
        config = replace(self.config, home=self.config.home.absolute())
        return process.call(OpenRun(self._link, config), cancel=self._stopped)

    def _attach(self, shared: SharedVectors) -> None:
        assert shared.path is not None
        self._process.call(AttachVectors(shared.path, shared["theta"].size // CELL, self._tensors))
        shared.unlink()

    def _enter(self, join: JoinRun) -> bool:
        self._call(replace(join, position=self.position, again=self._joined))
        if self._leases is not None:  # A restarted process does not know them.
            self._process.post(replace(self._leases, urgent=True))
        return self.sync()

    def _call(self, command: Command[_A]) -> _A:
        answer = self._process.call(command, cancel=self._waiting)
        self._drain()
        return answer

    def _waiting(self) -> bool:
        """Process notices while a command runs. Returns whether to give it up."""
        self._drain()
        return self._stopped()

    def _drain(self) -> None:
        notices = self._process.notices
        while not notices.empty():
            arrived, notice = notices.get()
            match notice:
                case TelemetryNotice(event):
                    self._telemetry.take(event)
                case Pulse() as pulse:
                    if pulse.round != self.pulse.round:
                        self.ready_at.clear()
                    self.ready_at |= {peer: arrived for peer in pulse.ready if peer not in self.ready_at}
                    self.pulse = pulse

    def _fail(self, step: str, error: FlockstepError) -> None:
        """Emit why a command failed; a dead process is restarted. Raises what a newcomer or one who leaves must know."""
        if isinstance(error, NetworkDied):
            self._restart(str(error))
        elif isinstance(error, Cancelled) or not self._joined:
            raise error
        else:
            self._telemetry.emit("network.failed", step=step, reason=str(error))

    def _restart(self, reason: str) -> None:
        if self._restarter is None:
            self._telemetry.emit("network.died", step="network process", reason=reason)
            self._process.stop(NETWORK_LEAVE_SECONDS)
            self._restarter = threading.Thread(target=self._bring_up, name="network restart", daemon=True)
            self._restarter.start()

    def _bring_up(self) -> None:
        turn = 0
        while not self._stopped():
            process = _spawn()
            try:
                self._open(process)
            except FlockstepError as error:
                process.stop(NETWORK_LEAVE_SECONDS)
                self._telemetry.emit("network.retry", step="restart", reason=str(error))
                time.sleep(RESTART_SECONDS[min(turn, len(RESTART_SECONDS) - 1)])
                turn += 1
                continue
            self._restarted = process
            return


def _spawn() -> NetworkProcess:
    return NetworkProcess(ENTRY, (TelemetryNotice, Pulse))
