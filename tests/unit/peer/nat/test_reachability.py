"""Reachability from the bootstraps' sightings: every kind of router, and properties."""

import pytest
from flockstep.peer.base.transport import Reachability, Rung
from flockstep.peer.nat.reachability import Sighting, decide
from hypothesis import given
from hypothesis import strategies as st

DROPPED = "timed out after 3 s"


def sighting(
    address: str, *, reached: bool = False, cause: str = DROPPED, own_port: bool = True, own: bool = False
) -> Sighting:
    where = address.rpartition("/")[0] + "/4001"
    return Sighting(address, own_port, where if reached else "", "" if reached else cause, own)


def test_nobody_has_told() -> None:
    assert decide({}).rung is None
    assert decide({"a": sighting("/ip4/44.0.1.1/tcp/4001", cause="")}).rung is None


HERE, LIE = "/ip4/44.0.1.1/tcp/7", "/ip4/44.0.66.6/tcp/7"


@pytest.mark.parametrize("others", [0, 1, 2])
def test_whom_most_bootstraps_reach_strangers_reach(others: int) -> None:
    seen = {str(number): sighting(f"/ip4/44.0.1.1/tcp/{number}", reached=True) for number in range(others + 1)}
    decided = decide({**seen, **{f"not {number}": sighting(HERE) for number in range(others)}})
    assert (decided.rung, decided.confirmed) == (Rung.DIRECT, ("/ip4/44.0.1.1/tcp/4001",))
    assert not decided.needs_relay


LIARS = [
    sighting(LIE, reached=True),
    sighting(LIE),
    sighting(HERE),
    sighting(HERE, reached=True),
    sighting("/ip4/44.0.1.1/tcp/666", reached=True),
    sighting(HERE, own=True, reached=True),
    sighting("/ip4/10.0.0.2/tcp/7", cause="a router translates it"),
    sighting("/ip6/2a0f:66::6/tcp/4001", reached=True),
    sighting("/ip4/44.0.1.1/tcp/9", own_port=False),
    sighting(LIE, cause=""),
]
HONEST = {
    "a home": [sighting(HERE)] * 3,
    "a home with an open port": [sighting(HERE, reached=True)] * 3,
    "a server": [sighting(HERE, reached=True, own=True)] * 3,
    "a home that reaches all over IPv6": [sighting("/ip6/2a0f:44::7/tcp/4001", own=True)] * 3,
    "a local run": [sighting("/ip4/192.168.1.7/tcp/4001", reached=True, own=True)] * 3,
    "a symmetric router": [sighting(f"/ip4/44.0.1.1/tcp/{number}") for number in (1, 2, 3)],
}


@pytest.mark.parametrize("liar", LIARS)
@pytest.mark.parametrize("liars", [1, 2])
@pytest.mark.parametrize("where", HONEST)
@pytest.mark.parametrize("first", ["a", "z"])
def test_fewer_liars_than_honest_bootstraps_change_nothing(where: str, liars: int, liar: Sighting, first: str) -> None:
    honest = {f"h{number}": one for number, one in enumerate(HONEST[where][: liars + 1])}
    lies = {f"{first}{number}": liar for number in range(liars)}
    alone, beside = decide(honest), decide({**lies, **honest})
    if where != "a symmetric router":  # Who says what an honest one says may make a port look kept.
        assert beside.rung is alone.rung or beside.rung is None
    assert beside.needs_relay == alone.needs_relay or beside.rung is None
    assert set(beside.confirmed) <= set(alone.confirmed)
    assert set(beside.aims) <= {*alone.aims, *(one.address for one in honest.values())}


def test_the_first_to_answer_does_not_decide() -> None:
    liar = {"liar": sighting(LIE, reached=True)}
    assert decide(liar, num_awaited=2).rung is None
    assert decide({**liar, "b": sighting(HERE)}, num_awaited=1).rung is None
    assert decide({**liar, "b": sighting(HERE), "c": sighting(HERE)}).rung is Rung.PUNCHED
    assert decide({"a": sighting(HERE), "b": sighting(HERE)}, num_awaited=1).rung is Rung.PUNCHED  # It cannot be tipped.
    assert decide({name: sighting(HERE, reached=True) for name in "ab"}, num_awaited=1).rung is Rung.DIRECT


