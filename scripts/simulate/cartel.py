"""What votes by work cost whoever wants them all: the rounds until a cartel's keys hold a third of the votes, and a quorum.

Theory of operation. The others have trained in the run for long, each with the same work, and sit in all seats that the
cartel leaves them. Then its keys fill the other seats of every roster, each from a network of its own, contribute what looks
like honest work, and claim more tokens than count. Trust, caps, shares, balances and electorate are the production code; no
message is sent.
"""

import json
from collections.abc import Callable, Container
from dataclasses import dataclass, replace

from ...collectives.accountability.trust import after, newcomer_record, weigh
from ...collectives.agreement.electorate import Electorate
from ...collectives.chain.balances import balances_of, shares_of
from ...collectives.chain.voters import electorate_after
from ...dht.run.admission import Charter
from ...peer import wire
from ...peer.errors import UsageError
from ...peer.transport import PeerId

WORK_ROUNDS = 400
"""Rounds that the honest peers have trained before: their balances have reached their shares."""
MOST_ROUNDS = 1000
"""Rounds after which a cartel that holds less is taken never to hold more: balances have long reached their shares."""
TOKENS_OF_EACH, CLAIMED = 1000, 10**12
"""Of an honest peer, and of a key of the cartel."""
_CHARTER = Charter("cartel", earned=True, by_work=True)


@dataclass(frozen=True, slots=True)
class CartelPrice:
    """The rounds until a cartel holds so much; None if it never does."""

    seats: int
    third: int | None
    """More than a third of the votes: no round is decided against it."""
    quorum: int | None
    """A quorum: it decides alone."""


def price_of(seats: int) -> CartelPrice:
    """Return what a cartel that fills so many of 64 seats pays. Raises `UsageError` for a number out of 1 to 63."""
    if not 1 <= seats < wire.MAX_ROSTER:
        raise UsageError(f"a cartel has 1 to {wire.MAX_ROSTER - 1} of {wire.MAX_ROSTER} seats, not {seats}")
    honest = {f"h{number:039}": _newcomer(f"10.{number}.0.0") for number in range(wire.MAX_ROSTER - seats)}
    for _ in range(WORK_ROUNDS):
        honest, _ = _round(honest, ())
    cartel = {f"c{number:039}": _newcomer(f"11.{number}.0.0") for number in range(seats)}
    members, third = honest | cartel, None
    for number in range(1, MOST_ROUNDS + 1):
        members, electorate = _round(members, cartel)
        votes = electorate.votes_of(cartel)
        if third is None and votes >= electorate.third:
            third = number
        if electorate.is_quorum(cartel):
            return CartelPrice(seats, third, number)
    return CartelPrice(seats, third, None)


def run_cartel(seats: int, write_line: Callable[[str], None], *, as_json: bool) -> None:
    """Write what a cartel pays: one line, or one JSON object. Raises `UsageError`."""
    price = price_of(seats)
    if as_json:
        write_line(json.dumps({"seats": price.seats, "third": price.third, "quorum": price.quorum}))
        return
    write_line(f"a cartel with {seats} of {wire.MAX_ROSTER} seats, each round from the first on:")
    write_line(f"  more than a third of the votes (it can stop the run): {_after(price.third)}")
    write_line(f"  a quorum, more than two thirds (it decides): {_after(price.quorum)}")


def _after(rounds: int | None) -> str:
    return "never" if rounds is None else f"after {rounds} rounds"


def _newcomer(prefix: str) -> wire.Seat:
    record = newcomer_record(earned=True)
    return wire.Seat(record.trust, record.rounds, prefix)


def _round(members: dict[PeerId, wire.Seat], cartel: Container[PeerId]) -> tuple[dict[PeerId, wire.Seat], Electorate]:
    """Return the seats after a round of all, and the electorate of the next one."""
    peers, seats = tuple(members), tuple(members.values())
    count = len(peers)
    masses = weigh([CLAIMED if peer in cartel else TOKENS_OF_EACH for peer in peers], [1.0] * count, seats, earned=True)
    value = wire.Value(
        *("cartel", 1, bytes(32), bytes(32), peers, tuple(range(count + 1)), seats, bytes(32), tuple(range(count))),
        *((bytes(32),) * count, bytes(32), 0),
        shares=shares_of([masses], (0, 1)),
    )
    records = [after(seat, True, False, held) for seat, held in zip(seats, balances_of(value), strict=True)]
    following = {
        peer: replace(seat, trust=record.trust, rounds=record.rounds, balance=record.balance)
        for (peer, seat), record in zip(members.items(), records, strict=True)
    }
    return following, electorate_after(value, _CHARTER)
