"""Why a contribution was lost, from the event logs of all peers: which round, which home, and every reason told meanwhile."""

from collections.abc import Collection, Sequence
from pathlib import Path

from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, log_path, read_events

BESIDE = ("dial.", "gossip.", "member.", "phase.", "reachability.", "relay.", "upnp.")
"""Events of what goes on beside a round: their reasons are none for a loss in it."""


def losses(homes: Sequence[Path], rounds: Collection[int]) -> list[str]:
    """Lines on each round that not all homes ended, or whose cut lacks one: who, and in order of time why."""
    names = {Identity.load_or_create(home / "identity.key").peer_id: f"home {n}" for n, home in enumerate(homes)}
    told = [(name, event) for name, home in zip(names.values(), homes, strict=True) for event in _events(home)]
    lines: list[str] = []
    for round_ in rounds:
        ends = {name: event for name, event in told if event["event"] == "round.done" and event["round"] == round_}
        cut = {str(peer) for event in ends.values() for peer in _list(event["cut"])}
        left_out = [name for peer, name in names.items() if peer not in cut]
        unfinished = [name for name in names.values() if name not in ends]
        if left_out or unfinished:
            lines.append(f"round {round_}: left out of the cut: {left_out}; without its result: {unfinished}")
            lines += _reasons(told, names, round_)
    return lines


def _reasons(told: Sequence[tuple[str, Event]], names: dict[str, str], round_: int) -> list[str]:
    """The events with a reason between a round's first and last one, peers by the names of their homes."""
    times = [_time(event) for _, event in told if str(event["event"]).startswith("round.") and event["round"] == round_]
    began, ended = min(times, default=0.0), max(times, default=0.0)
    lines: list[tuple[float, str]] = []
    for name, event in told:
        kind = str(event["event"])
        if event.get("reason") and began <= _time(event) <= ended and not kind.startswith(BESIDE):
            line = f"{name}: {kind} {event.get('step', '')} {event.get('peer', '')}: {event['reason']}"
            for peer, home in names.items():
                line = line.replace(peer, home)
            lines.append((_time(event) - began, line))
    return [f"  {seconds:6.2f} s  {line}" for seconds, line in sorted(lines)]


def _events(home: Path) -> list[Event]:
    return [event for _, event in read_events(log_path(home))]


def _list(value: object) -> list[object]:
    assert isinstance(value, list)
    return value


def _time(event: Event) -> float:
    return float(str(event["time"]))
