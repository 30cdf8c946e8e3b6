"""Claims: their room is shared by origin, and those that are dialled are taken in turns of their carriers."""

import pytest
from flockstep.dht.members import claims as claims_module
from flockstep.dht.members.body import MemberBody, MemberState
from flockstep.dht.members.claims import MAX_TRIED, PROBE_AGAIN, Claims, Probes
from flockstep.dht.members.table import LAPSED, LIFETIME, MAX_MEMBERS, PRESENCE, MemberTable, MergeOutcome
from flockstep.dht.records import Record
from flockstep.peer.identity import Identity
from flockstep.peer.quota.origins import Origins
from flockstep.peer.wire.schema import encode
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

RUN = "a" * 52
ME, *KEYS = [Identity.from_seed(bytes([n]) * 32) for n in range(9)]
IPS = ("192.168.0.1", "198.51.100.1", "198.51.100.2", "203.0.113.1")
RECORDS = {
    (number, sequence): Record.sign(
        key, run=RUN, kind="member", sequence=sequence, lifetime=LIFETIME, body=encode(MemberBody(MemberState.TRAINING))
    )
    for number, key in enumerate(KEYS)
    for sequence in range(1, 5)
}
NUMBERS = st.integers(0, len(KEYS) - 1)


def test_carriers_take_turns_and_a_peer_is_dialled_once_a_minute() -> None:
    probes = Probes()
    for number in range(100):
        probes.add(f"ghost {number}", "liar")
    probes.add("bert", "anna")
    assert probes.take(2, 0.0) == ["ghost 0", "bert"]
    probes.add("bert", "anna")
    assert probes.take(2, PROBE_AGAIN - 1) == ["ghost 1", "ghost 2"]
    probes.add("bert", "anna")
    assert "bert" in probes.take(2, PROBE_AGAIN)


def test_in_a_crowd_only_those_wanted_are_dialled_the_best_first() -> None:
    probes = Probes()
    for peer in ("a", "b", "c", "d"):
        probes.add(peer, "anna")
    assert probes.take(2, 0.0, ["c", "a", "x"]) == ["c", "a"]
    assert len(probes) == 0


def test_waiting_and_tried_peers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_module, "CLAIMS_PER_CARRIER", 10)
    probes = Probes()
    for number in range(50):
        probes.add(f"ghost {number}", "liar")
    assert len(probes) == 10
    assert probes.take(1, 0.0) == ["ghost 40"]
    monkeypatch.setattr(claims_module, "MAX_TRIED", 3)
    probes.take(9, 0.0)
    assert len(probes._tried) == 3
    assert MAX_TRIED <= MAX_MEMBERS


def test_the_carrier_with_the_most_claims_gives_way() -> None:
    claims = Claims()
    for number in range(5):
        claims.add(f"ghost {number}", "liar", "")
    claims.add("bert", "anna", "")
    assert claims.to_drop("anna") == claims.to_drop(None) == "ghost 0"
    assert claims.to_drop("liar") is None
    assert Claims().to_drop(None) is None


def test_claims_from_an_exempt_network_are_limited_by_their_carriers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_module, "CLAIMS_PER_NETWORK", 2)
    for ip, exempt in (("192.168.0.1", True), ("198.51.100.1", False)):
        table, origin = MemberTable(RUN, ME.peer_id), Origins(("192.168.0.0/16",)).of(ip)
        for number, carrier in enumerate((KEYS[7], KEYS[6], KEYS[5])):
            merged = table.merge(RECORDS[number, 1], 0.0, carrier=carrier.peer_id, origin=origin)
        assert merged.outcome is (MergeOutcome.NEW if exempt else MergeOutcome.FULL)
        assert (table.room_for_claims(KEYS[4].peer_id, origin)[0] > 0) is exempt


def test_an_exempt_address_is_not_limited_by_the_rest_of_its_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_module, "CLAIMS_PER_NETWORK", 2)
    table, origins = MemberTable(RUN, ME.peer_id), Origins(("198.51.100.0/25",))
    exempt, limited = origins.of("198.51.100.1"), origins.of("198.51.100.200")
    for number in range(2):
        table.merge(RECORDS[number, 1], 0.0, carrier=KEYS[7].peer_id, origin=limited)
    assert table.room_for_claims(KEYS[6].peer_id, limited)[0] == 0
    assert table.room_for_claims(KEYS[6].peer_id, exempt) == (2, "")
    assert table.merge(RECORDS[2, 1], 0.0, carrier=KEYS[6].peer_id, origin=exempt).outcome is MergeOutcome.NEW


