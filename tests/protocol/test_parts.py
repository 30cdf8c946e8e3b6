"""Parts and codecs follow the lines: parts as receivers have measured them, not as claimed. Under virtual time."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import trio
from flockstep.collectives.chain.certificate import value_of
from flockstep.collectives.vector.lines import StatedLines
from flockstep.collectives.vector.partition import split
from flockstep.peer import wire
from flockstep.peer.memory.network import run_virtual
from support.liars import banned, events_of, lies, lies_about
from support.rounds import CELLS as FEW_CELLS
from support.rounds import PEERS, a_ready, a_roster, a_setup, a_vote, electorate, order_of
from support.swarm import SimSwarm, all_at_once, with_swarm

CELLS = 8192
"""1.1 MB a contribution as int4: an eighth of it is enough to measure a line."""
HOME = 1e6


def shares_of(swarm: SimSwarm) -> dict[str, float]:
    certificate = swarm.sims[-1].averager.certificate
    assert certificate is not None
    value = value_of(certificate)
    sizes = dict(zip(value.members, (high - low for low, high in pairwise(value.bounds)), strict=True))
    return {sim.peer: sizes.get(sim.peer, 0) / CELLS for sim in swarm.sims}


def run(lines: list[float], rounds: int, check: Callable[[list[float]], None], *, liar: bool = False) -> None:
    """Run rounds of peers with these lines; `check` gets their shares in the last round, a liar's first."""

    async def body(swarm: SimSwarm) -> None:
        if liar:
            lies(swarm.sims[0], lies_about("line", "ready"))
        await all_at_once(swarm.sims, rounds)
        assert len({sim.root for sim in swarm.sims}) == 1
        check(list(shares_of(swarm).values()))

    run_virtual(partial(with_swarm, len(lines), body, cells=CELLS, lines=lines))


def test_a_fast_line_owns_more_once_the_others_have_received_from_it() -> None:
    def check(shares: list[float]) -> None:
        assert shares[0] > 0.3  # Symmetric homes receive no faster from it than from all others together.
        assert all(0.03 < share < 0.13 for share in shares[1:]), shares

    run([20 * HOME] + [HOME] * 7, 3, check)


def test_a_slow_line_owns_less_whatever_it_claims_and_states_of_the_others() -> None:
    def check(shares: list[float]) -> None:
        assert shares[0] < 0.6 / 7
        assert all(0.1 < share < 0.2 for share in shares[1:]), shares

    run([HOME / 4] + [HOME] * 6, 3, check, liar=True)


