"""`flockstep demo`: a bootstrap and several real peers on this computer train one model.

Theory of operation. The demo starts the same commands that a user would type: a bootstrap, `run create`, which goes on as
the run's keeper, and `join` for each peer. It reads their event logs, kills one peer half way and starts a fresh one.
Everything that it prints is from these logs or measured on the model that a peer saved. Every wait has a timeout, and every
failure names the log file with the details.
"""

import contextlib
import json
import os
import shutil
import time
import webbrowser
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table
from rich.text import Text

from ...dht.run.manifest import Manifest, load_manifest
from ...optim.models.needs import size_of_gpt
from ...peer.base.config import PeerConfig
from ...peer.base.disk import disk_errors, write_whole
from ...peer.base.errors import LocalError, UsageError
from ...peer.base.plain import plain_lines
from ...peer.identity import Identity, identity_path
from ...peer.log.telemetry import log_path, read_events
from ..page.page import EarlyPage
from ..watch.console import PlainConsole
from ..watch.live_view import DemoView
from ..watch.story import PeerStory
from .findings import Findings, summary_of
from .local_run import HERE, open_run
from .processes import PROCESS_POLL, Killed, Process, Processes

DEMO_STALL_SECONDS = 180.0
"""Seconds without a finished round or a newcomer after which the demo fails: ten rounds on two busy cores."""
SEQUENCE_LENGTH = 128
PEER_MARK = "# Written by `flockstep demo`."

DEMO_RUN_TOML = """{mark}
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

[eval]
every = 3
prompts = ["def "]

[outer]
rounds = {rounds}
"""
DEMO_PAGE = "127.0.0.1:0"
"""Of the page: any free port, since a bootstrap or a run of this computer may have the usual one."""
FRAGMENTS = 2
"""In streaming mode: more fragments would make phases of the demo's small model shorter than the votes on a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The options of the command line. Raises `UsageError`."""

    peers: int
    rounds: int
    kill: bool
    data: Path | None
    out: Path
    seed: int
    streaming: bool = False
    """Whether peers train on while a round runs."""
    page: bool = False
    """Whether the web page of the run is served."""
    opens: bool = False
    """Whether it is opened in a browser."""

    def __post_init__(self) -> None:
        if self.kill and (self.peers < 2 or self.rounds < 2):
            raise UsageError("killing one peer needs at least 2 peers and 2 rounds", remedy="add --no-kill")

    @property
    def num_rounds(self) -> int:
        """All rounds of the run: so many of each fragment."""
        return self.rounds * (FRAGMENTS if self.streaming else 1)

    @property
    def source(self) -> str:
        """The run's data source."""
        return "text:{stdlib}" if self.data is None else f"text:{self.data.expanduser().absolute()}"


@dataclass(slots=True)
class DemoPeer:
    """One peer of the demo: its process, its log, and the story of its events so far."""

    process: Process
    story: PeerStory
    home: Path
    offset: int = 0

    def read(self) -> bool:
        """Apply the new events; return True if any was not an inner step."""
        progressed = False
        for offset, event in read_events(log_path(self.home), offset=self.offset):
            self.offset = offset
            self.story.apply(event)
            progressed = progressed or event.get("event") != "step"
        return progressed


