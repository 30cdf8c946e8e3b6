"""The `flockstep` command: verbs only; the work of each verb is in the file of its name.

The verbs for runs are in `cli.run`, those of the laboratory in `lab.verbs`, shared options in `cli.options`. Everything
heavy is imported inside the verbs, so that `--help` answers at once. Every error ends in `main`.
"""

import enum
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from ...peer.base.config import DEFAULT_PORT, default_home
from ...peer.base.errors import FlockstepError, UsageError
from ..peers.terminal import outlive_terminal
from ..volunteer.policy import MAX_CELSIUS, MAX_WATTS
from . import data, run, service
from .bootstrap import bootstrap
from .echo import echo
from .options import (
    Announce,
    Home,
    Host,
    Json,
    LinkArgument,
    MaxDown,
    MaxUp,
    Metrics,
    Name,
    PlanGpu,
    PlanPeers,
    PlanRate,
    Port,
    Upnp,
    Via,
    config_of,
)

DEFAULT_PAGE = "127.0.0.1:9402"
"""Beside 9401, which the examples give to Prometheus."""

GONE = {
    "--allow-data": "leave it out: a run's data are packed, and joining it agrees to them",
    "--csv": "`--json` has the same rows",
    "--log": "`--metrics` has the curves for Prometheus, `--json` and events.jsonl in the home folder every event",
    "--phase-s": "the steps of `bench utilization` take given times",
    "--picture": "`bench outer --json` has the curves",
    "--publish": "`flockstep export HOME FOLDER --to hf://org/name` uploads the newest state of a keeper",
    "--publish-every": "run `flockstep export HOME FOLDER --to …` as often as you like, as from cron",
    "--stop-after": "`flockstep simulate --at round=2,after=Have,stall=owner` lets a peer fall silent",
    "agree": "the data of a run are those of its manifest; `[model] from` begins a run of others from its state",
    "bench adversary": "`flockstep bench robust` trains under attack, also a function of your own",
    "bootstrap --keep": "start `flockstep keep LINK` beside it, with a home folder of its own",
    "bootstrap --page": "`flockstep page LINK` serves the page of a run, on the bootstrap's host as anywhere",
    "join --via": "the link names the bootstraps; `flockstep runs --via ADDRESS` prints the links of listed runs",
    "run snapshot": "`flockstep status LINK --json` prints the same picture",
    "service log": "your system shows it, such as `journalctl --user -u flockstep`",
    "service status": "`flockstep status` shows how the peer stands, and your system whether it runs",
}
"""Verbs and options that are gone, and what to use instead."""

app = typer.Typer(
    name="flockstep",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Its boxes break the lines of examples, which are there to be copied.
)
app.add_typer(run.app, name="run")
app.add_typer(data.app, name="data")
app.add_typer(service.app, name="service")


class Mode(enum.StrEnum):
    """The modes of the outer loop."""

    BLOCKING = "blocking"
    STREAMING = "streaming"


class Precision(enum.StrEnum):
    """The precisions of the passes (`peer.base.config.PRECISIONS`)."""

    AUTO = "auto"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


