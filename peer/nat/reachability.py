"""Direct, punched or relayed: how others reach me, decided from what bootstraps see of me. Pure.

Theory of operation. A bootstrap tells from which address my connection comes and, if I ask, whether it got through when
it dialled that address back, with the port that I listen on (`libp2p_dialback`). My connections to bootstraps leave from
my listen port, so the address that they see is the one that my router has given to that port.

    it got through                      direct   strangers dial that address
    the same address for all of them    punched  one who dials at the moment when I do gets through: NATs whose mapping
                                                 does not depend on the destination (RFC 4787, section 4.1)
    another one for each of them        relayed  a "symmetric" NAT: nobody knows where the next mapping will be

A bootstrap in my own network sees a private address, which says nothing about the world: where others see a public one,
only these count. Where all are private the run is a local one, and who is reached there stands on the rung `lan`.

Everybody has IPv4, if behind a router, but not everybody IPv6. So whoever sees me under an IPv4 address decides my rung;
an IPv6 address at which I was reached is told to others besides, and who is reached there alone keeps its relays.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..address import is_ipv6, rung_of
from ..transport import Address, PeerId, Rung


@dataclass(frozen=True, slots=True)
class Sighting:
    """What one bootstrap sees of me."""

    address: Address
    """Where my connection comes from."""

    from_listen_port: bool
    """Whether the connection left from the port that I listen on; else the port in `address` leads nowhere."""

    reached: Address = ""
    """Where it got through when it dialled me back; empty if it did not."""

    cause: str = ""
    """Why it did not get through; empty while nobody has tried."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How others reach me, and why I think so."""

    rung: Rung | None
    """None while nobody has told."""

    confirmed: tuple[Address, ...] = ()
    """Where strangers have reached me."""

    aims: tuple[Address, ...] = ()
    """Where a hole punch should aim; none where that cannot be known."""

    reason: str = ""

    @property
    def needs_relay(self) -> bool:
        """Whether some cannot reach me but through a relay."""
        everywhere = not self.confirmed or not all(map(is_ipv6, self.confirmed))
        return self.rung in (Rung.PUNCHED, Rung.RELAYED) or (self.rung is Rung.DIRECT and not everywhere)


def decide(sightings: Mapping[PeerId, Sighting]) -> Standing:
    """My standing by what is seen of me now."""
    seen = [sightings[observer] for observer in sorted(sightings)]
    if not seen:
        return Standing(None, reason="no bootstrap has told what it sees of me")
    public = [sighting for sighting in seen if rung_of(sighting.address) is Rung.DIRECT]
    counted = public or seen
    deciding = [sighting for sighting in counted if not is_ipv6(sighting.address)] or counted
    confirmed = _unique(sighting.reached for sighting in (*deciding, *counted))
    if any(sighting.reached for sighting in deciding):
        return Standing(rung_of(confirmed[0]), confirmed, confirmed, "a bootstrap reached me when it dialled back")
    aims = _unique(sighting.address for sighting in deciding if sighting.from_listen_port)
    if not all(sighting.cause for sighting in deciding):
        sole = aims if len(aims) == 1 else ()
        return Standing(None, confirmed, sole, "a bootstrap still tries to dial me back")
    blocked = f"dialled back: {deciding[0].cause}"
    if not aims:
        return Standing(Rung.RELAYED, confirmed, (), f"no connection could leave from my listen port; {blocked}")
    if len(aims) > 1:
        symmetric = "the router gives each destination another port (symmetric NAT)"
        return Standing(Rung.RELAYED, confirmed, (), f"{symmetric}; {blocked}")
    return Standing(Rung.PUNCHED, confirmed, aims, f"the router lets nobody in unasked; {blocked}")


def _unique(addresses: Iterable[Address]) -> tuple[Address, ...]:
    return tuple(dict.fromkeys(filter(None, addresses)))
