"""Which listed run a name or an id means, whatever strangers list and bootstraps say."""

import time
from dataclasses import replace

import pytest
from flockstep.dht.run.link import JoinLink
from flockstep.dht.run.listing import ListedRun, sign_listing
from flockstep.dht.run.manifest import Manifest, SignedManifest
from flockstep.peer.errors import NetworkError, UsageError
from flockstep.peer.identity import Identity
from flockstep.scripts.runs.listed import FoundRun, FoundRuns, best_listed, only_match

OWNER, STRANGER = Identity.from_seed(b"o" * 32), Identity.from_seed(b"s" * 32)
NOW = time.time()
TOML = 'name = "tiny"\n[model]\nsize = "0.2m"\n[data]\nsource = "text:{stdlib}"\nsequence_length = 16\nbatch_size = 1\n'
MANIFEST = Manifest.from_toml(TOML, where="run.toml", owner=OWNER.peer_id)


def found(name: str, by: Identity = OWNER) -> FoundRun:
    signed = SignedManifest.sign(replace(MANIFEST, owner=by.peer_id, name=name), by)
    return FoundRun(signed, listed(signed), str(JoinLink(signed.run_id, (f"/ip4/192.0.2.1/tcp/1/p2p/{OWNER.peer_id}",))))


def listed(signed: SignedManifest, by: Identity = OWNER, *, round_: int = 0, followed: bool = False) -> ListedRun:
    return ListedRun(signed.run_id, sign_listing(by, signed.run_id, NOW).encode(), round_, followed, 0)


def test_a_run_that_is_named_as_another_ones_id_is_not_that_run() -> None:
    mine = found("tiny")
    mimic = found(mine.signed.run_id, STRANGER)
    assert only_match(mine.signed.run_id, FoundRuns((mimic, mine), 0)) is mine
    with pytest.raises(UsageError, match="no run"):
        only_match(mine.signed.run_id, FoundRuns((mimic,), 0))


def test_a_name_means_no_run_while_others_that_are_listed_were_not_seen() -> None:
    mine = found("tiny")
    assert only_match("tiny", FoundRuns((mine,), 0)) is mine
    with pytest.raises(NetworkError, match="of 1 runs that these bootstraps list"):
        only_match("tiny", FoundRuns((mine,), 1))
    assert only_match(mine.signed.run_id, FoundRuns((mine,), 1)) is mine
    with pytest.raises(NetworkError):
        only_match("b" * 52, FoundRuns((mine,), 1))


def test_a_bootstrap_that_lies_of_a_run_does_not_hide_it() -> None:
    signed = found("tiny").signed
    honest, lie = listed(signed, round_=5), listed(signed, STRANGER, round_=9, followed=True)
    assert best_listed([lie, honest], OWNER.peer_id, NOW)[0] is honest
    assert best_listed([honest, replace(honest, round=7)], OWNER.peer_id, NOW)[0] == replace(honest, round=7)
    one, reason = best_listed([lie], OWNER.peer_id, NOW)
    assert one is None
    assert "is no listing of run" in reason