def main() -> None:
    """Run the command; an error becomes one line on stderr, exit code 2 for a wrong argument or file, 1 for others."""
    outlive_terminal()
    try:
        _refuse_gone(sys.argv[1:])
        app(prog_name="flockstep")  # As the shell's completion knows it, under `python -m flockstep`, too.
    except FlockstepError as error:
        remedy = f" — {error.remedy}" if error.remedy else ""
        echo(f"flockstep: {error}{remedy}", err=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except ModuleNotFoundError as error:
        if error.name != "torch":  # The only requirement that whoever keeps a run or shows it may leave out.
            raise
        remedy = "pytorch.org names the command for your device"
        echo(f"flockstep: this needs torch, which is not installed — {remedy}", err=True)
        sys.exit(1)


def _refuse_gone(arguments: Sequence[str]) -> None:
    """Raise `UsageError` for a verb or an option that is gone."""
    given = [" ".join(arguments[:1]), " ".join(arguments[:2]), *(each.partition("=")[0] for each in arguments[1:])]
    given += [f"{given[0]} {each}" for each in given[2:]]
    if gone := next((each for each in given if each in GONE), ""):
        raise UsageError(f"`{gone if gone.startswith('-') else f'flockstep {gone}'}` is gone", remedy=GONE[gone])


def _version(wanted: bool) -> None:
    if wanted:
        from ... import __version__

        echo(f"flockstep {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Train one model together over the open internet.

    \b
    Examples:
      flockstep demo                                # several peers train on this computer, two minutes
      flockstep join 'flockstep://…?via=…'          # lend this computer to a run
      flockstep keep 'flockstep://…?via=…'          # hold a run's state and vote, without training
      flockstep bootstrap                           # run a bootstrap, for others to join through
      flockstep run create run.toml --via /ip4/…    # publish a run of your own
    """


app.command()(bootstrap)


@app.command()
def join(
    link: LinkArgument,
    home: Home = None,
    host: Host = "0.0.0.0",
    port: Port = DEFAULT_PORT,
    announce: Announce = None,
    upnp: Upnp = True,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps, or any name that torch knows.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Processor threads.  [default: measured]")] = None,
    data: Annotated[str, typer.Option(help="Train on this folder of packed data (`flockstep data pack`).")] = "",
    data_cache: Annotated[float, typer.Option(min=0, help="GB of disk for packed data that are read from elsewhere.")] = 4.0,
    allow_model: Annotated[str, typer.Option(help="The run's model, if it is code, a folder here, or private.")] = "",
    invite: Annotated[str, typer.Option(help="The invitation that the run's owner has sent you.")] = "",
    name: Name = None,
    max_up: MaxUp = None,
    max_down: MaxDown = None,
    hours: Annotated[str | None, typer.Option(help="Train only in these hours of the day, such as 22-7.")] = None,
    when_idle: Annotated[
        bool | None, typer.Option("--when-idle/--always", help="Leave while other programs need this computer, or not.")
    ] = None,
    max_temp: Annotated[
        float | None, typer.Option(min=0, max=MAX_CELSIUS, help="Rest while the GPU is hotter, in °C (NVIDIA).")
    ] = None,
    max_watts: Annotated[
        float | None, typer.Option(min=0, max=MAX_WATTS, help="Rest so that the GPU draws no more on average (NVIDIA).")
    ] = None,
    metrics: Metrics = "",
    shard: Annotated[bool, typer.Option("--shard", help="Under torchrun: share the model, do not copy it.")] = False,
    micro_batch: Annotated[int, typer.Option(min=0, help="Samples through the model at once; 0: measured.")] = 0,
    checkpoint_activations: Annotated[
        bool, typer.Option("--checkpoint-activations", help="Less memory for a third more work.")
    ] = False,
    precision: Annotated[
        Precision, typer.Option(help="Of the passes; auto: bf16 or fp16 where a GPU is faster so.")
    ] = Precision.AUTO,
    load_in_4bit: Annotated[
        bool, typer.Option("--load-in-4bit", help="Hold the frozen base of a LoRA run in 4 bits (bitsandbytes).")
    ] = False,
    optimizer_8bit: Annotated[
        bool, typer.Option("--optimizer-8bit", help="Hold the states of AdamW in 8 bits (bitsandbytes).")
    ] = False,
    compile_model: Annotated[bool, typer.Option("--compile", help="Compile the model (torch.compile).")] = False,
    save: Annotated[Path | None, typer.Option(help="Write the model here at the end (safetensors).")] = None,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Go on from the state on this disk.")] = True,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before the first join of a run.")] = False,
    as_json: Json = False,
) -> None:
    """Lend this computer to a run: train until it ends, or Ctrl-C.

    Before the first join of a run it is shown, and on a terminal you are asked.

    \b
    Examples:
      flockstep join 'flockstep://…?via=…'
      flockstep join 'flockstep://…?via=…' --threads 2 --save model.safetensors
      flockstep join 'flockstep://…?via=…' --max-up 10 --hours 22-7 --when-idle
      torchrun --nproc-per-node 2 -m flockstep join 'flockstep://…?via=…'   # two GPUs, one peer
    """
    from ..peers.join import TrainingOptions
    from ..peers.join import join as join_run
    from ..volunteer.hours import Hours
    from ..volunteer.preferences import load_preferences

    place = config_of(home, host=host, port=port, announce=announce, upnp=upnp, device=device)
    config = replace(place, data=data, allow_model=allow_model)
    config = replace(config, shard=shard, resume=resume, invite=invite)
    config = replace(config, data_cache=data_cache, micro_batch=micro_batch, checkpoint_activations=checkpoint_activations)
    config = replace(config, threads=threads or 0, precision=precision.value, compile_model=compile_model)
    config = replace(config, load_in_4bit=load_in_4bit, optimizer_8bit=optimizer_8bit)
    preferred = load_preferences(config.home)
    limits = preferred.override(
        max_up=max_up, max_down=max_down, hours=hours, when_idle=when_idle, max_temp=max_temp, max_watts=max_watts
    )
    config = replace(config, max_up=limits.max_up, max_down=limits.max_down)
    config = replace(config, name=preferred.name if name is None else name)
    window = Hours.parse(limits.hours) if limits.hours else None
    options = TrainingOptions(
        save=save,
        as_json=as_json,
        yes=yes,
        hours=window,
        when_idle=limits.when_idle,
        max_temp=limits.max_temp,
        max_watts=limits.max_watts,
        metrics=metrics,
    )
    join_run(link, config, echo, options)


@app.command()
def runs(via: Via, home: Home = None, as_json: Json = False) -> None:
    """Show the runs that their owners list for everybody.

    \b
    Example:
      flockstep runs --via /ip4/203.0.113.7/tcp/4001/p2p/12D3KooW…
    """
    from ..runs.listed import show_runs

    show_runs(via, config_of(home, port=0), echo, as_json=as_json)


@app.command()
def plan(
    file: Annotated[Path, typer.Argument(help="The run.toml of the run.")],
    peers: PlanPeers = None,
    gpu: PlanGpu = None,
    rate: PlanRate = None,
    tokens_per_s: Annotated[
        float, typer.Option(help="Of one peer, as `flockstep join` says it.  [default: estimated from the GPU]")
    ] = 0.0,
    model: Annotated[str, typer.Option(help='MODULE:FUNCTION that makes the model of a run with source = "own".')] = "",
    as_json: Json = False,
) -> None:
    """Show what a run takes before anybody trains.

    These are its rounds, memory, tokens a day, hours and energy. It warns where the line is too thin or H too long,
    and names what to change.

    \b
    Examples:
      flockstep plan run.toml --peers 8 --gpu 4090 --rate 50
      flockstep plan run.toml --peers 4 --gpu t4 --rate 100 --tokens-per-s 9000
    """
    from ..runs.plan import fleet_named
    from ..runs.run import plan_run

    fleet = fleet_named(peers, gpu, rate, tokens_per_s)
    plan_run(file, fleet, echo, model=model, as_json=as_json)


@app.command()
def pause(home: Home = None) -> None:
    """Let the peer on this computer leave its run in order.

    It waits until `flockstep resume`, also after a restart.

    \b
    Example:
      flockstep pause
    """
    from ..volunteer.control import pause as pause_peer

    pause_peer(home or default_home(), echo)


@app.command()
def resume(home: Home = None) -> None:
    """Let a paused peer on this computer go on.

    \b
    Example:
      flockstep resume
    """
    from ..volunteer.control import resume as resume_peer

    resume_peer(home or default_home(), echo)


@app.command()
def keep(
    link: LinkArgument,
    home: Home = None,
    host: Host = "0.0.0.0",
    port: Port = DEFAULT_PORT,
    announce: Announce = None,
    upnp: Upnp = True,
    via: Annotated[list[str] | None, typer.Option(help="Address of a further bootstrap; repeatable.")] = None,
    invite: Annotated[str, typer.Option(help="The invitation that the run's owner has sent you.")] = "",
    name: Name = None,
    max_up: MaxUp = None,
    max_down: MaxDown = None,
    metrics: Metrics = "",
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Go on from the state on this disk.")] = True,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before the first time of a run.")] = False,
    as_json: Json = False,
) -> None:
    """Hold a run's state, vote and serve newcomers, without training.

    It needs no GPU, and no torch. Its vote counts where the run's manifest says so.

    \b
    Examples:
      flockstep keep 'flockstep://…?via=…'
      flockstep keep 'flockstep://…?via=…' --home ~/keeper --yes
    """
    from ..peers.keep import keep as keep_run
    from ..volunteer.preferences import load_preferences

    config = config_of(home, host=host, port=port, announce=announce, upnp=upnp)
    preferred = load_preferences(config.home)
    limits = preferred.override(max_up=max_up, max_down=max_down)
    config = replace(config, invite=invite, resume=resume, max_up=limits.max_up, max_down=limits.max_down)
    config = replace(config, name=preferred.name if name is None else name)
    keep_run(link, config, echo, via=via or (), as_json=as_json, yes=yes, metrics=metrics)


@app.command()
def doctor(
    link: Annotated[str | None, typer.Argument(help="The join link; without one: this computer alone.")] = None,
    home: Home = None,
    host: Host = "0.0.0.0",
    port: Port = DEFAULT_PORT,
    upnp: Upnp = True,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps, or any name that torch knows.")] = "auto",
    as_json: Json = False,
) -> None:
    """Find out what keeps this computer from a run, and the remedy.

    Exit code 1 if something is wrong.

    \b
    Examples:
      flockstep doctor                              # this computer
      flockstep doctor 'flockstep://…?via=…'        # and the way to a run
    """
    from ..doctor.doctor import doctor as examine

    if not examine(link, config_of(home, host=host, port=port, upnp=upnp, device=device), echo, as_json=as_json):
        raise typer.Exit(1)


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="A home folder, a run's folder in it, or a checkpoint's.")],
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.  [default: as trained]")] = "",
    merge: Annotated[str, typer.Option(help="Merge the adapter into this base: a folder or a hub id.")] = "",
    tokenizer: Annotated[str, typer.Option(help="Put this one beside it: a tokenizer.json, a folder, a hub id.")] = "",
    to: Annotated[str, typer.Option(help="Upload it: s3://bucket/prefix or hf://user/repository.")] = "",
    model: Annotated[str, typer.Option(help="Of a keeper of a run whose members bring it: MODULE:FUNCTION.")] = "",
) -> None:
    """Make a model for other programs of the last round here.

    \b
    Examples:
      flockstep export ~/.flockstep my-model
      flockstep export ~/.flockstep my-model --dtype bfloat16 --to hf://me/my-model
      flockstep export ~/.flockstep my-model --merge meta-llama/Llama-3.2-1B
    """
    from ..checkpoints.export import export as export_model

    export_model(source, out, echo, dtype=dtype, base=merge, tokenizer=tokenizer, to=to, model=model)


@app.command(name="eval")
def evaluate(
    source: Annotated[Path, typer.Argument(help="A home folder, a run's folder in it, or a checkpoint's.")],
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; repeatable.  [default: the run's]")] = None,
    home: Home = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps, or any name that torch knows.")] = "auto",
    data: Annotated[str, typer.Option(help="Measure on what this folder of packed data holds out.")] = "",
    allow_model: Annotated[str, typer.Option(help="The run's model, if it is code, a folder here, or private.")] = "",
    as_json: Json = False,
) -> None:
    """Measure the last round here: held-out loss, and prompts.

    \b
    Examples:
      flockstep eval ~/.flockstep
      flockstep eval ~/.flockstep --prompt 'def main(' --prompt 'import '
    """
    from ..checkpoints.evaluate import evaluate_checkpoint

    config = replace(config_of(home, port=0, device=device), data=data, allow_model=allow_model)
    evaluate_checkpoint(source, prompt or (), config, echo, lambda line: echo(line, err=True), as_json=as_json)


@app.command()
def status(
    link: Annotated[str | None, typer.Argument(help="The join link; without one: this computer's own peer.")] = None,
    home: Home = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until Ctrl-C, with each change of a run.")] = False,
    as_json: Json = False,
) -> None:
    """Show how a run and its peers stand.

    \b
    Examples:
      flockstep status                              # the peer on this computer
      flockstep status 'flockstep://…?via=…' --follow
      flockstep status 'flockstep://…?via=…' --json
    """
    from ..watch.status import status as show_status

    show_status(link, config_of(home, port=0), echo, as_json=as_json, follow=follow)


@app.command()
def page(
    link: LinkArgument,
    home: Home = None,
    place: Annotated[
        str, typer.Option("--page", help="HOST:PORT of the page; only an address of 127.0.0.1 keeps it on this computer.")
    ] = DEFAULT_PAGE,
    opens: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Serve a web page of a run: its curve, samples, peers, troubles.

    \b
    Examples:
      flockstep page 'flockstep://…?via=…' --open
      flockstep page 'flockstep://…?via=…' --page 0.0.0.0:9402   # for others, too: docs/page.md
    """
    from ..page.page import serve_page

    serve_page(link, config_of(home, port=0), echo, place=place, opens=opens)


@app.command()
def demo(
    peers: Annotated[int, typer.Option(min=1, max=16, help="How many peers to start.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="How many rounds they train.")] = 12,
    kill: Annotated[bool, typer.Option(help="Kill one peer half way, and start a fresh one.")] = True,
    data: Annotated[
        Path | None, typer.Option(help="Text to train on: a file or folder.  [default: Python's own]")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the figures, the logs and the peers' homes.")] = Path(
        "flockstep-demo"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Of the model and of the order of the text.")] = 0,
    mode: Annotated[Mode, typer.Option(help="Wait for the result of a round, or train on while it runs.")] = Mode.BLOCKING,
    page: Annotated[bool, typer.Option("--page", help="Serve the web page of the run, too.")] = False,
    opens: Annotated[bool, typer.Option("--open", help="Serve it, and open it in a browser.")] = False,
) -> None:
    """Watch several real peers train one model on this computer.

    One of them is killed half way.

    \b
    Examples:
      flockstep demo                                # two minutes on two cores
      flockstep demo --peers 6 --rounds 30 --data ~/books
      flockstep demo --mode streaming
      flockstep demo --open                         # and watch it in a browser
    """
    from ..demo.demo import DemoOptions, run_demo

    streaming = mode is Mode.STREAMING
    shown = {"page": page or opens, "opens": opens}
    run_demo(
        DemoOptions(peers=peers, rounds=rounds, kill=kill, data=data, out=out, seed=seed, streaming=streaming, **shown)
    )


def no_laboratory() -> None:
    """Measure and simulate: only in a checkout."""
    raise UsageError(
        "the laboratory (bench, simulate) is not part of an installation",
        remedy="`pip install -e .` in a checkout of flockstep",
    )


if find_spec("flockstep.scripts.lab") is not None:
    from ..lab import verbs

    app.add_typer(verbs.app, name="bench")
    app.command()(verbs.simulate)
else:
    for verb in ("bench", "simulate"):
        # Whatever stands behind the verb, --help too, gets the same answer.
        anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
        app.command(verb, hidden=True, context_settings=anything)(no_laboratory)
