"""No cartel of fresh keys moves an honest peer that holds a chain (holes 4 and 24); what it takes where members vote."""

import json
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flockstep.collectives.vector.codec import FlatSum
from flockstep.scripts.lab.attacks.gradients import Attackers
from flockstep.scripts.lab.attacks.protocol import LIARS, TOGETHER, changes, lies
from flockstep.scripts.lab.simulate.peer import SimulatedPeer
from flockstep.scripts.lab.simulate.report import Report
from flockstep.scripts.lab.simulate.world import LOG, simulate
from support.simulations import CALM

ROUNDS = 5


def cartel(liar: SimulatedPeer, since: int, fellows: Collection[str] = ()) -> None:
    """From round `since` on, make rounds with the fellows alone, of a vector of their own, and never leave that chain."""
    everybody, follows = liar.averager._active, liar.member.catch_up.follows_another_chain
    provider = liar.member.catch_up.provider

    def apart() -> bool:
        return liar.averager.round >= since

    liar.averager._active = lambda: frozenset(fellows) if apart() else everybody()
    liar.member.catch_up.follows_another_chain = lambda members: not apart() and follows(members)  # type: ignore[method-assign]
    liar.member.catch_up.provider = lambda members: None if apart() else provider(members)  # type: ignore[method-assign]
    if since <= 1:  # They are in no roster before: in their run they are the founders.
        charter = replace(liar.averager._spec.charter, founders=frozenset(fellows))
        liar.averager._spec = replace(liar.averager._spec, charter=charter)
        liar.member.archive.ledger._charter = charter
    if since > 1:
        lies(liar, lambda peer, message: message if peer in fellows or not apart() else None)
    own = FlatSum([np.full(liar.state.theta.size, 0.5, np.float32)])
    changes(liar, lambda mine: replace(mine, vector=own) if mine.round >= since else mine)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    cartels = {f"cartel_{since}": partial(cartel, since=since) for since in (1, 3)}
    for name, lie in cartels.items():
        monkeypatch.setitem(LIARS, name, lie)
    monkeypatch.setattr("flockstep.scripts.lab.simulate.harm.TOGETHER", (*TOGETHER, *cartels))


def attacked(folder: Path, honest: int, liars: int, *, since: int, voters: str) -> tuple[Report, list[dict[str, Any]]]:
    attack = Attackers(f"cartel_{since}", liars)
    options = replace(CALM, peers=honest + liars, rounds=ROUNDS, rule="mean", attacks=(attack,), voters=voters)
    report = simulate(replace(options, out=folder, seed=1))
    log = (folder / LOG).read_text(encoding="utf-8").splitlines()
    return report, [json.loads(line) for line in log]


def moved(log: list[dict[str, Any]], honest: int, since: int) -> set[str]:
    """The honest peers that took a state which no honest peer has made."""
    names = {f"p{number}" for number in range(honest)}
    mine = [event for event in log if event["at"] in names]
    made = {event["root"] for event in mine if event["event"] == "round.done" and not names.isdisjoint(event["roster"])}
    taken = [event for event in mine if event["event"] in ("state.synced", "round.replayed") and event["round"] >= since]
    return {event["at"] for event in taken if event["root"] not in made}


def explored(*sizes: object) -> Any:
    return pytest.param(*sizes, marks=pytest.mark.explore)


@pytest.mark.parametrize(("honest", "liars"), [(4, 5), explored(6, 7), explored(10, 11)])
def test_fresh_keys_move_nobody_however_many_there_are(tmp_path: Path, honest: int, liars: int) -> None:
    report, log = attacked(tmp_path, honest, liars, since=1, voters="honest")
    certified = [event for event in log if event["event"] == "round.done"]
    theirs = {f"p{number}" for number in range(honest, honest + liars)}
    assert any(set(event["roster"]) <= theirs for event in certified)  # They do make rounds of their own.
    assert not moved(log, honest, 1)
    assert [row.number for row in report.rows if row.certified][-1] >= ROUNDS


@pytest.mark.parametrize(("honest", "liars"), [(4, 1), (4, 5), explored(6, 3), explored(10, 5)])
def test_where_every_member_votes_half_of_the_votes_takes_nobody_along(tmp_path: Path, honest: int, liars: int) -> None:
    """They train with the others for two rounds, which keys can do, and then go their own way."""
    _, log = attacked(tmp_path, honest, liars, since=3, voters="founders")
    assert not moved(log, honest, 3)
