"""Members and manifest on disk, read back only if they are signed and of this run."""

import os
from pathlib import Path

import pytest
from flockstep.dht.members.body import MemberBody, MemberState, open_member
from flockstep.dht.members.remembered import MAX_KEPT, Remembered
from flockstep.dht.members.table import LIFETIME, Member
from flockstep.dht.records import Record
from flockstep.dht.run.admission import Invitation, Ticket
from flockstep.dht.run.manifest import Manifest, SignedManifest
from flockstep.dht.run.statements import OwnerStatement, OwnerStatements
from flockstep.peer.base.errors import LocalError
from flockstep.peer.base.home_lock import append_lock
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.peer.wire import Members
from flockstep.peer.wire.schema import encode
from support.recorded import recorded

RUN = "a" * 52
ANNA, BERT = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))


def record(identity: Identity, *, run: str = RUN, addresses: tuple[str, ...] = ("/ip4/192.0.2.1/tcp/4001",)) -> Record:
    body = encode(MemberBody(state=MemberState.TRAINING, addresses=addresses))
    return Record.sign(identity, run=run, kind="member", sequence=1, lifetime=LIFETIME, body=body)


def member(identity: Identity, expires: float = 0.0, addresses: tuple[str, ...] = ("/ip4/192.0.2.1/tcp/4001",)) -> Member:
    signed = record(identity, addresses=addresses)
    return Member(signed, open_member(signed), expires)


def remembered(folder: Path) -> tuple[Remembered, list[Event]]:
    telemetry, events = recorded()
    return Remembered(folder, RUN, telemetry), events


def test_who_was_met_is_found_again(tmp_path: Path) -> None:
    remembered(tmp_path / "run")[0].keep([member(ANNA), member(BERT, addresses=())])
    again, events = remembered(tmp_path / "run")
    assert again.addresses() == {ANNA.peer_id: ("/ip4/192.0.2.1/tcp/4001",)}
    assert not events
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["members"]


def test_nobody_is_met_in_a_run_that_is_new(tmp_path: Path) -> None:
    kept, events = remembered(tmp_path)
    assert kept.addresses() == {}
    assert kept.manifest() is None
    assert not events


def test_of_too_many_the_latest_are_kept(tmp_path: Path) -> None:
    kept, _ = remembered(tmp_path)
    crowd = [Identity.generate() for _ in range(MAX_KEPT + 3)]
    kept.keep(member(identity, expires=float(number)) for number, identity in enumerate(crowd))
    assert set(kept.addresses()) == {identity.peer_id for identity in crowd[3:]}


def test_no_number_is_signed_twice_by_two_processes_of_one_owner(tmp_path: Path) -> None:
    none = OwnerStatements(RUN, ANNA.peer_id)
    keeper, command = (remembered(tmp_path)[0] for _ in range(2))
    held = keeper.append(none, ANNA, [OwnerStatement("vouch", BERT.peer_id)])
    banned = command.append(none, ANNA, [OwnerStatement("ban", BERT.peer_id)])  # It has seen no directory.
    assert [stated.verb for stated in banned.statements] == ["vouch", "ban"]
    both = [OwnerStatement("pardon", BERT.peer_id), OwnerStatement("revoke", BERT.peer_id)]
    assert [stated.verb for stated in keeper.append(held, ANNA, both).statements] == ["vouch", "ban", "pardon", "revoke"]
    assert len(remembered(tmp_path)[0].statements(none)) == 4
    with pytest.raises(LocalError, match="only the owner"):
        keeper.append(held, BERT, both)


def test_an_owner_signs_no_number_anew_whose_file_is_damaged(tmp_path: Path) -> None:
    """Of two statements 2 every peer keeps the one with the smaller signature: the ban might be forgotten by all."""
    none, path = OwnerStatements(RUN, ANNA.peer_id), tmp_path / "statements"
    kept, events = remembered(tmp_path)
    first = kept.append(none, ANNA, [OwnerStatement("vouch", BERT.peer_id)])
    kept.append(first, ANNA, [OwnerStatement("ban", BERT.peer_id)])
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:50] + bytes([whole[50] ^ 1]) + whole[51:], bytes(len(whole))):
        path.write_bytes(damaged)
        with pytest.raises(LocalError, match="statements cannot be used") as caught:
            kept.append(first, ANNA, [OwnerStatement("pardon", BERT.peer_id)])  # The bootstraps lack the newest.
        assert caught.value.remedy
        assert path.read_bytes() == damaged
    kept.keep_statements(first)  # What the members hold is all that was published.
    assert len(kept.append(none, ANNA, [OwnerStatement("pardon", BERT.peer_id)])) == 2
    assert {event["event"] for event in events} == {"run.forgotten"}


def test_who_writes_statements_waits_for_the_other_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flockstep.peer.base.home_lock.APPEND_PATIENCE", 0.0)
    kept, events = remembered(tmp_path)
    none = OwnerStatements(RUN, ANNA.peer_id)
    with append_lock(tmp_path / "statements.lock"):
        with pytest.raises(LocalError, match="another process has held it"):
            kept.append(none, ANNA, [OwnerStatement("vouch", BERT.peer_id)])
        kept.keep_statements(none)
    assert [event["event"] for event in events] == ["run.not_remembered"]
    assert not (tmp_path / "statements").exists()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x00", "Members"),
        (encode(Members((record(ANNA, run="b" * 52).encode(),))), "another run"),
        (encode(Members((record(ANNA).encode().replace(b"192.0.2.1", b"192.0.2.9"),))), "not signed"),
        (b"x" * 10_000_000, "bytes, at most"),
    ],
)
def test_what_somebody_else_wrote_names_nobody(tmp_path: Path, data: bytes, why: str) -> None:
    kept, events = remembered(tmp_path)
    (tmp_path / "members").write_bytes(data)
    assert kept.addresses() == {}
    (event,) = events
    assert event["event"] == "run.forgotten"
    assert why in str(event["reason"])


def test_an_invitation_is_kept_for_its_holder_alone(tmp_path: Path) -> None:
    kept, events = remembered(tmp_path)
    assert kept.ticket() == ""
    whole = str(Ticket(Invitation.sign(ANNA, RUN, BERT.peer_id), b""))
    kept.keep_ticket(whole)
    assert kept.ticket() == whole
    if os.name == "posix":
        assert (tmp_path / "ticket").stat().st_mode & 0o777 == 0o600
    assert events == []
    (tmp_path / "ticket").write_bytes(whole.encode()[:-9] + b"\xff")
    assert kept.ticket() == ""
    assert (events[0]["event"], events[0]["step"]) == ("run.forgotten", f"read {tmp_path / 'ticket'}")


def test_the_manifest_is_the_runs_or_none(tmp_path: Path) -> None:
    toml = 'name = "kept"\n[data]\nsource = "own"\n'
    signed = SignedManifest.sign(Manifest.from_toml(toml, where="run.toml", owner=ANNA.peer_id), ANNA)
    kept = Remembered(tmp_path, signed.run_id, Telemetry())
    kept.keep_manifest(signed)
    assert kept.manifest() == signed
    other, events = remembered(tmp_path)
    assert other.manifest() is None
    assert "not of" in str(events[0]["reason"])


def test_a_folder_that_cannot_be_written_is_an_event_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    kept, events = remembered(tmp_path / "file")
    kept.keep([member(ANNA)])
    assert [event["event"] for event in events] == ["run.not_remembered"]
    kept.addresses()
    assert [event["event"] for event in events[1:]] == ["run.forgotten"]
