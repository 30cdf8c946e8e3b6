"""`config.toml` in the home folder: what a volunteer would else write behind every command; an option overrides it.

    name = "ada"

    [limits]
    max_up = 10.0
    max_down = 50.0
    hours = "22-7"
    when_idle = true
    max_temp = 75.0
    max_watts = 150.0
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from ...dht.run.settings import faults, from_table, parse_toml, read_toml
from ...peer.base.config import MAX_NAME_BYTES
from ...peer.base.disk import disk_errors
from ...peer.base.errors import UsageError
from ...peer.wire.schema import Between, Size
from .policy import MAX_CELSIUS, MAX_WATTS

MAX_MBIT = 1e6


@dataclass(frozen=True, slots=True)
class Limits:
    """What a volunteer gives at most."""

    max_up: Annotated[float, Between(0.0, MAX_MBIT)] = 0.0
    """Mbit/s; 0: no limit."""
    max_down: Annotated[float, Between(0.0, MAX_MBIT)] = 0.0
    hours: Annotated[str, Size(16)] = ""
    when_idle: Annotated[bool, None] = False
    max_temp: Annotated[float, Between(0.0, MAX_CELSIUS)] = 0.0
    """Degrees Celsius of the GPU; 0: no limit."""
    max_watts: Annotated[float, Between(0.0, MAX_WATTS)] = 0.0


@dataclass(frozen=True, slots=True)
class Preferences:
    """What the file says."""

    name: Annotated[str, Size(MAX_NAME_BYTES)] = ""
    """What others see this peer as in the list of contributors."""
    limits: Limits = field(default_factory=Limits)

    def override(self, **given: float | str | bool | None) -> Limits:
        """Return the limits, those in place of them that are given and not None."""
        return replace(self.limits, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def load_preferences(home: Path) -> Preferences:
    """Read `config.toml` of a home folder; without one nothing is preferred. Raises `UsageError`, or `LocalError`."""
    path = home / "config.toml"
    with disk_errors(f"read {path}"):
        if not path.exists():
            return Preferences()
    text = read_toml(path, "docs/volunteer.md shows one")
    try:
        table = parse_toml(text)
    except UsageError as error:
        raise UsageError(f"{path} is not TOML: {error}", remedy="docs/volunteer.md shows one") from error
    try:
        preferred = from_table(Preferences, table)
        if (fault := next(faults(preferred), None)) is not None:
            raise UsageError(fault)
    except UsageError as error:
        raise UsageError(f"{path}: {error}", remedy="docs/volunteer.md has every key") from error
    return preferred
