"""Catching up on the production path: missed rounds are replayed from their outputs, else the state is taken."""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trio
from certificates import grow
from flock import OUTER, RUN, Bird, Flock, with_flock
from flockstep.collectives import merkle, replay
from flockstep.collectives.agenda import OutcomeKind
from flockstep.collectives.codec import codec_named
from flockstep.collectives.ledger import Ledger
from flockstep.collectives.packed import pack
from flockstep.collectives.quorum import check_certificate, verify
from flockstep.collectives.replay import KEPT_ROUNDS, ask_certificates, fetch_outputs, in_my_order, serve_ledger
from flockstep.collectives.transfer import Giver, Place
from flockstep.dht.members import Member, MemberBody, MemberState
from flockstep.dht.records import Record
from flockstep.optim.catch_up import CatchUp
from flockstep.optim.outer import OuterSettings
from flockstep.peer import wire
from flockstep.peer.digest import digest
from flockstep.peer.errors import NetworkError, ProtocolViolation, RemoteError, sole_error
from flockstep.peer.memory import run_virtual
from flockstep.peer.telemetry import Event

CELLS = 40


class Fledgling:
    """A bird with a ledger, which follows its rounds, and with what it takes to catch up."""

    def __init__(self, bird: Bird, folder: Path, outer: OuterSettings = OUTER) -> None:
        self.bird = bird
        node, spec = bird.node, bird.averager._spec
        self.ledger = Ledger.open(folder / bird.peer, RUN, verify=verify, telemetry=node.telemetry)
        serve_ledger(node, RUN, self.ledger)
        state = bird.theta, bird.momentum
        self.catch_up = CatchUp(node, spec, outer, state, self.ledger, bird.averager.kept)
        self.giver = Giver(node, RUN)

    @property
    def place(self) -> Place:
        return self.catch_up.place

    async def rounds(self, count: int) -> None:
        for _ in range(count):
            outcome = await self.bird.round()
            assert outcome.kind is OutcomeKind.DONE
            await self.catch_up.advance(Place(outcome.slot.round, outcome.root, outcome.tokens, outcome.certificate))

    def serve_state(self) -> None:
        leaves = merkle.leaves(self.bird.theta), merkle.leaves(self.bird.momentum)
        self.giver.offer(self.place, self.bird.theta, self.bird.momentum, leaves)

    def member(self, **other: int | bytes) -> Member:
        at = self.place
        stated = {"round": at.round, "root": at.root, "head": at.head.hash, "chain_tokens": at.tokens, **other}
        body = MemberBody(state=MemberState.TRAINING, **stated)  # type: ignore[arg-type]
        return Member(Record(RUN, "member", self.bird.peer, 1, 60.0, b"", bytes(64)), body, expires=60.0)

    def named(self, name: str) -> list[Event]:
        return [event for event in self.bird.events if event["event"] == name]


Body = Callable[[Flock, list[Fledgling], Fledgling], Awaitable[None]]


def fly(
    count: int, missed: int, body: Body, folder: Path, *, codec: str = "int4", outer: OuterSettings = OUTER
) -> None:
    """All do one round together; the last one misses so many; then `body(flock, others, it)`."""

    async def main(flock: Flock) -> None:
        birds = [Fledgling(bird, folder, outer if bird is flock.birds[-1] else OUTER) for bird in flock.birds]
        await all_of(birds, 1)
        *others, late = birds
        flock.birds.remove(late.bird)
        await all_of(others, missed)
        await late.catch_up.hash_state()
        await body(flock, others, late)

    run_virtual(lambda: with_flock(count, main, cells=CELLS, codec=codec))


async def all_of(birds: Sequence[Fledgling], rounds: int) -> None:
    async with trio.open_nursery() as nursery:
        for bird in birds:
            nursery.start_soon(bird.rounds, rounds)


async def catch_up(late: Fledgling, others: Sequence[Fledgling]) -> None:
    members = [other.member() for other in others]
    giver = late.catch_up.giver(members)
    assert giver is not None
    await late.catch_up.take_from(giver, members)


@pytest.mark.parametrize("missed", range(1, KEPT_ROUNDS + 1))
def test_missed_rounds_are_replayed_from_their_outputs_alone(tmp_path: Path, missed: int) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        await catch_up(late, others)  # Nobody offers a state.
        assert late.place == others[0].place
        assert late.bird.root == others[0].bird.root
        assert late.ledger.head == others[0].ledger.head == others[0].place.head
        assert late.ledger.first == 1
        sizes = [event["bytes"] for event in late.named("round.replayed")]
        assert [event["round"] for event in late.named("round.replayed")] == list(range(2, missed + 2))
        assert sizes == [codec_named("int4").num_bytes(CELLS)] * missed
        assert late.catch_up.num_bytes == missed * codec_named("int4").num_bytes(CELLS)
        assert late.catch_up.changed
        # It serves what it has fetched, and goes on with the others.
        for key in (output for other in others for output in other.bird.outcomes[-1].outputs):
            assert late.bird.node.blobs.get(key, "anybody") is not None
        flock.birds.append(late.bird)
        late.bird.averager.expect(late.place.round + 1, late.place.certificate)
        await all_of([*others, late], 1)
        assert len({bird.bird.root for bird in (*others, late)}) == 1

    fly(4, missed, body, tmp_path)


