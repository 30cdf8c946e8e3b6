"""TensorBoard, wandb (`flockstep[log]`) and trackio: the curves of a peer, from its events.

The points of a curve lie at the number of the inner step or of the round, as `CURVES` says. A logger that fails is closed and
the training goes on: none of them is worth an inner step.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ...dht.run.link import JoinLink
from ...peer.base.disk import user_path
from ...peer.base.errors import LocalError, UsageError
from ...peer.base.install import how_to_install
from ...peer.log.telemetry import Event

REMEDY = "tensorboard:DIR, wandb, wandb:PROJECT, trackio, or trackio:PROJECT"
PROJECT = "flockstep"


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve: the field of an event over another one; of a list its length."""

    name: str
    event: str
    field: str
    over: str


CURVES = (
    Curve("train/loss", "step", "loss", "step"),
    Curve("train/tokens_per_second", "step", "tokens_per_s", "step"),
    Curve("train/run_tokens", "step", "tokens", "step"),
    Curve("network/sent_bytes", "step", "sent", "step"),
    Curve("network/received_bytes", "step", "received", "step"),
    Curve("phase/loss", "phase.end", "loss", "round"),
    Curve("phase/steps", "phase.end", "steps", "round"),
    Curve("round/seconds", "round.done", "seconds", "round"),
    Curve("round/contributors", "round.done", "cut", "round"),
    Curve("round/members", "round.done", "roster", "round"),
)


class Logger(Protocol):
    """Something that draws curves."""

    def add(self, curve: Curve, value: float, at: int) -> None:
        """Add a point."""

    def close(self) -> None:
        """Write what is left."""


class TensorBoard:
    """Event files for TensorBoard. Raises `LocalError` without its package."""

    def __init__(self, folder: Path) -> None:
        try:
            module: Any = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise _missing("tensorboard", error) from error
        self._writer: Any = module.SummaryWriter(str(folder))

    def add(self, curve: Curve, value: float, at: int) -> None:
        """Add a point."""
        self._writer.add_scalar(curve.name, value, at)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class Wandb:
    """A run of wandb, of the same name as ours. Raises `LocalError` without its package, `UsageError` without a login."""

    def __init__(self, project: str, home: Path, run_id: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb", error) from error
        mode = os.environ.get("WANDB_MODE", "online")
        if mode == "online" and not wandb.api.api_key:
            remedy = "run `wandb login` once, or set WANDB_MODE=offline and `wandb sync` later"
            raise UsageError("--log wandb: this computer is not logged in to wandb", remedy=remedy)
        settings = wandb.Settings(silent=True, console="off")
        home.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=project, dir=str(home), name=run_id[:8], config={"run": run_id}, settings=settings
        )
        for axis in sorted({_axis(curve) for curve in CURVES}):
            self._run.define_metric(axis)
        for curve in CURVES:
            self._run.define_metric(curve.name, step_metric=_axis(curve))

    def add(self, curve: Curve, value: float, at: int) -> None:
        """Add a point."""
        self._run.log({curve.name: value, _axis(curve): at})

    def close(self) -> None:
        """Write what is left, and send it where wandb is online."""
        self._run.finish()


class Trackio:
    """A run of trackio, of the same name as ours, which goes on after a restart. Raises `LocalError` without its package."""

    def __init__(self, project: str, run_id: str) -> None:
        try:
            import trackio
        except ImportError as error:
            raise _missing("trackio", error, how_to_install("trackio")) from error
        with contextlib.redirect_stdout(sys.stderr):  # Ours may be read by a program.
            self._run: Any = trackio.init(project=project, name=run_id[:8], config={"run": run_id}, resume="allow")
        self._finish: Callable[[], None] = trackio.finish

    def add(self, curve: Curve, value: float, at: int) -> None:
        """Add a point."""
        self._run.log(metrics={curve.name: value}, step=at)

    def close(self) -> None:
        """Write what is left, and send it where trackio has a Space."""
        with contextlib.redirect_stdout(sys.stderr):
            self._finish()


class Loggers:
    """The loggers of a peer."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = list(loggers)

    def take(self, event: Event) -> str:
        """Add the points of an event; returns why a logger failed, which then gets nothing any more, or ""."""
        failures = []
        for curve in CURVES:
            value, at = event.get(curve.field), event.get(curve.over)
            number = len(value) if isinstance(value, list) else value
            if curve.event == event["event"] and isinstance(number, int | float) and isinstance(at, int):
                failures += [self._try(logger, partial(logger.add, curve, float(number), at)) for logger in [*self._loggers]]
        return "; ".join(filter(None, failures))

    def close(self) -> str:
        """Write what is left; returns why that failed, or ""."""
        return "; ".join(filter(None, [self._try(logger, logger.close) for logger in [*self._loggers]]))

    def _try(self, logger: Logger, act: Callable[[], None]) -> str:
        try:
            act()
        except Exception as error:  # noqa: BLE001  The boundary to another program, which must not end the training.
            self._loggers.remove(logger)
            return f"{type(logger).__name__}: {error}"
        return ""


def open_loggers(names: Sequence[str], home: Path, link: str) -> Loggers:
    """Open the loggers of these names. Raises `UsageError` for one that nobody knows, and what they raise."""
    return Loggers([_logger(name, home, JoinLink.parse(link).run_id) for name in names])


def _logger(name: str, home: Path, run_id: str) -> Logger:
    kind, _, place = name.partition(":")
    if kind == "tensorboard" and place:
        return TensorBoard(user_path(place))
    if kind == "wandb" and (place or name == "wandb"):
        return Wandb(place or PROJECT, home, run_id)
    if kind == "trackio" and (place or name == "trackio"):
        return Trackio(place or PROJECT, run_id)
    raise UsageError(f"--log {name!r} is no logger", remedy=REMEDY)


def _axis(curve: Curve) -> str:
    return "inner_step" if curve.event == "step" else "round"


def _missing(package: str, error: ImportError, remedy: str = how_to_install("log")) -> LocalError:
    return LocalError(f"--log {package} needs a package: {error}", remedy=remedy)
