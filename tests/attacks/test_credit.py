"""Nobody gives itself credit: not by what it claims to have trained, nor by certificates that it shows."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio
from attacks.voters import founded
from flockstep.collectives.accountability.credit import Credits, PeerCredit
from flockstep.collectives.chain.certificate import value_of
from flockstep.collectives.chain.ledger import Ledger
from flockstep.collectives.chain.packed import pack_certificate
from flockstep.collectives.spec import charter_of
from flockstep.collectives.state.archive import LEDGER_FILE
from flockstep.collectives.visit.watcher import RunWatcher
from flockstep.dht.run.admission import Charter
from flockstep.dht.run.link import JoinLink
from flockstep.peer import wire
from flockstep.peer.base.transport import PeerId
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.wire.signed import verify_signed
from support.certificates import decided
from support.keepers import KeptRun, all_at, in_memory, kept_run
from support.swarm import SimPeer, SimSwarm, with_swarm


def test_who_claims_a_million_times_the_tokens_gets_half_as_many_again_as_the_others() -> None:
    async def body(swarm: SimSwarm) -> None:
        *others, liar = swarm.sims

        async def two_rounds(sim: SimPeer) -> None:
            while sim.averager.round <= 2:
                await sim.round(tokens=10**8 if sim is liar else 100)

        async with trio.open_nursery() as nursery:
            for sim in swarm.sims:
                nursery.start_soon(two_rounds, sim)
        certificate = others[0].averager.certificate
        assert certificate is not None
        value = value_of(certificate)
        credit = {value.members[index]: tokens for index, tokens in zip(value.contributors, value.credit, strict=True)}
        assert credit == {sim.peer: 150 if sim is liar else 100 for sim in swarm.sims}
        assert value.tokens == 2 * (4 * 100 + 150)

    run_virtual(partial(with_swarm, 5, body, cells=12, charter=founded(5)))


@pytest.mark.parametrize(
    ("tokens", "length", "credit"), [(5, 0.05, 5), (100, 0.05, 0), (5, 0.004, 0), (5, 0.0, 0), (100, -30.0, 0)]
)
def test_few_steps_bring_their_tokens_and_next_to_nothing_for_its_tokens_a_flag(
    tokens: int, length: float, credit: int
) -> None:
    async def body(swarm: SimSwarm) -> None:
        *others, slow = swarm.sims
        delta = slow.delta
        slow.delta = lambda round_: np.float32(length) * delta(round_)  # type: ignore[method-assign]

        async def a_round(sim: SimPeer) -> None:
            while sim.averager.round <= 1:
                await sim.round(tokens=tokens if sim is slow else 100)

        async with trio.open_nursery() as nursery:
            for sim in swarm.sims:
                sim.common = 1.0
                nursery.start_soon(a_round, sim)
        certificate = others[0].averager.certificate
        assert certificate is not None
        value = value_of(certificate)
        assert [value.members[index] for index in value.flagged] == ([] if credit else [slow.peer])
        found = dict(zip((value.members[index] for index in value.contributors), value.credit, strict=True))
        assert found == {sim.peer: credit if sim is slow else 100 for sim in swarm.sims}
        assert value.tokens == 400 + credit
        record = others[0].averager._conduct.trust_of(slow.peer)
        assert record is not None
        assert record.trust == (1.0 if credit else 0.5)

    run_virtual(partial(with_swarm, 5, body, cells=12, charter=founded(5), rule="gramguard"))


def folded(folder: Path, run: str, charter: Charter) -> dict[PeerId, tuple[int, int]]:
    """The credit by a ledger's file."""
    ledger = Ledger.open(folder / LEDGER_FILE, run, verify=verify_signed, telemetry=Telemetry(), charter=charter)
    credits_ = Credits()
    for number in range(1, ledger.head.round + 1):
        certificate = ledger.certificate(number)
        assert certificate is not None
        credits_.take(value_of(certificate))
    assert sum(each.tokens for each in credits_.all()) == ledger.head.tokens
    return {each.peer: (each.tokens, each.rounds) for each in credits_.all()}


def test_a_visitor_computes_what_the_ledgers_hold_and_believes_no_member(tmp_path: Path) -> None:
    """One member shows certificates that credit it more, under its own signature."""

    async def body(run: KeptRun) -> None:
        keeper, liar = run.keep(0), run.keep(1)
        trainers = [run.train(number) for number in (2, 3, 4)]
        await run.until(lambda: all_at([keeper, liar, *trainers], 8))
        for trainer in trainers:
            run.kill(trainer)
        await trio.sleep(180)  # Until no record of theirs is left.
        assert keeper.keeper is not None
        assert keeper.keeper.kept is not None
        assert liar.node is not None
        ledger = keeper.keeper.kept.archive.ledger

        lied = list[PeerId]()

        async def lie(peer: PeerId, question: wire.LedgerAsk) -> wire.LedgerPage:
            lied.append(peer)
            if (certificate := ledger.certificate(question.from_round)) is None:
                return wire.LedgerPage(())
            value = value_of(certificate)
            generous = replace(value, credit=(*value.credit[:-1], value.credit[-1] + 9), tokens=value.tokens + 9)
            return wire.LedgerPage((pack_certificate(decided(generous, certificate.slot, [liar.identity])),))

        liar.node.on_ask(wire.LedgerAsk, lie)
        while not lied:  # Whom a visitor asks first, it draws.
            async with run.visit() as visitor:
                watcher = RunWatcher(visitor.node, visitor.directory, signed, JoinLink(signed.run_id, ()))
                await watcher.look(ledger.head.round)
            found = watcher.chain
            assert (found.first, found.head) == (1, ledger.head)
            assert {each.peer for each in found.credit} == {trainer.peer for trainer in trainers}
            assert found.credit[0].tokens >= 100 * 6
        kept.append((found.credit, keeper.peer))

    signed, kept = kept_run(2), list[tuple[tuple[PeerCredit, ...], PeerId]]()
    run_virtual(partial(in_memory, signed, tmp_path, body), seed=0)
    ((found, holder),) = kept
    credit = {each.peer: (each.tokens, each.rounds) for each in found}
    assert folded(tmp_path / holder, signed.run_id, charter_of(signed)) == credit
