"""The ledger: which certificates it appends, which chain it prefers, and what it follows."""

import zlib
from pathlib import Path
from random import Random

import pytest
from flockstep.collectives.chain import ledger as ledger_module
from flockstep.collectives.chain.chain import NOTHING, ChainLink
from flockstep.collectives.chain.packed import MAX_PLAIN_BYTES, pack_certificate, unpack_certificate
from flockstep.peer import wire
from flockstep.peer.base.errors import MalformedMessage, RemoteError
from flockstep.peer.identity import Identity
from flockstep.peer.log.file import read_records
from hypothesis import given, settings
from hypothesis import strategies as st
from support.certificates import LONE, certify, grow
from support.ledgers import named, open_ledger, rounds_in, write

CHAIN = grow(None, 5)


def test_what_was_appended_is_there_after_a_restart(tmp_path: Path) -> None:
    write(tmp_path / "runs" / "ledger", CHAIN)
    ledger, events = open_ledger(tmp_path / "runs" / "ledger")
    assert ledger.head == ChainLink.of(CHAIN[-1]).head
    assert rounds_in(ledger) == CHAIN
    assert ledger.certificate(6) is None
    assert ledger.certificate(0) is None
    assert [event["event"] for event in events] == ["ledger.opened"]
    assert ledger.at(3) == ChainLink.of(CHAIN[2]).head


def test_a_new_ledger_is_empty(tmp_path: Path) -> None:
    ledger, _ = open_ledger(tmp_path / "ledger")
    assert (ledger.head, ledger.first, rounds_in(ledger)) == (NOTHING, 1, [])
    assert ledger.since(1, 9, max_bytes=1 << 20) == ()


def test_extend_takes_the_next_certificates_and_nothing_else(tmp_path: Path) -> None:
    ledger, _ = open_ledger(tmp_path / "ledger")
    other = grow(None, 2, mark=b"other")
    assert not ledger.extend(CHAIN[1:2])
    assert ledger.extend(CHAIN[:1])
    assert not ledger.extend(CHAIN[2:3])
    assert not ledger.extend(other[1:])
    assert ledger.extend(CHAIN[:3])  # What is here already is left out.
    assert ledger.extend(other)
    assert rounds_in(ledger) == CHAIN[:3] == rounds_in(open_ledger(tmp_path / "ledger")[0])


def test_follow_takes_no_certificate_that_is_not_valid_after_the_one_before(tmp_path: Path) -> None:
    ledger, _ = open_ledger(tmp_path / "ledger")
    first = CHAIN[0]
    stranger = Identity.from_seed(bytes([9]) * 32)
    ledger.follow([first])
    for bad, why in (
        (certify(first, -1), "takes tokens away"),
        (certify(first, 100, credit=(101,)), "round 2 credits 101 tokens and adds 100"),
        (certify(first, 1, roster=(LONE, stranger), signers=(stranger,)), "which has no vote in its round"),
        (certify(None, 1, run="b" * 52), "another run"),
    ):
        with pytest.raises(RemoteError, match=why):
            ledger.follow([bad])
    assert rounds_in(open_ledger(tmp_path / "ledger")[0]) == [first]


