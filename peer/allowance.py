"""How much a server gives to one IP address in a period of time: so many dials, so many bytes. Pure."""

from collections import deque

MAX_REMEMBERED = 4096
"""IP addresses that are counted, some 300 bytes each; the oldest are forgotten."""


class Allowance:
    """At most `most` of anything to one address within `period` seconds."""

    def __init__(self, most: int, period: float) -> None:
        self._most = most
        self._period = period
        self._taken: dict[str, deque[tuple[float, int]]] = {}

    def take(self, ip: str, now: float, amount: int = 1) -> bool:
        """Whether `ip` may have so much at the time `now`; then it has it."""
        taken = self._taken.pop(ip, deque())
        while taken and taken[0][0] <= now - self._period:
            taken.popleft()
        self._taken[ip] = taken
        if len(self._taken) > MAX_REMEMBERED:
            del self._taken[next(iter(self._taken))]
        if sum(each for _, each in taken) + amount > self._most:
            return False
        taken.append((now, amount))
        return True
