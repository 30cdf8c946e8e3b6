"""The owner bans a peer of its run, and pardons it: through the command, a bootstrap, and real peers."""

import json
from pathlib import Path

import pytest
from flockstep.dht.rendezvous import publish_manifest
from flockstep.dht.run.link import JoinLink
from flockstep.dht.run.manifest import Manifest, SignedManifest
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import UsageError
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.scripts.runs.owner import revise_run, state_as_owner
from flockstep.scripts.runs.run import run_info
from support.trainers import RUN, Trainer


def roster_of(event: Event) -> set[str]:
    roster = event["roster"]
    assert isinstance(roster, list)
    return set(map(str, roster))


def test_whom_the_owner_bans_is_in_no_round_until_it_is_pardoned(bootstrap_address: str, tmp_path: Path) -> None:
    config = PeerConfig(home=tmp_path / "owner", host="127.0.0.1", port=0)
    identity = Identity.load_or_create(config.home / "identity.key")
    # Its owner alone votes: a round would wait 15 s for the vote of a member that is banned (attacks/test_owner_bans.py).
    toml = RUN.replace("floor = 20.0", "floor = 5.0").replace('voters = "members"', "").format(rounds=100_000, peers=1)
    signed = SignedManifest.sign(Manifest.from_toml(toml, where="run.toml", owner=identity.peer_id), identity)
    link = str(JoinLink(signed.run_id, (bootstrap_address,)))
    publish_manifest(signed, JoinLink.parse(link), config, Telemetry())
    stays, target = Trainer(link, config.home, 0), Trainer(link, tmp_path / "target", 1)
    try:
        for member in (stays, target):
            member.start()
        both = {stays.peer_id, target.peer_id}
        stays.heard("round.done", lambda event: roster_of(event) == both)

        banned = state_as_owner("ban", link, target.peer_id, "sends noise", None, config)
        assert (banned.number, banned.num_holders, banned.num_bootstraps) == (1, 1, 1)
        stays.heard("peer.banned", lambda event: event["peer"] == target.peer_id)
        since = len(stays.events)
        alone = stays.heard("round.done", lambda event: roster_of(event) == {stays.peer_id}, since=since)
        before = [event for event in stays.named("round.done") if event in stays.events[since:] and event is not alone]
        assert [event for event in before if int(str(event["round"])) != int(str(alone["round"])) - 1] == []
        target.heard("round.awaited", lambda event: "by the run's owner: sends noise" in str(event["reason"]))

        assert state_as_owner("ban", link, target.peer_id, "sends noise", None, config).number == 1  # It holds already.
        said: list[str] = []
        run_info(link, config, said.append, as_json=True)
        run_info(link, config, said.append)
        figures = json.loads(said[0])["statements"]
        assert figures == [
            {"number": 1, "verb": "ban", "peer": target.peer_id, "reason": "sends noise", "until_round": 0}
        ]
        assert any(target.peer_id in line and "sends noise" in line for line in "\n".join(said[1:]).splitlines())

        since = len(stays.events)
        pardoned = state_as_owner("pardon", link, target.peer_id, "", None, config)
        assert pardoned.number == 2
        assert pardoned.statement.until_round >= int(str(alone["round"]))
        stays.heard("peer.pardoned", lambda event: event["peer"] == target.peer_id, since=since)
        stays.heard("round.done", lambda event: roster_of(event) == both, since=since)
        with pytest.raises(UsageError, match="only its owner"):
            state_as_owner(
                "ban", link, target.peer_id, "", None, PeerConfig(home=tmp_path / "x", host="127.0.0.1", port=0)
            )
    finally:
        for member in (stays, target):
            member.stop.set()
            if member.ident is not None:
                member.join()
    assert (stays.error, target.error) == (None, None)


def test_a_setting_of_two_sections_is_named_with_its_section(bootstrap_address: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="several sections have 'lr'"):
        revise_run(str(JoinLink("a" * 52, (bootstrap_address,))), ["lr=0.1"], None, PeerConfig(home=tmp_path))


def test_a_run_that_trains_is_revised_in_one_round_for_all(bootstrap_address: str, tmp_path: Path) -> None:
    config = PeerConfig(home=tmp_path / "owner", host="127.0.0.1", port=0)
    identity = Identity.load_or_create(config.home / "identity.key")
    toml = RUN.replace("floor = 20.0", "floor = 5.0").format(rounds=100_000, peers=2)
    signed = SignedManifest.sign(Manifest.from_toml(toml, where="run.toml", owner=identity.peer_id), identity)
    link = str(JoinLink(signed.run_id, (bootstrap_address,)))
    publish_manifest(signed, JoinLink.parse(link), config, Telemetry())
    both = [Trainer(link, config.home, 0), Trainer(link, tmp_path / "other", 1)]
    try:
        for member in both:
            member.start()
        both[0].heard("round.done", lambda event: int(str(event["round"])) > 2)
        with pytest.raises(UsageError, match="below the present round"):
            revise_run(link, ["rounds=1"], None, config)
        (tmp_path / "revise.toml").write_text(
            "[outer]\nrounds = 50000\nlr = 0.9\n[inner]\nclip = 0.5\n[codec]\nresult = 'bf16'\ncontribution = 'int4'\n"
        )
        for member in both:  # No round passes by while the command runs, however long it takes.
            member.rests.set()
        now = both[0].named("round.done")[-1]["round"]
        made = revise_run(link, [f"rounds={int(str(now)) + 10}"], tmp_path / "revise.toml", config)
        assert made.statement.settings == (
            '{"codec.contribution":"int4","codec.result":"bf16","inner.clip":0.5,"outer.lr":0.9,'
            f'"outer.rounds":{int(str(now)) + 10}}}'
        )
        for member in both:
            member.rests.clear()
        for member in both:
            member.join(120)
            assert not member.is_alive()
        (first,), (second,) = (member.named("run.revised") for member in both)
        assert (first["round"], first["reason"]) == (second["round"], second["reason"])
        assert "[inner] clip = 0.5 (published with 1.0)" in str(first["reason"])
        ends = {(event["round"], event["root"]) for member in both for event in member.named("run.finished")}
        assert len(ends) == 1
        assert not [event for member in both for event in member.named("round.void") if "revision" in str(event["reason"])]
    finally:
        for member in both:
            member.stop.set()
            if member.ident is not None:
                member.join()
    assert [member.error for member in both] == [None, None]

