"""A claim about a round is judged by what held in it: who was away while the run was revised waits until it knows."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flockstep.collectives.accountability import waiting
from flockstep.collectives.accountability.conduct import Conduct
from flockstep.collectives.accountability.evidence import claim_of
from flockstep.collectives.accountability.waiting import MAX_EARLY_CARRIERS
from flockstep.collectives.chain.certificate import certificate_hash
from flockstep.collectives.vector.codec import Codec
from flockstep.collectives.vector.lines import CodecChoice
from flockstep.dht.run.admission import Charter
from flockstep.dht.run.statements import OwnerStatement, OwnerStatements
from flockstep.peer import wire
from flockstep.peer.identity import Identity
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.node.node import Node
from flockstep.peer.wire import MAX_CLAIMS, Accusations
from flockstep.peer.wire.schema import encode
from flockstep.peer.wire.signed import sign
from support.certificates import grow
from support.keepers import KeptRun, all_at, in_memory, kept_run, key
from support.swarm import RUN, SimSwarm, with_swarm

KEEPER = 10
OWNER, LIAR = key(KEEPER), key(2)


def test_who_returns_after_a_revision_bans_the_liar_and_no_honest_accuser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It judged their claims by the codecs of the manifest, and banned six honest members, all voters among them."""

    def most_bits(choice: CodecChoice, *_: Any) -> str:
        choice.mine = max(choice.codec.codecs, key=lambda codec: codec.cell_bytes)
        return ""

    async def body(run: KeptRun) -> None:
        is_lying = False

        def corrupt(node: Node, codec: Codec) -> None:
            compute = node.compute

            async def changed(function: Any, *arguments: Any) -> Any:
                result = await compute(function, *arguments)
                if is_lying and getattr(function, "__name__", "") == "sketch_parts":
                    return (np.frombuffer(result, "<f4") * np.float32(0.5)).tobytes()
                return result

            node.compute = changed  # type: ignore[method-assign]  # a liar

        run.corrupt[LIAR.peer_id] = corrupt
        keepers = [run.keep(KEEPER + number) for number in range(4)]
        trainers = [run.train(number) for number in range(3)]
        away = run.keep(20)
        await run.until(lambda: all_at([*keepers, *trainers, away], 2))
        run.kill(away)
        log = OwnerStatements(run.signed.run_id, OWNER.peer_id)
        await run.state(log.sign(OWNER, OwnerStatement("revise", OWNER.peer_id, settings='{"codec.choices":"int8"}')))
        honest = [*keepers, *trainers[:2]]
        await run.until(lambda: all(peer.named("run.revised") for peer in keepers))
        is_lying = True
        await run.until(lambda: all(peer.named("peer.banned") for peer in honest))
        run.board.up = False  # No bootstrap answers.
        back = run.keep(20)
        await run.until(lambda: bool(back.named("peer.banned")), 120)
        await run.until(lambda: all_at([back], keepers[0].at[0]))
        assert back.named("evidence.missing")  # The claims came before it knew.
        assert {event["peer"] for peer in [*honest, back] for event in peer.named("peer.banned")} == {LIAR.peer_id}

    monkeypatch.setattr(CodecChoice, "choose", most_bits)
    run_virtual(partial(in_memory, kept_run(4, first=KEEPER, rule="gramguard"), tmp_path, body), seed=0)


def test_what_held_in_a_round_is_known_by_the_certificate_before_it_or_by_a_later_one_without_a_revision() -> None:
    async def body(swarm: SimSwarm) -> None:
        (sim,) = swarm.sims
        terms, chain = sim.averager._spec.terms, grow(None, 6)
        slot = wire.Slot(RUN, 4, certificate_hash(chain[2]))
        conduct = Conduct(sim.node, terms, Charter(), None, lambda round_: None)
        assert conduct._terms_in(wire.Slot(RUN, 1, bytes(32))) == terms
        assert conduct._terms_in(slot) is None  # A newcomer without a state.
        for round_, knows in ((2, False), (3, True), (4, True), (6, True)):
            conduct.advance(round_ + 1, chain[round_ - 1])
            assert (conduct._terms_in(slot) is not None) == knows, round_
        ledger = Conduct(sim.node, terms, Charter(), None, lambda round_: chain[round_ - 1])
        assert ledger._terms_in(slot) == terms
        assert ledger._terms_in(replace(slot, previous=bytes(32))) is None  # On a chain that I do not hold.

    run_virtual(partial(with_swarm, 1, body))


def test_claims_about_rounds_to_come_have_a_bounded_room_and_wait_for_their_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "MAX_EARLY_BYTES", 100_000)

    async def body(swarm: SimSwarm) -> None:
        (sim,) = swarm.sims
        bans, author = sim.averager._conduct.bans, Identity.from_seed(b"a" * 32)
        said = sign(author, wire.Commit(wire.Slot(RUN, 9, bytes(32)), bytes(32), 1, 1, 0.0, (bytes(32),) * 64))
        claims = tuple(encode(sign(author, claim_of(RUN, (said, said, said), part))) for part in range(64))
        bans._take("first", bans._judge(Accusations(claims[:1])) * 2)
        assert [*bans._early._claims["first"]] == [claims[0]]
        for number in range(MAX_EARLY_CARRIERS + 2):
            bans._take(f"carrier {number}", bans._judge(Accusations(claims[:MAX_CLAIMS])))
        assert len(bans._early._claims) == MAX_EARLY_CARRIERS
        for start in range(0, len(claims), MAX_CLAIMS):
            bans._take("first", bans._judge(Accusations(claims[start : start + MAX_CLAIMS])))
        assert 100_000 - len(claims[-1]) < sum(map(len, bans._early._claims["first"])) <= 100_000
        bans.advance(8)
        assert len(bans._early._claims) == MAX_EARLY_CARRIERS
        bans.advance(9)
        assert not bans._early._claims

    run_virtual(partial(with_swarm, 1, body))
