"""The hours of the day in which a volunteer's computer may train, such as 22-7. Pure."""

import re
from dataclasses import dataclass
from typing import Self

from ...peer.base.errors import UsageError

_WINDOW = re.compile(r"(\d{1,2})(?::(\d{2}))?-(\d{1,2})(?::(\d{2}))?")
MINUTES_OF_A_DAY = 24 * 60


@dataclass(frozen=True, slots=True)
class Hours:
    """A part of each day in local time, from `begin` up to `end`, in minutes after midnight, which it may cross."""

    begin: int
    end: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `22-7` or `22:30-6:45`. Raises `UsageError`."""
        remedy = "write them as 22-7 or 22:30-6:45, local time"
        match = _WINDOW.fullmatch(text.replace(" ", ""))
        if match is None:
            raise UsageError(f"--hours {text!r} are no hours of a day", remedy=remedy)
        hours = [int(match[1]), int(match[3])]
        minutes = [int(match[2] or 0), int(match[4] or 0)]
        begin, end = (60 * hour + minute for hour, minute in zip(hours, minutes, strict=True))
        if max(minutes) > 59 or max(begin, end) > MINUTES_OF_A_DAY or begin == MINUTES_OF_A_DAY:
            raise UsageError(f"--hours {text!r}: a day has 24 hours of 60 minutes", remedy=remedy)
        if begin == end % MINUTES_OF_A_DAY:
            raise UsageError(f"--hours {text!r} begin when they end", remedy="leave --hours out to train at any time")
        return cls(begin, end % MINUTES_OF_A_DAY)

    def hold(self, minute: int) -> bool:
        """Return True for a minute of the day within these hours."""
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end

    def __str__(self) -> str:
        ends = (divmod(minute, 60) for minute in (self.begin, self.end))
        return "-".join(f"{hour}:{minute:02}" if minute else f"{hour}" for hour, minute in ends)
