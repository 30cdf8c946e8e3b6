"""A program for the kernel of Linux (classic BPF, socket(7)) that drops the packets of some networks. Pure.

Attached to a listening socket it drops attempts to connect: a system call and a task for each would let one address take
a whole core (measured: 25 µs each and 5,000 a second from one process, more from a faster one).
"""

import ipaddress
import struct
from collections.abc import Collection, Iterator

INSTRUCTION = struct.Struct("@HBBI")
"""Linux's struct sock_filter: the code, two jumps, and the operand."""
LOAD_WORD, AND, JUMP_IF_EQUAL, RETURN = 0x20, 0x54, 0x15, 0x06
NETWORK_HEADER = 0xFFF00000
"""SKF_NET_OFF: offsets from here on are those of the IP header."""
SOURCES = {4: 12, 6: 8}
"""The offset of the source address in the header of each version."""
DROP, KEEP = 0, 0xFFFFFFFF
MAX_NETWORKS = 256
"""With seven instructions for a network of IPv6 less than half of the 4,096 that Linux takes."""


def filter_program(networks: Collection[str], version: int) -> bytes:
    """Return a program that drops what comes from the first `MAX_NETWORKS` of these networks that are of this IP version."""
    wanted = [network for network in map(ipaddress.ip_network, networks) if network.version == version]
    instructions = [each for network in wanted[:MAX_NETWORKS] for each in _drop(network)]
    return b"".join(INSTRUCTION.pack(*each) for each in [*instructions, (RETURN, 0, 0, KEEP)])


def _drop(network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> Iterator[tuple[int, int, int, int]]:
    """Yield the instructions that drop a packet of one network, and go on with the next one for any other."""
    pairs = zip(*(struct.iter_unpack(">I", part.packed) for part in (network.network_address, network.netmask)), strict=True)
    words = [(4 * at, value, mask) for at, ((value,), (mask,)) in enumerate(pairs) if mask]
    for number, (offset, value, mask) in enumerate(words):
        left = 3 * (len(words) - number - 1) + 1
        yield LOAD_WORD, 0, 0, NETWORK_HEADER + SOURCES[network.version] + offset
        yield AND, 0, 0, mask
        yield JUMP_IF_EQUAL, 0, left, value
    yield RETURN, 0, 0, DROP
