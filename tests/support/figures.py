"""Figures of a round, each seen from outside: `PYTHONPATH=tests python -m support.figures [WORD …]`, a table and JSON.

The same command measures any commit: messages are counted by the names that they have, and no step of a round is named but
the Result, after which an owner is killed. Simulated rounds take the time of their messages alone, so that the virtual
seconds from the last contributor that is ready to the first certificate, divided by the delay between two peers, are the
delays that follow one another. Some three CPU minutes.
"""

import gc
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import trio
from attacks.test_lies import KEPT
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.collectives.driver.contribution import Averaged, Contribution
from flockstep.collectives.vector.codec import CELL
from flockstep.dht.run.admission import Charter
from flockstep.peer import wire
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.node.node import Node
from flockstep.scripts.lab.simulate.options import SimulateOptions, Span, Strike
from flockstep.scripts.lab.simulate.peer import SimulatedPeer
from flockstep.scripts.lab.simulate.world import GC_THRESHOLD, World
from flockstep.scripts.lab.table import table_lines
from flockstep.scripts.lab.training.batches import SIZES
from support.lies import Moment
from support.simulations import CALM
from support.swarm import SimSwarm, all_at_once, with_swarm

DELAY = 0.1
"""Seconds from one peer to another."""
CONTROL_DEADLINE = 2.0
"""Seconds: the shortest, as simulated peers have it."""
PARAMS = 25_000_000
Figures: TypeAlias = dict[str, Any]


class Sent:
    """What a node sends: bytes of messages by the name of their kind, and of blobs by their key, once a reader."""

    def __init__(self, node: Node) -> None:
        self.messages = Counter[str]()
        self.blobs: dict[tuple[bytes, str], int] = {}
        send, find = node.send, node.blobs.find

        def counted(peers: str | Iterable[str], message: object) -> None:
            to = (peers,) if isinstance(peers, str) else tuple(peers)
            kind = wire.CODES[message.code] if isinstance(message, wire.Signed) else type(message)
            self.messages[kind.__name__] += len(to) * len(wire.pack(message))
            send(to, message)

        def found(key: bytes, reader: str) -> Any:
            blob = find(key, reader)
            if blob is not None and reader != node.peer_id:
                self.blobs[key, reader] = len(blob)
            return blob

        node.send = counted  # type: ignore[method-assign]
        node.blobs.find = found  # type: ignore[method-assign]

    def split(self, outputs: Iterable[bytes]) -> tuple[int, int]:
        """Return the bytes of contributions, and of outputs, which have these keys."""
        known = {*outputs}
        made = sum(size for (key, _), size in self.blobs.items() if key in known)
        return sum(self.blobs.values()) - made, made


class MeasuredWorld(World):
    """A simulation that notes when rounds begin and end, their processor time, and what each peer sends in them."""

    def __init__(self, options: SimulateOptions, folder: Path, voters: int) -> None:
        super().__init__(options, None, folder, lambda progress: None)
        founders = frozenset(self._identity(number).peer_id for number in range(voters or options.peers))
        self.charter = Charter(founders=founders, keepers=founders if voters else None)
        self.ready: dict[tuple[int, str], float] = {}
        self.sent_by: dict[str, Sent] = {}
        self.marks: dict[int, list[tuple[float, dict[str, Counter[str]]]]] = {}
        """By round: processor time and what each has sent, when the first begins it, and when the last has ended it."""
        self._checking = 0.0

    def assembled(self, peer: SimulatedPeer) -> None:
        super().assembled(peer)
        self.sent_by[peer.peer] = Sent(peer.node)

    def started(self, peer: SimulatedPeer, contribution: Contribution) -> None:
        self.ready.setdefault((contribution.round, peer.peer), trio.current_time())
        self.marks.setdefault(contribution.round, [self._mark()] * 2)
        super().started(peer, contribution)

    def ended(self, peer: SimulatedPeer, averaged: Averaged) -> None:
        if averaged.outcome.kind is OutcomeKind.DONE:
            self.marks[averaged.outcome.slot.round][1] = self._mark()
        began = time.process_time()
        super().ended(peer, averaged)
        self._checking += time.process_time() - began

    def _mark(self) -> tuple[float, dict[str, Counter[str]]]:
        return time.process_time() - self._checking, {peer: sent.messages.copy() for peer, sent in self.sent_by.items()}

    def waited(self, round_: int) -> float:
        """Return the seconds from the last that was ready for a round to its first certificate."""
        last = max(at for (number, _), at in self.ready.items() if number == round_)
        return self.checks.rows[round_].certified - last


