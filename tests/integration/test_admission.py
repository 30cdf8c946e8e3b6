"""A run by invitation: a peer with one is admitted, one without is refused. Real processes."""

import json
from pathlib import Path

import pytest
import trio
from flockstep.dht.rendezvous import publish_manifest
from flockstep.dht.run.admission import Invitation, Ticket
from flockstep.dht.run.link import JoinLink
from flockstep.dht.run.manifest import Manifest, SignedManifest
from flockstep.optim.member.reach import reach_run
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import UsageError
from flockstep.peer.identity import Identity, identity_path
from flockstep.peer.log.telemetry import Telemetry
from flockstep.scripts.runs.owner import state_as_owner
from flockstep.scripts.runs.run import invite, run_info
from support.trainers import RUN, Trainer


def test_who_is_invited_takes_part_and_a_visitor_sees_the_members_and_no_certificates(
    bootstrap_address: str, tmp_path: Path
) -> None:
    config = PeerConfig(home=tmp_path / "owner", host="127.0.0.1", port=0)
    identity = Identity.load_or_create(config.home / "identity.key")
    toml = RUN.format(rounds=100_000, peers=2).replace("[admission]", '[admission]\nkind = "invite"')
    signed = SignedManifest.sign(Manifest.from_toml(toml, where="run.toml", owner=identity.peer_id), identity)
    link = str(JoinLink(signed.run_id, (bootstrap_address,)))
    publish_manifest(signed, JoinLink.parse(link), config, Telemetry())
    late = identity_path(tmp_path / "late")
    said: list[str] = []
    invite(link, "", 2, 30, config, said.append)
    (token,) = said
    assert Ticket.parse(token).invitation.run == signed.run_id
    members = [Trainer(link, config.home, 0), Trainer(link, tmp_path / "invited", 1, invite=token)]
    stranger = Trainer(link, tmp_path / "stranger", 2)
    try:
        for member in members:
            member.start()
        with pytest.raises(UsageError, match="does not let this peer in: it shows no invitation"):
            stranger.swarm.__enter__()
        for member in members:
            member.heard("round.done", lambda event: int(str(event["round"])) >= 2)
        run_info(link, PeerConfig(home=tmp_path / "visitor", host="127.0.0.1", port=0), said.append, as_json=True)
    finally:
        for member in members:
            member.stop.set()
            if member.ident is not None:
                member.join()
    assert [member.error for member in members] == [None, None]

    async def reach(name: str, invite: str = "") -> bytes:
        invited = PeerConfig(home=tmp_path / name, host="127.0.0.1", port=0, invite=invite)
        async with reach_run(JoinLink.parse(link), invited, Telemetry()) as reached:
            return reached.invite

    assert trio.run(reach, "invited")  # Its home folder has kept the invitation.
    for name, member_id in (("invited", members[1].peer_id), ("late", Identity.load_or_create(late).peer_id)):
        expired = Ticket(Invitation.sign(identity, signed.run_id, member_id, expires=1), b"")
        if name == "invited":  # It returns, as after a restart: only an entry can be too late.
            assert trio.run(reach, name, str(expired))
        else:
            with pytest.raises(UsageError, match="its invitation has expired"):
                trio.run(reach, name, str(expired))
    state_as_owner("revoke", link, members[1].peer_id, "", None, config)
    with pytest.raises(UsageError, match="the run's owner has withdrawn its admission"):
        trio.run(reach, "invited")
    shown = json.loads(said[-1])
    assert {figures["peer"] for figures in shown["members"]} == {member.peer_id for member in members}
    assert shown["trust"] == {}
