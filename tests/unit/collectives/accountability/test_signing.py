"""The signing guard: no two different statements on one subject in a slot, whatever happens to the process and its disk."""

import ast
import errno
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from flockstep.collectives.accountability import signing
from flockstep.collectives.accountability.signing import (
    FAR,
    LOCK_NAME,
    MAX_BYTES,
    MAX_DECISIONS,
    MAX_SLOTS,
    SigningGuard,
    Spoken,
    SpokenSlots,
)
from flockstep.collectives.accountability.statements import STATEMENTS
from flockstep.collectives.chain.certificate import value_hash
from flockstep.peer import wire
from flockstep.peer.base.digest import DIGEST_BYTES, digest
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.wire.schema import decode, encode
from hypothesis import given
from hypothesis import strategies as st
from support.certificates import RUN

ME = Identity.from_seed(bytes([1]) * 32)
A_CHAIN, B_CHAIN = b"a" * 32, b"b" * 32
SLOT = wire.Slot(RUN, 3, A_CHAIN, 1)
ROOT = Path(__file__).parents[4]


class Disk:
    """One peer's folder and its processes, one after the other, with all that they have signed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "spoken"
        self.events: list[Event] = []
        self.signed: dict[tuple[wire.Slot, int, object], set[bytes]] = {}
        self.now = 1e9
        self.start()

    def start(self, *, is_known: bool = False) -> None:
        telemetry = Telemetry(clock=lambda: 0.0)
        telemetry.subscribe(self.events.append)
        self.guard = SigningGuard(ME, telemetry, self.path, is_known=is_known, clock=lambda: self.now)

    def names(self) -> list[str]:
        return [str(event["event"]) for event in self.events]

    def say(self, message: wire.RoundMessage, lock: wire.Proof | None = None) -> str:
        """Sign a message as the driver does; returns why not, empty if it was signed."""
        signed = self.guard.sign(message, lock)
        if isinstance(signed, str):
            return signed
        kind = STATEMENTS[type(message)]
        if kind.convicts:
            self.signed.setdefault((message.slot, signed.code, kind.subject(message)), set()).add(signed.payload)
        return ""

    def copied(self) -> bytes:
        """Return what a backup of an hour ago would hold if the record was the same then."""
        data = self.path.read_bytes()
        spoken = decode(SpokenSlots, data[DIGEST_BYTES:], max_bytes=MAX_BYTES)
        payload = encode(replace(spoken, made=spoken.made - 3600 * 10**9))
        return digest(payload) + payload


def accept(slot: wire.Slot, value: int) -> wire.Prevote:
    return wire.Prevote(slot, bytes([value]) * 32)


def at(round_: int, attempt: int) -> wire.Slot:
    return wire.Slot(RUN, round_, A_CHAIN, attempt)


def cut(slot: wire.Slot, value: int) -> wire.Cut:
    return wire.Cut(slot, bytes(32), bytes(32 * (value % 2)), (value,), ((0, bytes(wire.NAME_BYTES)),), (0,), (b"",))


rounds, values = st.integers(1, 3), st.integers(0, 3)
chains = st.sampled_from([A_CHAIN, B_CHAIN])
slots = st.builds(partial(wire.Slot, RUN), rounds, chains, st.integers(0, 3))
steps = st.one_of(
    st.tuples(st.just("begin"), rounds),
    st.tuples(st.just("restart")),
    st.tuples(st.just("full"), st.booleans()),
    st.tuples(st.just("say"), st.sampled_from([accept, cut]), slots, values),
)


@given(st.lists(steps, max_size=40))
def test_whatever_a_machine_asks_for_nothing_is_signed_twice(life: list[tuple[object, ...]]) -> None:
    """Any statement in any order, rounds that come back, restarts, and a disk that is full for a while."""
    with TemporaryDirectory() as folder:
        disk = Disk(Path(folder) / "run")
        for step in life:
            match step:
                case ("begin", int(round_)):
                    disk.guard.begin(at(round_, 0))
                case ("restart",):
                    disk.start()
                case ("full", bool(full)):
                    disk.guard._path = Path(folder) / "run" / "spoken" / "below a file" if full else disk.path
                case ("say", make, wire.Slot() as slot, int(value)):
                    disk.say(make(slot, value))  # type: ignore[operator]
        assert all(len(payloads) == 1 for payloads in disk.signed.values())


losses = st.sampled_from(["restart", "missing", "damaged", "empty", "old", "snapshot"])
moves = st.one_of(losses, st.sampled_from(["attempt", "attempt", "certified", "certified", "keep"]))


@given(st.lists(st.tuples(moves, st.integers(0, 3)), max_size=60))
def test_a_peer_that_loses_what_it_has_signed_never_signs_against_it(life: list[tuple[str, int]]) -> None:
    """The run goes on meanwhile; the peer comes back with an old state now and then, and signs in what it takes for next."""
    others = ["one", "two", "three"]
    with TemporaryDirectory() as folder:
        disk, head, mine = Disk(Path(folder) / "run"), 0, 0
        kept = latest = disk.copied(), 0
        for number, (move, raised) in enumerate(life):
            disk.now += 60.0
            match move:
                case "attempt":  # Of the round after its state; others may have moved it on.
                    first = disk.guard.begin(at(mine + 1, 0))
                    for attempt in (first, first + raised):
                        assert disk.say(wire.Prevote(at(mine + 1, attempt), number.to_bytes(32))) == ""
                    latest = disk.copied(), mine
                case "certified":
                    head = head + 1 if mine == head else head
                    mine = head
                    disk.guard.certified(mine, others)
                case "keep":
                    kept = latest
                case "missing":
                    disk.path.unlink(missing_ok=True)
                case "damaged":
                    data = bytearray(disk.path.read_bytes() if disk.path.exists() else b"")
                    data[raised : raised + 1] = b"?"
                    disk.path.write_bytes(bytes(data))
                case "empty":
                    disk.path.write_bytes(b"")
                case "old":
                    disk.path.write_bytes(kept[0])
                case "snapshot":  # The record, and the state as well.
                    disk.path.write_bytes(kept[0])
                    mine = kept[1]
            if move not in ("attempt", "certified", "keep"):
                disk.start(is_known=True)
                if mine:
                    disk.guard.certified(mine, others)
        assert all(len(payloads) == 1 for payloads in disk.signed.values())


@pytest.mark.parametrize("loss", ["missing", "damaged", "copied", "of the first version", "unreadable"])
def test_after_a_loss_it_begins_far_ahead_until_others_have_certified_three_rounds(tmp_path: Path, loss: str) -> None:
    disk = Disk(tmp_path)
    assert disk.say(accept(SLOT, 1)) == ""
    match loss:
        case "missing":
            disk.path.unlink()
        case "damaged":
            disk.path.write_bytes(disk.path.read_bytes()[:-1] + b"?")
        case "copied":
            disk.path.write_bytes(disk.copied())
        case "of the first version":
            disk.path.write_bytes(b"\x93\x03\x01\xff")
        case "unreadable":
            disk.path.unlink()
            disk.path.mkdir()
    disk.start(is_known=True)
    assert disk.names()[-1] == "promise.forgotten"
    far = disk.guard.begin(at(3, 0))
    assert far >= FAR
    assert far == disk.events[-1]["attempt"]
    for round_, signers in [(2, ["a", "b"]), (3, ["a", ME.peer_id]), (3, ["a", "b"]), (3, ["a", "b"])]:
        disk.guard.certified(round_, signers)
        assert disk.guard.begin(at(round_ + 1, 0)) == far
    disk.guard.certified(4, ["a", "b"])
    assert disk.guard.begin(at(5, 0)) == 0


def test_a_record_that_begins_though_certificates_name_me_is_not_the_first_one(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.guard.named(6)
    assert disk.guard.begin(at(7, 0)) >= FAR
    disk.start()
    assert disk.say(accept(SLOT, 1)) == ""
    disk.guard.named(3)
    assert disk.guard.begin(at(4, 0)) == 0


def test_a_record_that_no_process_has_used_is_lost_as_well_once_certificates_name_me(tmp_path: Path) -> None:
    """The first process after the loss of a disk was killed before it heard of them, the second one after it did."""
    disk = Disk(tmp_path)
    disk.start(is_known=True)
    assert disk.guard.begin(at(7, 0)) == 0  # It may have watched the run and signed nothing.
    for _ in range(2):
        disk.guard.named(6)
        assert disk.guard.begin(at(7, 0)) >= FAR
        disk.start(is_known=True)


def test_a_record_that_ends_before_a_round_that_names_me_is_that_of_a_backup(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    assert disk.say(accept(at(3, 0), 1)) == ""
    backup, status = disk.path.read_bytes(), disk.path.stat()
    assert disk.say(accept(at(7, 0), 1)) == ""
    disk.path.write_bytes(backup)
    os.utime(disk.path, ns=(status.st_atime_ns, status.st_mtime_ns))
    disk.start(is_known=True)
    disk.guard.named(3)
    assert disk.guard.begin(at(7, 0)) == 0
    disk.guard.named(6)
    assert disk.guard.begin(at(7, 0)) >= FAR
    assert disk.events[-1]["reason"] == "the record ends with round 3, and this peer signed in round 6"
    for round_ in (7, 8, 9):  # Without me.
        assert disk.guard.is_lost
        disk.guard.certified(round_, ["a", "b"])
        disk.guard.named(6)
    assert disk.guard.begin(at(10, 0)) == 0
    assert disk.names().count("promise.forgotten") == 1


def test_while_certificates_name_who_signs_nothing_another_process_has_its_key(tmp_path: Path) -> None:
    """Two processes with copies of one home folder: the second one is silent as long as the first one signs."""
    disk = Disk(tmp_path)
    disk.guard.named(5)
    for round_ in range(6, 20):
        disk.guard.certified(round_, ["a", "b", ME.peer_id])
        disk.guard.named(round_)
        assert disk.guard.is_lost
    for round_ in (20, 21):
        disk.guard.certified(round_, ["a", "b"])
        disk.guard.named(19)
    assert disk.guard.begin(at(22, 0)) == 0


@given(st.lists(st.tuples(st.integers(1, 4), chains, st.integers(0, 3)), max_size=30))
def test_no_process_begins_in_a_slot_in_which_an_earlier_one_may_have_signed(
    visits: list[tuple[int, bytes, int]],
) -> None:
    """Rounds in any order (a chain may give way to another), attempts that others have raised, restarts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signing, "MAX_DECISIONS", 3)
        spoken, slots = SpokenSlots(), list[wire.Slot]()
        for round_, chain, attempts in visits:
            first = wire.Slot(RUN, round_, chain)
            slot = first.at(spoken.first_free(first) + attempts)
            spoken = spoken.after(slot)
            slots.append(slot)
            assert all(spoken.first_free(it) > it.attempt for it in slots)
    assert len(slots) == len(set(slots))


