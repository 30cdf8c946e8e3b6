"""The signing guard: no two different statements on one subject in a slot, whatever happens to the process and its disk."""

import ast
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from flockstep.collectives.accountability.signing import MAX_SLOTS, SigningGuard, SpokenSlots
from flockstep.collectives.accountability.statements import STATEMENTS
from flockstep.peer import wire
from flockstep.peer.identity import Identity
from flockstep.peer.telemetry import Event, Telemetry
from hypothesis import given
from hypothesis import strategies as st
from support.certificates import RUN

ME = Identity.from_seed(bytes([1]) * 32)
SLOT = wire.Slot(RUN, 3, 1)
ROOT = Path(__file__).parents[4]


class Disk:
    """One peer's folder and its processes, one after the other, with all that they have signed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "spoken"
        self.events: list[Event] = []
        self.signed: dict[tuple[wire.Slot, int, object], set[bytes]] = {}
        self.start()

    def start(self) -> None:
        telemetry = Telemetry(clock=lambda: 0.0)
        telemetry.subscribe(self.events.append)
        self.guard = SigningGuard(ME, telemetry, self.path)

    def names(self) -> list[str]:
        return [str(event["event"]) for event in self.events]

    def say(self, message: wire.RoundMessage) -> str:
        """Sign a message as the driver does; returns why not, empty if it was signed."""
        signed = self.guard.sign(message)
        if isinstance(signed, str):
            return signed
        kind = STATEMENTS[type(message)]
        if kind.convicts:
            self.signed.setdefault((message.slot, signed.code, kind.subject(message)), set()).add(signed.payload)
        return ""


def ack(slot: wire.Slot, value: int) -> wire.RosterAck:
    return wire.RosterAck(slot, bytes([value]) * 32)


def cut(slot: wire.Slot, value: int) -> wire.Cut:
    return wire.Cut(slot, bytes(32), value % 2, (value,), bytes(32), ())


rounds, attempts, values = st.integers(1, 3), st.integers(0, 3), st.integers(0, 3)
steps = st.one_of(
    st.tuples(st.just("begin"), rounds),
    st.tuples(st.just("restart")),
    st.tuples(st.just("full"), st.booleans()),
    st.tuples(st.just("say"), st.sampled_from([ack, cut]), rounds, attempts, values),
)


@given(st.lists(steps, max_size=40))
def test_whatever_a_machine_asks_for_nothing_is_signed_twice(life: list[tuple[object, ...]]) -> None:
    """Any statement in any order, rounds that come back, restarts, and a disk that is full for a while."""
    with TemporaryDirectory() as folder:
        disk = Disk(Path(folder) / "run")
        for step in life:
            match step:
                case ("begin", int(round_)):
                    disk.guard.begin(round_)
                case ("restart",):
                    disk.start()
                case ("full", bool(full)):
                    disk.guard._path = Path(folder) / "run" / "spoken" / "below a file" if full else disk.path
                case ("say", make, int(round_), int(attempt), int(value)):
                    disk.say(make(wire.Slot(RUN, round_, attempt), value))  # type: ignore[operator]
        assert all(len(payloads) == 1 for payloads in disk.signed.values())


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=30))
def test_no_life_speaks_in_a_slot_in_which_an_earlier_one_may_have(visits: list[tuple[int, int]]) -> None:
    """Rounds in any order (a chain may give way to another), attempts that others have raised, restarts in between."""
    spoken, slots = SpokenSlots(), list[tuple[int, int]]()
    for round_, raised in visits:
        slot = wire.Slot(RUN, round_, spoken.first_free(round_) + raised)
        spoken = spoken.after(slot)
        slots.append((slot.round, slot.attempt))
    assert all(one != other for one, other in combinations(slots, 2))


def test_the_same_again_is_signed_and_another_one_is_an_event(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    assert [disk.say(ack(SLOT, value)) for value in (1, 1)] == ["", ""]
    assert disk.say(ack(SLOT, 2)) == "I have signed a different one in this slot"
    assert disk.say(wire.Void(SLOT, "one", ())) == disk.say(wire.Void(SLOT, "two", ())) == ""
    assert [(event["event"], event["step"], event["attempt"]) for event in disk.events] == [("promise.kept", "RosterAck", 1)]


def test_a_slot_of_an_earlier_attempt_or_process_is_closed(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    assert disk.say(ack(wire.Slot(RUN, 7, 2), 1)) == ""
    assert [disk.guard.first_free(round_) for round_ in (6, 7, 8)] == [3, 3, 0]
    assert disk.guard.begin(7) == 3
    assert disk.say(ack(wire.Slot(RUN, 7, 2), 1)) == "I may have signed in this slot before"
    assert disk.say(ack(wire.Slot(RUN, 7, 3), 1)) == ""
    disk.start()
    assert disk.guard.begin(7) == 4
    assert disk.say(ack(wire.Slot(RUN, 7, 3), 2)) == "I may have signed in this slot before"


def test_a_slot_is_on_the_disk_before_its_first_statement_and_once(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    assert disk.say(ack(SLOT, 1)) == ""
    written = disk.path.stat().st_ino
    assert disk.say(cut(SLOT, 1)) == ""
    assert disk.path.stat().st_ino == written


def test_nothing_is_signed_in_a_slot_that_cannot_be_written_down(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    disk = Disk(tmp_path / "file")
    assert disk.say(ack(SLOT, 1)).startswith("the slot cannot be written down")
    assert disk.names()[-2:] == ["promise.unwritten", "promise.kept"]
    assert disk.signed == {}


def test_a_liar_that_moves_an_attempt_on_and_on_takes_a_bounded_memory(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    slots = [wire.Slot(RUN, 1, attempt) for attempt in range(MAX_SLOTS + 1)]
    assert [bool(disk.say(ack(slot, 1))) for slot in slots] == [False] * MAX_SLOTS + [True]


@pytest.mark.parametrize("floor", ["collectives", "optim", "dht"])
def test_only_the_guard_and_the_bans_sign(floor: str) -> None:
    signers = set[str]()
    for path in (ROOT / floor).glob("**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and "sign" in {alias.name for alias in node.names}:
                signers.add(path.relative_to(ROOT).as_posix())
    allowed = {"collectives/accountability/bans.py", "collectives/accountability/signing.py"}
    assert signers == (allowed if floor == "collectives" else set())
