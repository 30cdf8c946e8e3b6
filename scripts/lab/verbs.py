"""`flockstep bench` and `flockstep simulate`: the verbs that measure and simulate, on this computer alone."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..cli.options import Json

app = typer.Typer(help="Measure this computer, side by side with others.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def allreduce(
    peers: Annotated[list[str] | None, typer.Option(help="How many, such as 4,8; repeatable.  [default: 4]")] = None,
    params: Annotated[list[str] | None, typer.Option(help="Of the vector: 25M, 1e6.  [default: 25M]")] = None,
    codec: Annotated[
        list[str] | None, typer.Option(help="Contribution/result, or one for both.  [default: int8,int4]")
    ] = None,
    rule: Annotated[list[str] | None, typer.Option(help="How contributions become one.  [default: mean]")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds of each; medians are shown.")] = 3,
    hivemind: Annotated[str, typer.Option(help="Measure it, too, with this interpreter: hm/bin/python.")] = "",
    as_json: Json = False,
) -> None:
    """Average a vector among real peers here: time, CPU, bytes.

    Exactness, too.

    \b
    Examples:
      flockstep bench allreduce
      flockstep bench allreduce --hivemind hm/bin/python --repeat 5
      flockstep bench allreduce --codec int4 --rule mean,gramguard     # what the defence costs
      flockstep bench allreduce --peers 4,8 --codec int4,int4/int8 --json
    """
    from .bench.allreduce import allreduce_cases, run_allreduce

    cases = allreduce_cases(
        peers=peers or ["4"],
        params=params or ["25M"],
        codec=codec or ["int8", "int4"],
        rule=rule or ["mean"],
        baseline_python=hivemind,
    )
    run_allreduce(cases, repeat, typer.echo, as_json=as_json)


@app.command()
def gpu(
    cpu: Annotated[bool, typer.Option("--cpu", help="The same commands in a tiny size, on the processor.")] = False,
    as_json: Json = False,
) -> None:
    """Try everything on one CUDA GPU, in ten minutes: a table.

    It is what scripts/test-gpu runs: joins in each precision, memory, speed.

    \b
    Examples:
      flockstep bench gpu --json
      flockstep bench gpu --cpu
    """
    from .bench.gpu import run_gpu

    if not run_gpu(typer.echo, partial(typer.echo, err=True), cpu=cpu, as_json=as_json):
        raise typer.Exit(1)


@app.command(name="join")
def bench_join(
    members: Annotated[int, typer.Option(min=1, max=32, help="How many train when a newcomer comes.")] = 3,
    size: Annotated[str, typer.Option(help="Size of the gpt.")] = "25m",
    steps: Annotated[int, typer.Option(min=2, help="Inner steps of a phase: it must outlast the coming.")] = 30,
    repeat: Annotated[int, typer.Option(min=1, help="Newcomers, one after the other; medians are shown.")] = 2,
    as_json: Json = False,
) -> None:
    """Let newcomers join a run that trains, and time them.

    \b
    Examples:
      flockstep bench join
      flockstep bench join --members 5 --size 1m --steps 2000 --json
    """
    from .bench.join import JoinOptions, run_join

    options = JoinOptions(members=members, size=size, steps=steps, repeat=repeat, as_json=as_json)
    run_join(options, typer.echo, partial(typer.echo, err=True))


@app.command()
def outer(
    mode: Annotated[list[str] | None, typer.Option(help="Repeatable.  [default: blocking,streaming]")] = None,
    codec: Annotated[
        list[str] | None, typer.Option(help="Contribution/result, or one for both.  [default: fp32,int4,lloyd2/int4]")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--outer", help="Outer lr/momentum/warm-up; repeatable.  [default: 0.9/0.8/10]")
    ] = None,
    ramp: Annotated[list[str] | None, typer.Option(help="Most batches of one step, such as 1,8.  [default: 1]")] = None,
    peers: Annotated[list[str] | None, typer.Option(help="How many, such as 4,8.  [default: 8]")] = None,
    seeds: Annotated[list[str] | None, typer.Option(help="Such as 0,1,2.  [default: 0]")] = None,
    size: Annotated[str, typer.Option(help="tiny, micro, small, 1m, 10m or 51m.")] = "small",
    steps: Annotated[int | None, typer.Option(help="Inner steps of a round.  [default: the size's]")] = None,
    rounds: Annotated[int | None, typer.Option(help="How many.  [default: the size's]")] = None,
    rate: Annotated[list[str] | None, typer.Option(help="Multiples of the inner rates, such as 1,2,4.  [default: 1]")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or any name that torch knows.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Train a swarm in one process: the loss at equal tokens.

    One row for each mode, codec and outer setting, and the gap to data parallel.

    \b
    Examples:
      flockstep bench outer                         # ten minutes of one core
      flockstep bench outer --size tiny --codec int4,lloyd2/int4
      flockstep bench outer --mode blocking --codec fp32 --outer 0.8/0.5,0.9/0.8 --peers 2,4,8
      flockstep bench outer --size 1m --seeds 0,1,2 --json
    """
    from .bench.outer import baseline_of, outer_tables, outer_trainings
    from .training.rows import run_trainings

    trainings = outer_trainings(
        modes=mode or ["blocking,streaming"],
        codecs=codec or ["fp32,int4,lloyd2/int4"],
        outer=settings or ["0.9/0.8/10"],
        ramps=ramp or ["1"],
        peers=peers or ["8"],
        seeds=seeds or ["0"],
        rates=rate or ["1"],
        size=size,
        steps=steps,
        rounds=rounds,
        device=device,
    )
    run_trainings(trainings, baseline_of, outer_tables, typer.echo, as_json=as_json)


