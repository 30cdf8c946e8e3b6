"""What an owner's command refuses before it signs anything."""

from dataclasses import replace

import pytest
from flockstep.dht.run.manifest import Manifest
from flockstep.peer.base.errors import UsageError
from flockstep.scripts.runs.owner import check_rounds

TOML = 'name = "some"\n[data]\nsource = "text:{stdlib}"\n[outer]\nrounds = 20\nmode = "streaming"\nfragments = 5\n'
RUN = Manifest.from_toml(TOML, where="run.toml", owner="")


def test_a_run_that_trains_does_not_end_in_the_past() -> None:
    longer, shorter = (replace(RUN, outer=replace(RUN.outer, rounds=rounds)) for rounds in (30, 10))
    check_rounds(101, longer)
    check_rounds(50, shorter)
    with pytest.raises(UsageError, match=r"outer.rounds = 10 is below the present round, 11"):
        check_rounds(51, shorter)
