"""Addresses as text."""

from dataclasses import replace
from itertools import pairwise

import pytest
from flockstep.peer.address import (
    Surroundings,
    by_turns,
    is_ipv6,
    is_secure,
    is_socket,
    is_web,
    rung_of,
    split_p2p,
    valid_address,
    why_not_dial,
)
from flockstep.peer.base.errors import UsageError
from flockstep.peer.base.transport import Rung
from flockstep.peer.identity import Identity
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

PEER = Identity.from_seed(bytes(32)).peer_id


@pytest.mark.parametrize(
    ("text", "rung"),
    [
        ("/ip4/8.8.8.8/tcp/4001", Rung.DIRECT),
        ("/ip4/192.168.1.2/tcp/65535", Rung.LAN),
        ("/ip4/127.0.0.1/tcp/1", Rung.LAN),
        ("/ip6/::1/tcp/4001", Rung.LAN),
        ("/ip6/2a00::1/tcp/4001", Rung.DIRECT),
        ("/ip6/fd00::1/tcp/4001", Rung.LAN),
        ("/dns/boot.example/tcp/4001", Rung.DIRECT),
        ("/dns4/a-host.example./tcp/4001", Rung.DIRECT),
        (f"/ip4/8.8.8.8/tcp/4001/p2p/{PEER}/p2p-circuit", Rung.RELAYED),
        ("/ip4/192.168.1.2/tcp/8080/ws", Rung.LAN),
        ("/dns/boot.example/tcp/443/tls/ws", Rung.DIRECT),
        (f"/dns/boot.example/tcp/443/wss/p2p/{PEER}/p2p-circuit", Rung.RELAYED),
    ],
)
def test_an_address_that_can_be_dialled_stands_for_a_rung(text: str, rung: Rung) -> None:
    assert valid_address(text)
    assert rung_of(text) is rung


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("/ip4/8.8.8.8/tcp/1", True),
        ("/ip6/2a00::1/tcp/65535", True),
        ("/dns/boot.example/tcp/4001", False),
        ("/ip4/8.8.8.8/tcp/1/ws", False),
        (f"/ip4/8.8.8.8/tcp/1/p2p/{PEER}/p2p-circuit", False),
        ("/ip4/8.8.8.8/tcp/0", False),
        ("/ip4/8.8.8/tcp/1", False),
        ("", False),
    ],
)
def test_a_bootstrap_sees_a_peer_at_an_ip_and_a_port(text: str, is_one: bool) -> None:
    assert is_socket(text) is is_one


@pytest.mark.parametrize(
    ("text", "web", "secure"),
    [
        ("/dns/boot.example/tcp/443/tls/ws", True, True),
        (f"/dns/boot.example/tcp/443/wss/p2p/{PEER}/p2p-circuit", True, True),
        ("/ip4/8.8.8.8/tcp/80/ws", True, False),
        ("/ip4/8.8.8.8/tcp/4001", False, False),
        (f"/ip4/8.8.8.8/tcp/4001/p2p/{PEER}/p2p-circuit", False, False),
    ],
)
def test_an_address_tells_whether_it_is_a_websockets(text: str, web: bool, secure: bool) -> None:
    assert (is_web(text), is_secure(text)) == (web, secure)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "8.8.8.8:4001",
        "/ip4/8.8.8.8",
        "/ip4/8.8.8.8/tcp/0",
        "/ip4/8.8.8.8/tcp/65536",
        "/ip4/8.8.8.8/tcp/-1",
        "/ip4/8.8.8.8/tcp/٤",
        "/ip4/8.8.8.8/udp/4001",
        "/ip4/8.8.8.8/tcp/4001/http",
        "/ip4/8.8.8.8/tcp/4001/tls",
        "/ip4/8.8.8.8/tcp/4001/ws/ws",
        f"/ip4/8.8.8.8/tcp/4001/ws/p2p/{PEER}",
        "/ip4/8.8.8.8/tcp/4001/p2p-circuit",
        "/ip4/8.8.8.8/tcp/4001/",
        "/ip4/300.8.8.8/tcp/4001",
        "/ip4/::1/tcp/4001",
        "/ip6/8.8.8.8/tcp/4001",
        "/ip6/fe80::1%eth0/tcp/4001",
        "/ip6/fe80::1/tcp/4001",
        "/ip6/::ffff:8.8.8.8/tcp/4001",
        "/dns/a b/tcp/4001",
        "/dns/under_score.example/tcp/4001",
        "/dns/" + "a" * 64 + "/tcp/4001",
        "/dns/" + "a." * 127 + "/tcp/4001",
        f"/ip4/8.8.8.8/tcp/4001/p2p/{PEER}",
        "/ip4/8.8.8.8/tcp/4001/p2p/nobody/p2p-circuit",
    ],
)
def test_anything_else_is_no_address(text: str) -> None:
    assert not valid_address(text)


@given(st.from_regex(r"[a-zA-Z0-9_.-]{1,70}", fullmatch=True))
def test_each_name_in_an_address_is_one_in_a_multiaddr(name: str) -> None:
    address = f"/dns/{name}/tcp/4001"
    if valid_address(address):
        assert Multiaddr(address).to_bytes()