def test_a_router_that_keeps_one_port_for_all_can_be_punched() -> None:
    shifted = "/ip4/44.0.1.1/tcp/34001"
    decided = decide({"a": sighting(shifted), "b": sighting(shifted)})
    assert (decided.rung, decided.aims, decided.confirmed) == (Rung.PUNCHED, (shifted,), ())
    assert decided.needs_relay
    assert DROPPED in decided.reason


def test_a_symmetric_router_leaves_the_relay() -> None:
    decided = decide({"a": sighting("/ip4/44.0.1.1/tcp/1000"), "b": sighting("/ip4/44.0.1.1/tcp/2000")})
    assert (decided.rung, decided.aims) == (Rung.RELAYED, ())
    assert "symmetric" in decided.reason


def test_a_connection_from_another_port_tells_nothing_of_the_listen_port() -> None:
    decided = decide({"a": sighting("/ip4/44.0.1.1/tcp/5555", own_port=False)})
    assert (decided.rung, decided.aims) == (Rung.RELAYED, ())
    seen = "/ip4/44.0.1.1/tcp/4001"
    assert decide({"a": sighting(seen), "b": sighting("/ip4/44.0.1.1/tcp/5555", own_port=False)}).aims == (seen,)


def test_a_neighbour_that_reaches_me_says_nothing_of_the_world() -> None:
    neighbour = sighting("/ip4/192.168.1.7/tcp/4001", reached=True)
    assert decide({"a": neighbour}).rung is Rung.LAN
    assert decide({"a": neighbour, "b": sighting("/ip4/44.0.1.1/tcp/4001")}).rung is Rung.PUNCHED


V6 = "/ip6/2a0f:44::7/tcp/4001"


def test_one_who_is_seen_on_both_versions_of_ip_is_not_behind_a_symmetric_router() -> None:
    decided = decide({"a": sighting("/ip4/44.0.1.1/tcp/4001"), "b": sighting(V6)})
    assert (decided.rung, decided.aims) == (Rung.PUNCHED, ("/ip4/44.0.1.1/tcp/4001",))


def test_ipv4_decides_the_rung_and_ipv6_is_told_besides() -> None:
    decided = decide({"a": sighting("/ip4/44.0.1.1/tcp/4001"), "b": sighting(V6, reached=True)})
    assert (decided.rung, decided.confirmed, decided.needs_relay) == (Rung.PUNCHED, (V6,), True)
    decided = decide({"a": sighting(V6, reached=True), "b": sighting("/ip4/44.0.1.1/tcp/4001", reached=True)})
    assert (decided.rung, decided.confirmed) == (Rung.DIRECT, ("/ip4/44.0.1.1/tcp/4001", V6))
    assert not decided.needs_relay


def test_who_is_reached_on_ipv6_alone_keeps_its_relays() -> None:
    decided = decide({"a": sighting(V6, reached=True)})
    assert (decided.rung, decided.needs_relay) == (Rung.DIRECT, True)


addresses = st.sampled_from(["/ip4/44.0.1.1/tcp/4001", "/ip4/44.0.1.1/tcp/9", "/ip4/10.0.0.2/tcp/4001", V6])
sightings = st.builds(sighting, addresses, reached=st.booleans(), own_port=st.booleans())


@given(st.dictionaries(st.sampled_from("abcd"), sightings, max_size=4))
def test_the_order_of_observers_does_not_matter_and_a_reason_is_given(seen: dict[str, Sighting]) -> None:
    decided = decide(seen)
    assert decided == decide(dict(reversed(seen.items())))
    assert decided.reason
    assert set(decided.confirmed) <= {one.reached for one in seen.values()}


@pytest.mark.parametrize("rung", [None, *Rung])
def test_a_relay_is_needed_by_those_whom_strangers_do_not_reach(rung: Rung | None) -> None:
    assert Reachability(rung).needs_relay == (rung in (Rung.PUNCHED, Rung.RELAYED))
