"""Progress: measured where rounds were seen, else stated, and in words why a run waits."""

from collections.abc import Sequence
from dataclasses import replace

from flockstep.collectives.accountability.signing import FAR
from flockstep.collectives.agreement.electorate import Electorate
from flockstep.collectives.picture.fold import ChainFold, ChainView
from flockstep.collectives.picture.picture import RunState, TroubleKind
from flockstep.collectives.picture.progress import progress_of
from flockstep.collectives.picture.shown import (
    MAX_MEMBERS_SHOWN,
    median_loss,
    shown_members,
    troubles_of,
    troubles_stated,
)
from flockstep.collectives.picture.votes import VotesHere
from flockstep.collectives.spec import charter_of
from flockstep.dht.members.body import MemberBody
from flockstep.dht.members.table import Member
from flockstep.dht.records import Record
from flockstep.dht.run.revision import UNREVISED, settings_of
from flockstep.dht.run.statements import OwnerStatement, OwnerStatements
from support.keepers import key
from support.light import KEEPERS, SIGNED, chain_of
from support.pictures import crowd, round_of

CHAIN = chain_of(8)
MODEL = bytes(31) + b"1"


def view_of(times: Sequence[float | None]) -> ChainView:
    fold = ChainFold(charter_of(SIGNED))
    fold.extend(CHAIN[: len(times)])
    view = fold.view()
    return replace(view, rows=tuple(replace(row, time=time) for row, time in zip(view.rows, times, strict=True)))


def member(number: int, **body: object) -> Member:
    stated = MemberBody(**{"state": "training", "layout": MODEL, **body})  # type: ignore[arg-type]
    return Member(Record("", "member", key(number).peer_id, 1, 1.0, b"", bytes(64)), stated, 0.0)


def votes(*here: int) -> VotesHere:
    electorate = Electorate({keeper.peer_id: 1 for keeper in KEEPERS})
    return VotesHere(8, electorate, tuple(KEEPERS[number].peer_id for number in here))


def test_speed_is_measured_by_the_rounds_that_were_seen() -> None:
    progress = progress_of(SIGNED, view_of([None, None, 10.0, 20.0, 40.0]), [member(9, tokens_per_s=1e12)], None)
    assert (progress.claimed, progress.round_seconds) == (False, 15.0)
    assert progress.tokens_per_s == 200 / 30
    assert progress.seconds_left == 15.0 * (SIGNED.manifest.num_rounds - 5)


def test_before_that_it_is_what_members_state() -> None:
    members = [member(9, tokens_per_s=20.0), member(10, tokens_per_s=30.0), member(11, state="left", tokens_per_s=1e9)]
    progress = progress_of(SIGNED, view_of([None] * 5), members, None)
    assert (progress.claimed, progress.tokens_per_s, progress.round_seconds) == (True, 50.0, 2.0)
    assert progress_of(SIGNED, view_of([]), members, None).round_seconds is None


def test_a_stated_speed_of_nothing_is_no_duration() -> None:
    for speed in (1e-300, 1e-12):
        progress = progress_of(SIGNED, view_of([None] * 5), [member(9, tokens_per_s=speed)], None)
        assert (progress.round_seconds, progress.seconds_left) == (None, None)


def test_free_keys_do_not_move_the_loss_that_the_last_roster_states() -> None:
    liars = [member(number, loss=1e-9) for number in range(30, 40)]
    assert median_loss([member(1, loss=3.0), member(2, loss=5.0), *liars], [key(1).peer_id, key(2).peer_id]) == 4.0
    assert median_loss(liars, [key(1).peer_id]) == 1e-9


def test_a_revised_run_has_the_rounds_of_its_revision_and_is_no_trouble() -> None:
    rounds = settings_of(SIGNED.manifest, UNREVISED, {"outer.rounds": 60})
    revise = OwnerStatement("revise", SIGNED.manifest.owner, settings=rounds)
    ban = OwnerStatement("ban", key(9).peer_id, reason="sends noise")
    statements = OwnerStatements(SIGNED.run_id, SIGNED.manifest.owner).sign(key(0), revise).sign(key(0), ban)
    view = replace(view_of([None] * 5), revision=statements.records[0].encode())
    assert progress_of(SIGNED, view, [], None).rounds == 60
    assert [(trouble.kind, trouble.peer) for trouble in troubles_stated(statements)] == [(TroubleKind.BAN, key(9).peer_id)]


def test_why_a_run_does_not_go_on() -> None:
    def state(view: ChainView, members: Sequence[Member], here: VotesHere | None) -> tuple[RunState, str]:
        progress = progress_of(SIGNED, view, members, here)
        return progress.state, progress.reason

    trains = [member(9)]
    assert state(view_of([None]), trains, votes(0, 1, 2))[0] is RunState.TRAINING
    assert state(view_of([None]), trains, votes(0, 1)) == (RunState.WAITING, f"{votes(0, 1)}. Nobody's work is lost")
    assert state(view_of([None]), [member(9, state="syncing")], None)[0] is RunState.WAITING
    assert state(view_of([None]), [], None)[0] is RunState.EMPTY
    over = view_of([None])
    over = replace(over, head=replace(over.head, round=SIGNED.manifest.num_rounds))
    assert state(over, [], None)[0] is RunState.OVER


def test_what_is_no_number_is_no_loss_and_keepers_have_none() -> None:
    members = [member(1, loss=float("nan")), member(2, loss=3.0), member(3, loss=5.0), member(4, loss=9.0, layout=bytes(32))]
    assert median_loss(members) == 4.0
    assert median_loss(members[:1]) is None
    assert median_loss([member(1, loss=1e308), member(2, loss=-1.0), member(3, loss=float("inf"))]) is None
    assert shown_members(members[:1], votes().electorate, {}, {})[0].loss is None


def test_a_flood_of_free_keys_hides_no_voter() -> None:
    flood = [member(20, device="x")] * 2 * MAX_MEMBERS_SHOWN
    shown = shown_members([*flood, *(member(number) for number in range(4))], votes().electorate, {}, {flood[0].peer: False})
    assert len(shown) == MAX_MEMBERS_SHOWN
    assert {one.peer for one in shown if one.votes} == {keeper.peer_id for keeper in KEEPERS}
    assert not any(one.here for one in shown)


def test_certificates_tell_of_flags_and_an_attempt_far_ahead_is_no_count() -> None:
    fold = ChainFold(charter_of(SIGNED))
    roster = crowd(6)
    fold.extend([round_of(None, roster, contributors=[0, 5], flagged=[5])])
    (row,) = fold.view().recent
    (trouble,) = troubles_of([row], {1: 7.0})
    attempts = [replace(row, flagged=(), attempt=attempt) for attempt in (1, FAR - 1, FAR, 91_997)]
    reasons = [trouble.reason for trouble in troubles_of(attempts, {})]
    assert [reason.partition(" ")[0] for reason in reasons] == ["1", str(FAR - 1), "a", "a"]
    assert (trouble.kind, trouble.peer, trouble.time) == (TroubleKind.FLAG, row.roster[5], 7.0)