def simulated(peers: int, rounds: int, *, rule: str = "gramguard", voters: int = 0, strike: str = "") -> MeasuredWorld:
    """Run rounds of peers that are ready at once; `voters` of them vote (0: all)."""
    options = replace(
        CALM,
        peers=peers,
        rounds=rounds,
        rule=rule,
        latency=Span(DELAY, DELAY),
        steps_time=Span(4.0, 4.0),
        strikes=(Strike.parse(strike, peers),) if strike else (),
    )
    gc.set_threshold(*GC_THRESHOLD)
    with TemporaryDirectory() as folder:
        world = MeasuredWorld(options, Path(folder), voters)
        run_virtual(world.run, seed=options.seed)
    gc.collect()
    assert not world.checks.violations, world.checks.violations
    assert not world.chaos.unmet
    return world


def of_rounds(peers: int, rounds: int, rule: str, voters: int = 0) -> Figures:
    """Return medians of all rounds but the first, in which streams are opened, and what a contributor sends in one."""
    world = simulated(peers, rounds, rule=rule, voters=voters)
    later = range(2, rounds + 1)
    sent = Counter[str]()
    contributors = [peer for peer in world.sent_by if not voters or peer not in world.charter.founders]
    for (_, before), (_, after) in (world.marks[number] for number in later):
        for peer in contributors:
            sent += after[peer] - before[peer]
    share = 1 / (len(later) * len(contributors))
    return {
        "delays": round(median(world.waited(number) / DELAY for number in later), 2),
        "cpu_s": round(median(after - before for (before, _), (after, _) in (world.marks[it] for it in later)), 2),
        "control_bytes": round(share * sum(sent.values())),
        "by_kind": {kind: round(share * size) for kind, size in sent.most_common()},
    }


def added_by(blow: str) -> Figures:
    """Return what a blow to an owner, once it has said its Result, adds to a round, in control deadlines."""
    world = simulated(8, 3, strike=f"round=3,after=Result,{blow}=owner")
    return {"deadlines": round((world.waited(3) - world.waited(2)) / CONTROL_DEADLINE, 2)}


def bytes_of_a_peer() -> Figures:
    """Return what one of four peers sends in a round of `PARAMS` in int4, in MB."""
    found: Figures = {}

    async def body(swarm: SimSwarm) -> None:
        all_ = [Sent(sim.node) for sim in swarm.sims]
        await all_at_once(swarm.sims)
        outputs = swarm.sims[0].outcomes[0].value.outputs
        contributed, made = zip(*(sent.split(outputs) for sent in all_), strict=True)
        control = [sum(sent.messages.values()) for sent in all_]
        for name, sizes in {"contributions": contributed, "outputs": made, "control": control}.items():
            found[name] = round(sum(sizes) / len(all_) / 1e6, 3)

    run_virtual(partial(with_swarm, 4, body, cells=-(-PARAMS // CELL), codec="int4", rule="gramguard"))
    return found


def replayed_lies() -> Figures:
    """Return the worst that the kept lies do to a round: the progress lost, and the length of the outer step."""
    moment, found = Moment(10, replace(SIZES["tiny"], steps=4), 2), Figures()
    for case, lie in KEPT:
        harm = moment.harm(case, lie)
        for name, worst in {"lost": harm.lost, "length": harm.longer}.items():
            key = f"{name} by {case.liars} of 10, {case.codec}"
            found[key] = max(found.get(key, 0.0), round(worst, 3))
    return found


PARTS: dict[str, Callable[[], Figures]] = {
    "8 voters, gramguard": partial(of_rounds, 8, 5, "gramguard"),
    "8 voters, mean": partial(of_rounds, 8, 5, "mean"),
    "16 voters, gramguard": partial(of_rounds, 16, 3, "gramguard"),
    "64 voters, mean": partial(of_rounds, 64, 2, "mean"),
    "64 members, 7 voters, gramguard": partial(of_rounds, 64, 2, "gramguard", 7),
    "an owner killed at its Result": partial(added_by, "kill"),
    "an owner stopped at its Result": partial(added_by, "stall"),
    "MB of 4 peers, 25M, int4": bytes_of_a_peer,
    "replayed lies, the worst": replayed_lies,
}


def main() -> None:
    """Measure the parts whose names have one of these words in them (none: all)."""
    began, words = time.process_time(), sys.argv[1:] or [""]
    figures = {name: part() for name, part in PARTS.items() if any(word in name for word in words)}
    rows = [
        [name, ", ".join(f"{key} {value}" for key, value in it.items() if key != "by_kind")] for name, it in figures.items()
    ]
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    seconds = round(time.process_time() - began)
    lines = [*table_lines(f"At {commit}, in {seconds} CPU seconds", ("part", "figures"), rows), json.dumps(figures)]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
