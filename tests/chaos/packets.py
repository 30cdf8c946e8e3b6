"""Network namespaces for the peers of a group, to drop all packets of one silently.

To cut a peer off, its port is removed from the bridge, while its interface stays up.
"""

from pathlib import Path
from typing import Self

from flockstep.scripts.lab.namespaces import Namespaces, ShapedLine, check_namespaces

BRIDGE = "hub"


class Networks(Namespaces):
    """`count` of them, with one interface each. Use as a context. Raises `LocalError`."""

    def __init__(self, count: int) -> None:
        super().__init__(Path("unused"))
        self._count = count

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def _build(self) -> None:
        check_namespaces(["ip"])
        self.add_bridge(BRIDGE, "10.77.0.254/24")
        for index in range(self._count):
            self.add(str(index))
            self.connect(str(index), "eth0", BRIDGE, f"port{index}", ShapedLine())
            self.address(str(index), "eth0", f"{_address(index)}/24")

    def launch(self, index: int) -> tuple[list[str], str]:
        """How to start a program in a peer's network, and the address that it has there."""
        return self.command(str(index)), _address(index)

    def cut_off(self, index: int, whether: bool) -> None:
        """Drop every packet from and to a peer, or let them pass again."""
        self.inside(BRIDGE, f"ip link set port{index} {'nomaster' if whether else 'master bridge'}")


def _address(index: int) -> str:
    return f"10.77.0.{index + 1}"
