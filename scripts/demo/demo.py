"""`flockstep demo`: a bootstrap and several peers as real processes on this computer train one model together.

Theory of operation. The demo is a bystander: it starts the same commands that a person would type, reads the event logs
that any peer writes, kills one peer half way and starts a fresh one. Everything it prints it has read there or measured
on the model that a peer saved. Every wait has a bound, and every failure names the log file that tells more.
"""

import json
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from ...dht.run.manifest import Manifest, load_manifest
from ...peer.errors import LocalError, UsageError
from ...peer.identity import Identity
from ...peer.telemetry import log_path, read_events
from ..demo_view import DemoView
from ..local_run import ADDRESS, LINK, START_SECONDS
from ..processes import POLL, Killed, Process, Processes
from ..run import identity_path
from ..story import PeerStory
from .report import Findings, report, summary

STALL_SECONDS = 180.0
"""Without a finished round or a newcomer something hangs: ten times what a round takes on two busy cores."""
SEQUENCE_LENGTH = 128
MARK = "# Written by `flockstep demo`."

RUN_TOML = """{mark}
name = "demo"
seed = {seed}

[model]
name = "gpt"
size = "1m"

[data]
source = {source}
sequence_length = {length}
batch_size = 8

[inner]
steps = 20

[outer]
rounds = {rounds}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the user chose. Raises `UsageError` where it cannot be done."""

    peers: int
    rounds: int
    kill: bool
    data: Path | None
    out: Path
    seed: int

    def __post_init__(self) -> None:
        if self.kill and (self.peers < 2 or self.rounds < 2):
            raise UsageError("to lose one of them takes at least 2 peers and 2 rounds", remedy="add --no-kill")

    @property
    def source(self) -> str:
        """The data source of the run."""
        return "text:{stdlib}" if self.data is None else f"text:{self.data.expanduser().absolute()}"


@dataclass(slots=True)
class DemoPeer:
    """One peer of the demo: its process, its log, and the story that the log tells so far."""

    process: Process
    story: PeerStory
    home: Path
    offset: int = 0

    def read(self) -> bool:
        """Take in the new events; whether a round or a start was among them."""
        news = False
        for offset, event in read_events(log_path(self.home), offset=self.offset):
            self.offset = offset
            self.story.apply(event)
            news = news or event.get("event") != "step"
        return news


