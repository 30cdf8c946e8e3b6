"""A network process on its way to a run: begun before torch is loaded, since neither needs the other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from ...peer.base.config import PeerConfig
from ...peer.process.bridge import NetworkDied, NetworkProcess, PendingAnswer
from .border import OpenRun, Pulse, RunOpened, TelemetryNotice

ENTRY = "flockstep.optim.member.participant:main"
NETWORK_LEAVE_SECONDS = 0.9
"""For the process to exit once it has sent its goodbyes; with those, Ctrl-C is over in less than three seconds."""


class Opening:
    """A network process that was told to reach a run, and its answer."""

    def __init__(self, link: str, config: PeerConfig) -> None:
        self.process = NetworkProcess(ENTRY, (TelemetryNotice, Pulse))
        self._answer: PendingAnswer[RunOpened] | None = None
        with suppress(NetworkDied):
            self._answer = self.process.start(OpenRun(link, replace(config, home=config.home.absolute())))

    def wait(self, cancel: Callable[[], bool]) -> RunOpened:
        """Wait until the run is reached. Raises `FlockstepError`, `NetworkDied` and `Cancelled` among them."""
        if self._answer is None:
            raise NetworkDied("the network process has died")
        return self._answer.wait(cancel=cancel)


@contextmanager
def begun(link: str, config: PeerConfig) -> Iterator[Opening]:
    """Yield a network process that reaches a run meanwhile; it ends with the block, whoever has used it."""
    opening = Opening(link, config)
    try:
        yield opening
    finally:
        opening.process.stop(NETWORK_LEAVE_SECONDS)