class Tables(RuleBasedStateMachine):
    """A small table under any sequence of records, sessions, words, losses and waits, against a plain model."""

    def __init__(self) -> None:
        super().__init__()
        self._limit = pytest.MonkeyPatch()
        self._limit.setattr("flockstep.dht.members.table.MAX_MEMBERS", 6)
        self._limit.setattr(claims_module, "CLAIMS_PER_CARRIER", 2)
        self.table = MemberTable(RUN, ME.peer_id)
        self.table.update_own(ME, MemberBody(MemberState.TRAINING), 0.0)
        self.now = 0.0
        self.met: dict[str, float] = {}
        self.vouched: frozenset[str] = frozenset()

    def teardown(self) -> None:
        self._limit.undo()

    @rule(number=NUMBERS, sequence=st.integers(1, 4), carrier=NUMBERS, ip=st.sampled_from(IPS), met=st.booleans())
    def merge(self, number: int, sequence: int, carrier: int, ip: str, met: bool) -> None:
        origin = Origins(("192.168.0.0/16",)).of(ip)
        before = {row.peer for row in self.table}
        self.table.merge(RECORDS[number, sequence], self.now, carrier=KEYS[carrier].peer_id, origin=origin, met=met)
        if met:
            assert KEYS[number].peer_id in {row.peer for row in self.table}
        for peer in before - {row.peer for row in self.table}:
            self.met.pop(peer, None)
            self.vouched -= {peer}

    @rule(number=NUMBERS, ip=st.sampled_from(IPS), relayed=st.booleans())
    def meet(self, number: int, ip: str, relayed: bool) -> None:
        peer = KEYS[number].peer_id
        origin = Origins(("192.168.0.0/16",)).of(ip)
        if not self.table.meet(peer, self.now, origin, relayed=relayed) and self.table.get(peer) is not None:
            self.met[peer] = self.now

    @rule(numbers=st.sets(NUMBERS))
    def vouch(self, numbers: set[int]) -> None:
        peers = {KEYS[number].peer_id for number in numbers}
        rows = {peer: row for peer in peers if (row := self.table.get(peer)) is not None}
        self.table.vouch(peers)
        self.vouched = frozenset(peer for peer, row in rows.items() if row.gone in ("", LAPSED))

    @rule(number=NUMBERS)
    def lose(self, number: int) -> None:
        peer = KEYS[number].peer_id
        row = self.table.get(peer)
        if row is not None and not row.gone:
            self.table.lose(peer, self.now, "silent")
            self.met.pop(peer, None)
            self.vouched -= {peer}

    @rule(number=NUMBERS)
    def regain(self, number: int) -> None:
        self.table.regain(KEYS[number].peer_id, self.now)

    @rule(seconds=st.sampled_from((1.0, 30.0, PRESENCE, LIFETIME)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.table.expire(self.now)
        self.vouched &= {row.peer for row in self.table if row.gone == ""}
        self.met = {peer: at for peer, at in self.met.items() if at + PRESENCE > self.now}

    @invariant()
    def only_who_was_met_or_vouched_for_counts(self) -> None:
        active = {row.peer for row in self.table.active(self.now)}
        expected = {ME.peer_id}
        for row in self.table:
            if (row.peer in self.met or row.peer in self.vouched) and not row.gone and row.expires > self.now:
                expected.add(row.peer)
        assert active == expected
        assert all(not self.table.is_claim(peer) for peer in active)

    @invariant()
    def what_it_keeps_is_bounded_and_its_counts_agree(self) -> None:
        rows = list(self.table)
        assert len(rows) <= 6
        assert ME.peer_id in {row.peer for row in rows}
        claims = [row for row in rows if self.table.is_claim(row.peer)]
        assert self.table.num_claims == len(claims)
        assert self.table.num_here == sum(not row.gone and row not in claims for row in rows)
        assert {record.peer for record in self.table.newer_than(b"", self.now)}.isdisjoint(row.peer for row in claims)


def test_a_member_that_is_met_counts_as_soon_as_its_next_record_comes() -> None:
    """Its record has expired meanwhile: the session holds all the same."""
    table, peer, late = MemberTable(RUN, ME.peer_id), KEYS[0].peer_id, LIFETIME + 1
    table.merge(RECORDS[0, 1], 0.0)
    assert not table.meet(peer, LIFETIME - 1)
    assert [reason for _, reason in table.expire(late)] == ["its record expired"]
    assert not table.counts(peer, late)
    table.merge(RECORDS[0, 2], late)
    assert table.counts(peer, late)
    table.expire(LIFETIME - 1 + PRESENCE)
    assert not table.counts(peer, LIFETIME - 1 + PRESENCE)


Tables.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTables = Tables.TestCase
