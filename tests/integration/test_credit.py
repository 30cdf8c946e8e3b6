"""Credit with real processes: a visitor sums up the certificates of a run that goes on, with the names of who is there."""

import csv
import json
from pathlib import Path

from support.bootstraps import TINY_RUN
from support.commands import Command, flockstep

HERE = ("--host", "127.0.0.1", "--port", "0")


def test_a_visitor_sees_who_has_contributed_under_the_name_that_it_gives_itself(
    bootstrap_address: str, tmp_path: Path
) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(TINY_RUN)
    with Command("run", "create", str(toml), "--via", bootstrap_address, "--home", str(tmp_path / "owner"), *HERE) as owner:
        link = next(line for line in owner.stdout if "flockstep://" in line).split("'")[1]
        join = ("join", link, "--home", str(tmp_path / "anna"), *HERE, "--threads", "1", "--json", "--yes")
        with Command(*join, "--name", "Anna [red]") as anna:
            events = (json.loads(line) for line in anna.stdout)
            peer = next(event["peer"] for event in events if event["event"] == "peer.start")
            next(event for event in events if event["event"] == "round.done" and event["round"] >= 2)
            show = ("run", "credit", link, "--home", str(tmp_path / "visitor"))
            shown = flockstep(*show, "--json", check=True).stdout
            lines = flockstep(*show, "--csv", check=True).stdout
            anna.kill()
        owner.kill()
    table = json.loads(shown)
    (row,) = table["credit"]
    assert (row["peer"], row["name"], table["first_round"]) == (peer, "Anna [red]", 1)
    assert row["rounds"] == table["round"] >= 2
    assert row["tokens"] >= 2 * 5 * 16  # Two rounds of five steps of a sequence of 16.
    (line,) = csv.DictReader(lines.splitlines())
    assert (line["peer"], line["name"]) == (peer, "Anna [red]")