@dataclass(slots=True)
class Demo:
    """A running demo."""

    options: DemoOptions
    processes: Processes
    view: DemoView
    started: float
    link: str = ""
    keeper: DemoPeer | None = None
    peers: list[DemoPeer] = field(default_factory=list)
    killed: Killed | None = None

    @property
    def out(self) -> Path:
        """The output folder."""
        return self.options.out

    @property
    def stories(self) -> list[PeerStory]:
        """The story of each peer so far, the keeper's last."""
        return [peer.story for peer in (*self.peers, *([self.keeper] if self.keeper else []))]

    def open_run(self) -> Manifest:
        """Start the bootstrap, and the owner, which publishes the run through it and keeps it from then on."""
        owner = self.out / "owner"
        keeper, self.link = open_run(self.processes, self.out / "run.toml")
        keeper_id = Identity.load_or_create(identity_path(owner)).peer_id
        self.keeper = DemoPeer(keeper, PeerStory("keeper", keeper_id), owner)
        return load_manifest(self.out / "demo.flockstep").manifest

    def start_peer(self) -> None:
        """Start one more peer, which knows only the link."""
        name = f"peer-{len(self.peers) + 1}"
        home = self.out / "peers" / name
        threads = max(1, (os.cpu_count() or 1) // self.options.peers)
        join = ["join", self.link, "--home", str(home), *HERE, "--name", name]
        save = ["--yes", "--threads", str(threads), "--save", str(home / "model.safetensors")]
        peer_id = Identity.load_or_create(identity_path(home)).peer_id
        process = self.processes.start(name, join + save, home / "log.txt")
        self.peers.append(DemoPeer(process, PeerStory(name, peer_id), home))

    def watch(self) -> None:
        """Show the progress until all have finished, and kill one peer half way."""
        last_progress = time.monotonic()
        while True:
            ended = [peer for peer in self.peers if peer.process.code is not None]  # Before their last events are read.
            assert self.keeper is not None
            self.keeper.read()
            if self.keeper.process.code is not None:
                raise self.keeper.process.died()
            progressed = [peer.read() for peer in self.peers]
            self.view.update(self.stories)
            for peer in ended:
                if peer.story.state not in ("finished", "killed"):
                    raise peer.process.died()
            if len(ended) == len(self.peers):
                return
            if (
                self.options.kill
                and self.killed is None
                and len(self.peers[1].story.rounds) >= self.options.num_rounds // 2
            ):
                self._kill(self.peers[1])
                self.start_peer()
            if any(progressed):
                last_progress = time.monotonic()
            elif time.monotonic() - last_progress > DEMO_STALL_SECONDS:
                logs = ", ".join(str(peer.process.log) for peer in self.peers if peer not in ended)
                raise LocalError(f"no progress for {DEMO_STALL_SECONDS:.0f} s", remedy=f"the logs are {logs}")
            time.sleep(PROCESS_POLL)

    def _kill(self, peer: DemoPeer) -> None:
        self.killed = peer.process.kill()
        peer.read()
        peer.story.kill()
        self.view.say(f"{peer.story.name} was killed with SIGKILL. {self.killed} A fresh peer joins.")

    def measure(self, manifest: Manifest) -> Findings:
        """Measure the held-out loss of the initial model and of the one that a peer saved."""
        from .evaluate import evaluate_saved

        self.view.say("Measuring the model on text that no peer trained on …")
        seconds = time.time() - self.started
        saved = [peer.home / "model.safetensors" for peer in self.peers if peer.story.state == "finished"]
        assert self.keeper is not None
        self.keeper.read()
        before, after = evaluate_saved(manifest, saved[0], self.out / "owner")
        return Findings(
            run_id=self.link.removeprefix("flockstep://").partition("?")[0],
            model=f"A byte-level {manifest.model.name.upper()}",
            parameters=size_of_gpt(manifest.model.options).num_trained,
            fragments=manifest.outer.fragments,
            data="the Python standard library" if self.options.data is None else self.options.data.name,
            peers=[peer.story for peer in self.peers],
            keeper=self.keeper.story,
            seconds=seconds,
            heldout_loss_start=before.loss,
            heldout_loss_end=after.loss,
            prompt=manifest.eval.prompts[0],
            sample_start=plain_lines(before.samples[0]),
            sample=plain_lines(after.samples[0]),
            killed=self.killed,
        )


def run_demo(options: DemoOptions) -> None:
    """Run the demo, print the figures, and write `summary.json`. Raises `LocalError` if roots differ or no loss fell."""
    check_out(options.out)
    if options.data is not None:
        from ...optim.packing.sources import open_source

        open_source(options.source)  # Wrong data is reported here, not in a process's log.
    prepare(options)
    console = PlainConsole()
    with Processes() as processes, contextlib.ExitStack() as views:
        page = views.enter_context(EarlyPage(DEMO_PAGE, PeerConfig(home=options.out / "page"))) if options.page else None
        if page is not None:
            console.say(f"The page of the run is {page.url} until the demo ends.")
            if options.opens:
                webbrowser.open(page.url)
        view = views.enter_context(DemoView(options.num_rounds, console))
        demo = Demo(options, processes, view, time.time())
        view.say(
            f"Starting a bootstrap and {options.peers} peers on 127.0.0.1; their files are under {options.out}/."
        )
        manifest = demo.open_run()
        view.say(f"The run is open: {demo.link}")
        view.say("Its owner's process goes on as the keeper, which votes and trains nothing.")
        if page is not None:
            page.follow(demo.link)
        for _ in range(options.peers):
            demo.start_peer()
        demo.watch()
        view.finish(demo.stories)
        findings = demo.measure(manifest)
    write_whole(options.out / "summary.json", json.dumps(summary_of(findings), indent=2).encode())
    columns = Table("before the training", "after it", padding=(0, 2, 0, 0), box=None)
    columns.add_row(*(Text(findings.prompt + sample) for sample in (findings.sample_start, findings.sample)))
    console.print("\nWhat the model writes\n", columns, "\n", sep="")
    for line in (*findings.lines(), f"All figures are in {options.out / 'summary.json'}."):
        console.say(line)
    if faults := findings.faults():
        raise LocalError("; ".join(faults), remedy=f"the logs are under {options.out}/")


def check_out(out: Path) -> None:
    """Raise `UsageError` if the output folder holds files that no demo wrote, since the demo empties it."""
    try:
        toml = out / "run.toml"
        ours = not out.exists() or not any(out.iterdir()) or toml.read_text(encoding="utf-8").startswith(PEER_MARK)
    except (OSError, UnicodeDecodeError):
        ours = False
    if not ours:
        raise UsageError(f"{out} holds files that no demo wrote", remedy="choose another --out")


def prepare(options: DemoOptions) -> None:
    """Empty the output folder and write the `run.toml`. Raises `LocalError` where that cannot be done."""
    source = json.dumps(options.source)  # A JSON string is a TOML string.
    text = DEMO_RUN_TOML.format(
        mark=PEER_MARK, seed=options.seed, source=source, length=SEQUENCE_LENGTH, rounds=options.rounds
    )
    text += f'mode = "streaming"\nfragments = {FRAGMENTS}\n' if options.streaming else ""
    with disk_errors(f"write {options.out}"):
        if options.out.exists():
            shutil.rmtree(options.out)
    write_whole(options.out / "run.toml", text.encode())
