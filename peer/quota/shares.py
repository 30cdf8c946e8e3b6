"""Fair shares of a limit among addresses and networks: whoever takes most loses first. Pure.

Theory of operation. A limit that strangers share is used up by one of them, and a limit of each address by whoever has many
addresses: a /48 of IPv6 has 65,536 of ours. So there are three, of an address, of its network, and of all networks:

- an address never exceeds its own;
- while that of a network is used up, an address that has less than an equal part of it is still served, and the others are
  not; while that of all is used up, so is a network. Max-min fairness, as of fair queueing (Demers, Keshav, Shenker 1989).

`Shares` limits rates. It is exceeded by newcomers' equal parts alone: by n of them at most 1 + ½ + … + 1/n times.
What is held at a time, such as open streams, has `places`.
"""

from collections import OrderedDict

from .origins import MAX_REMEMBERED, ROUNDING, Origin, Rates

NETWORK_SHARE = 4
"""The rate of a network, in those of an address. Its burst is that of one address: both are a peak of work."""
ALL_SHARE = 8
"""The rate of all networks together, in those of an address; four times as much in a burst as an address."""
ALL_BURST_SHARE = 4


class FairBucket:
    """A leaky bucket of several: it holds `burst` and leaks `rate` a second. While it is full, small users are served."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level, self._at = 0.0, 0.0
        self._of: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """What each has in it, as of a time; the one last used stands last. After a burst's time without use it is dropped:
        by then all has leaked that it had, if it was alone."""

    def __len__(self) -> int:
        return len(self._of)

    def spend(self, name: str, now: float, amount: float = 1.0) -> float:
        """Add so much; returns for how many seconds `name` has to wait: 0 while there is room, or it has its part or less."""
        level, at = self._of.pop(name, (0.0, now))
        self._forget(now)
        num = len(self._of) + 1
        level = max(0.0, level - (now - at) * self._rate / num) + amount
        self._of[name] = level, now
        self._level = max(0.0, self._level - (now - self._at) * self._rate) + amount
        self._at = now
        if self._level <= self._burst:
            return 0.0
        return max(0.0, level - self._burst / num) * num / self._rate

    def take(self, name: str, now: float, amount: float = 1.0) -> bool:
        """Add so much and return True, or return False if that is beyond its part."""
        if self.spend(name, now, amount) <= ROUNDING:
            return True
        level, at = self._of[name]
        self._of[name] = level - amount, at
        self._level -= amount
        return False

    def _forget(self, now: float) -> None:
        while self._of:
            _, at = next(iter(self._of.values()))
            if now - at <= self._burst / self._rate and len(self._of) < MAX_REMEMBERED:
                break
            self._of.popitem(last=False)


class Shares:
    """Rate limits of an address (`rate` a second, `burst_seconds` of it at once), of its network and of all networks."""

    def __init__(
        self, rate: float, burst_seconds: float, *, network_share: float = NETWORK_SHARE, all_share: float = ALL_SHARE
    ) -> None:
        self._network_rate = network_share * rate
        self._burst = rate * burst_seconds
        self._addresses = Rates(rate, burst_seconds)
        self._networks: OrderedDict[str, FairBucket] = OrderedDict()
        self._all = FairBucket(all_share * rate, ALL_BURST_SHARE * self._burst)

    def exceeded(self, origin: Origin, now: float) -> str:
        """Count one, and return ""; or return whose limit is used up. Nothing is counted of exempt origins."""
        if origin.exempt:
            return ""
        if not self._addresses.take(origin, now):
            return "one address"
        if not self._network(origin).take(origin.address, now):
            return "one network"
        return "" if self._all.take(origin.network, now) else "all networks"

    def spend(self, origin: Origin, now: float, amount: float) -> float:
        """Count so much, whatever was counted before; return the seconds until it is within the limits."""
        if origin.exempt:
            return 0.0
        return max(
            self._addresses.spend(origin, now, amount),
            self._network(origin).spend(origin.address, now, amount),
            self._all.spend(origin.network, now, amount),
        )

    def _network(self, origin: Origin) -> FairBucket:
        bucket = self._networks.pop(origin.network, None) or FairBucket(self._network_rate, self._burst)
        self._networks[origin.network] = bucket
        if len(self._networks) > MAX_REMEMBERED:
            self._networks.popitem(last=False)
        return bucket