def test_each_sends_in_the_codec_that_its_line_allows_in_one_round() -> None:
    lines = [HOME / 4, *[1.6 * HOME] * 5]
    stated: dict[str, str] = {}

    async def body(swarm: SimSwarm) -> None:
        for sim in swarm.sims:
            sim.phase_seconds = 75.0  # Of which a twentieth is for the contribution.
            lies(sim, partial(keep, sim.peer))
        await all_at_once(swarm.sims, 4)
        assert len({sim.root for sim in swarm.sims}) == 1
        assert {len(sim.outcomes[-1].cut) for sim in swarm.sims} == {len(lines)}
        slow, *homes = (stated[sim.peer] for sim in swarm.sims)
        assert (slow, {*homes}) == ("lloyd2", {"int8"})
        reasons = [str(event["reason"]) for event in events_of(swarm.sims, "codec.changed")]
        assert len(reasons) == len(lines)
        assert {reason.split(",")[0] for reason in reasons} == {"lloyd2 in place of int4", "int8 in place of int4"}

    def keep(author: str, peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
        if isinstance(message, wire.Commit):
            stated[author] = message.codec
        return message

    run_virtual(partial(with_swarm, len(lines), body, cells=CELLS, codec="int4 int8 lloyd2", rule="gramguard", lines=lines))


def test_a_round_that_nobody_waits_for_takes_half_of_a_line_where_that_is_enough() -> None:
    """And its rate is taken for nobody's line: the round after it goes as fast as before."""
    took: list[float] = []

    async def body(swarm: SimSwarm) -> None:
        for patience in (0.0, 0.0, 60.0, 60.0, 6.0, 2.0):
            for sim in swarm.sims:
                sim.patience = patience
            began = trio.current_time()
            await all_at_once(swarm.sims, 1)
            took.append(trio.current_time() - began)
        assert len({sim.root for sim in swarm.sims}) == 1

    run_virtual(partial(with_swarm, 5, body, cells=CELLS, lines=[HOME] * 5))
    _, full, half, again, shorter, short = took
    assert half == pytest.approx(2 * full, rel=0.25)
    assert again == pytest.approx(half, rel=0.25)
    assert full * 1.1 < shorter < half * 0.9  # At more than half of the line, and less than all.
    assert short == pytest.approx(full, rel=0.25)


def test_a_contribution_in_a_codec_that_the_run_does_not_offer_is_left_out() -> None:
    async def body(swarm: SimSwarm) -> None:
        liar, *others = swarm.sims
        lies(liar, lambda peer, message: replace(message, codec="fp32") if isinstance(message, wire.Commit) else message)
        await all_at_once(swarm.sims)
        assert [{*sim.outcomes[-1].cut} for sim in others] == [{sim.peer for sim in others}] * len(others)
        reasons = {event["reason"] for event in events_of(others, "round.part_missing")}
        assert reasons == {"the run lets nobody choose the codec that it states"}
        assert not any(banned(swarm.sims))

    run_virtual(partial(with_swarm, 5, body, codec="int4 lloyd2"))


VOTERS, KEYS = order_of(PEERS[:4]), PEERS[4:10]
CONVENER, *REST = VOTERS


def proposed(left_out: Collection[str], relayed: Collection[str], *, lying: bool) -> tuple[set[str], str | None]:
    """Return whom a proposer of four voters and six free keys leaves out, and why a voter refuses its roster.

    A lying one leaves out all of `left_out`, an honest one those of them that it may.
    """
    readies = {peer: replace(a_ready(), upload=0.0 if peer in relayed else 1e6) for peer in (*VOTERS, *KEYS)}
    made = a_roster(readies, voters=VOTERS, readies=readies, may_own=lambda peer: lying or peer not in left_out)
    members = made.roster.members
    lines = StatedLines({peer: readies[peer] for peer in members}, (), electorate(VOTERS).frontier)
    if lying:
        owners = set(readies) - {*left_out} - {*relayed} or set(readies) - {*left_out}
        made = made.but(bounds=split(range(FEW_CELLS), [int(peer in owners) for peer in members]))
    why_not = made.why_not(a_setup(REST[0], readies), a_vote(REST[0], VOTERS), CONVENER)
    return lines.without(made.roster.bounds), why_not


@pytest.mark.parametrize(
    ("left_out", "relayed", "why"),
    [
        ([*REST, *KEYS], [], "voters with a third of the votes"),
        ([*REST, *KEYS], [CONVENER], "do not follow from the lines"),
        (REST[:2], [], "voters with a third of the votes"),
        ([CONVENER], REST, "more than half of those that can own"),
        ([*KEYS], REST, "whole vector to one member"),
        (KEYS[:4], VOTERS, "more than half of those that can own"),
        ([*REST, *KEYS], [*VOTERS, *KEYS], "voters with a third of the votes"),
        (REST[:1], [], None),
        ([*REST[:1], *KEYS], [], None),
        (KEYS[:3], VOTERS, None),
    ],
)
def test_a_proposer_that_leaves_out_more_owners_than_can_have_lied_is_refused(
    left_out: list[str], relayed: list[str], why: str | None
) -> None:
    _, flaw = proposed(left_out, relayed, lying=True)
    assert (flaw is None) if why is None else (why in (flaw or "")), flaw
    without, flaw = proposed(left_out, relayed, lying=False)
    assert flaw is None  # An honest one leaves out fewer.
    assert (without >= set(left_out)) == (why is None)
