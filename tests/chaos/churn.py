"""Churn: the held-out loss of a run with joins and leaves, against the same run without.

cd tests && python -m chaos.churn --seed 1 --comings 20 --rounds 30

Real `flockstep join` processes on loopback. At moments drawn from the seed a peer joins, leaves in order, or is killed with
SIGKILL. It checks that all peers end every round with equal roots, and prints the held-out loss of both runs.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from flockstep.dht.run.manifest import load_manifest
from flockstep.peer.telemetry import log_path, read_events
from flockstep.scripts.demo.evaluate import evaluate_saved
from flockstep.scripts.local_run import open_run
from flockstep.scripts.processes import Process, Processes
from flockstep.scripts.story import PeerStory

FOUNDERS = 4
FEWEST, MOST = 3, 6
"""Members at any time: below nobody goes, above nobody comes."""
PATIENCE = 300.0
"""Seconds without a finished round after which something hangs."""
RUN_TOML = """\
name = "churn"
seed = 3

[model]
name = "gpt"
size = "0.2m"

[data]
source = "text:{{stdlib}}"
sequence_length = 128
batch_size = 8

[inner]
steps = 50

[outer]
rounds = {rounds}
"""


@dataclass
class Member:
    """One peer: its process and what its log has told."""

    process: Process
    home: Path
    story: PeerStory
    offset: int = 0
    gone: bool = False

    def read(self) -> None:
        for offset, event in read_events(log_path(self.home), offset=self.offset):
            self.offset = offset
            self.story.apply(event)


@dataclass
class Season:
    """A run from its first round to its last."""

    folder: Path
    rounds: int
    processes: Processes
    members: list[Member] = field(default_factory=list)
    happened: list[str] = field(default_factory=list)

    def open(self) -> None:
        toml = self.folder / "run.toml"
        toml.write_text(RUN_TOML.format(rounds=self.rounds))
        _, self.link = open_run(self.processes, toml)
        for _ in range(FOUNDERS):
            self.come()

    def come(self) -> None:
        name = f"peer-{len(self.members) + 1}"
        home = self.folder / name
        listen = ["--home", str(home), "--host", "127.0.0.1", "--port", "0", "--threads", "1"]
        save = ["--save", str(home / "model.safetensors")]
        process = self.processes.start(name, ["join", self.link, *listen, *save], home / "log.txt")
        self.members.append(Member(process, home, PeerStory(name, "")))

    def go(self, member: Member, *, kill: bool) -> None:
        member.gone = True
        if kill:
            member.process.kill()
        else:
            member.process.interrupt()

    def here(self) -> list[Member]:
        return [member for member in self.members if not member.gone]

    def reached(self) -> int:
        """The last round that anybody has finished."""
        for member in self.members:
            member.read()
        return max((number for member in self.members for number in member.story.rounds), default=0)

    def run_rounds(self, moments: list[int], chance: random.Random) -> None:
        """To the last round; behind each round in `moments` somebody comes or goes."""
        last, since = 0, time.monotonic()
        while any(member.process.code is None for member in self.here()):
            reached = self.reached()
            if reached > last:
                last, since = reached, time.monotonic()
            assert time.monotonic() - since < PATIENCE, f"nothing after round {last}; the logs are in {self.folder}"
            while moments and moments[0] <= reached:
                moments.pop(0)
                self.change(reached, chance)
            time.sleep(0.1)
        self.reached()

    def change(self, number: int, chance: random.Random) -> None:
        here = self.here()
        comes = len(here) <= FEWEST or (len(here) < MOST and chance.random() < 0.5)
        if comes:
            self.come()
            self.happened.append(f"{number}: {self.members[-1].story.name} comes")
            return
        member, kill = chance.choice(here), chance.random() < 0.5
        self.go(member, kill=kill)
        self.happened.append(f"{number}: {member.story.name} {'is killed' if kill else 'leaves'}")

    def unequal(self) -> list[int]:
        """The rounds after which two peers held different states."""
        roots = defaultdict(set)
        for member in self.members:
            for seen in member.story.rounds.values():
                roots[seen.round].add(seen.root)
        return [number for number, found in roots.items() if len(found) != 1]

    def loss(self) -> float:
        """Of the model that the run ended with, on held-out text."""
        saved = [path for member in self.here() if (path := member.home / "model.safetensors").exists()]
        assert saved, f"nobody has finished; the logs are in {self.folder}"
        return evaluate_saved(load_manifest(self.folder / "churn.flockstep").manifest, saved[0])[1].loss


def season(rounds: int, moments: list[int], chance: random.Random) -> dict[str, object]:
    """One run with these moments; what it came to."""
    with tempfile.TemporaryDirectory(prefix="flockstep-churn-") as folder, Processes() as processes:
        run = Season(Path(folder), rounds, processes)
        run.open()
        run.run_rounds(list(moments), chance)
        return {
            "happened": run.happened,
            "rounds": run.reached(),
            "unequal_rounds": run.unequal(),
            "void": sum(len(member.story.voids) for member in run.members),
            "tokens": sum(member.story.tokens for member in run.members),
            "heldout_loss": run.loss(),
        }


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--comings", type=int, default=20, help="how often somebody comes or goes")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    moments = sorted(chance.randrange(1, arguments.rounds - 1) for _ in range(arguments.comings))
    losses = []
    for name, when in (("without", []), ("with", moments)):
        figures = season(arguments.rounds, when, chance)
        losses.append(figures["heldout_loss"])
        say(json.dumps({"churn": name, **figures}))
        if figures["unequal_rounds"]:
            return 1
    without, with_churn = losses
    assert isinstance(without, float)
    assert isinstance(with_churn, float)
    say(f"held-out loss with churn: {with_churn / without - 1:+.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
