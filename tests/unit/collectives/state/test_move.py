"""A checkpoint that is moved on in its place: whole after a kill at any moment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from flockstep.collectives.chain.chain import position_after
from flockstep.collectives.chain.ledger import Ledger
from flockstep.collectives.state.move import rounds_between
from flockstep.dht.run.admission import Charter
from flockstep.dht.run.statements import OwnerStatement, OwnerStatements
from flockstep.peer import wire
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.wire.signed import verify_signed
from support.certificates import LONE, RUN, certify

TESTS = Path(__file__).parents[3]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes that are killed are forked")
@pytest.mark.parametrize("memory", ["as certified", "moved on"])
def test_a_kill_at_any_write_leaves_a_state_that_is_whole_and_of_one_round(tmp_path: Path, memory: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "support.killed_moves", str(tmp_path), memory]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


def test_a_planned_round_is_under_the_revision_that_the_certificate_before_it_names(tmp_path: Path) -> None:
    statement = OwnerStatement("revise", LONE.peer_id, settings='{"outer.lr":0.5}')
    revision = OwnerStatements(RUN, LONE.peer_id).sign(LONE, statement).revision
    charter = Charter(owner=LONE.peer_id, founders=frozenset([LONE.peer_id]))
    ledger = Ledger.open(tmp_path / "ledger", RUN, verify=verify_signed, telemetry=Telemetry(), charter=charter)
    chain: list[wire.Certificate] = []
    for named in (b"", revision, revision, revision):
        chain.append(certify(chain[-1] if chain else None, 1, revision=named))
        ledger.append(chain[-1])
    end = position_after(chain[3], RUN)
    rounds = rounds_between(ledger, position_after(chain[0], RUN), end)
    assert rounds is not None
    assert [(it.round, it.revision) for it in rounds] == [(2, b""), (3, revision), (4, revision)]
    rounds = rounds_between(ledger, position_after(chain[1], RUN), end)
    assert rounds is not None
    assert [it.revision for it in rounds] == [revision, revision]
