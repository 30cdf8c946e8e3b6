"""The owner of a run of version 0.1 trains on from the state that its home folder has kept, and a newcomer takes it."""

from pathlib import Path

from flockstep.dht.rendezvous import publish_manifest
from flockstep.dht.run.link import JoinLink
from flockstep.peer.config import PeerConfig
from flockstep.peer.telemetry import Telemetry, log_path, read_events
from integration.test_resume import hear, joined
from support.first_version import ROOT, ROUND, manifest_in, unpack_home


def test_a_home_of_version_0_1_trains_on_from_its_state(bootstrap_address: str, tmp_path: Path) -> None:
    homes = owner, newcomer = [tmp_path / "owner", tmp_path / "newcomer"]
    signed = manifest_in(unpack_home(owner))
    link = JoinLink(signed.run_id, (bootstrap_address,))
    publish_manifest(signed, link, PeerConfig(home=owner, host="127.0.0.1", port=0), Telemetry())
    with joined(str(link), [owner]) as (first,):
        hear(first, lambda event: event["event"] == "run.joined")
        with joined(str(link), [newcomer]) as (second,):
            hear(second, lambda event: event["event"] == "state.synced")
            hear(first, lambda event: event["event"] == "round.done")
    events, theirs = ([event for _, event in read_events(log_path(home))] for home in homes)
    begun = [event for event in events if event["event"] in ("state.carried_over", "state.restored", "state.synced")]
    assert [(event["event"], event["round"], event["root"]) for event in begun[:3]] == [
        ("state.carried_over", ROUND, ROOT.hex()),
        ("state.restored", 0, ROOT.hex()),
        ("state.synced", 0, ROOT.hex()),
    ]
    assert next(event["round"] for event in events if event["event"] == "round.done") == 1
    assert next(event for event in theirs if event["event"] == "state.synced")["peer"]
    blamed = ("peer.charged", "checkpoint.damaged", "file.damaged", "promise.forgotten", "outputs.unreadable")
    assert [event for event in (*events, *theirs) if event["event"] in blamed] == []
