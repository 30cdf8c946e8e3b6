"""What is shown of listed runs, whatever strangers list and bootstraps say."""

import time
from dataclasses import replace
from typing import Any

import trio
from flockstep.dht.keys import RUNS_KEY, run_key, statements_key
from flockstep.dht.run.link import JoinLink
from flockstep.dht.run.listing import ListedRun, RunList, sign_listing
from flockstep.dht.run.manifest import Manifest, SignedManifest
from flockstep.dht.run.statements import OwnerStatement, OwnerStatements, pages_of
from flockstep.peer.base.errors import NetworkError
from flockstep.peer.base.troubles import NEEDS_PROGRAM
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.wire.schema import encode
from flockstep.scripts.runs.listed import (
    ANY_RUN,
    FoundRun,
    best_listed,
    describe_listed,
    find_listed,
    run_figures,
)

OWNER, STRANGER = Identity.from_seed(b"o" * 32), Identity.from_seed(b"s" * 32)
SERVERS = [Identity.from_seed(bytes([number]) * 32).peer_id for number in range(3)]
NOW = time.time()
TOML = 'name = "tiny"\n[model]\nsize = "0.2m"\n[data]\nsource = "text:{stdlib}"\nsequence_length = 16\nbatch_size = 1\n'
MANIFEST = Manifest.from_toml(TOML, where="run.toml", owner=OWNER.peer_id)


def found(name: str, by: Identity = OWNER) -> FoundRun:
    signed = SignedManifest.sign(replace(MANIFEST, owner=by.peer_id, name=name), by)
    return FoundRun(signed, listed(signed), str(JoinLink(signed.run_id, (f"/ip4/192.0.2.1/tcp/1/p2p/{OWNER.peer_id}",))))


def test_a_run_that_takes_a_program_says_so_in_place_of_the_command() -> None:
    own = Manifest.from_toml('name = "own"\n[data]\nsource = "own"\n', where="run.toml", owner=OWNER.peer_id)
    signed = SignedManifest.sign(own, OWNER)
    run, tiny = FoundRun(signed, listed(signed), "flockstep://own"), found("tiny")
    lines = [*describe_listed(run)]
    assert lines[0].startswith("own  a model of its members  round 0 of 100")
    assert lines[-2:] == [f"    {NEEDS_PROGRAM}", "    link     flockstep://own"]
    assert [*describe_listed(tiny)][-1] == f"    flockstep join '{tiny.link}'"
    assert [run_figures(one)["joining"] for one in (run, tiny)] == [str(NEEDS_PROGRAM), ""]
    assert run_figures(run)["memory"] is None  # Of the gpt that nobody trains.


def listed(signed: SignedManifest, by: Identity = OWNER, *, round_: int = 0, followed: bool = False) -> ListedRun:
    return ListedRun(signed.run_id, sign_listing(by, signed.run_id, NOW).encode(), round_, followed, 0)


def test_a_bootstrap_that_lies_of_a_run_does_not_hide_it() -> None:
    signed = found("tiny").signed
    honest, lie = listed(signed, round_=5), listed(signed, STRANGER, round_=9, followed=True)
    assert best_listed([lie, honest], OWNER.peer_id, NOW)[0] is honest
    assert best_listed([honest, replace(honest, round=7)], OWNER.peer_id, NOW)[0] == replace(honest, round=7)
    one, reason = best_listed([lie], OWNER.peer_id, NOW)
    assert one is None
    assert "is no listing of run" in reason


class Bootstraps:
    """What each of some bootstraps answers: the runs of its list, and their manifests, if it shows them."""

    round = 0
    """The round that each of them has checked; 0: they follow no run."""

    def __init__(self, **lists: dict[str, bytes | Exception | None]) -> None:
        self.stated: dict[str, bytes] = {}
        self._lists = dict(zip(SERVERS, lists.values(), strict=False))
        self.link = JoinLink(ANY_RUN, tuple(f"/ip4/192.0.2.1/tcp/4001/p2p/{server}" for server in self._lists))

    async def held(self, server: str, key: str) -> bytes | None:
        await trio.lowlevel.checkpoint()
        if key == RUNS_KEY:
            listings = {run: sign_listing(OWNER, run, NOW).encode() for run in self._lists[server]}
            runs = (ListedRun(run, listing, self.round, self.round > 0, 0) for run, listing in listings.items())
            return encode(RunList(tuple(runs)))
        answer = self._lists[server][key.removeprefix(run_key(""))]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def get(self, key: str) -> bytes | None:
        """What owners have stated."""
        return self.stated.get(key)


def test_one_bootstrap_that_invents_runs_hides_no_other() -> None:
    mine = found("tiny")
    here = {mine.signed.run_id: mine.signed.publishable}
    invented = {letter * 52: None for letter in "bcd"}
    mute: dict[str, bytes | Exception | None] = dict.fromkeys(invented, NetworkError("no answer"))
    for lists in ({"honest": {**here, **invented}}, {"honest": dict(here), "liar": mute}, {"liar": {**mute, **here}}):
        bootstraps: Any = Bootstraps(**lists)
        seen = trio.run(find_listed, bootstraps, bootstraps.link, Telemetry())
        assert ([run.signed for run in seen.runs], seen.missing) == ([mine.signed], 3)


def test_a_listed_run_has_the_rounds_of_its_owners_last_revision_and_is_over_after_them() -> None:
    run = found("tiny").signed
    log = OwnerStatements(run.run_id, OWNER.peer_id)
    log = log.sign(OWNER, OwnerStatement("revise", OWNER.peer_id, settings='{"outer.rounds":12}'))
    bootstraps: Any = Bootstraps(one={run.run_id: run.publishable})
    bootstraps.stated = {statements_key(run.run_id, OWNER.peer_id, page): value for page, value in pages_of(log)}

    def shown(round_: int) -> list[str]:
        bootstraps.round = round_
        (one,) = trio.run(find_listed, bootstraps, bootstraps.link, Telemetry()).runs
        assert (one.signed.run_id, run_figures(one)["rounds"]) == (run.run_id, 12)
        return [*describe_listed(one)]

    assert "round 11 of 12 (followed by the bootstrap)" in shown(11)[0]
    assert shown(11)[-1].startswith("    flockstep join ")
    assert "round 12 of 12, over (followed by the bootstrap)" in shown(12)[0]
    assert not any("flockstep join" in line for line in shown(12))
