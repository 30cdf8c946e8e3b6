"""Who decides a run, in words; and the links and lines of a keeper."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from flockstep.collectives.agreement.electorate import Electorate
from flockstep.collectives.picture.votes import VotesHere
from flockstep.dht.members.remembered import Remembered
from flockstep.dht.run.link import JoinLink
from flockstep.dht.run.manifest import Admission, Data, Manifest, SignedManifest
from flockstep.dht.run.statements import OwnerStatement, OwnerStatements
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.errors import UsageError
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Event, Telemetry
from flockstep.scripts.peers.join import describe_event
from flockstep.scripts.peers.keep import describe_keeping, voteless, with_bootstraps
from flockstep.scripts.watch.story import RESTORED_START
from flockstep.scripts.watch.voters import describe_voters, how_to_share, who_decides, why_votes

IDS = [Identity.from_seed(bytes([number]) * 32).peer_id for number in range(1, 6)]
OWNER = Identity.from_seed(bytes([1]) * 32)
RUN = Manifest(owner=IDS[0], name="run", data=Data(source="own"))


@pytest.mark.parametrize(
    ("keepers", "said"),
    [
        (1, "its owner decides, as its only keeper, 1 of 1 votes; while it is away, no round ends"),
        (2, "its 2 keepers decide, 2 of 2 votes; while one of them is away, no round ends"),
        (3, "its 3 keepers decide, 2 of 3 votes; while more than 1 of them is away, no round ends"),
        (4, "its 4 keepers decide, 3 of 4 votes; while more than 1 of them is away, no round ends"),
    ],
)
def test_who_decides_and_what_their_loss_means(keepers: int, said: str) -> None:
    admission = Admission(keepers=" ".join(IDS[1:keepers]))
    assert who_decides(replace(RUN, admission=admission)).startswith(said)


def test_who_decides_where_no_keepers_vote() -> None:
    assert who_decides(replace(RUN, admission=Admission(voters="members"))) == (
        "all members decide, one vote each; its owner alone in the first round"
    )
    assert who_decides(RUN).endswith("and all wait for it")


def test_an_owner_that_decides_alone_is_told_how_others_get_a_vote() -> None:
    assert "`flockstep run vouch 'flockstep://x' ID` gives it a vote" in how_to_share(RUN, "flockstep://x")
    for rules in (Admission(keepers=IDS[1]), Admission(voters="members")):
        assert how_to_share(replace(RUN, admission=rules), "flockstep://x") == ""


def test_the_votes_that_are_here_are_named_with_those_that_are_missing() -> None:
    votes = VotesHere(3, Electorate(dict.fromkeys(IDS[:4], 1)), (IDS[0], IDS[1]))
    first, second = sorted(IDS[2:4])
    assert str(votes) == f"waits for {first[-8:]}, {second[-8:]}: 2 of 4 votes are here, 3 needed"
    away = replace(votes, owner=IDS[3], away=250.0)
    assert str(away) == f"waits for its owner, {IDS[2][-8:]}, away for 4 min or longer: 2 of 4 votes are here, 3 needed"
    assert str(replace(votes, here=tuple(IDS[:3]))) == f"3 of 4 votes are here, 3 needed; missing: {IDS[3][-8:]}"
    assert set(votes.missing) == {IDS[2], IDS[3]}
    assert (votes.figures["votes"], votes.figures["quorum"], votes.figures["total"]) == (2, 3, 4)


def test_why_each_voter_may_vote_is_told_from_what_the_owner_signed() -> None:
    manifest = replace(RUN, admission=Admission(keepers=IDS[1]))
    votes = VotesHere(41, Electorate(dict.fromkeys(IDS, 1)), (IDS[0],))
    assert describe_voters(votes, manifest) == [
        f"{peer[-8:]}  {'here' if peer == IDS[0] else 'away'}  {why}"
        for peer, why in sorted(
            zip(
                IDS,
                (
                    "owns the run",
                    "is listed in the manifest",
                    *["the owner vouched for it"] * 3,
                ),
                strict=True,
            )
        )
    ]
    assert why_votes(IDS[3], replace(RUN, admission=Admission(kind="allow", voters="members"))) == "is a member"


def test_further_bootstraps_of_a_link_are_added_once_and_checked() -> None:
    first, second = (f"/ip4/192.0.2.{number}/tcp/4001/p2p/{IDS[number]}" for number in (1, 2))
    link = JoinLink("a" * 52, (first,), (3, b"h" * 32))
    assert with_bootstraps(link, [first, second]) == JoinLink("a" * 52, (first, second), (3, b"h" * 32))
    with pytest.raises(UsageError, match="is not an address"):
        with_bootstraps(link, ["192.0.2.1"])


@pytest.mark.parametrize("describe", [describe_keeping, describe_event])
def test_a_state_of_the_start_continues_no_round(describe: Callable[[Event], str]) -> None:
    assert describe({"event": "state.restored", "round": 0}) == RESTORED_START
    assert describe({"event": "state.restored", "round": 7}).startswith("continues from round 7")


def test_a_keeper_without_a_vote_says_how_it_gets_one(tmp_path: Path) -> None:
    owner = Identity.from_seed(bytes([1]) * 32)
    config, telemetry = PeerConfig(home=tmp_path), Telemetry()
    signed = SignedManifest.sign(replace(RUN, owner=IDS[0], admission=Admission(keepers=IDS[1])), owner)
    link = JoinLink(signed.run_id, ("/ip4/192.0.2.1/tcp/4001/p2p/" + IDS[0],))
    said = voteless(signed, link, IDS[2], config, telemetry)
    assert f"the run's owner gives it one: flockstep run vouch '{link}' {IDS[2]}" in said
    assert [voteless(signed, link, voter, config, telemetry) for voter in IDS[:2]] == ["", ""]
    log = OwnerStatements(signed.run_id, IDS[0])
    Remembered(tmp_path / "runs" / signed.run_id, signed.run_id, telemetry).append(
        log, owner, (OwnerStatement("vouch", IDS[2]),)
    )
    assert voteless(signed, link, IDS[2], config, telemetry) == ""
    rules = Admission(kind="allow", allow=IDS[2], voters="members")
    listed = SignedManifest.sign(replace(RUN, owner=IDS[0], admission=rules), owner)
    assert voteless(listed, link, IDS[2], config, telemetry) == ""  # No word of the owner's gives it a vote.
