"""Revisions of a run that trains: all peers take one at one round boundary, whenever and from wherever they hear of it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from flockstep.collectives.allreduce.actions import Setup
from flockstep.collectives.chain.certificate import settings_after, signed_in, value_of
from flockstep.collectives.round import gather
from flockstep.collectives.round.vote import Vote
from flockstep.collectives.vector.codec import codec_named
from flockstep.dht.members.owner_log import OWNER_PERIOD
from flockstep.dht.run.manifest import Manifest
from flockstep.dht.run.revision import open_revision, why_not_revise
from flockstep.dht.run.statements import OwnerStatement, OwnerStatements
from flockstep.optim.keeper.keeper import Keeper
from flockstep.peer import wire
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.wire.schema import encode
from support.keepers import KeptRun, Peer, all_at, in_memory, kept_run, key
from support.rounds import PEERS, a_roster, a_setup, a_vote, order_of, signed

KEEPER = 10
"""The number of the first keeper's key, which owns the run."""
OWNER = key(KEEPER)


def live(body: Callable[[KeptRun], Any], folder: Path, keepers: int, **options: Any) -> None:
    run_virtual(partial(in_memory, kept_run(keepers, first=KEEPER, **options), folder, body), seed=0)


def log_of(run: KeptRun, *settings: str, ban: str = "") -> OwnerStatements:
    log = OwnerStatements(run.signed.run_id, OWNER.peer_id)
    for text in settings:
        log = log.sign(OWNER, OwnerStatement("revise", OWNER.peer_id, settings=text))
    return log.sign(OWNER, OwnerStatement("ban", ban)) if ban else log


def kept_of(peer: Peer) -> Keeper:
    assert peer.keeper is not None
    return peer.keeper


def settings_by_round(run: KeptRun, keeper: Peer) -> dict[int, Manifest]:
    """The settings after each round, by the certificates that a keeper holds."""
    kept = kept_of(keeper).kept
    assert kept is not None
    ledger = kept.archive.ledger
    found = {number: ledger.certificate(number) for number in range(1, kept.place.round + 1)}
    return {number: settings_after(it, run.signed) for number, it in found.items() if it is not None}


def numbers_by_round(run: KeptRun, keeper: Peer) -> list[int]:
    """The number of the revision that each certificate of a keeper names, in order."""
    kept = kept_of(keeper).kept
    assert kept is not None
    found = [kept.archive.ledger.certificate(number) for number in range(1, kept.place.round + 1)]
    named = [value_of(it).revision for it in found if it is not None]
    return [open_revision(data, run.signed.run_id, OWNER.peer_id).number for data in named]


def check_agreement(run: KeptRun, keeper: Peer, peers: Sequence[Peer]) -> None:
    """No peer has used other settings in a round than those of the chain."""
    chain = settings_by_round(run, keeper) | {0: run.signed.manifest}
    for peer in peers:
        assert peer.settings
        assert {number: chain[number] for number in peer.settings} == peer.settings


