"""Parts follow the lines that receivers have measured, and not those that a member claims. Under virtual time."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

from flockstep.collectives.chain.certificate import value_of
from flockstep.peer import wire
from flockstep.peer.memory.network import run_virtual
from support.liars import lies
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

            def lie(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
                if not isinstance(message, wire.Ready):
                    return message
                return replace(message, upload=1e15, rates=b"\xff" + bytes(len(message.rates) - 1) if message.rates else b"")

            lies(swarm.sims[0], lie)
        await all_at_once(swarm.sims, rounds)
        assert len({sim.root for sim in swarm.sims}) == 1
        check(list(shares_of(swarm).values()))

    run_virtual(partial(with_swarm, len(lines), body, cells=CELLS, lines=lines))


def test_a_fast_line_owns_more_once_the_others_have_received_from_it() -> None:
    def check(shares: list[float]) -> None:
        assert shares[0] > 0.3  # Symmetric homes receive no faster from it than from all others together.
        assert all(0.03 < share < 0.13 for share in shares[1:]), shares

    run([20 * HOME] + [HOME] * 7, 4, check)


def test_a_slow_line_owns_less_whatever_it_claims_and_states_of_the_others() -> None:
    def check(shares: list[float]) -> None:
        assert shares[0] < 0.6 / 7
        assert all(0.1 < share < 0.2 for share in shares[1:]), shares

    run([HOME / 4] + [HOME] * 6, 4, check, liar=True)