def test_further_back_the_state_is_taken_and_the_ledger_still_has_every_round(tmp_path: Path) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        for other in others:
            other.serve_state()
        await catch_up(late, others)
        assert late.place == others[0].place
        assert late.bird.root == others[0].bird.root
        assert not late.named("round.replayed")
        assert not late.named("replay.failed")
        assert (late.ledger.first, late.ledger.head) == (1, others[0].ledger.head)

    fly(4, KEPT_ROUNDS + 1, body, tmp_path)


def test_the_ledger_joins_the_others_chain_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_PAGE", 2)

    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        others[0].serve_state()
        await catch_up(late, others[:1])
        assert [late.ledger.at(number) for number in range(1, 7)] == [others[0].ledger.at(n) for n in range(1, 7)]

    fly(3, 5, body, tmp_path)


@pytest.mark.parametrize("why", ["too far", "not there", "not valid"])
def test_where_the_chains_cannot_be_joined_the_ledger_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        giver = others[0]
        giver.serve_state()
        if why == "too far":
            monkeypatch.setattr(replay, "MAX_TRAIL", 3)
        elif why == "not there":
            giver.ledger.follow([])
            giver.ledger.follow([giver.place.certificate] if giver.place.certificate else [])
        else:
            forged = grow(None, 6)
            page = [pack(certificate) for certificate in forged]
            real = giver.ledger.since

            def since(first: int, limit: int, *, max_bytes: int) -> tuple[bytes, ...]:
                return (*page[first - 1 : 4], *real(5, 1, max_bytes=max_bytes))

            monkeypatch.setattr(giver.ledger, "since", since)
        await catch_up(late, others[:1])
        assert late.place == giver.place
        assert (late.ledger.first, late.ledger.head) == (6, giver.place.head)
        said = {"too far": 0, "not there": 1, "not valid": 0}
        assert len(late.named("ledger.trail_ends")) == said[why]
        assert len(late.named("ledger.refused")) == (why == "not valid")

    fly(3, 5, body, tmp_path)


def test_a_certificate_that_names_what_cannot_be_outputs_is_refused(tmp_path: Path) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        node, codec = late.bird.node, codec_named("int4")
        certificate = others[0].place.certificate
        assert certificate is not None
        roster, _, result = check_certificate(certificate, verify)
        garbage = b"\xff" * codec.num_bytes(roster.bounds[1])
        others[0].bird.node.blobs.put(digest(garbage), garbage)
        holders = [other.bird.peer for other in others]
        empty = (0, 0, *roster.bounds[2:])
        for bad_roster, bad_result in (
            (replace(roster, bounds=(0, 10**9)), result),
            (replace(roster, bounds=(*roster.bounds[:-1], 10**9)), result),
            (replace(roster, bounds=empty), result),
            (roster, replace(result, outputs=result.outputs[1:])),
            (roster, replace(result, outputs=(digest(garbage), *result.outputs[1:]))),
        ):
            with pytest.raises((RemoteError, BaseExceptionGroup)) as caught:
                await fetch_outputs(node, codec, CELLS, (bad_roster, bad_result), holders)
            assert isinstance(sole_error(caught.value), RemoteError)

    fly(3, 1, body, tmp_path)


def test_a_thousand_followers_spread_over_all_who_have_an_output() -> None:
    holders = [f"holder {number}" for number in range(64)]
    orders = [in_my_order(f"follower {number}", holders) for number in range(936)]
    assert all(sorted(order) == sorted(holders) for order in orders)
    for turn in (0, 1, 63):
        asked = Counter(order[turn] for order in orders)
        assert max(asked.values()) <= 3 * 936 // 64


def test_where_outputs_are_bigger_than_the_state_the_state_is_taken(tmp_path: Path) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        others[0].serve_state()
        await catch_up(late, others[:1])
        assert late.place == others[0].place
        assert not late.named("round.replayed")

    fly(3, 3, body, tmp_path, codec="fp32")


def test_an_output_that_one_has_dropped_comes_from_another(tmp_path: Path) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        for key in others[0].bird.outcomes[1].outputs:
            others[0].bird.node.blobs.drop([key])
        others[1].bird.node.blobs.put(others[1].bird.outcomes[2].outputs[0], b"garbage")
        await catch_up(late, others)
        assert late.bird.root == others[0].bird.root
        assert len(late.named("round.replayed")) == 2

    fly(4, 2, body, tmp_path)


