"""Evaluation with real processes: drawn peers measure the run's state, and a checkpoint is measured by hand."""

import json
from pathlib import Path

from flockstep.peer.base.config import PeerConfig
from flockstep.scripts.runs.run import create_run
from support.bootstraps import TINY_RUN
from support.commands import flockstep

EVALUATED = TINY_RUN + '[eval]\nevery = 2\nprompts = ["def main("]\n[admission]\nvoters = "members"\n'


def test_a_drawn_peer_measures_the_state_as_anybody_does_later_by_hand(bootstrap_address: str, tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(EVALUATED.replace("rounds = 100000", "rounds = 6"))
    home = tmp_path / "anna"
    link = create_run(toml, [bootstrap_address], PeerConfig(home=home), lambda line: None)
    shared = ("--home", str(home), "--host", "127.0.0.1", "--port", "0", "--threads", "1")
    joined = flockstep("join", link, *shared, "--name", "Anna [red]", "--json", "--yes")
    assert joined.returncode == 0, joined.stderr
    events = [json.loads(line) for line in joined.stdout.splitlines()]
    measured = {event["round"]: event for event in events if event["event"] == "eval.measured"}
    assert set(measured) == {2, 4, 6}
    results = [event for event in events if event["event"] == "eval.result"]
    assert results
    for event in results:
        assert event["loss"] == measured[event["round"]]["loss"]
        assert event["prompts"] in (["def main("], [])
        assert len(event["texts"]) == len(event["prompts"])
    ended = flockstep("eval", str(home), "--home", str(home), "--prompt", "import ", "--json")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.startswith("opening tokens:")  # Progress, where there is no terminal.
    found = json.loads(ended.stdout)
    assert (found["round"], found["samples"][0]["prompt"]) == (6, "import ")
    assert abs(found["loss"] - measured[6]["loss"]) < (0.01 if found["tokens"] == measured[6]["tokens"] else 1.0)
    wrong = flockstep("eval", str(home), "--home", str(home), "--prompt", "x" * 401)
    assert wrong.returncode == 2
    assert wrong.stderr.strip() == "flockstep: --prompt takes 1 to 400 bytes of text, not 401 — shorten it"
