"""Reachability: direct, punched or relayed, decided from what bootstraps observe. Pure.

Theory of operation. A bootstrap reports the address that it observes a peer's connection from and, on request, whether it
could dial that address back, with the port that the peer listens on (`dialback`). Connections to bootstraps leave from the
listen port, so the observed address is the NAT's mapping of that port.

    the dialback succeeded              direct   strangers dial that address
    the same address for all of them    punched  a simultaneous dial gets through: endpoint-independent mapping
                                                 (RFC 4787, section 4.1)
    another one for each of them        relayed  a "symmetric" NAT: the next mapping is not known

A bootstrap may lie. What it says counts once more than half of those that answer say the same: else one of them could have a
peer give up its relays, and send everybody to an address of its choice. Where some are reached over IPv4 and others over
IPv6, these are more than half of one version, and no less than half of all, so that a minority of liars never is enough.
While a dialback is pending that could still tip the balance, nothing is decided.

A private address says nothing about the internet, and no bootstrap dials one back. If it is one of the peer's own in the eyes
of most bootstraps the run is local (`lan`), and its relays stay, since a firewall may lie between.

Every peer has IPv4, perhaps behind a NAT, but not every one IPv6. So sightings under IPv4 tell symmetric NATs from others,
and a peer reached by IPv6 alone keeps its relays.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..address import is_ipv6, rung_of
from ..base.transport import Address, PeerId, Reachability, Rung


@dataclass(frozen=True, slots=True)
class Sighting:
    """One bootstrap's observation of me."""

    address: Address
    """The observed source of my connection."""

    from_listen_port: bool
    """True if the connection left from my listen port; else the port in `address` cannot be dialled."""

    reached: Address = ""
    """The address of a successful dialback; empty if there was none."""

    cause: str = ""
    """Why the dialback failed; empty before it was tried."""

    is_own: bool = False
    """True if the observed IP address is one of the peer's own interfaces, so that no router translates it."""


def decide(sightings: Mapping[PeerId, Sighting], num_awaited: int = 0) -> Reachability:
    """Decide a peer's reachability from the current sightings; `num_awaited` bootstraps have yet to report one."""
    seen = [sightings[observer] for observer in sorted(sightings)]
    if not seen:
        return Reachability(None, reason="no bootstrap has reported an observed address")
    deciding = _unless_few(seen, lambda one: rung_of(one.address) is Rung.DIRECT)
    deciding = _unless_few(deciding, lambda one: not is_ipv6(one.address))
    votes = Counter(_statement(sighting) for sighting in seen if sighting.reached)
    agreed = [one for one in seen if one.reached and _is_most(votes[_statement(one)], one, seen, num_awaited)]
    confirmed = _unique(sighting.reached for sighting in sorted(agreed, key=lambda one: is_ipv6(one.address)))
    if confirmed and is_ipv6(confirmed[0]) == is_ipv6(deciding[0].address):
        how_many = f"{votes[_statement(agreed[0])]} of {len(seen) + num_awaited} bootstraps"
        is_direct = rung_of(confirmed[0]) is Rung.DIRECT
        how = "reached this peer when they dialled back" if is_direct else "see this peer at its own address"
        return Reachability(rung_of(confirmed[0]), confirmed, confirmed, f"{how_many} {how}")
    mapped = [sighting.address for sighting in deciding if sighting.from_listen_port]
    kept = tuple(address for address, count in Counter(mapped).items() if 2 * count > len(mapped))
    aims = tuple(address for address in kept if address in places_of_most(seen))
    num_pending = num_awaited + sum(not (sighting.reached or sighting.cause) for sighting in deciding)
    most = max((votes[_statement(sighting)] for sighting in deciding if sighting.reached), default=0)
    if num_pending and _is_most(most + num_pending, deciding[0], seen, num_awaited):
        return Reachability(None, confirmed, aims, "a dialback is still pending")
    causes = _unique(sighting.cause for sighting in (*deciding, *seen))
    blocked = f"dialled back: {causes[0]}" if causes else "the bootstraps do not agree where they reached this peer"
    if not mapped:
        return Reachability(Rung.RELAYED, confirmed, (), f"no connection could leave from the listen port; {blocked}")
    if not kept:
        symmetric = "the router gives each destination another port (symmetric NAT)"
        return Reachability(Rung.RELAYED, confirmed, (), f"{symmetric}; {blocked}")
    return Reachability(Rung.PUNCHED, confirmed, aims, f"the router lets nobody in unasked; {blocked}")


def places_of_most(seen: Sequence[Sighting]) -> tuple[Address, ...]:
    """Return the observed addresses of which most bootstraps saw the IP address."""
    ips = Counter(_ip(sighting.address) for sighting in seen)
    return _unique(sighting.address for sighting in seen if _is_most(ips[_ip(sighting.address)], sighting, seen))


def _is_most(votes: int, example: Sighting, seen: Sequence[Sighting], num_awaited: int = 0) -> bool:
    """Return True if so many say what `example` does that a minority of liars cannot be all of them."""
    of_version = num_awaited + sum(is_ipv6(one.address) == is_ipv6(example.address) for one in seen)
    return 2 * votes > of_version and 2 * votes >= len(seen) + num_awaited


def _unless_few(seen: Sequence[Sighting], is_telling: Callable[[Sighting], bool]) -> list[Sighting]:
    """Return the sightings that tell most, and the others if these are fewer than half."""
    telling = [one for one in seen if is_telling(one)]
    return telling if 2 * len(telling) >= len(seen) else [one for one in seen if not is_telling(one)]


def _statement(sighting: Sighting) -> tuple[Rung, bool, Address]:
    """Return what a bootstrap says that has reached a peer: at its own address of that version, or at another one."""
    return rung_of(sighting.address), is_ipv6(sighting.address), "" if sighting.is_own else sighting.reached


def _ip(address: Address) -> Address:
    return address.partition("/tcp/")[0]


def _unique(addresses: Iterable[Address]) -> tuple[Address, ...]:
    return tuple(dict.fromkeys(filter(None, addresses)))
