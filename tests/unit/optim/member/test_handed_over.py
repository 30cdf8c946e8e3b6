"""What a computer holds of a run that has ended becomes the start of the next one, and of no other run."""

from dataclasses import replace
from pathlib import Path

import pytest
from flockstep.collectives.state.checkpoint_file import load_checkpoint, read_description
from flockstep.dht.members.remembered import Remembered
from flockstep.dht.run.manifest import Data, Manifest, Outer, SignedManifest
from flockstep.dht.run.succession import manifest_after
from flockstep.optim.member.handed_over import HANDED_OVER, hand_over
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from support.homes import home_of
from torch import nn

OWNER, OTHER = (Identity.from_seed(bytes([seed]) * 32) for seed in (1, 2))


def run_of(owner: Identity) -> SignedManifest:
    return SignedManifest.sign(Manifest(owner=owner.peer_id, name="one", data=Data("own")), owner)


def prepared(home: Path, owner: Identity = OWNER) -> tuple[SignedManifest, SignedManifest]:
    """A home with the state of round 10 of a run, and the run that goes on from there."""
    before = run_of(OWNER)
    home_of(nn.Linear(3, 2), home, run=before.run_id)
    folder = home / "runs" / before.run_id
    (folder / "manifest").write_bytes(before.publishable)
    for name in HANDED_OVER:
        (folder / name).write_text(name)
    root = load_checkpoint(folder / "checkpoints" / "10").place.root
    mine = run_of(owner)
    after = SignedManifest.sign(manifest_after(before, mine.manifest, (10, bytes(32)), root, (), ()), owner)
    Remembered(folder, before.run_id, Telemetry()).keep_successor(after.run_id)
    return before, after


def handed(home: Path, after: SignedManifest) -> list[Event]:
    events: list[Event] = []
    telemetry = Telemetry()
    telemetry.subscribe(events.append)
    hand_over(home, after, telemetry)
    return events


def test_the_state_moves_and_consent_invitation_and_progress_are_copied(tmp_path: Path) -> None:
    before, after = prepared(tmp_path)
    (event,) = handed(tmp_path, after)
    assert (event["event"], event["round"]) == ("state.handed_over", 10)
    folder = tmp_path / "runs" / after.run_id
    moved = load_checkpoint(folder / "checkpoints" / "0")
    assert (moved.run, moved.place.round, moved.place.root.hex()) == (after.run_id, 0, after.manifest.start)
    assert {tensor.name for tensor in moved.tensors} == {"weight", "bias"}
    assert {(folder / name).read_text() for name in HANDED_OVER} == set(HANDED_OVER)
    assert not (tmp_path / "runs" / before.run_id / "checkpoints" / "10").exists()
    assert handed(tmp_path, after) == []


def test_a_kill_between_description_and_move_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = prepared(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("flockstep.collectives.state.checkpoint_file.rename", _killed)
        with pytest.raises(KeyboardInterrupt):
            handed(tmp_path, after)
    left = tmp_path / "runs" / before.run_id / "checkpoints" / "10"
    assert read_description((left / "checkpoint.json").read_bytes())[0] == after.run_id
    handed(tmp_path, after)
    assert load_checkpoint(tmp_path / "runs" / after.run_id / "checkpoints" / "0").run == after.run_id


def _killed(*_: Path) -> None:
    raise KeyboardInterrupt


def test_a_run_that_this_computer_does_not_follow_gets_nothing(tmp_path: Path) -> None:
    """Its owner may have published another one that claims to go on from here, and a second name replaces no first."""
    before, after = prepared(tmp_path)
    folder = tmp_path / "runs" / before.run_id
    other = SignedManifest.sign(replace(after.manifest, outer=Outer(rounds=3)), OWNER)
    Remembered(folder, before.run_id, Telemetry()).keep_successor(other.run_id)
    assert handed(tmp_path, other) == []
    assert (folder / "checkpoints" / "10").is_dir()


@pytest.mark.parametrize("owner", [OTHER, OWNER])
def test_a_stranger_takes_no_consent_and_an_owner_no_other_state(tmp_path: Path, owner: Identity) -> None:
    """Whoever sends a link to a run that claims to go on from one of mine gets nothing, nor does one with another state."""
    before, after = prepared(tmp_path, owner)
    if owner is OWNER:
        state = tmp_path / "runs" / before.run_id / "checkpoints" / "10"
        home_of(nn.Linear(3, 2), tmp_path / "other", run=before.run_id)
        for name in ("checkpoint.json", "state.safetensors"):
            other = tmp_path / "other" / state.relative_to(tmp_path) / name
            (state / name).write_bytes(other.read_bytes())
        (event,) = handed(tmp_path, after)
        assert (event["event"], state.exists()) == ("state.not_handed_over", True)
    else:
        assert handed(tmp_path, after) == []
        assert not (tmp_path / "runs" / after.run_id).exists()
