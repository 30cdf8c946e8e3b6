"""`flockstep run`: the link that `run info` prints."""

from dataclasses import replace

from flockstep.collectives.light.marks import Mark, Marks
from flockstep.dht.members.body import MemberBody, MemberState
from flockstep.dht.members.table import Member
from flockstep.dht.records import Record
from flockstep.dht.run.link import JoinLink
from flockstep.peer.identity import Identity
from flockstep.scripts.runs.run import link_at_head

PEER = Identity.from_seed(b"p" * 32).peer_id
LINK = JoinLink("a" * 52, (f"/ip4/192.0.2.1/tcp/4001/p2p/{PEER}",))
A, B = b"a" * 32, b"b" * 32


def member(name: str, round_: int, head: bytes, state: MemberState = MemberState.TRAINING) -> Member:
    body = MemberBody(state=state, round=round_, head=head, chain_tokens=7)
    return Member(Record("run", "member", name, 1, 60.0, b"", bytes(64)), body, expires=60.0)


def test_the_link_names_the_head_that_most_members_train_on() -> None:
    newcomers = [member(f"newcomer {n}", 9, B, MemberState.SYNCING) for n in range(3)]
    most = [member("a", 4, A), member("b", 4, A), member("c", 9, B), *newcomers]
    assert link_at_head(LINK, most, {}) == replace(LINK, at=(4, A))
    assert link_at_head(LINK, [member("a", 4, A), member("c", 9, B)], {}) == replace(LINK, at=(9, B))
    assert JoinLink.parse(str(link_at_head(LINK, most, {}))) == replace(LINK, at=(4, A))


def test_the_link_names_what_most_bootstraps_name_whatever_members_state() -> None:
    strangers = [member(f"stranger {n}", 9, B) for n in range(9)]
    one, other = (Marks(LINK.run_id, (Mark(5, A), Mark(round_, hash_))) for round_, hash_ in ((6, B), (7, A)))
    assert link_at_head(LINK, strangers, {"x": one, "y": other, "z": None}) == replace(LINK, at=(5, A))
    assert link_at_head(LINK, strangers, {"z": None}) == replace(LINK, at=(9, B))
    beginning = Marks(LINK.run_id, (Mark(0, A),))
    assert link_at_head(LINK, strangers, {"x": beginning}) == replace(LINK, at=(9, B))


def test_a_run_without_a_certified_round_has_its_link_as_it_is() -> None:
    start = member("a", 0, bytes(32))
    start = replace(start, body=replace(start.body, chain_tokens=0))
    assert link_at_head(LINK, [], {}) == link_at_head(LINK, [start], {}) == LINK