@app.command()
def robust(
    attacks: Annotated[
        list[str] | None,
        typer.Option(help="NAME:COUNT[:SCALE], none or all; repeatable.  [default: a few]"),
    ] = None,
    rules: Annotated[
        list[str] | None, typer.Option(help="Of the defence; repeatable.  [default: gramguard,mean]")
    ] = None,
    seeds: Annotated[list[str] | None, typer.Option(help="Such as 0,1,2.  [default: 0]")] = None,
    peers: Annotated[int, typer.Option(help="Honest ones and attackers together.")] = 10,
    size: Annotated[str, typer.Option(help="tiny, micro, small, 1m, 10m or 51m.")] = "tiny",
    device: Annotated[str, typer.Option(help="cpu, cuda, or any name that torch knows.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Train under attack: the loss above that without attackers.

    One row for each attack and rule.

    \b
    Examples:
      flockstep bench robust                        # a few minutes
      flockstep bench robust --attacks all --seeds 0,1,2 --json
      flockstep bench robust --attacks ipm:4:1.5 --rules gramguard
      flockstep bench robust --size 1m --device cuda
    """
    from .bench.robust import DEFAULT_ATTACKS, oracle_of, robust_table, robust_trainings
    from .training.rows import run_trainings

    trainings = robust_trainings(
        rules=rules or ["gramguard", "mean"],
        attacks=attacks or DEFAULT_ATTACKS,
        seeds=seeds or ["0"],
        peers=peers,
        size=size,
        device=device,
    )
    run_trainings(trainings, oracle_of, robust_table, typer.echo, as_json=as_json)


@app.command()
def utilization(
    peers: Annotated[
        int, typer.Option(min=2, max=64, help="How many, each in a network namespace of its own.")
    ] = 4,
    params: Annotated[str, typer.Option(help="Of the model: 25M, 150M.")] = "25M",
    rate: Annotated[list[str] | None, typer.Option(help="Mbit/s up and down; repeatable.  [default: 100]")] = None,
    delay: Annotated[float, typer.Option(min=0, max=10_000, help="Round trip between two peers, ms.")] = 60.0,
    step_s: Annotated[float, typer.Option(min=1e-3, max=86_400, help="Seconds of an inner step.")] = 1.0,
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="Inner steps between two rounds, H.")] = 100,
    rounds: Annotated[int, typer.Option(min=1, max=10_000, help="Rounds that are measured, after a first one.")] = 3,
    modes: Annotated[list[str] | None, typer.Option(help="Of [outer]; repeatable.  [default: both]")] = None,
    codecs: Annotated[list[str] | None, typer.Option(help="Contribution/result; repeatable.  [default: int4]")] = None,
    as_json: Json = False,
) -> None:
    """Train on shaped lines: the share of time spent training.

    It takes Linux and root.

    \b
    Examples:
      flockstep bench utilization --rate 16.7 --step-s 0.3
      flockstep bench utilization --params 150M --rate 30,100 --codecs int4,int8 --json
    """
    from .utilization.cases import utilization_cases
    from .utilization.utilization import run_utilization

    cases = utilization_cases(
        peers=peers,
        params=params,
        rate=rate or ["100"],
        round_trip_ms=delay,
        step_s=step_s,
        steps=steps,
        rounds=rounds,
        modes=modes or ["blocking,streaming"],
        codecs=codecs or ["int4"],
    )
    if not run_utilization(cases, typer.echo, partial(typer.echo, err=True), as_json=as_json):
        raise typer.Exit(1)


def simulate(
    peers: Annotated[int, typer.Option(help="How many found the run.")] = 8,
    rounds: Annotated[int, typer.Option(help="How many rounds they train.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Decides all that is left to chance.")] = 0,
    bandwidth: Annotated[str, typer.Option(help="Each way: 20Mbit or 10Mbit..100Mbit.  [default: no limit]")] = "",
    latency: Annotated[str, typer.Option(help="One way between two peers.")] = "20ms..100ms",
    loss: Annotated[float, typer.Option(help="Chance of a packet to be sent again.")] = 0.0,
    churn: Annotated[float, typer.Option(help="Joins, and as many leaves, to expect in a round.")] = 0.0,
    partition: Annotated[list[str] | None, typer.Option(help="5+3@round=2,for=60s; repeatable.")] = None,
    stall: Annotated[float, typer.Option(help="Peers that fall silent, to expect in a round.")] = 0.0,
    stall_time: Annotated[str, typer.Option(help="For how long.")] = "5s..20s",
    at: Annotated[
        list[str] | None, typer.Option(help="round=3,after=Cut,kill=proposer (or stall=, cut=, leave=; for=10s); repeatable.")
    ] = None,
    attack: Annotated[
        list[str] | None, typer.Option(help="NAME:COUNT, such as withholding:1; repeatable.")
    ] = None,
    rule: Annotated[str, typer.Option(help="Of the defence: gramguard or mean.")] = "gramguard",
    steps_time: Annotated[str, typer.Option(help="How long an inner phase takes.")] = "10s..12s",
    voters: Annotated[
        str, typer.Option(help="Of the first round: founders, honest (of them); of all: keepers (the founders).")
    ] = "founders",
    fragments: Annotated[int, typer.Option(help="Of the vector; more than 1: streaming mode.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder for the event log.")] = None,
    as_json: Json = False,
) -> None:
    """Try rounds on a network in memory, in virtual time.

    The same seed gives the same events.

    \b
    Examples:
      flockstep simulate --peers 8 --loss 0.01 --churn 1
      flockstep simulate --at round=3,after=Cut,kill=proposer --partition 5+3@round=5,for=60s
      flockstep simulate --attack withholding:2 --attack lying_owner:1
      flockstep simulate --peers 64 --rounds 50 --rule mean --json
      flockstep simulate --fragments 4 --rounds 40 --churn 0.5 --loss 0.01
    """
    from .attacks.gradients import Attackers
    from .attacks.protocol import LIARS
    from .simulate.options import RATES, SECONDS, Partition, SimulateOptions, Span, Strike
    from .simulate.world import run_simulate

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
        attacks=tuple(Attackers.parse(text, LIARS) for text in attack or ()),
        rule=rule,
        steps_time=Span.parse(steps_time, SECONDS),
        voters=voters,
        fragments=fragments,
        out=out,
    )
    if not run_simulate(options, typer.echo, as_json=as_json):
        raise typer.Exit(1)