def test_another_chain_replaces_mine_from_where_they_part(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    write(path, CHAIN[:4])
    ledger, events = open_ledger(path)
    branch = grow(CHAIN[1], 1, tokens=1000)
    ledger.follow(branch)
    assert rounds_in(ledger) == [*CHAIN[:2], *branch]
    (event,) = named(events, "ledger.replaced")
    assert "2 rounds of mine" in str(event["reason"])
    assert rounds_in(open_ledger(path)[0]) == [*CHAIN[:2], *branch]
    longer = [*CHAIN[:2], *branch, *grow(branch[-1], 2)]
    ledger.follow(longer)  # From the beginning: what is known is passed over.
    assert rounds_in(open_ledger(path)[0]) == longer
    assert len(named(events, "ledger.replaced")) == 1


def test_what_is_no_chain_is_refused_with_the_reason(tmp_path: Path) -> None:
    ledger, _ = open_ledger(tmp_path / "ledger")
    for certificate in CHAIN[:3]:
        ledger.extend([certificate])
    elsewhere = grow(grow(None, 1, mark=b"x")[0], 4, tokens=900)
    with pytest.raises(RemoteError, match="does not follow round 3"):
        ledger.follow([CHAIN[2], CHAIN[4]])
    with pytest.raises(RemoteError, match="follows another one"):
        ledger.follow([CHAIN[2], elsewhere[2]])
    with pytest.raises(RemoteError, match="takes tokens away"):
        ledger.follow([CHAIN[2], certify(CHAIN[2], -1)])
    assert rounds_in(ledger) == CHAIN[:3]


def test_a_total_at_its_limit_ends_no_trail(tmp_path: Path) -> None:
    ledger, _ = open_ledger(tmp_path / "ledger")
    full = grow(None, 1, tokens=wire.MAX_COUNT)
    for _ in range(3):
        full.append(certify(full[-1], 0))
    ledger.follow(full[:2])
    ledger.extend([full[2]])
    ledger.follow(full)
    assert rounds_in(ledger) == full == rounds_in(open_ledger(tmp_path / "ledger")[0])


def test_a_branch_too_long_for_one_record_takes_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_LOG_PAYLOAD_BYTES", 2 * len(pack_certificate(CHAIN[0])) + 50)
    ledger, _ = open_ledger(tmp_path / "ledger")
    ledger.follow(CHAIN)
    assert len(list(read_records(tmp_path / "ledger"))) == 3
    assert rounds_in(ledger) == CHAIN == rounds_in(open_ledger(tmp_path / "ledger")[0])


def test_the_ledger_follows_the_state_that_i_hold(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger, events = open_ledger(path)
    ledger.follow(CHAIN[2:3])  # A newcomer: nothing of what was before is known.
    assert (ledger.first, rounds_in(ledger)) == (3, CHAIN[2:3])
    ledger.follow(CHAIN[3:5])
    assert (ledger.first, rounds_in(ledger)) == (3, CHAIN[2:5])
    ledger.follow(CHAIN[1:5])  # What is before was read, too.
    assert (ledger.first, rounds_in(ledger)) == (2, CHAIN[1:5])
    ledger.follow(CHAIN[2:5])
    assert ledger.first == 2
    assert not named(events, "ledger.left_behind")
    ledger.follow(CHAIN[3:4])  # Nobody has the state of round 5 any more.
    assert rounds_in(ledger) == CHAIN[1:4]
    assert len(named(events, "ledger.left_behind")) == 1
    assert open_ledger(path)[0].head.round == 5  # What is known is not thrown away.
    ledger.follow(())
    assert ledger.head == NOTHING
    worse = grow(None, 1, tokens=1)
    ledger.extend([worse[0]])
    assert rounds_in(ledger) == worse == rounds_in(open_ledger(path)[0])
    ledger.follow(CHAIN)
    assert rounds_in(ledger) == CHAIN == rounds_in(open_ledger(path)[0])
    ledger.follow(worse)
    assert rounds_in(ledger) == worse
    with pytest.raises(RemoteError):
        ledger.follow([CHAIN[0], CHAIN[2]])


def test_who_began_in_the_middle_can_take_the_whole_chain(tmp_path: Path) -> None:
    ledger, _ = open_ledger(tmp_path / "ledger")
    ledger.follow(CHAIN[2:3])
    ledger.follow(CHAIN)
    assert rounds_in(ledger) == CHAIN == rounds_in(open_ledger(tmp_path / "ledger")[0])


def test_a_page_ends_at_its_limits(tmp_path: Path) -> None:
    write(tmp_path / "ledger", CHAIN)
    ledger, _ = open_ledger(tmp_path / "ledger")
    packed = [pack_certificate(certificate) for certificate in CHAIN]
    assert ledger.since(2, 2, max_bytes=1 << 20) == tuple(packed[1:3])
    assert ledger.since(4, 9, max_bytes=1 << 20) == tuple(packed[3:])
    assert ledger.since(1, 9, max_bytes=len(packed[0]) + len(packed[1])) == tuple(packed[:2])
    assert ledger.since(1, 9, max_bytes=len(packed[0]) - 1) == ()
    assert ledger.since(2**62, 2**62, max_bytes=1) == ()


def test_the_certificate_of_a_full_roster_fits_where_it_must() -> None:
    roster = [Identity.from_seed(number.to_bytes(32, "big")) for number in range(wire.MAX_ROSTER)]
    certificate = certify(None, 1, roster=roster)
    assert unpack_certificate(pack_certificate(certificate)) == certificate
    assert len(pack_certificate(certificate)) < wire.MAX_PACKED_BYTES


def test_what_is_no_packed_certificate_is_refused_in_order() -> None:
    bomb = zlib.compress(bytes(1 << 24))
    for data in (
        b"",
        b"junk",
        bomb,
        pack_certificate(CHAIN[0])[:-1],
        pack_certificate(CHAIN[0]) + b"x",
        zlib.compress(b"junk"),
    ):
        with pytest.raises(MalformedMessage):
            unpack_certificate(data)
    longest = zlib.compress(bytes(MAX_PLAIN_BYTES + 1))
    with pytest.raises(MalformedMessage, match="too long"):
        unpack_certificate(longest)


def forest(parents: list[tuple[int, int]]) -> list[list[wire.Certificate]]:
    """A tree of certificates from (which one before, how many tokens); each as the chain that leads to it."""
    chains: list[list[wire.Certificate]] = [[]]
    for number, (parent, tokens) in enumerate(parents):
        before = chains[parent % len(chains)]
        made = certify(before[-1] if before else None, tokens, mark=number.to_bytes(2, "big"))
        chains.append([*before, made])
    return chains[1:]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), min_size=1, max_size=8).map(forest),
    st.randoms(use_true_random=False),
)
@settings(max_examples=40, deadline=None)
def test_a_ledger_holds_the_chain_that_it_followed_last_whatever_it_knew(
    tmp_path_factory: pytest.TempPathFactory, chains: list[list[wire.Certificate]], random: Random
) -> None:
    random.shuffle(chains)
    path = tmp_path_factory.mktemp("ledger") / "ledger"
    ledger, _events = open_ledger(path)
    for chain in chains:
        ledger.follow(chain)
        assert rounds_in(ledger) == chain
    again, _events = open_ledger(path)
    assert rounds_in(again)[: len(chains[-1])] == chains[-1]