def test_a_run_is_extended_retuned_and_a_peer_banned_while_it_trains(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        keepers = [run.keep(KEEPER + number) for number in range(3)]
        trainers = [run.train(number) for number in range(3)]
        await run.until(lambda: all_at([*keepers, *trainers], 2))
        await run.state(log_of(run, '{"inner.lr":0.01,"outer.rounds":14}', ban=trainers[2].peer))
        staying = trainers[:2]
        await run.until(lambda: all_at([*keepers, *staying], 9))
        late = run.train(7)  # It has never heard of the manifest's own settings being in force.
        await run.until(lambda: all_at([*keepers, *staying, late], 14))
        await trio.sleep(60)
        assert {peer.at[0] for peer in (*keepers, *staying, late)} == {14}
        assert len({peer.at for peer in (*keepers, *staying, late)}) == 1
        check_agreement(run, keepers[0], [*staying, late])
        named = numbers_by_round(run, keepers[0])
        first = named.index(1) + 1
        assert named == [0] * (first - 1) + [1] * (15 - first)
        assert staying[0].settings[first - 1].inner.lr == run.signed.manifest.inner.lr
        assert staying[0].settings[first].inner.lr == 0.01
        # None is void because of it; keepers may become ready before there is a quorum of those that train.
        voids = {str(event["reason"]) for peer in (*keepers, *staying) for event in peer.named("round.void")}
        assert not {reason for reason in voids if "revision" in reason}
        assert not [event for peer in staying for event in peer.named("round.void")]
        last = [event for event in staying[0].named("round.done") if event["round"] == 14]
        assert trainers[2].peer not in last[0]["roster"]  # type: ignore[operator]  # A list.

    live(body, tmp_path, 3, rounds=8)


def test_what_reaches_one_keeper_reaches_all_with_the_certificate_and_survives_their_restarts(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        keepers = [run.keep(KEEPER + number) for number in range(4)]
        trainers = [run.train(number) for number in range(2)]
        everybody = [*keepers, *trainers]
        await run.until(lambda: all_at(everybody, 2))
        kept = kept_of(keepers[1]).kept
        assert kept is not None
        conduct = kept.archive.conduct
        conduct.revision = log_of(run, '{"inner.clip":0.5}').revision  # By a way that no other peer has.
        await run.until(lambda: 1 in numbers_by_round(run, keepers[0]))
        for keeper in keepers:
            run.kill(keeper)
        keepers = [run.keep(KEEPER + number) for number in range(4)]
        target = trainers[0].round + 3
        await run.until(lambda: all_at([*keepers, *trainers], target))
        assert all(kept_of(keeper).kept.archive.conduct.revision == b"" for keeper in keepers)  # type: ignore[union-attr]
        assert numbers_by_round(run, keepers[2])[-1] == 1
        check_agreement(run, keepers[2], trainers)
        assert {it.inner.clip for peer in trainers for it in [peer.settings[peer.round]]} == {0.5}

    live(body, tmp_path, 4)


def test_of_two_revisions_with_one_number_the_voters_take_one_and_no_older_one_comes_back(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        keepers = [run.keep(KEEPER + number) for number in range(4)]
        trainers = [run.train(number) for number in range(2)]
        await run.until(lambda: all_at([*keepers, *trainers], 2))
        one, other = log_of(run, '{"inner.lr":0.5}'), log_of(run, '{"inner.lr":0.25}')
        halves = {True: one.revision, False: other.revision}
        for number, keeper in enumerate(keepers):  # The owner shows each half of them another one.
            kept_of(keeper).kept.archive.conduct.revision = halves[number < 2]  # type: ignore[union-attr]
        await run.until(lambda: all_at([*keepers, *trainers], 8))
        named = numbers_by_round(run, keepers[0])
        rates = [it.inner.lr for it in settings_by_round(run, keepers[0]).values()]
        first = named.index(1)
        assert named == sorted(named)
        assert len(set(rates[first:])) == 1
        assert rates[first] in (0.5, 0.25)
        check_agreement(run, keepers[0], trainers)
        second = log_of(run, '{"inner.lr":0.5}', "{}")
        await run.state(second)
        await run.until(lambda: 2 in numbers_by_round(run, keepers[0]))
        for keeper in keepers:  # Whoever held the old one goes on to propose it.
            kept_of(keeper).kept.archive.conduct.revision = one.revision  # type: ignore[union-attr]
        target = trainers[0].round + 4
        await run.until(lambda: all_at([*keepers, *trainers], target))
        named = numbers_by_round(run, keepers[0])
        assert named == sorted(named)
        assert named[-1] == 2
        assert trainers[0].settings[trainers[0].round] == run.signed.manifest
        assert not [event for peer in trainers for event in peer.named("round.void")]

    live(body, tmp_path, 4)


def test_what_breaks_the_limits_is_never_proposed_and_strangers_revise_nothing(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        keepers = [run.keep(KEEPER + number) for number in range(3)]
        trainers = [run.train(number) for number in range(2)]
        everybody = [*keepers, *trainers]
        await run.until(lambda: all_at(everybody, 1))
        stranger = key(50)
        forged = replace(OwnerStatements(run.signed.run_id, stranger.peer_id)).sign(
            stranger, OwnerStatement("revise", stranger.peer_id, settings='{"inner.lr":0.5}')
        )
        kept_of(keepers[1]).kept.archive.conduct.revision = forged.revision  # type: ignore[union-attr]
        await run.state(log_of(run, '{"inner.lr":-1.0}'))
        await trio.sleep(2 * OWNER_PERIOD)
        target = trainers[0].round + 3
        await run.until(lambda: all_at(everybody, target))
        assert set(numbers_by_round(run, keepers[0])) == {0}
        assert not [event for peer in trainers for event in peer.named("round.void")]
        await run.state(log_of(run, '{"inner.lr":-1.0}', '{"inner.lr":0.5}'))
        await run.until(lambda: numbers_by_round(run, keepers[0])[-1] == 2)

    live(body, tmp_path, 3)


def test_a_proposer_that_names_an_old_revision_convinces_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old: list[bytes] = []
    honest, liar = gather.proposal, key(KEEPER + 1).peer_id

    def lying(setup: Setup, vote: Vote, *words: Any) -> tuple[wire.Roster, wire.Basis] | str:
        made = honest(setup, vote, *words)
        if isinstance(made, str) or not old or vote.me != liar:
            return made
        return replace(made[0], revision=old[0]), made[1]

    monkeypatch.setattr(gather, "proposal", lying)

    async def body(run: KeptRun) -> None:
        keepers = [run.keep(KEEPER + number) for number in range(4)]
        trainers = [run.train(number) for number in range(2)]
        everybody = [*keepers, *trainers]
        await run.until(lambda: all_at(everybody, 1))
        log = log_of(run, '{"inner.lr":0.5}', "{}")
        await run.state(log)
        await run.until(lambda: numbers_by_round(run, keepers[0])[-1] == 2)
        old.append(log.records[0].encode())
        target = trainers[0].round + 6
        await run.until(lambda: all_at(everybody, target))
        assert set(numbers_by_round(run, keepers[0])) <= {0, 2}
        refused = [event for event in keepers[0].events if "it names revision 1 after revision 2" in str(event)]
        assert refused  # It has proposed, and was heard.

    live(body, tmp_path, 4)


def test_a_revision_that_the_owner_has_replaced_is_brought_in_by_nobody() -> None:
    """The chain names none yet: the first is greater than what it holds, and the owner has withdrawn it with the second."""
    run = kept_run(1, first=KEEPER)
    log = OwnerStatements(run.run_id, OWNER.peer_id)
    for text in ('{"inner.lr":0.5}', "{}"):
        log = log.sign(OWNER, OwnerStatement("revise", OWNER.peer_id, settings=text))
    first, second = (record.encode() for record in log.records)
    proposer, me = order_of(PEERS[:4])[:2]
    check: dict[str, Any] = {"why_not_revise": partial(why_not_revise, run), "run": run.run_id}

    def answer(named: bytes, held: bytes, aware: int) -> str | None:
        """Answer a proposer that names one revision, where so many voters say that they hold another one."""
        made = a_roster(PEERS[:4], revision=named, **check)
        for voter in order_of(PEERS[:4])[4 - aware :]:
            word = next(wire.opened(signed_in(data)) for data in made.basis.heards if signed_in(data).sender == voter)
            assert isinstance(word, wire.Heard)
            said = encode(signed(voter, replace(word, revision=open_revision(held, run.run_id, "").number)))
            heards = (said if signed_in(data).sender == voter else data for data in made.basis.heards)
            made = made.but(heards=tuple(heards))
        assert made.roster.revision == named
        return made.why_not(a_setup(me, PEERS[:4], **check), a_vote(me, PEERS[:4]), proposer)

    for aware in (2, 3):
        assert answer(first, second, aware) == "it names a revision that the owner has replaced"
        assert answer(b"", second, aware) == "it names a revision that the owner has replaced"
        for named, held in ((first, b""), (first, first), (second, first), (second, second)):
            assert answer(named, held, aware) is None
    assert answer(first, second, aware=1) is None  # One of four may lie.


def test_codecs_and_outer_rates_change_at_one_boundary_also_for_who_replays_over_it(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        keepers = [run.keep(KEEPER + number) for number in range(4)]
        trainers = [run.train(number) for number in range(2)]
        states: dict[int, tuple[Any, Any]] = {}

        async def watch(run: KeptRun) -> None:
            while True:
                vectors = trainers[0].vectors
                if vectors is not None:
                    states[trainers[0].round] = vectors.theta.astype(np.float64), vectors.momentum.astype(np.float64)
                await trio.sleep(0.1)

        run.start(watch)
        await run.until(lambda: all_at([*keepers, *trainers], 2))
        away = keepers.pop()
        run.kill(away)  # Its disk ends before the first of the two.
        first = '{"codec.contribution":"bf16","codec.result":"int8","outer.lr":0.5,"outer.momentum":0.25}'
        second = '{"codec.result":"int8","outer.lr":1.5}'
        for number, log in enumerate((log_of(run, first), log_of(run, first, second)), start=1):
            for keeper in keepers:  # At once: the one that is away is to find few rounds, so that it replays them.
                kept_of(keeper).kept.archive.conduct.revision = log.revision  # type: ignore[union-attr]
            await run.until(lambda number=number: numbers_by_round(run, keepers[0])[-2:] == [number] * 2)  # type: ignore[misc]
        keepers.append(run.keep(KEEPER + 3))
        trainers.append(run.train(7))
        target = trainers[0].round + 3
        await run.until(lambda: all_at([*keepers, *trainers], target))
        assert len({peer.at for peer in (*keepers, *trainers) if peer.at[0] == target}) == 1
        replayed = {int(str(event["round"])) for event in keepers[-1].named("round.replayed")}
        named = numbers_by_round(run, keepers[0])
        assert len({named[number - 2] for number in replayed}) > 1  # Those that held in the rounds replayed.
        for peer in (*keepers, *trainers):
            for wrong in ("state.drift", "peer.charged", "peer.banned"):
                assert [str(event) for event in peer.named(wrong)] == []
            assert not [event for event in peer.named("replay.failed") if "lead" in str(event["reason"])]
        chain, kept = settings_by_round(run, keepers[0]) | {0: run.signed.manifest}, kept_of(keepers[0]).kept
        assert kept is not None
        rates, codecs, node = set(), set(), keepers[0].node
        assert node is not None
        for number in range(1, target + 1):
            outer = chain[number - 1].outer
            certificate = kept.archive.ledger.certificate(number)
            assert certificate is not None
            value, result = value_of(certificate), chain[number - 1].codec.result
            for output, low, high in zip(value.outputs, value.bounds, value.bounds[1:], strict=False):
                if low < high and (data := node.blobs.get(output, node.peer_id)) is not None:  # Of the last rounds.
                    assert len(data) == codec_named(result).num_bytes(high - low)
                    codecs.add(result)
            if number in states and number - 1 in states:
                (theta, m), (before, earlier) = states[number], states[number - 1]
                g = m - outer.momentum * earlier
                assert np.allclose(theta, before - outer.lr * (outer.momentum * m + g), atol=1e-6)
                rates.add(outer.lr)
        assert rates == {0.8, 0.5, 1.5}
        assert "int8" in codecs

    live(body, tmp_path, 4)