def test_what_nobody_has_any_more_is_taken_as_state_and_said(tmp_path: Path) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        for other in others:
            other.bird.node.blobs.drop(other.bird.outcomes[2].outputs)
            other.serve_state()
        await catch_up(late, others)
        assert late.bird.root == others[0].bird.root
        assert [event["round"] for event in late.named("round.replayed")] == [2]
        (failed,) = late.named("replay.failed")
        assert failed["round"] == 3
        assert "nobody has an output" in str(failed["reason"])

    fly(4, 2, body, tmp_path)


def test_a_giver_without_the_certificates_gives_its_state(tmp_path: Path) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        others[0].ledger.follow(())
        others[0].serve_state()
        await catch_up(late, others[:1])
        assert late.place == others[0].place
        assert "has 0 of the 2 rounds" in str(late.named("replay.failed")[0]["reason"])

    fly(3, 2, body, tmp_path)


def test_outputs_that_do_not_lead_to_the_certified_state_change_nothing(tmp_path: Path) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        before = late.bird.theta.copy()
        await catch_up(late, others)  # With another outer learning rate than the run's, and nobody to give a state.
        assert np.array_equal(late.bird.theta, before)
        assert late.place.round == 1
        assert "do not lead to its certified state" in str(late.named("replay.failed")[0]["reason"])

    fly(3, 1, body, tmp_path, outer=OuterSettings(lr=0.7, momentum=0.5))


def test_a_state_that_has_drifted_is_not_replayed_on(tmp_path: Path) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        late.bird.theta[3] += 1
        await late.catch_up.hash_state()
        for other in others:
            other.serve_state()
        await catch_up(late, others)
        assert late.bird.root == others[0].bird.root
        assert "does not follow from my state" in str(late.named("replay.failed")[0]["reason"])

    fly(3, 1, body, tmp_path)


def test_only_the_outputs_of_the_last_rounds_are_kept(tmp_path: Path) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        bird = others[0].bird
        held = [all(bird.node.blobs.get(key, "x") is not None for key in o.outputs) for o in bird.outcomes]
        assert held == [False, False] + [True] * KEPT_ROUNDS

    fly(3, KEPT_ROUNDS + 1, body, tmp_path)


def test_who_states_more_than_it_can_prove_is_charged_and_not_believed_again(tmp_path: Path) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        honest, liar = others[0], late  # The liar is a round behind, and serves what it has.
        liar.serve_state()
        claim = liar.member(round=99, head=b"z" * 32, chain_tokens=10**6)
        assert honest.catch_up.giver([claim]) == claim
        await honest.catch_up.take_from(claim, [claim])
        (charge,) = honest.named("peer.charged")
        assert charge["peer"] == liar.bird.peer
        assert "worse than the taker's" in str(charge["reason"])
        assert honest.catch_up.giver([claim]) is None
        assert honest.catch_up.credible([claim, honest.member()]) == [honest.member()]
        assert not honest.catch_up.changed
        another = liar.member(round=99, head=b"y" * 32, chain_tokens=10**6)
        assert honest.catch_up.giver([another]) == another

    fly(3, 1, body, tmp_path)


def test_who_does_not_answer_is_passed_over_for_another(tmp_path: Path) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        members = [other.member() for other in others]
        first = late.catch_up.giver(members)
        assert first is not None
        flock.network.kill(first.peer)
        await late.catch_up.take_from(first, members)
        assert late.named("state.retry")
        second = late.catch_up.giver(members)
        assert second is not None
        assert second.peer != first.peer

    fly(4, 1, body, tmp_path)


def test_the_ledger_is_served_page_by_page_and_only_to_its_own_run(tmp_path: Path) -> None:
    async def body(flock: Flock, others: list[Fledgling], late: Fledgling) -> None:
        giver, node = others[0], late.bird.node

        async def ask(run: str, first: int, limit: int) -> list[int]:
            page = await ask_certificates(node, giver.bird.peer, wire.LedgerAsk(run, first, limit))
            return [certificate.slot.round for certificate in page]

        assert await ask(RUN, 1, 16) == [1, 2, 3, 4]
        assert await ask(RUN, 2, 2) == [2, 3]
        assert await ask(RUN, 5, 16) == []
        with pytest.raises(NetworkError, match="another run"):
            await ask("b" * 52, 1, 1)

        async def shifted(peer: str, question: wire.LedgerAsk) -> wire.LedgerPage:
            return wire.LedgerPage(giver.ledger.since(question.from_round + 1, 1, max_bytes=1 << 20))

        giver.bird.node.on_ask(wire.LedgerAsk, shifted)
        with pytest.raises(ProtocolViolation, match="other certificates"):
            await ask(RUN, 1, 1)

        async def too_many(peer: str, question: wire.LedgerAsk) -> wire.LedgerPage:
            return wire.LedgerPage(giver.ledger.since(question.from_round, 3, max_bytes=1 << 20))

        giver.bird.node.on_ask(wire.LedgerAsk, too_many)
        with pytest.raises(ProtocolViolation, match="other certificates"):
            await ask(RUN, 1, 1)

    fly(3, 3, body, tmp_path)