@dataclass(slots=True)
class Demo:
    """A demo under way."""

    options: DemoOptions
    processes: Processes
    view: DemoView
    started: float
    link: str = ""
    peers: list[DemoPeer] = field(default_factory=list)
    killed: Killed | None = None

    @property
    def out(self) -> Path:
        """Where everything is written."""
        return self.options.out

    @property
    def stories(self) -> list[PeerStory]:
        """What happened so far, a story for each peer."""
        return [peer.story for peer in self.peers]

    def open_run(self) -> Manifest:
        """Start the bootstrap and publish the run through it."""
        listen = ["--host", "127.0.0.1", "--port", "0"]
        home = self.out / "bootstrap"
        door = self.processes.start("the bootstrap", ["bootstrap", "--home", str(home), *listen], home / "log.txt")
        address = door.await_line(ADDRESS, START_SECONDS)
        owner = self.out / "owner"
        create = ["run", "create", str(self.out / "run.toml"), "--via", address, "--home", str(owner)]
        creator = self.processes.start("flockstep run create", create, owner / "log.txt")
        self.link = creator.await_line(LINK, START_SECONDS)
        return load_manifest(self.out / "demo.flockstep").manifest

    def start_peer(self) -> None:
        """Start one more peer, which knows nothing but the link."""
        name = f"peer-{len(self.peers) + 1}"
        home = self.out / "peers" / name
        threads = max(1, (os.cpu_count() or 1) // self.options.peers)
        join = ["join", self.link, "--home", str(home), "--host", "127.0.0.1", "--port", "0"]
        save = ["--threads", str(threads), "--save", str(home / "model.safetensors")]
        peer_id = Identity.load_or_create(identity_path(home)).peer_id
        process = self.processes.start(name, join + save, home / "log.txt")
        self.peers.append(DemoPeer(process, PeerStory(name, peer_id), home))

    def watch(self) -> None:
        """Until all have finished: show how they stand, and kill one half way."""
        last_news = time.monotonic()
        while True:
            ended = [peer for peer in self.peers if peer.process.code is not None]  # Before their last words are read.
            news = [peer.read() for peer in self.peers]
            self.view.update(self.stories)
            for peer in ended:
                if peer.story.state not in ("finished", "killed"):
                    raise peer.process.died()
            if len(ended) == len(self.peers):
                return
            if (
                self.options.kill
                and self.killed is None
                and len(self.peers[1].story.rounds) >= self.options.rounds // 2
            ):
                self._kill(self.peers[1])
                self.start_peer()
            if any(news):
                last_news = time.monotonic()
            elif time.monotonic() - last_news > STALL_SECONDS:
                logs = ", ".join(str(peer.process.log) for peer in self.peers if peer not in ended)
                raise LocalError(f"nothing has happened for {STALL_SECONDS:.0f} s", remedy=f"the logs are {logs}")
            time.sleep(POLL)

    def _kill(self, peer: DemoPeer) -> None:
        self.killed = peer.process.kill()
        peer.read()
        peer.story.kill()
        self.view.say(f"{peer.story.name} was killed with SIGKILL. {self.killed} A fresh peer joins.")

    def measure(self, manifest: Manifest) -> Findings:
        """Compare the model that a peer saved with the one that the run started from."""
        from .evaluate import Evaluation

        self.view.say("Measuring the model on text that no peer trained on …")
        seconds = time.time() - self.started
        saved = [peer.home / "model.safetensors" for peer in self.peers if peer.story.state == "finished"]
        evaluation = Evaluation(manifest)
        before = evaluation.loss()
        evaluation.load(saved[0])
        prompt, sample = evaluation.sample()
        return Findings(
            run_id=self.link.removeprefix("flockstep://").partition("?")[0],
            model=f"A byte-level {manifest.model.name.upper()}",
            parameters=evaluation.num_parameters,
            data="the Python standard library" if self.options.data is None else self.options.data.name,
            peers=self.stories,
            started=self.started,
            seconds=seconds,
            heldout_loss_start=before,
            heldout_loss_end=evaluation.loss(),
            prompt=prompt,
            sample=sample,
            killed=self.killed,
        )


def run_demo(options: DemoOptions) -> None:
    """Run it, print what it measured, and write the report. Raises `LocalError` if roots differ or no loss fell."""
    check_out(options.out)
    from ...optim.data.sources import open_source

    open_source(options.source, sequence_length=SEQUENCE_LENGTH)  # Wrong data is said here, not in a peer's log.
    prepare(options)
    console = Console()
    with Processes() as processes, DemoView(options.rounds, console) as view:
        demo = Demo(options, processes, view, time.time())
        view.say(
            f"Starting a bootstrap and {options.peers} peers on 127.0.0.1; all they write is under {options.out}/."
        )
        manifest = demo.open_run()
        view.say(f"The run is open: {demo.link}")
        for _ in range(options.peers):
            demo.start_peer()
        demo.watch()
        view.finish(demo.stories)
        findings = demo.measure(manifest)
    (options.out / "summary.json").write_text(json.dumps(summary(findings), indent=2), encoding="utf-8")
    (options.out / "report.html").write_text(report(findings), encoding="utf-8")
    for name, figure in findings.figures():
        console.print(f"{name:<14} {figure}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"\n{findings.prompt}{findings.sample}\n", highlight=False, markup=False, soft_wrap=True, style="dim")
    console.print(f"report         {options.out / 'report.html'}", highlight=False, markup=False, soft_wrap=True)
    if faults := findings.faults():
        raise LocalError("; ".join(faults), remedy=f"the logs are under {options.out}/")


def check_out(out: Path) -> None:
    """Raise `UsageError` if the output folder holds something that no demo wrote: the next one empties it."""
    try:
        toml = out / "run.toml"
        ours = not out.exists() or not any(out.iterdir()) or toml.read_text(encoding="utf-8").startswith(MARK)
    except (OSError, UnicodeDecodeError):
        ours = False
    if not ours:
        raise UsageError(f"{out} holds something that no demo wrote", remedy="choose another --out")


def prepare(options: DemoOptions) -> None:
    """Write the `run.toml` into an empty output folder. Raises `UsageError` where that cannot be done."""
    source = json.dumps(options.source)  # A JSON text is a TOML text.
    text = RUN_TOML.format(mark=MARK, seed=options.seed, source=source, length=SEQUENCE_LENGTH, rounds=options.rounds)
    try:
        if options.out.exists():
            shutil.rmtree(options.out)
        options.out.mkdir(parents=True)
        (options.out / "run.toml").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {options.out}: {error.strerror}", remedy="choose another --out") from error