FOUR, SIX = "/ip4/8.8.8.8/tcp/{}", "/ip6/2a00::1/tcp/{}"


@given(st.lists(st.sampled_from([FOUR, SIX]), max_size=8))
def test_the_two_versions_of_ip_take_turns_and_keep_their_order(kinds: list[str]) -> None:
    given_order = [kind.format(number + 1) for number, kind in enumerate(kinds)]
    turns = by_turns(given_order)
    assert sorted(turns) == sorted(given_order)
    assert turns[:1] == tuple(given_order[:1])
    for version in (True, False):
        mine = [place for place, address in enumerate(turns) if is_ipv6(address) == version]
        assert [turns[place] for place in mine] == [address for address in given_order if is_ipv6(address) == version]
    both = 2 * min(sum(map(is_ipv6, turns)), len(turns) - sum(map(is_ipv6, turns)))
    assert all(is_ipv6(one) != is_ipv6(next_) for one, next_ in pairwise(turns[:both]))


def test_a_full_address_is_split_into_place_and_peer() -> None:
    assert split_p2p(f"/ip4/8.8.8.8/tcp/4001/p2p/{PEER}") == ("/ip4/8.8.8.8/tcp/4001", PEER)
    relayed = f"/ip4/8.8.8.8/tcp/4001/p2p/{PEER}/p2p-circuit"
    assert split_p2p(f"{relayed}/p2p/{PEER}") == (relayed, PEER)


@pytest.mark.parametrize(
    "text", ["", PEER, f"/p2p/{PEER}", "/ip4/8.8.8.8/tcp/4001", "/ip4/8.8.8.8/tcp/4001/p2p/nobody"]
)
def test_half_a_full_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        split_p2p(text)
    assert "/p2p/" in caught.value.remedy


def at(*ips: str) -> tuple[str, ...]:
    return tuple(f"/ip{6 if ':' in ip else 4}/{ip}/tcp/4001" for ip in ips)


HOME = Surroundings(interfaces=at("192.168.1.5", "fd00:1::5"), seen_at=at("44.0.1.1"), bootstraps=at("44.9.9.9"))


@pytest.mark.parametrize(
    "ip",
    [
        *("169.254.169.254", "169.254.1.1", "0.0.0.0", "0.1.2.3", "224.0.0.1", "239.1.1.1", "255.255.255.255", "240.0.0.1"),
        *("::", "ff02::1", "fd00:ec2::254"),
        *("127.0.0.1", "127.8.8.8", "::1"),
        *("192.168.2.1", "10.0.0.1", "172.16.0.1", "100.64.0.1", "fd00:2::1"),
    ],
)
def test_what_a_member_states_is_not_dialled_where_it_may_mean_another_computer(ip: str) -> None:
    assert why_not_dial(at(ip)[0], at(ip, "44.7.7.7"), HOME)


def test_public_addresses_and_those_of_my_network_are_dialled() -> None:
    for ip in ("44.7.7.7", "192.168.1.200", "fd00:1::9", "2a00::1"):
        assert not why_not_dial(at(ip)[0], at(ip), HOME), ip
    # Behind the same router, in another part of its network.
    assert not why_not_dial(at("192.168.7.7")[0], at("192.168.7.7", "44.0.1.1"), HOME)
    # A cluster without a public address, whose bootstrap is in it.
    cluster = Surroundings(interfaces=at("10.0.1.5"), bootstraps=at("10.9.9.9"))
    assert not why_not_dial(at("10.0.7.7")[0], at("10.0.7.7"), cluster)
    assert why_not_dial(at("192.168.0.1")[0], at("192.168.0.1"), cluster)


def test_loopback_is_dialled_by_who_is_on_it_or_whose_link_leads_to_it() -> None:
    for here in (Surroundings(interfaces=at("127.0.0.1")), Surroundings(bootstraps=at("127.0.0.1"))):
        assert not why_not_dial(at("127.0.0.1")[0], (), here)
        near = replace(here, interfaces=(*here.interfaces, *at("fd00:ec2::5", "169.254.169.1")))
        for ip in ("169.254.169.254", "fd00:ec2::254"):
            assert why_not_dial(at(ip)[0], (), near)
    # A bootstrap that claims to see me there is not believed.
    assert why_not_dial(at("127.0.0.1")[0], at("127.0.0.1"), Surroundings(seen_at=at("127.0.0.1")))


def test_names_and_relayed_addresses_say_nothing_about_where_somebody_is() -> None:
    theirs = ("/dns/44.0.1.1/tcp/1", f"/ip4/44.0.1.1/tcp/4001/p2p/{PEER}/p2p-circuit", "nonsense")
    assert why_not_dial(at("192.168.7.7")[0], theirs, HOME)


@pytest.mark.parametrize(
    "ip", ["::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:0a00:0001::1", "fec0::1"]
)
def test_an_ipv6_form_of_an_address_that_is_not_dialled_is_not_dialled(ip: str) -> None:
    """A name may resolve to such a form."""
    assert why_not_dial(f"/ip6/{ip}/tcp/80", ("/ip4/44.7.7.7/tcp/1",), HOME)
