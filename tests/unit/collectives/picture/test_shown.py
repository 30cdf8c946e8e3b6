"""What is shown beside the chain: the versions that members state."""

from dataclasses import replace

import pytest
from flockstep.collectives.picture import shown
from flockstep.collectives.picture.shown import troubles_of_versions
from flockstep.dht.members.body import MemberBody, MemberState
from flockstep.dht.members.table import Member
from flockstep.dht.records import Record
from support.light import SIGNED


def member(peer: str, version: str) -> Member:
    body = MemberBody(state=MemberState.TRAINING, version=version)
    return Member(Record(SIGNED.run_id, "member", peer, 1, 60.0, b"", bytes(64)), body, expires=60.0)


def test_versions_older_than_the_run_asks_for_and_newer_than_mine_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "VERSION", "0.4.0")
    manifest = replace(SIGNED.manifest, min_version="0.3")
    stated = {"a": "0.3.0", "b": "0.4", "c": "0.2.9", "d": "0.1.0", "e": "0.10.0.dev1", "f": "", "g": "\x1b[2J", "h": "0"}
    found = troubles_of_versions([member(peer, version) for peer, version in stated.items()], manifest)
    assert [(trouble.kind, trouble.peer) for trouble in found] == [("version", "d"), ("version", "e")]
    assert [trouble.reason for trouble in found] == [
        "flockstep 0.1, and 1 more, older than 0.3, which the run asks for",
        "flockstep 0.10, newer than this one, 0.4.0: get newer sources, then pip install . in your checkout of flockstep",
    ]
    assert troubles_of_versions([member("a", "0.4.0"), member("d", "0.0.1")], SIGNED.manifest) == []
