"""Ledgers for tests, and their contents."""

from collections.abc import Sequence
from pathlib import Path

from flockstep.collectives.chain.ledger import Ledger
from flockstep.dht.run.admission import Charter
from flockstep.peer import wire
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event
from flockstep.peer.wire.signed import verify_signed
from support.certificates import LONE, RUN
from support.recorded import recorded


def open_ledger(path: Path, founders: Sequence[Identity] = (LONE,)) -> tuple[Ledger, list[Event]]:
    telemetry, events = recorded(clock=lambda: 0.0)
    charter = Charter(founders=frozenset(founder.peer_id for founder in founders))
    return Ledger.open(path, RUN, verify=verify_signed, telemetry=telemetry, charter=charter), events


def named(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event["event"] == name]


def rounds_in(ledger: Ledger) -> list[wire.Certificate | None]:
    return [ledger.certificate(number) for number in range(ledger.first, ledger.head.round + 1)]


def write(path: Path, certificates: list[wire.Certificate]) -> list[int]:
    """Write a ledger file with one record each, and return the end offset of each record."""
    ledger, _ = open_ledger(path)
    ends: list[int] = []
    for certificate in certificates:
        ledger.extend([certificate])
        ends.append(path.stat().st_size)
    return ends
