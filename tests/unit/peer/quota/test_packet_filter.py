"""The program that drops packets, run by an interpreter of its four instructions."""

import ipaddress
import struct

import pytest
from flockstep.peer.quota.packet_filter import (
    AND,
    INSTRUCTION,
    JUMP_IF_EQUAL,
    LOAD_WORD,
    MAX_NETWORKS,
    NETWORK_HEADER,
    RETURN,
    SOURCES,
    filter_program,
)

NETWORKS = ("203.0.113.7", "198.51.100.0/24", "2001:db8:1:2::/64", "2001:db8:9::/48")


def keeps(program: bytes, source: str) -> bool:
    """Return whether a packet from an address passes."""
    address = ipaddress.ip_address(source)
    header = bytes(SOURCES[address.version]) + address.packed
    instructions, at, word = list(INSTRUCTION.iter_unpack(program)), 0, 0
    while True:
        code, then, otherwise, operand = instructions[at]
        at += 1
        if code == LOAD_WORD:
            (word,) = struct.unpack_from(">I", header, operand - NETWORK_HEADER)
        elif code == AND:
            word &= operand
        elif code == JUMP_IF_EQUAL:
            at += then if word == operand else otherwise
        else:
            assert code == RETURN
            return bool(operand)


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        ("203.0.113.7", False),
        ("203.0.113.8", True),
        ("198.51.100.0", False),
        ("198.51.100.255", False),
        ("198.51.101.1", True),
        ("2001:db8:1:2:3::4", False),
        ("2001:db8:1:3::4", True),
        ("2001:db8:9:ffff::1", False),
        ("2001:db8:8::1", True),
    ],
)
def test_packets_from_these_networks_are_dropped_and_others_kept(source: str, kept: bool) -> None:
    program = filter_program(NETWORKS, ipaddress.ip_address(source).version)
    assert keeps(program, source) is kept
    assert keeps(filter_program((), 4), "203.0.113.7")


def test_a_program_stays_shorter_than_linux_takes() -> None:
    program = filter_program([f"2001:db8:{number:x}:1::/64" for number in range(2 * MAX_NETWORKS)], 6)
    assert len(program) // INSTRUCTION.size <= 4096
    assert keeps(program, f"2001:db8:{MAX_NETWORKS:x}:1::1")
    assert not keeps(program, f"2001:db8:{MAX_NETWORKS - 1:x}:1::1")
