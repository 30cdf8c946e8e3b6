"""What `status` says of a picture: a run that waits, one beyond its end, a closed one, names in a narrow terminal."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from flockstep.collectives.agreement.electorate import Electorate
from flockstep.collectives.picture.figures import figures_of
from flockstep.collectives.picture.picture import NOT_COUNTED, Picture, RunState, RunTrouble, TroubleKind
from flockstep.collectives.picture.votes import VotesHere
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.troubles import NEEDS_PROGRAM
from flockstep.peer.log.telemetry import Telemetry, log_path
from flockstep.scripts.watch.status import live_view, votes_line
from flockstep.scripts.watch.words import describe_picture, member_story, progress_words, trouble_words
from rich.console import Console
from support.pictures import big_picture


@pytest.fixture
def waiting() -> Picture:
    picture = big_picture(6, 8)
    voters = tuple(member.peer for member in picture.members[:4])
    votes = VotesHere(8, Electorate(dict.fromkeys(voters, 1)), voters[:2])
    stall = RunTrouble(9, None, TroubleKind.STALL, "", str(votes))
    progress = replace(picture.progress, state=RunState.WAITING, reason=str(votes), seconds_left=90.0)
    return replace(picture, votes=votes, progress=progress, troubles=(stall,))


def test_a_run_that_waits_says_why_once_and_what_follows(waiting: Picture) -> None:
    assert "left" not in progress_words(waiting)
    assert next(describe_picture(waiting)) == "after round 5: held-out loss 6.936, as 1 peer measured"
    waiting = replace(waiting, evaluations=())
    first, *others = describe_picture(waiting)
    assert first.startswith("It goes on by itself once enough of them are back")
    assert others == [f"verified: {waiting.verified}"]
    states = [member_story(member, waiting.votes).state for member in waiting.members]
    assert [state == "missing" for state in states] == [False, False, True, True, False, False]


def test_work_that_does_not_count_is_no_accusation() -> None:
    trouble = RunTrouble(9, None, TroubleKind.FLAG, "12D3KooWabcdefgh", NOT_COUNTED)
    said = trouble_words(trouble)
    assert said == f"round 9: not counted abcdefgh: {NOT_COUNTED}"


def test_a_run_that_goes_on_says_how_long_it_takes_and_who_votes(waiting: Picture) -> None:
    going = replace(waiting, progress=replace(waiting.progress, state=RunState.TRAINING))
    assert "1 min left" in progress_words(going)
    assert f"votes: {waiting.votes}" in describe_picture(going)


def test_a_run_that_no_command_joins_says_how_it_is_joined(waiting: Picture) -> None:
    own = replace(waiting, joining=str(NEEDS_PROGRAM))
    assert [*describe_picture(own)] == [*describe_picture(waiting), str(NEEDS_PROGRAM)]
    assert figures_of(own, "0.1")["joining"] == str(NEEDS_PROGRAM)


def test_the_votes_of_a_closed_run_are_those_that_its_own_peer_has_reported(tmp_path: Path) -> None:
    config, run = PeerConfig(home=tmp_path), "r" * 52
    log = Telemetry(log_path(tmp_path))
    log.emit("peer.start", peer="me", device="cpu", version="0.1.0")
    log.emit("run.joined", run=run, round=3, peers=2)
    log.emit("round.awaited", round=4, reason="1 of 2 votes are here, 2 needed; missing: you")
    assert votes_line(config, run) == "no round: 1 of 2 votes are here, 2 needed; missing: you"
    assert votes_line(config, "s" * 52) == ""  # Of another run than the one that is asked about.
    log.emit("peer.leave", reason="left")
    assert votes_line(config, run) == ""
    log.close()


def test_others_texts_are_shown_as_texts(waiting: Picture, tmp_path: Path) -> None:
    hostile = r"[/nope] [link=x]\x1b[2J"
    members = tuple(replace(member, name=hostile) for member in waiting.members)
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(live_view(replace(waiting, name=hostile, members=members), PeerConfig(home=tmp_path), 200))
    shown = console.export_text()
    assert shown.startswith(hostile)
    assert shown.count(hostile) == 1 + len(members)
    assert all(member.peer[-8:] in shown for member in members)  # Whatever it calls itself.
