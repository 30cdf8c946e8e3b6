"""Reachability: direct, punched or relayed, decided from what bootstraps observe. Pure.

Theory of operation. A bootstrap reports the address that it observes my connection from and, on request, whether it
could dial that address back, with the port that I listen on (`dialback`). My connections to bootstraps leave from my
listen port, so the observed address is the NAT's mapping of that port.

    the dialback succeeded              direct   strangers dial that address
    the same address for all of them    punched  a simultaneous dial gets through: endpoint-independent mapping
                                                 (RFC 4787, section 4.1)
    another one for each of them        relayed  a "symmetric" NAT: the next mapping is not known

A bootstrap in my own network observes a private address, which says nothing about the internet: if others observe a
public one, only these count. If all are private the run is local, and a peer reached there is on the rung `lan`.

Every peer has IPv4, perhaps behind a NAT, but not every one IPv6. So sightings under IPv4 decide my rung. An IPv6
address that was dialled back is announced as well, but a peer reached by IPv6 alone keeps its relays.
"""

from collections.abc import Iterable, Mapping
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


def decide(sightings: Mapping[PeerId, Sighting]) -> Reachability:
    """Decide my reachability from the current sightings."""
    seen = [sightings[observer] for observer in sorted(sightings)]
    if not seen:
        return Reachability(None, reason="no bootstrap has reported an observed address")
    public = [sighting for sighting in seen if rung_of(sighting.address) is Rung.DIRECT]
    counted = public or seen
    deciding = [sighting for sighting in counted if not is_ipv6(sighting.address)] or counted
    confirmed = _unique(sighting.reached for sighting in (*deciding, *counted))
    if any(sighting.reached for sighting in deciding):
        return Reachability(rung_of(confirmed[0]), confirmed, confirmed, "a bootstrap reached me when it dialled back")
    aims = _unique(sighting.address for sighting in deciding if sighting.from_listen_port)
    if not all(sighting.cause for sighting in deciding):
        sole = aims if len(aims) == 1 else ()
        return Reachability(None, confirmed, sole, "a dialback is still pending")
    blocked = f"dialled back: {deciding[0].cause}"
    if not aims:
        return Reachability(Rung.RELAYED, confirmed, (), f"no connection could leave from my listen port; {blocked}")
    if len(aims) > 1:
        symmetric = "the router gives each destination another port (symmetric NAT)"
        return Reachability(Rung.RELAYED, confirmed, (), f"{symmetric}; {blocked}")
    return Reachability(Rung.PUNCHED, confirmed, aims, f"the router lets nobody in unasked; {blocked}")


def _unique(addresses: Iterable[Address]) -> tuple[Address, ...]:
    return tuple(dict.fromkeys(filter(None, addresses)))
