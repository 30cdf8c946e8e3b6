"""A router's UPnP: answers the search, and passes ports on by nftables.

    python upnp_router.py <address inside> <network device outside>      in the router's namespace

Like many routers it takes no lease but a permanent one.
"""

import socket
import struct
import subprocess
import sys

import trio
from support.router import Answer, Router


class PassingRouter(Router):
    """A router whose chain says what its `ports` say."""

    def __init__(self, inside: str, wan: str) -> None:
        super().__init__(inside)
        self.leases = False
        self._wan = wan
        shown = subprocess.run(["ip", "-4", "-o", "addr", "show", wan], capture_output=True, text=True, check=True).stdout
        self.outside = shown.split()[3].partition("/")[0]
        _nft("add chain ip nat upnp { type nat hook prerouting priority -100; }")

    async def bound(self) -> trio.socket.SocketType:
        """Return a socket that hears the searches of the home (UPnP Device Architecture 1.1, section 1.3.2)."""
        searches = trio.socket.socket(type=trio.socket.SOCK_DGRAM)
        await searches.bind(("", 1900))
        group = struct.pack("4s4s", socket.inet_aton("239.255.255.250"), socket.inet_aton(self.here))
        searches.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
        return searches

    def act(self, action: str, stated: dict[str, str]) -> Answer:
        """Do what is asked, and write the chain."""
        answer = super().act(action, stated)
        rules = [
            f'add rule ip nat upnp iifname "{self._wan}" tcp dport {port} dnat to {host}:{to}'
            for port, (host, to, _) in self.ports.items()
        ]
        _nft("\n".join(["flush chain ip nat upnp", *rules]))
        return answer


def _nft(rules: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)


async def main() -> None:
    async with PassingRouter(*sys.argv[1:]).running():
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main)