def test_the_longest_record_can_be_read_again() -> None:
    most = wire.MAX_COUNT, A_CHAIN, wire.MAX_ATTEMPT
    spoken = SpokenSlots((Spoken(*most),) * MAX_DECISIONS, most[0], most[2], 1 << 20, wire.MAX_COUNT)
    assert len(encode(spoken)) + DIGEST_BYTES <= MAX_BYTES


def test_the_same_again_is_signed_and_another_one_is_an_event(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    assert [disk.say(accept(SLOT, value)) for value in (1, 1)] == ["", ""]
    assert disk.say(accept(SLOT, 2)) == "I have signed a different one in this slot"
    assert disk.say(wire.Void(SLOT, "one")) == disk.say(wire.Void(SLOT, "two")) == ""
    assert [(event["event"], event["step"], event["attempt"]) for event in disk.events] == [("promise.kept", "Prevote", 1)]


def test_a_slot_of_an_earlier_attempt_or_process_is_closed(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    assert disk.say(accept(at(7, 2), 1)) == ""
    assert [disk.guard.first_free(at(round_, 0)) for round_ in (6, 7, 8)] == [0, 3, 0]
    assert disk.guard.begin(at(7, 0)) == 3
    assert disk.say(accept(at(7, 2), 1)) == "I may have signed in this slot before"
    assert disk.say(accept(at(7, 5), 1)) == ""
    disk.start()
    assert disk.guard.begin(at(7, 0)) == 6
    assert disk.say(accept(at(7, 5), 2)) == "I may have signed in this slot before"


def test_nothing_is_signed_in_a_slot_that_cannot_be_written_down(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    disk = Disk(tmp_path / "file")
    slot = at(3, disk.guard.begin(at(3, 0)))
    assert disk.say(accept(slot, 1)).startswith("the slot cannot be written down")
    assert disk.names()[-2:] == ["promise.unwritten", "promise.kept"]
    assert disk.signed == {}


def test_a_liar_that_moves_an_attempt_on_and_on_takes_a_bounded_memory() -> None:
    guard = SigningGuard(ME, Telemetry())  # Without a path: nothing is synced 4,096 times.
    slots = [at(1, attempt) for attempt in range(MAX_SLOTS + 1)]
    assert [isinstance(guard.sign(accept(slot, 1)), str) for slot in slots] == [False] * MAX_SLOTS + [True]


# The lock.


def proof(slot: wire.Slot, value: bytes = b"value") -> wire.Proof:
    return wire.Proof(slot, value, (ME.peer_id,), (bytes(64),))


def confirm(slot: wire.Slot) -> wire.Precommit:
    return wire.Precommit(slot, value_hash(b"value"))


def test_a_lock_is_on_the_disk_when_its_confirm_is_signed_and_survives_a_restart(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    assert disk.guard.lock_in(SLOT.decision) is None
    assert disk.say(confirm(SLOT), proof(SLOT)) == ""
    other = Disk(tmp_path)  # Another process, as after a crash right then.
    assert disk.guard.lock_in(SLOT.decision) == other.guard.lock_in(SLOT.decision) == proof(SLOT)
    assert other.names() == []
    for elsewhere in (replace(SLOT, round=4), replace(SLOT, previous=B_CHAIN), replace(SLOT, run="other")):
        assert other.guard.lock_in(elsewhere.decision) is None


def test_a_newer_lock_replaces_the_one_before(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    later = proof(SLOT.at(2), b"other")
    assert disk.say(confirm(SLOT), proof(SLOT)) == ""
    assert disk.say(wire.Precommit(later.slot, value_hash(b"other")), later) == ""
    disk.start()
    assert disk.guard.lock_in(SLOT.decision) == later


def test_without_room_for_its_lock_a_confirm_is_not_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path)
    assert disk.say(accept(SLOT, 1)) == ""  # The slot is on the disk already.
    replace_file = os.replace

    def full(source: str | Path, target: str | Path) -> None:
        if Path(target).name == LOCK_NAME:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace_file(source, target)

    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", full)
        assert disk.say(confirm(SLOT), proof(SLOT)).startswith("the lock cannot be written down: ")
    assert [(event["event"], event["step"]) for event in disk.events] == [("promise.unwritten", "lock")]
    assert disk.guard.lock_in(SLOT.decision) is None
    assert wire.code_of_kind(wire.Precommit) not in {code for _, code, _ in disk.signed}
    assert disk.say(confirm(SLOT), proof(SLOT)) == ""
    disk.start()
    assert disk.guard.lock_in(SLOT.decision) == proof(SLOT)


@pytest.mark.parametrize("damage", ["a flipped bit", "cut short", "empty", "no proof", "a folder"])
def test_a_damaged_lock_counts_as_a_lost_record(tmp_path: Path, damage: str) -> None:
    disk = Disk(tmp_path)
    assert disk.say(confirm(SLOT), proof(SLOT)) == ""
    path = tmp_path / LOCK_NAME
    data = path.read_bytes()
    match damage:
        case "a flipped bit":
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "cut short":
            path.write_bytes(data[:-1])
        case "empty":
            path.write_bytes(b"")
        case "no proof":
            path.write_bytes(digest(b"junk") + b"junk")
        case "a folder":
            path.unlink()
            path.mkdir()
    disk.start(is_known=True)
    assert disk.names() == ["promise.unreadable", "promise.forgotten"]
    assert disk.guard.lock_in(SLOT.decision) is None
    assert disk.guard.is_lost
    assert disk.guard.begin(at(SLOT.round, 0)) >= FAR


@pytest.mark.parametrize("floor", ["collectives", "optim", "dht"])
def test_only_the_guards_and_the_bans_sign(floor: str) -> None:
    signers = set[str]()
    for path in (ROOT / floor).glob("**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and {"sign", "sign_encoded"} & {alias.name for alias in node.names}:
                signers.add(path.relative_to(ROOT).as_posix())
    allowed = {f"collectives/accountability/{name}.py" for name in ("bans", "signing")}
    assert signers == (allowed if floor == "collectives" else set())


def test_a_catch_up_of_several_rounds_at_a_time_ends_the_distance_too(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.path.unlink()
    disk.start(is_known=True)
    for round_ in (10, 12):
        assert disk.guard.begin(at(round_, 0)) >= FAR
        disk.guard.certified(round_, ["a", "b"])
    assert disk.guard.begin(at(13, 0)) == 0


def test_a_record_whose_owner_or_mode_is_changed_is_no_copy(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    assert disk.say(accept(SLOT, 1)) == ""
    os.link(disk.path, tmp_path / "backup")
    disk.path.chmod(0o600)
    disk.start(is_known=True)
    assert disk.names() == []
