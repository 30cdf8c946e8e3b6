"""What a reader of chains takes from peers, and what two certificates of one round are to it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from flockstep.collectives.chain.certificate import value_of
from flockstep.collectives.chain.chain import NOTHING, ChainLink, Head, HeldChain
from flockstep.collectives.chain.fork_choice import Relation
from flockstep.collectives.chain.packed import pack_certificate
from flockstep.collectives.chain.reader import ChainReader
from flockstep.collectives.spec import charter_of
from flockstep.peer import wire
from flockstep.peer.base.errors import NetworkError, RemoteError
from support.certificates import decided
from support.keepers import key
from support.light import KEEPERS, SIGNED, chain_of

RUN = SIGNED.run_id
CHAIN = chain_of(40)
STRANGERS = [key(number) for number in range(10, 14)]
TWICE = [*CHAIN[:25], *chain_of(10, CHAIN[24], mark=b"twice")]


class Givers:
    """Peers by name, each with the certificates that it gives."""

    def __init__(self, **chains: Sequence[wire.Certificate]) -> None:
        self.chains = chains
        self.asked: list[int] = []

    async def ask(self, peer: str, message: Any, *, timeout: float) -> wire.LedgerPage:
        assert timeout > 0
        self.asked.append(message.from_round)
        wanted = range(message.from_round, message.from_round + message.limit)
        found = [certificate for certificate in self.chains[peer] if certificate.slot.round in wanted]
        is_held = bool(found) and found[0].slot.round == message.from_round  # A ledger shows no later ones instead.
        return wire.LedgerPage(tuple(map(pack_certificate, found if is_held else ())))

    async def compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    def reader(self) -> ChainReader:
        return ChainReader(self, RUN, charter_of(SIGNED))


def head_of(chain: Sequence[wire.Certificate]) -> Head:
    return ChainLink.of(chain[-1]).head if chain else NOTHING


def held(chain: Sequence[wire.Certificate]) -> HeldChain:
    return HeldChain.of(chain, head_of(chain))


async def ignored(*_: object) -> bool:
    return True


async def taken(givers: Givers, chain: Sequence[wire.Certificate], until: int = 100) -> list[wire.Certificate]:
    pages: list[wire.Certificate] = []

    async def take(page: list[wire.Certificate], _: Mapping[int, float]) -> bool:
        pages.extend(page)
        return True

    await givers.reader().follow(held(chain), "giver", until, take)
    return pages


@pytest.mark.parametrize("start", [0, 1, 39])
async def test_what_a_quorum_of_the_voters_decided_is_taken_from_any_round_on(start: int) -> None:
    assert await taken(Givers(giver=CHAIN), CHAIN[:start]) == CHAIN[start:]
    assert await taken(Givers(giver=CHAIN), CHAIN[max(0, start - 1) : start], until=start + 3) == CHAIN[start : start + 3]


@pytest.mark.parametrize("start", [0, 10])
async def test_neither_strangers_nor_fewer_than_a_quorum_lead_on(start: int) -> None:
    before = CHAIN[start - 1] if start else None
    (good,) = chain_of(1, before)
    for false in (
        chain_of(1, before, keepers=STRANGERS, signers=STRANGERS),
        [decided(value_of(good), good.slot, KEEPERS[:2])],
        [replace(good, signatures=(bytes(64), *good.signatures[1:]))],
    ):
        with pytest.raises(RemoteError):
            await taken(Givers(giver=[*CHAIN[:start], *false]), CHAIN[:start])


async def test_of_a_page_what_is_valid_is_taken_before_the_rest_is_refused() -> None:
    pages: list[wire.Certificate] = []

    async def take(page: list[wire.Certificate], _: Mapping[int, float]) -> bool:
        pages.extend(page)
        return True

    broken = replace(CHAIN[2], signatures=(bytes(64), *CHAIN[2].signatures[1:]))
    with pytest.raises(RemoteError, match="signature"):
        await Givers(giver=[*CHAIN[:2], broken, *CHAIN[3:]]).reader().follow(held([]), "giver", 9, take)
    assert pages == CHAIN[:2]


async def test_a_page_is_paid_for_before_it_is_verified_and_reading_stops_when_told() -> None:
    paid: list[int] = []
    givers = Givers(giver=CHAIN)

    async def take(page: list[wire.Certificate], _: Mapping[int, float]) -> bool:
        assert sum(paid) == page[-1].slot.round
        return False

    reader = ChainReader(givers, RUN, charter_of(SIGNED), lambda page: paid.append(len(page)))
    await reader.follow(held([]), "giver", 40, take)
    assert paid == [wire.MAX_PAGE]
    givers.chains["giver"] = chain_of(20, keepers=STRANGERS, signers=STRANGERS)
    with pytest.raises(RemoteError):
        await reader.follow(held([]), "giver", 40, take)
    assert paid == [wire.MAX_PAGE] * 2


@pytest.mark.parametrize("first", [1, 20])
async def test_the_past_is_taken_by_its_hashes_down_to_the_first_round_that_is_asked_for(first: int) -> None:
    past: list[wire.Certificate] = []

    async def take(page: list[wire.Certificate], _: Mapping[int, float]) -> bool:
        past[:0] = page
        return True

    assert await Givers(giver=CHAIN).reader().fill(CHAIN[38], first, "giver", take) == CHAIN[first - 1]
    assert past == CHAIN[first - 1 : 38]
    past.clear()
    late = Givers(giver=CHAIN[33:])
    assert await late.reader().fill(CHAIN[38], first, "giver", take) == CHAIN[33]
    assert past == CHAIN[33:38]
    for false in (chain_of(10, mark=b"another"), [*CHAIN[:5], replace(CHAIN[5], signatures=CHAIN[6].signatures), *CHAIN[6:]]):
        with pytest.raises(RemoteError):
            await Givers(giver=false).reader().fill(CHAIN[10], 1, "giver", take)
    assert past == CHAIN[33:38]


@pytest.mark.parametrize("first", [0, 20, 24])
async def test_two_certificates_of_one_round_are_an_alarm_wherever_the_chains_part(first: int) -> None:
    for mine, theirs in ((CHAIN, TWICE), (CHAIN[:26], TWICE), (TWICE[:26], CHAIN)):
        givers = Givers(giver=theirs)
        reader = givers.reader()
        assert await reader.reach(held(mine[first:]), head_of(theirs), "giver", ignored) is Relation.TWICE
        assert reader.alarm is not None
        assert (reader.alarm.mine, reader.alarm.other) == (mine[25], theirs[25])
        assert str(reader.alarm).startswith("there are two certificates of round 26: ")


async def test_a_forged_certificate_of_a_round_is_no_alarm() -> None:
    forged = [*CHAIN[:25], *chain_of(10, CHAIN[24], keepers=STRANGERS, signers=STRANGERS, mark=b"forged")]
    reader = Givers(giver=forged).reader()
    with pytest.raises(RemoteError):
        await reader.reach(held(CHAIN), head_of(forged), "giver", ignored)
    assert reader.alarm is None


async def test_chains_that_cannot_be_compared_are_told_apart_from_those_that_can() -> None:
    reader = Givers(giver=TWICE).reader()
    assert await reader.reach(held(CHAIN[30:]), head_of(TWICE), "giver", ignored) is Relation.APART
    assert await reader.reach(held(CHAIN[36:]), head_of(TWICE), "giver", ignored) is Relation.OLDER
    assert await reader.reach(held(CHAIN[30:]), head_of(CHAIN[:35]), "giver", ignored) is Relation.EXTENDS
    assert reader.alarm is None


async def test_an_anchor_is_continued_by_its_hash_alone() -> None:
    at = replace(head_of(CHAIN[:10]), tokens=0)
    anchor = HeldChain(at, at.round, lambda round_: at if round_ == at.round else None, lambda _: None)
    assert await Givers(giver=CHAIN).reader().reach(anchor, head_of(CHAIN), "giver", ignored) is Relation.EXTENDS
    another = chain_of(12, mark=b"another")
    assert await Givers(giver=another).reader().reach(anchor, head_of(another), "giver", ignored) is Relation.APART
    with pytest.raises(NetworkError, match="is not here"):
        await Givers(giver=CHAIN[20:]).reader().reach(anchor, head_of(CHAIN), "giver", ignored)
