"""Evaluations of whole members in memory: all of them, keepers too, read the same median of what the drawn ones state."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from flockstep.peer.memory.network import run_virtual
from support.keepers import KeptRun, all_at, in_memory, kept_run, key

TRAINERS = range(2, 7)
ROUNDS = 16
"""With an evaluation every second round, each of the trainers is drawn in some."""


def live(body: Callable[[KeptRun], Any], folder: Path, **options: Any) -> None:
    run_virtual(partial(in_memory, kept_run(2, **options), folder, body), seed=0)


@pytest.mark.parametrize("fragments", [1, pytest.param(2, marks=pytest.mark.explore)])
def test_all_members_read_the_median_of_the_drawn_whatever_one_of_them_states(tmp_path: Path, fragments: int) -> None:
    async def body(run: KeptRun) -> None:
        liar, silent = key(2).peer_id, key(3).peer_id
        run.losses |= {liar: 0.0, silent: None}
        peers = [run.keep(0), run.keep(1), *(run.train(number) for number in TRAINERS)]
        await run.until(lambda: all_at(peers, ROUNDS))
        voters = {peer.peer for peer in peers[:2]}
        found: dict[Any, dict[str, Any]] = {}
        for peer in peers:
            results = peer.named("eval.result")
            assert len(results) >= 4
            assert not peer.named("eval.refused")
            for event in results:
                about: dict[str, Any] = {name: event[name] for name in ("loss", "by", "texts", "reason")}
                assert found.setdefault(event["round"], about) == about
        assert all(round_ % 2 == 0 for round_ in found)
        for about in found.values():
            others = set(about["by"]) - {liar}
            assert not set(about["by"]) & voters
            assert silent not in about["by"]
            if len(others) > 1:
                assert about["loss"] == 2.0
                assert about["texts"] == ["as the model writes"]
            if silent in about["reason"]:
                assert len(about["by"]) == 2
        assert any(liar in about["by"] for about in found.values())
        assert any(silent in about["reason"] for about in found.values())

    live(body, tmp_path, evaluate_every=2, fragments=fragments)


def test_a_run_that_asks_for_none_evaluates_nothing(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        peers = [run.keep(0), run.keep(1), run.train(2)]
        await run.until(lambda: all_at(peers, 6))
        assert not any(str(event["event"]).startswith("eval.") for peer in peers for event in peer.events)

    live(body, tmp_path)
