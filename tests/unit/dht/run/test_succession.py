"""Successions: which statements end a run, which run follows, and which one nobody follows."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from flockstep.collectives.spec import charter_of
from flockstep.dht.run.admission import Charter, Invitation, Ticket
from flockstep.dht.run.manifest import MAX_EARNED_BYTES, Data, Earned, Follows, Manifest, Outer, SignedManifest
from flockstep.dht.run.statements import OwnerStatement, OwnerStatements
from flockstep.dht.run.succession import (
    alarm_of,
    carried,
    describe_succession,
    is_ending,
    manifest_after,
    successor_of,
    why_not_follow,
    with_settings,
)
from flockstep.peer.base.errors import LocalError, MalformedMessage, UsageError
from flockstep.peer.identity import Identity
from flockstep.peer.wire.schema import decode, encode
from hypothesis import given
from hypothesis import strategies as st

OWNER, ANNA, BERT = (Identity.from_seed(bytes([seed]) * 32) for seed in (1, 2, 3))
FIRST, SECOND = "a" * 52, "b" * 52
ROOT, HASH = b"\1" * 32, b"\2" * 32


def run_of(**changes: object) -> SignedManifest:
    manifest = Manifest(owner=OWNER.peer_id, name="one", data=Data("own"), outer=Outer(rounds=30))
    return SignedManifest.sign(replace(manifest, **changes), OWNER)  # type: ignore[arg-type]


BEFORE = run_of()


def following(before: SignedManifest = BEFORE, round_: int = 10, earned: tuple[Earned, ...] = ()) -> Manifest:
    return manifest_after(before, before.manifest, (round_, HASH), ROOT, {ANNA.peer_id}, earned)


def stated(*runs: str) -> OwnerStatements:
    log = OwnerStatements(BEFORE.run_id, OWNER.peer_id)
    for run in runs:
        log = log.sign(OWNER, OwnerStatement("succeed", OWNER.peer_id, settings=run))
    return log


def test_the_first_run_that_the_owner_names_is_the_successor_and_a_second_one_an_alarm() -> None:
    none, ended = stated(), stated("")
    assert (is_ending(none), successor_of(none)) == (False, "")
    assert (is_ending(ended), successor_of(ended), alarm_of(ended)) == (True, "", "")
    named = stated("", FIRST, FIRST)
    assert (successor_of(named), alarm_of(named)) == (FIRST, "")
    twice = stated("", FIRST, SECOND)
    assert successor_of(twice) == FIRST
    assert SECOND in alarm_of(twice)
    shown = describe_succession(BEFORE, twice, ("/ip4/192.0.2.1/tcp/4001/p2p/" + ANNA.peer_id,))
    assert f"goes on as flockstep://{FIRST}?via=" in shown
    assert SECOND in shown


def test_no_name_of_a_file_is_a_run_to_follow() -> None:
    assert successor_of(stated("../../" + "a" * 46)) == ""
    with pytest.raises(LocalError, match="stated about the owner"):
        stated().sign(OWNER, OwnerStatement("succeed", ANNA.peer_id))


def test_the_next_run_has_the_rounds_that_are_left_and_the_schedules_go_on() -> None:
    after = SignedManifest.sign(following(earned=(Earned(ANNA.peer_id, 0.1 + 0.2, 20), Earned(BERT.peer_id, 1.0, 3))), OWNER)
    assert SignedManifest.decode(after.publishable).manifest == after.manifest
    manifest = after.manifest
    assert (manifest.num_rounds, manifest.schedule_rounds, manifest.start) == (20, 30, ROOT.hex())
    assert set(manifest.follows.members) == {Earned(ANNA.peer_id, 0.1 + 0.2, 20), Earned(BERT.peer_id, 1.0, 3)}
    assert manifest.admission.keeper_ids == (ANNA.peer_id,)
    assert why_not_follow(BEFORE, after) == ""
    third = SignedManifest.sign(manifest_after(after, manifest, (5, HASH), ROOT, set(), ()), OWNER)
    assert (third.line, third.manifest.follows.rounds, third.manifest.schedule_rounds) == (BEFORE.run_id, 15, 30)
    streamed = Outer(rounds=7, mode="streaming", fragments=5)
    assert manifest_after(run_of(outer=streamed), run_of(outer=streamed).manifest, (11, HASH), ROOT, (), ()).outer.rounds == 5


CHANGES: dict[str, Callable[[Manifest], Manifest]] = {
    "another owner": lambda it: replace(it, owner=ANNA.peer_id),
    "does not say that it goes on": lambda it: replace(it, follows=Follows(), start=""),
    "another model": lambda it: replace(it, layout="0" * 64 + "/1/10"),
    "its data": lambda it: replace(it, data=Data("text:elsewhere")),
    "its seed": lambda it: replace(it, seed=1),
    "its contact": lambda it: replace(it, contact="ada@example.org"),
    "admits others": lambda it: replace(it, admission=replace(it.admission, kind="invite")),
    r"\[inner\]": lambda it: replace(it, inner=replace(it.inner, steps=it.inner.steps + 1)),
    r"\[outer\]": lambda it: replace(it, outer=replace(it.outer, checkpoint_every=1)),
}


@pytest.mark.parametrize("why", CHANGES)
def test_nobody_follows_a_run_to_which_its_volunteers_have_not_agreed(why: str) -> None:
    manifest = CHANGES[why](following())
    identity = OWNER if manifest.owner == OWNER.peer_id else ANNA
    with pytest.raises(AssertionError, match=why):
        assert not (found := why_not_follow(BEFORE, SignedManifest.sign(manifest, identity))), found


def test_what_a_revision_can_change_may_change() -> None:
    changed = with_settings(following(), {"inner.lr": 1, "outer.rounds": 60, "codec.result": "bf16"})
    assert (changed.inner.lr, changed.num_rounds, changed.codec.result) == (1.0, 60, "bf16")
    assert why_not_follow(BEFORE, SignedManifest.sign(changed, OWNER)) == ""
    with pytest.raises(UsageError, match=r"inner\.steps cannot change"):
        with_settings(following(), {"inner.steps": 3})


def test_bans_withdrawals_and_votes_are_stated_again_but_for_first_voters() -> None:
    log = OwnerStatements(BEFORE.run_id, OWNER.peer_id)
    for verb, peer in (("vouch", ANNA), ("vouch", BERT), ("ban", ANNA), ("revise", OWNER)):
        log = log.sign(OWNER, OwnerStatement(verb, peer.peer_id, settings="{}" if verb == "revise" else ""))
    assert [(it.verb, it.peer) for it in carried(log, [BERT.peer_id])] == [("vouch", ANNA.peer_id), ("ban", ANNA.peer_id)]


def test_whoever_was_in_the_run_before_enters_after_its_invitation_has_expired() -> None:
    before = run_of(admission=replace(BEFORE.manifest.admission, kind="invite"))
    after = charter_of(SignedManifest.sign(following(before, earned=(Earned(ANNA.peer_id, 1.0, 0),)), OWNER))
    invited = [Invitation.sign(OWNER, before.run_id, it.peer_id, expires=5) for it in (ANNA, BERT)]
    shown = [Ticket(it, b"").credential(it.key) for it in invited]
    assert after.why_not_enter(ANNA.peer_id, shown[0], (), time=10.0) == ""
    assert after.why_not_enter(BERT.peer_id, shown[1], (), time=10.0) == "its invitation has expired"


def test_an_invitation_to_the_first_run_of_a_line_admits_to_all_of_it() -> None:
    before = run_of(admission=replace(BEFORE.manifest.admission, kind="invite"))
    after = SignedManifest.sign(following(before), OWNER)
    ticket = Ticket(Invitation.sign(OWNER, before.run_id, ANNA.peer_id), b"")
    shown = ticket.credential(ANNA.peer_id)
    charter: Charter = charter_of(after)
    assert charter.admits(ANNA.peer_id, shown)
    assert not charter.admits(BERT.peer_id, shown)
    assert not charter_of(run_of(admission=before.manifest.admission, name="another")).admits(ANNA.peer_id, shown)


@pytest.mark.parametrize(
    ("follows", "why"),
    [
        (Follows(run="a"), "names no run"),
        (Follows(run=FIRST, first=FIRST, round=1, rounds=1), "names no run"),
        (Follows(FIRST, FIRST, 0, HASH.hex(), 0), "without a state"),
        (Follows(FIRST, FIRST, 3, HASH.hex(), 2), "without a state"),
        (Follows(FIRST, FIRST, 1, HASH.hex(), 1, f"{ANNA.peer_id}:2.0:1"), "no peer with its trust"),
        (Follows(FIRST, FIRST, 1, HASH.hex(), 1, f"{ANNA.peer_id}:nan:1"), "no peer with its trust"),
        (Follows(FIRST, FIRST, 1, HASH.hex(), 1, " ".join([f"{ANNA.peer_id}:1.0:1"] * 2)), "one twice"),
    ],
)
def test_a_manifest_that_goes_on_from_nothing_is_malformed(follows: Follows, why: str) -> None:
    with pytest.raises(LocalError, match=why):
        run_of(follows=follows, start=ROOT.hex())


def test_of_more_members_than_fit_those_of_most_rounds_are_carried() -> None:
    peers = [Identity.from_seed(number.to_bytes(32, "big")).peer_id for number in range(400)]
    follows = Follows.of(FIRST, FIRST, 1, HASH, 1, [Earned(peer, 0.5, place % 21) for place, peer in enumerate(peers)])
    assert MAX_EARNED_BYTES - 100 < len(follows.earned) <= MAX_EARNED_BYTES
    left_out = {place % 21 for place, peer in enumerate(peers) if peer not in {it.peer for it in follows.members}}
    assert max(left_out) <= min(it.rounds for it in follows.members)


@given(st.binary(max_size=400))
def test_no_bytes_of_a_stranger_end_a_run(data: bytes) -> None:
    try:
        decode(OwnerStatement, data, max_bytes=400)
    except MalformedMessage:
        return
    assert encode(decode(OwnerStatement, data, max_bytes=400)) == data
