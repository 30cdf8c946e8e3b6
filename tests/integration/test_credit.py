"""Credit with real processes: a visitor sums up the certificates of a run that goes on, with the names of who is there."""

import csv
import json
import subprocess
import sys
from pathlib import Path

from support.bootstraps import TINY_RUN

HERE = ("--host", "127.0.0.1", "--port", "0")


def test_a_visitor_sees_who_has_contributed_under_the_name_that_it_gives_itself(
    bootstrap_address: str, tmp_path: Path
) -> None:
    toml, command = tmp_path / "run.toml", [sys.executable, "-u", "-m", "flockstep"]
    toml.write_text(TINY_RUN)
    create = [*command, "run", "create", str(toml), "--via", bootstrap_address, "--home", str(tmp_path / "owner"), *HERE]
    with subprocess.Popen(create, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        link = next(line for line in owner.stdout if "flockstep://" in line).split("'")[1]
        join = [*command, "join", link, "--home", str(tmp_path / "anna"), *HERE, "--threads", "1", "--json", "--yes"]
        with subprocess.Popen([*join, "--name", "Anna [red]"], stdout=subprocess.PIPE, text=True) as anna:
            assert anna.stdout is not None
            events = (json.loads(line) for line in anna.stdout)
            peer = next(event["peer"] for event in events if event["event"] == "peer.start")
            next(event for event in events if event["event"] == "round.done" and event["round"] >= 2)
            show = [*command, "run", "credit", link, "--home", str(tmp_path / "visitor")]
            shown = subprocess.run([*show, "--json"], capture_output=True, text=True, timeout=60, check=True).stdout
            lines = subprocess.run([*show, "--csv"], capture_output=True, text=True, timeout=60, check=True).stdout
            anna.kill()
        owner.kill()
    table = json.loads(shown)
    (row,) = table["credit"]
    assert (row["peer"], row["name"], table["unlisted_rounds"]) == (peer, "Anna [red]", 0)
    assert row["rounds"] == table["round"] >= 2
    assert row["tokens"] >= 2 * 5 * 16  # Two rounds of five steps of a sequence of 16.
    (line,) = csv.DictReader(lines.splitlines())
    assert (line["peer"], line["name"]) == (peer, "Anna [red]")
