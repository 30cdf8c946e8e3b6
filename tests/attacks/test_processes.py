"""Attackers in real processes: four honest peers and one attacker over real sockets.

The four are the same in all tests, and `Company.fly` checks the invariants of each round.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacks.members import Company
from attacks.peer import TESTS, Fall, Train

NUM_HONEST = 4
TWO_CUTS = "two different Cuts"
OTHER_SKETCH = "its sketch is not of what it committed to"


@pytest.fixture(scope="module")
def company(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Company]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((TESTS, os.environ.get("PYTHONPATH", ""))))
        with Company(tmp_path_factory.mktemp("company"), NUM_HONEST) as company:
            company.run_rounds()  # Of the run's first round all that are there are voters; of the second these.
            yield company


def test_a_proposer_that_cuts_two_ways_is_banned_by_its_own_words_also_by_who_is_killed_and_comes_back(
    company: Company,
) -> None:
    with company.joined_by("equivocating_proposer", proposing=True) as liar:
        company.run_rounds(liar)  # It gets a vote, and proposes in the next one.
        victim = company.honest[1]
        victim.call(Fall("Commit"))
        company.run_rounds(liar, falling=victim)
        company.all_ban(liar, TWO_CUTS)
        again = company.restart(company.honest[0])
        assert again.wait("peer.banned", peer=liar.id)["step"] == "from the disk"
        company.run_until(lambda: company.cuts() == {tuple(company.ids)}, liar)
        assert company.banned() == set()


def test_who_commits_to_other_bytes_than_it_speaks_of_is_banned_by_them(company: Company) -> None:
    with company.joined_by("lying_sender") as liar:
        company.run_until(lambda: bool(company.banned()), liar)
        company.all_ban(liar, OTHER_SKETCH)
        assert all(set(cut) <= set(company.ids) for cut in company.cuts())


def test_who_votes_alone_and_is_killed_before_it_holds_what_it_has_decided_goes_on_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts are lost with it, and nobody else can give it the round: it replays what its disk has of it."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((TESTS, os.environ.get("PYTHONPATH", ""))))
    with Company(tmp_path, 1) as company:
        (alone,) = company.honest
        company.run_rounds()
        alone.call(Fall("Precommit"))
        alone.post(Train(2, (alone.id,)))
        assert alone.fallen()
        alone = company.restart(alone)
        alone.train(4, [alone.id])
        assert alone.position.round == 4
