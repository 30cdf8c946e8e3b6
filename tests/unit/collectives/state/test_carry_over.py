"""A folder of version 0.1: its state is the start of a new chain, and nothing is lost that was not said to be."""

from dataclasses import replace
from pathlib import Path

import pytest
from flockstep.collectives.chain.chain import start_of_run
from flockstep.collectives.spec import Spec
from flockstep.collectives.state.carry_over import ASIDE, carry_over
from flockstep.collectives.state.checkpoint_file import DESCRIPTION, STATE, load_checkpoint
from flockstep.dht.run.manifest import Manifest
from flockstep.peer.errors import UsageError
from flockstep.peer.telemetry import Event, Telemetry
from support.first_version import ROOT, ROUND, TOKENS, spec_in, unpack_home


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return unpack_home(tmp_path)


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def telemetry(events: list[Event]) -> Telemetry:
    telemetry = Telemetry()
    telemetry.subscribe(events.append)
    return telemetry


def files_of(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_an_untouched_checkpoint_of_version_0_1_can_be_read(run: Path) -> None:
    place = load_checkpoint(run / "checkpoints" / str(ROUND)).place
    assert (place.round, place.root, place.tokens, place.certificate) == (ROUND, ROOT, TOKENS, None)


def test_the_newest_state_begins_a_new_chain(run: Path, telemetry: Telemetry, events: list[Event]) -> None:
    newest, before = run / "checkpoints" / str(ROUND), files_of(run)
    carry_over(run, spec_in(run), telemetry)
    assert load_checkpoint(newest).place == start_of_run(ROOT)
    after = files_of(run)
    assert after[f"checkpoints/{ROUND}/{STATE}"] == before[f"checkpoints/{ROUND}/{STATE}"]
    assert after.keys() & {"ledger", "spoken"} == set()
    assert {name: after[f"{ASIDE}/{name}"] for name in ("ledger", "spoken")} == {
        name: before[name] for name in ("ledger", "spoken")
    }
    assert not (run / "outputs").exists()
    (event,) = events
    assert (event["event"], event["round"], event["root"]) == ("state.carried_over", ROUND, ROOT.hex())
    assert "the key and the state after round 5, with root 7d258538, are kept" in str(event["reason"])
    carry_over(run, spec_in(run), telemetry)
    assert files_of(run) == after
    assert len(events) == 1


def test_a_process_that_was_killed_before_the_end_is_made_good(
    run: Path, telemetry: Telemetry, events: list[Event]
) -> None:
    (run / ASIDE).mkdir()
    (run / "ledger").rename(run / ASIDE / "ledger")
    carry_over(run, spec_in(run), telemetry)
    assert load_checkpoint(run / "checkpoints" / str(ROUND)).place == start_of_run(ROOT)
    assert sorted(path.name for path in (run / ASIDE).iterdir()) == ["ledger", "spoken"]
    assert [event["round"] for event in events] == [ROUND]


def test_a_damaged_state_is_not_kept_and_said_not_to_be(run: Path, telemetry: Telemetry, events: list[Event]) -> None:
    with (run / "checkpoints" / str(ROUND) / STATE).open("r+b") as state:
        state.seek(-1, 2)
        state.write(b"\xff")
    description = (run / "checkpoints" / str(ROUND) / DESCRIPTION).read_bytes()
    carry_over(run, spec_in(run), telemetry)
    assert (run / "checkpoints" / str(ROUND) / DESCRIPTION).read_bytes() == description
    (event,) = events
    assert event["round"] == 0
    assert "the key is kept, the state is not, since no whole checkpoint of a round is left" in str(event["reason"])
    assert not (run / "ledger").exists()


def test_without_resume_the_state_is_not_used(run: Path, telemetry: Telemetry, events: list[Event]) -> None:
    carry_over(run, spec_in(run), telemetry, resume=False)
    assert load_checkpoint(run / "checkpoints" / str(ROUND)).place.round == ROUND
    assert not (run / "ledger").exists()
    assert "since it is not to be used" in str(events[0]["reason"])


def test_a_run_whose_rounds_are_done_stays_as_it_is(run: Path, telemetry: Telemetry, events: list[Event]) -> None:
    before = files_of(run)
    with pytest.raises(UsageError, match="all 5 rounds of the run are done") as raised:
        carry_over(run, ending_after(5, spec_in(run)), telemetry)
    assert "flockstep export" in raised.value.remedy
    assert (files_of(run), events) == (before, [])
    carry_over(run, ending_after(6, spec_in(run)), telemetry)
    assert [event["round"] for event in events] == [ROUND]


def ending_after(rounds: int, spec: Spec) -> Spec:
    """The spec of a run of so many rounds."""
    assert spec.settings is not None
    settings = spec.settings(b"")

    def shorter(revision: bytes) -> Manifest:
        return replace(settings, outer=replace(settings.outer, rounds=rounds))

    return replace(spec, settings=shorter)


def test_a_folder_of_this_version_stays_as_it_is(run: Path, telemetry: Telemetry, events: list[Event]) -> None:
    carry_over(run, spec_in(run), telemetry)
    before = files_of(run)
    (run / "ledger").write_bytes(b"damaged")
    events.clear()
    carry_over(run, spec_in(run), telemetry)
    assert files_of(run) == before | {"ledger": b"damaged"}
    assert events == []
