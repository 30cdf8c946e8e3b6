"""Rounds of fragments, with the real participant and keeper: replay, restart and state transfer end in the same state."""

from functools import partial
from pathlib import Path

from flockstep.collectives.chain.certificate import value_of
from flockstep.collectives.chain.losses import Losses
from flockstep.collectives.state.archive import LOSSES_FILE
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.memory.network import run_virtual
from support.keepers import CELLS, KeptRun, all_at, in_memory, kept_run

FRAGMENTS = 3
RUN = kept_run(2, fragments=FRAGMENTS, rule="gramguard")


def test_each_round_averages_the_next_fragment_and_all_hold_the_same_state(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        peers = [run.keep(0), run.keep(1), run.train(2), run.train(3)]
        await run.until(lambda: all_at(peers, 2 * FRAGMENTS + 1))
        kept = peers[0].keeper and peers[0].keeper.kept
        assert kept
        certificates = [kept.archive.ledger.certificate(round_) for round_ in range(1, 2 * FRAGMENTS + 2)]
        ends = [(value.bounds[0], value.bounds[-1]) for value in map(value_of, filter(None, certificates))]
        cuts = [index * CELLS // FRAGMENTS for index in range(FRAGMENTS + 1)]
        assert ends == [(cuts[r % FRAGMENTS], cuts[r % FRAGMENTS + 1]) for r in range(2 * FRAGMENTS + 1)]

    run_virtual(partial(in_memory, RUN, tmp_path, body))


def test_who_was_away_replays_the_fragments_that_it_missed(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        keepers, trainers = [run.keep(0), run.keep(1)], [run.train(2), run.train(3)]
        await run.until(lambda: all_at([*keepers, *trainers], 2))
        run.network.partition([trainers[1].peer], [peer.peer for peer in (*keepers, trainers[0])])
        await run.until(lambda: all_at([*keepers, trainers[0]], 2 + FRAGMENTS + 2))
        run.network.heal()
        await run.until(lambda: all_at([*keepers, *trainers], 2 + FRAGMENTS + 4))
        assert len(trainers[1].named("round.replayed")) >= FRAGMENTS
        assert not trainers[1].named("replay.failed")

    run_virtual(partial(in_memory, RUN, tmp_path, body))


def test_a_killed_keeper_restores_its_checkpoint_and_replays_the_fragments_since(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        trainers = [run.train(2), run.train(3)]
        both = [run.keep(0), run.keep(1)]
        due = 2 * FRAGMENTS  # The round of a checkpoint.
        await run.until(lambda: all_at([*both, *trainers], due + 2))
        run.kill(both[1])
        again = run.keep(1)
        await run.until(lambda: again.keeper is not None and again.keeper.kept is not None and again.keeper.kept.is_settled)
        await run.until(lambda: all_at([both[0], again, *trainers], due + 4))
        (restored,) = again.named("state.restored")
        assert int(str(restored["round"])) >= due + 2
        assert int(str(restored["round"])) > int(str(restored["checkpoint"]))

    run_virtual(partial(in_memory, RUN, tmp_path, body))


def test_a_newcomer_takes_a_checkpoint_replays_the_fragments_since_and_learns_the_losses(tmp_path: Path) -> None:
    begin = 2 * FRAGMENTS + 2
    seen = [float(round_) for round_ in range(1, begin + 1)]

    def losses_of(peer: str) -> Losses:
        return Losses(tmp_path / peer / LOSSES_FILE, Telemetry())

    async def body(run: KeptRun) -> None:
        first = [run.keep(0), run.keep(1), run.train(2)]
        await run.until(lambda: all_at(first, begin))
        for peer in first:
            losses_of(peer.peer).learn(dict(enumerate(seen, 1)))
        newcomer = run.train(3)
        await run.until(lambda: all_at([*first, newcomer], begin + 3))
        assert int(str(newcomer.named("state.synced")[0]["round"])) >= begin
        assert newcomer.named("round.replayed")
        assert losses_of(newcomer.peer).since(1, begin) == tuple(seen)

    run_virtual(partial(in_memory, RUN, tmp_path, body))
