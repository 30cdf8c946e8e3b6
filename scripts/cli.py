"""The `flockstep` command: verbs only; what stands behind each verb is in the file of its name.

Everything heavy is imported inside the verbs, so that `--help` answers at once. Every error ends in `main`.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..peer.config import DEFAULT_PORT
from ..peer.errors import FlockstepError, UsageError
from .cli_options import Announce, Home, Host, Json, Link, Port, config_of
from .cli_run import run_app

app = typer.Typer(
    name="flockstep",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Its boxes break the lines of examples, which are there to be copied.
)
app.add_typer(run_app, name="run")
bench_app = typer.Typer(help="Measure this computer, side by side with others.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench_app, name="bench")

def main() -> None:
    """Run the command; an error becomes one line on stderr, exit code 2 for a wrong argument or file, 1 for others."""
    try:
        app()
    except FlockstepError as error:
        remedy = f" — {error.remedy}" if error.remedy else ""
        sys.stderr.write(f"flockstep: {error}{remedy}\n")
        sys.exit(2 if isinstance(error, UsageError) else 1)


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"flockstep {__version__}")
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
      flockstep bootstrap                           # keep the door open for others
      flockstep run create run.toml --via /ip4/…    # publish a run of your own
    """


@app.command()
def bootstrap(home: Home = None, host: Host = "0.0.0.0", port: Port = DEFAULT_PORT, announce: Announce = None) -> None:
    """Keep the door open: a small daemon through which peers find each other.

    \b
    Examples:
      flockstep bootstrap                           # on port 4001 of every interface
      flockstep bootstrap --host 127.0.0.1 --port 0 # for this computer only, on any free port
    """
    from .bootstrap import run_bootstrap

    typer.echo("Opening the door; Ctrl-C closes it. Publish a run through any of its addresses as they appear:")
    run_bootstrap(
        config_of(home, host=host, port=port, announce=announce),
        lambda address: typer.echo(f"    flockstep run create run.toml --via {address}"),
    )


@app.command()
def join(
    link: Link,
    home: Home = None,
    host: Host = "0.0.0.0",
    port: Port = DEFAULT_PORT,
    announce: Announce = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps, or any name that torch knows.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Processor threads, to leave some to other work.")] = None,
    data: Annotated[str, typer.Option(help="Train on this source of yours, such as text:/corpus/*.txt.")] = "",
    tokenizer: Annotated[str, typer.Option(help="Where the file of the run's tokenizer is.")] = "",
    allow_model: Annotated[str, typer.Option(help="pkg.module:function that may build the run's model.")] = "",
    invite: Annotated[str, typer.Option(help="The invitation that the run's owner has sent you.")] = "",
    shard: Annotated[bool, typer.Option("--shard", help="Under torchrun: share the model, do not copy it.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write the model here at the end (safetensors).")] = None,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Go on from the state on this disk.")] = True,
    as_json: Json = False,
) -> None:
    """Lend this computer to a run: train with the others until it ends, or until Ctrl-C.

    \b
    Examples:
      flockstep join 'flockstep://…?via=…'
      flockstep join 'flockstep://…?via=…' --threads 2 --save model.safetensors
      torchrun --nproc-per-node 2 -m flockstep join 'flockstep://…?via=…'   # two GPUs, one peer
    """
    from .join import join as join_run

    config = config_of(home, host=host, port=port, announce=announce, device=device, data=data, allow_model=allow_model)
    config = replace(config, shard=shard, tokenizer=tokenizer, resume=resume, invite=invite)
    join_run(link, config, typer.echo, save=save, threads=threads, as_json=as_json)


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="A home folder, a run's folder in it, or a checkpoint's.")],
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.  [default: as trained]")] = "",
    merge: Annotated[str, typer.Option(help="Merge the adapter into this base: a folder or a hub id.")] = "",
    tokenizer: Annotated[str, typer.Option(help="Put this one beside it: a tokenizer.json, a folder, a hub id.")] = "",
    to: Annotated[str, typer.Option(help="Upload it: s3://bucket/prefix or hf://user/repository.")] = "",
) -> None:
    """Make a model that other programs load of the newest checkpoint on this computer.

    \b
    Examples:
      flockstep export ~/.flockstep my-model
      flockstep export ~/.flockstep my-model --dtype bfloat16 --to hf://me/my-model
      flockstep export ~/.flockstep my-model --merge meta-llama/Llama-3.2-1B
    """
    from .export import export as export_model

    export_model(source, out, typer.echo, dtype=dtype, base=merge, tokenizer=tokenizer, to=to)


