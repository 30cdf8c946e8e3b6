"""The protocol number, which a run's manifest and its checkpoints state. Pure."""

from importlib.metadata import version

from ...peer.base.errors import OtherProtocol

PROTOCOL = 4
"""Number of all that the members of a run send, sign and keep. A flockstep that writes or reads any of it otherwise has the
next number. So no run is ever of two, and a peer refuses a run of another number before it writes or sends anything."""


def check_protocol(what: str, number: int, remedy: str) -> None:
    """Raise `OtherProtocol`, with this remedy, for something of another number than `PROTOCOL`."""
    if number != PROTOCOL:
        mine = f"flockstep {version('flockstep')} speaks protocol {PROTOCOL}"
        raise OtherProtocol(f"{what} of protocol {number}: {mine}", remedy=remedy)