@app.command()
def status(
    link: Annotated[str | None, typer.Argument(help="The join link; without one: this computer's own peer.")] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Show how the peers of a run stand.

    \b
    Examples:
      flockstep status                              # the peer on this computer
      flockstep status 'flockstep://…?via=…' --json
    """
    from .status import status as show_status

    show_status(link, config_of(home, port=0), typer.echo, as_json=as_json)


@app.command()
def demo(
    peers: Annotated[int, typer.Option(min=1, max=16, help="How many peers to start.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="How many rounds they train.")] = 12,
    kill: Annotated[bool, typer.Option(help="Kill one peer half way, and start a fresh one.")] = True,
    data: Annotated[
        Path | None, typer.Option(help="Text to train on: a file or folder.  [default: Python's own]")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the report, the logs and the peers' homes.")] = Path(
        "flockstep-demo"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Of the model and of the order of the text.")] = 0,
) -> None:
    """Watch several real peers train one model on this computer, one of them killed half way.

    \b
    Examples:
      flockstep demo                                # two minutes on two cores
      flockstep demo --peers 6 --rounds 30 --data ~/books
    """
    from .demo import DemoOptions, run_demo

    run_demo(DemoOptions(peers=peers, rounds=rounds, kill=kill, data=data, out=out, seed=seed))


@bench_app.command()
def allreduce(
    peers: Annotated[list[str] | None, typer.Option(help="How many, such as 4,8; repeatable.  [default: 4]")] = None,
    params: Annotated[list[str] | None, typer.Option(help="Of the vector: 25M, 1e6.  [default: 25M]")] = None,
    codec: Annotated[
        list[str] | None, typer.Option(help="Contribution/result, or one for both.  [default: int8,int4]")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds of each; medians are shown.")] = 3,
    baseline: Annotated[
        list[str] | None, typer.Option(help="Also measure hivemind, gloo, or one codec: hivemind/fp16.")
    ] = None,
    baseline_python: Annotated[str, typer.Option(help="Interpreter of the baselines.  [default: this one]")] = "",
    kill_after: Annotated[float | None, typer.Option(min=0, help="SIGKILL one peer so many seconds in.")] = None,
    stop_after: Annotated[float | None, typer.Option(min=0, help="SIGSTOP one peer so many seconds in.")] = None,
    as_json: Json = False,
) -> None:
    """Average a vector among real peers on this computer: time, CPU, bytes, memory and exactness.

    \b
    Examples:
      flockstep bench allreduce
      flockstep bench allreduce --baseline hivemind,gloo --repeat 5
      flockstep bench allreduce --peers 4,8 --codec int4,int4/int8 --kill-after 0.3 --json
    """
    from .bench import options_from, run_allreduce

    options = options_from(
        peers=peers or ["4"],
        params=params or ["25M"],
        codec=codec or ["int8", "int4"],
        repeat=repeat,
        baseline=baseline or [],
        baseline_python=baseline_python,
        kill_after=kill_after,
        stop_after=stop_after,
        as_json=as_json,
    )
    run_allreduce(options, typer.echo)


@bench_app.command(name="join")
def bench_join(
    members: Annotated[int, typer.Option(min=1, max=32, help="How many train when a newcomer comes.")] = 3,
    size: Annotated[str, typer.Option(help="Size of the gpt.")] = "25m",
    steps: Annotated[int, typer.Option(min=2, help="Inner steps of a phase: it must outlast the coming.")] = 100,
    repeat: Annotated[int, typer.Option(min=1, help="Newcomers, one after the other; medians are shown.")] = 3,
    as_json: Json = False,
) -> None:
    """Let newcomers join a run that trains: seconds to the first inner step, and what it costs the members.

    \b
    Examples:
      flockstep bench join
      flockstep bench join --members 5 --size 1m --steps 2000 --json
    """
    from .bench_join import JoinOptions, run_join

    run_join(JoinOptions(members=members, size=size, steps=steps, repeat=repeat, as_json=as_json), typer.echo)


@app.command()
def simulate(
    peers: Annotated[int, typer.Option(help="How many found the run.")] = 8,
    rounds: Annotated[int, typer.Option(help="How many rounds they train.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Decides all that is left to chance.")] = 0,
    bandwidth: Annotated[str, typer.Option(help="Each way: 20Mbit or 10Mbit..100Mbit.  [default: no limit]")] = "",
    latency: Annotated[str, typer.Option(help="One way between two peers.")] = "20ms..100ms",
    loss: Annotated[float, typer.Option(help="Chance of a packet to be sent again.")] = 0.0,
    churn: Annotated[float, typer.Option(help="Joins, and as many leaves, to expect in a round.")] = 0.0,
    partition: Annotated[list[str] | None, typer.Option(help="5+3@round=2..7; repeatable.")] = None,
    stall: Annotated[float, typer.Option(help="Peers that fall silent, to expect in a round.")] = 0.0,
    stall_time: Annotated[str, typer.Option(help="For how long.")] = "5s..20s",
    at: Annotated[
        list[str] | None, typer.Option(help="round=3,after=Cut,kill=convener (or stall=, cut=, leave=); repeatable.")
    ] = None,
    tensors: Annotated[bool, typer.Option(help="Average real vectors and check each bit.")] = True,
    steps_time: Annotated[str, typer.Option(help="How long an inner phase takes.")] = "10s..12s",
    min_peers: Annotated[int, typer.Option(help="Fewer make no round.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder for the event log.")] = None,
    as_json: Json = False,
) -> None:
    """Try rounds on a network in memory, in virtual time: the same seed gives the same events.

    \b
    Examples:
      flockstep simulate --peers 8 --loss 0.01 --churn 1
      flockstep simulate --at round=3,after=Cut,kill=convener --partition 5+3@round=5..7
      flockstep simulate --peers 64 --rounds 50 --no-tensors --json
    """
    from .simulate import run_simulate
    from .simulate_options import RATES, SECONDS, Partition, SimulateOptions, Span, Strike

    options = SimulateOptions(
        peers=peers,
        rounds=rounds,
        seed=seed,
        bandwidth=Span.parse(bandwidth, RATES, logarithmic=True) if bandwidth else None,
        latency=Span.parse(latency, SECONDS),
        loss=loss,
        churn=churn,
        stall=stall,
        stall_time=Span.parse(stall_time, SECONDS),
        partitions=tuple(Partition.parse(text, peers) for text in partition or ()),
        strikes=tuple(Strike.parse(text, peers) for text in at or ()),
        tensors=tensors,
        steps_time=Span.parse(steps_time, SECONDS),
        min_peers=min_peers,
        out=out,
    )
    if not run_simulate(options, typer.echo, as_json=as_json):
        raise typer.Exit(1)
