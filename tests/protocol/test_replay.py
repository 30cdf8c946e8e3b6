"""Catching up on the production path: missed rounds are replayed, else the state is taken."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flockstep.collectives.chain import replay
from flockstep.collectives.chain.certificate import check_certificate, open_value, value_of
from flockstep.collectives.chain.chain import ChainLink, position_after
from flockstep.collectives.chain.fork_choice import Relation
from flockstep.collectives.chain.packed import pack_certificate
from flockstep.collectives.chain.replay import ask_certificates, fetch_outputs, in_my_order
from flockstep.collectives.vector.codec import codec_named
from flockstep.dht.run.admission import OPEN
from flockstep.optim.member.catch_up import CatchUp
from flockstep.optim.step.outer import OuterSettings
from flockstep.peer import wire
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import NetworkError, ProtocolViolation, RemoteError, sole_error
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.wire.signed import verify_signed
from support.certificates import certify, decided, grow
from support.restoring_peer import CELLS, RestoringPeer, all_of, catch_up, run_rounds
from support.swarm import RUN, SimSwarm, identities, with_swarm

WORTH_REPLAYING = 15
"""Rounds: more outputs of 4.25 bits a parameter have more bytes than its state of 64."""


@pytest.mark.parametrize("missed", [1, 2, 5, WORTH_REPLAYING])
def test_missed_rounds_are_replayed_from_their_outputs_alone(tmp_path: Path, missed: int) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        await catch_up(late, others)  # Nobody offers a state.
        assert late.place.head == others[0].place.head
        assert late.sim.root == others[0].sim.root
        assert late.ledger.head == others[0].ledger.head == others[0].place.head
        assert late.ledger.first == 1
        sizes = [event["bytes"] for event in late.named("round.replayed")]
        assert [event["round"] for event in late.named("round.replayed")] == list(range(2, missed + 2))
        assert sizes == [codec_named("int4").num_bytes(CELLS)] * missed
        assert late.held.num_bytes == missed * codec_named("int4").num_bytes(CELLS)
        assert late.held.changed
        # It serves what it has fetched, and goes on with the others.
        for key in (output for other in others for output in other.sim.outcomes[-1].value.outputs):
            assert late.sim.node.blobs.get(key, "anybody") is not None
        swarm.sims.append(late.sim)
        late.sim.averager.expect(late.place.round + 1, late.place.certificate)
        await all_of([*others, late], 1)
        assert len({sim.sim.root for sim in (*others, late)}) == 1

    run_rounds(4, missed, body, tmp_path)


def test_further_back_the_state_is_taken_and_the_ledger_still_has_every_round(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        for other in others:
            await other.serve_state()
        await catch_up(late, others)
        assert late.place == others[0].place
        assert late.sim.root == others[0].sim.root
        assert not late.named("round.replayed")
        assert not late.named("replay.failed")
        assert (late.ledger.first, late.ledger.head) == (1, others[0].ledger.head)

    run_rounds(4, WORTH_REPLAYING + 1, body, tmp_path)


def test_the_ledger_joins_the_others_chain_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_PAGE", 2)

    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        await others[0].serve_state()
        await catch_up(late, others[:1])
        assert [late.ledger.at(number) for number in range(1, 7)] == [others[0].ledger.at(n) for n in range(1, 7)]

    run_rounds(3, 5, body, tmp_path, codec="fp32")


@pytest.mark.parametrize("why", ["not there", "not valid"])
def test_a_peer_that_holds_a_chain_follows_none_whose_certificates_it_cannot_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        provider, before = others[0], late.place
        await provider.serve_state()
        if why == "not there":
            provider.ledger.follow([])
            provider.ledger.follow([provider.place.certificate] if provider.place.certificate else [])
        else:
            page = [pack_certificate(certificate) for certificate in grow(None, 6)]
            real = provider.ledger.since

            def since(first: int, limit: int, *, max_bytes: int) -> tuple[bytes, ...]:
                return (*page[first - 1 : 5], *real(max(first, 6), 1, max_bytes=max_bytes))[:limit]

            monkeypatch.setattr(provider.ledger, "since", since)
        members = [provider.member()]
        assert await late.examine(members) is (why == "not valid")  # A false claim matters no more.
        assert late.catch_up.provider(members) is None
        assert late.place == before
        assert [event["peer"] for event in late.named("head.unproven")] == [provider.sim.peer]
        assert bool(late.named("peer.charged")) is (why == "not valid")
        assert await late.examine([other.member() for other in others[1:]])
        assert late.catch_up.provider([other.member() for other in others]) is not None

    run_rounds(3, 5, body, tmp_path, codec="fp32")


def test_a_certificate_that_names_what_cannot_be_outputs_is_refused(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        node, codec = late.sim.node, codec_named("int4")
        certificate = others[0].place.certificate
        assert certificate is not None
        value = check_certificate(certificate, verify_signed)
        garbage = b"\xff" * codec.num_bytes(value.bounds[1])
        others[0].sim.node.blobs.put(digest(garbage), garbage)
        holders = [other.sim.peer for other in others]
        empty = (0, 0, *value.bounds[2:])
        for bad in (
            replace(value, bounds=(0, 10**9)),
            replace(value, bounds=(*value.bounds[:-1], 10**9)),
            replace(value, bounds=empty),
            replace(value, outputs=(digest(garbage), *value.outputs[1:])),
        ):
            with pytest.raises((RemoteError, BaseExceptionGroup)) as caught:
                await fetch_outputs(node, codec, range(CELLS), bad, certificate.voters, holders, set())
            assert isinstance(sole_error(caught.value), RemoteError)

    run_rounds(3, 1, body, tmp_path)


def test_a_thousand_followers_spread_over_all_who_have_an_output() -> None:
    holders = [f"holder {number}" for number in range(64)]
    orders = [in_my_order(f"follower {number}", holders) for number in range(936)]
    assert all(sorted(order) == sorted(holders) for order in orders)
    for turn in (0, 1, 63):
        asked = Counter(order[turn] for order in orders)
        assert max(asked.values()) <= 3 * 936 // 64


def test_where_outputs_are_bigger_than_the_state_the_state_is_taken(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        await others[0].serve_state()
        await catch_up(late, others[:1])
        assert late.place == others[0].place
        assert not late.named("round.replayed")

    run_rounds(3, 3, body, tmp_path, codec="fp32")


def test_an_output_that_one_has_dropped_comes_from_another(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        for key in others[0].sim.outcomes[1].value.outputs:
            others[0].sim.node.blobs.drop([key])
        others[1].sim.node.blobs.put(others[1].sim.outcomes[2].value.outputs[0], b"garbage")
        await catch_up(late, others)
        assert late.sim.root == others[0].sim.root
        assert len(late.named("round.replayed")) == 2

    run_rounds(4, 2, body, tmp_path)


def test_an_output_that_does_not_come_from_one_is_requested_from_another_before_the_first_is_given_up(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        members = [other.member() for other in others]
        await late.examine(members)
        provider = late.catch_up.provider(members)
        assert provider is not None
        stopped = next(other for other in others if other.sim.peer != provider.peer)
        swarm.network.cut(stopped.sim.peer)
        await late.catch_up.take_from(provider, members)
        assert len(late.named("round.replayed")) == 2
        assert not late.sim.lost  # Nor was it waited for until its heartbeats were missed.

    run_rounds(5, 2, body, tmp_path)


def test_a_late_output_is_requested_from_no_more_than_two_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        node, now, most = late.sim.node, Counter[bytes](), Counter[bytes]()
        real = node.fetch

        async def counted(peer: str, key: bytes, num_bytes: int, **rest: Any) -> Any:
            now[key] += 1
            most[key] = max(most[key], now[key])
            try:
                return await real(peer, key, num_bytes, **rest)
            finally:
                now[key] -= 1

        monkeypatch.setattr(node, "fetch", counted)
        members = [other.member() for other in others]
        await late.examine(members)
        provider = late.catch_up.provider(members)
        assert provider is not None
        for stopped in [other for other in others if other.sim.peer != provider.peer][:3]:
            swarm.network.cut(stopped.sim.peer)
        await late.catch_up.take_from(provider, members)
        assert late.named("round.replayed")
        assert max(most.values()) == 2

    run_rounds(6, 2, body, tmp_path)


def test_what_nobody_has_any_more_is_taken_as_state_and_said(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        for other in others:
            other.sim.node.blobs.drop(other.sim.outcomes[2].value.outputs)
            await other.serve_state()
        await catch_up(late, others)
        assert late.sim.root == others[0].sim.root
        assert [event["round"] for event in late.named("round.replayed")] == [2]
        (failed,) = late.named("replay.failed")
        assert failed["round"] == 3
        assert "no peer has an output" in str(failed["reason"])

    run_rounds(4, 2, body, tmp_path)


def test_a_provider_without_the_certificate_of_its_state_is_not_believed(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        others[0].ledger.follow(())
        await others[0].serve_state()
        claim = others[0].member()
        assert not late.catch_up.follows_another_chain([claim])  # Which has it asked about in the background.
        assert await late.examine([claim])
        assert late.place.round == 1
        assert [event["reason"] for event in late.named("head.unproven")] == [
            f"it states round {claim.body.round}, but does not provide its certificate"
        ]
        assert late.catch_up.provider([claim]) is None

    run_rounds(3, 2, body, tmp_path)


def test_outputs_that_do_not_lead_to_the_certified_state_change_nothing(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        before = late.sim.theta.copy()
        await catch_up(late, others)  # With another outer learning rate than the run's, and nobody to give a state.
        assert np.array_equal(late.sim.theta, before)
        assert late.place.round == 1
        assert "do not lead to its certified state" in str(late.named("replay.failed")[0]["reason"])

    run_rounds(3, 1, body, tmp_path, outer=OuterSettings(lr=0.7, momentum=0.5))


def test_a_state_that_has_drifted_is_not_replayed_on(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        late.sim.theta[3] += 1
        await late.held.hash()
        for other in others:
            await other.serve_state()
        await catch_up(late, others)
        assert late.sim.root == others[0].sim.root
        assert "does not follow from my state" in str(late.named("replay.failed")[0]["reason"])

    run_rounds(3, 1, body, tmp_path)


def test_who_states_more_than_it_can_show_is_not_believed_again(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        honest, liar = others[0], late  # The liar is a round behind, and serves what it has.
        await liar.serve_state()
        claim = liar.member(round=99, head=b"z" * 32, chain_tokens=10**6)
        assert honest.catch_up.provider([claim]) is None  # As long as it is not proven.
        assert await honest.examine([claim])
        (failed,) = honest.named("head.unproven")
        assert failed["peer"] == liar.sim.peer
        assert "does not provide its certificate" in str(failed["reason"])
        assert not honest.named("peer.charged")  # It may have gone over to a better chain.
        assert honest.catch_up.provider([claim]) is None
        assert honest.catch_up.chain.credible([claim, honest.member()]) == [honest.member()]
        assert not honest.held.changed
        another = liar.member(round=99, head=b"y" * 32, chain_tokens=10**6)
        assert honest.catch_up.chain.credible([another]) == [another]

    run_rounds(3, 1, body, tmp_path)


def test_a_sound_state_is_not_given_up_for_an_older_checkpoint_of_its_chain(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        for other in others:
            await other.serve_state()
        await all_of(others, 1)
        for other in others:
            other.sim.node.blobs.drop(other.sim.outcomes[-1].value.outputs)
        members = [other.member() for other in others]
        await late.examine(members)
        await late.catch_up.take_from(members[0], members)
        assert late.place.round == 2  # As far as outputs led; and not back to the checkpoint of round 2.
        (first, *_) = late.named("state.retry")
        assert "nobody offers a checkpoint that leads on from my state" in str(first["reason"])
        assert not late.named("state.taking")

    run_rounds(3, 1, body, tmp_path)


def test_a_checkpoint_of_another_chain_is_not_taken_whoever_and_how_many_offer_it(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        honest, *liars = others
        await honest.serve_state()
        forged = grow(None, 2, mark=b"forged")[-1]

        async def lie(peer: str, question: wire.StateAsk) -> wire.StateOffer:
            return wire.StateOffer(((2, b"forged".ljust(32, b"\0"), pack_certificate(forged)),))

        for liar in liars:
            liar.sim.node.on_ask(wire.StateAsk, lie)
        members = [other.member() for other in others]
        await late.examine(members)
        assert (await late.catch_up._choose(members[0], members)).place.head == honest.place.head

        async def older(peer: str, question: wire.StateAsk) -> wire.StateOffer:
            return wire.StateOffer(((0, bytes(32), b""),))

        for liar in liars:
            liar.sim.node.on_ask(wire.StateAsk, older)
        assert (await late.catch_up._choose(members[0], members)).place.head == honest.place.head

    run_rounds(4, 1, body, tmp_path)


def test_a_head_without_a_quorum_under_it_proves_nothing(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        provider, running = others[0], identities(4)
        forged = certify(provider.place.certificate, 10**6, roster=running, signers=running[:1], run=RUN)
        real = provider.ledger.since

        async def answer(peer: str, question: wire.LedgerAsk) -> wire.LedgerPage:
            page = *real(1, 2, max_bytes=1 << 20), pack_certificate(forged)
            return wire.LedgerPage(page[question.from_round - 1 :][: question.limit])

        provider.sim.node.on_ask(wire.LedgerAsk, answer)
        head = ChainLink.of(forged).head
        claim = provider.member(round=head.round, head=head.hash, chain_tokens=head.tokens)
        assert await late.examine([claim])
        assert "with 1 of 2 votes" in str(late.named("head.unproven")[0]["reason"])
        assert late.ledger.head.round == 2
        assert late.catch_up.provider([claim]) is None

    run_rounds(3, 1, body, tmp_path)


def test_a_provider_that_is_lost_once_its_chain_was_read_is_not_needed(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        members = [other.member() for other in others]
        await late.examine(members)
        first = late.catch_up.provider(members)
        assert first is not None
        swarm.network.kill(first.peer)
        await late.catch_up.take_from(first, members)
        assert late.place.head == others[0].place.head

    run_rounds(4, 1, body, tmp_path)


def test_the_ledger_is_served_page_by_page_and_only_to_its_own_run(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        provider, node = others[0], late.sim.node

        async def ask(run: str, first: int, limit: int) -> list[int]:
            page = await ask_certificates(node, provider.sim.peer, wire.LedgerAsk(run, first, limit))
            return [certificate.slot.round for certificate in page]

        assert await ask(RUN, 1, 16) == [1, 2, 3, 4]
        assert await ask(RUN, 2, 2) == [2, 3]
        assert await ask(RUN, 5, 16) == []
        with pytest.raises(NetworkError, match="another run"):
            await ask("b" * 52, 1, 1)

        async def shifted(peer: str, question: wire.LedgerAsk) -> wire.LedgerPage:
            return wire.LedgerPage(provider.ledger.since(question.from_round + 1, 1, max_bytes=1 << 20))

        provider.sim.node.on_ask(wire.LedgerAsk, shifted)
        with pytest.raises(ProtocolViolation, match="other certificates"):
            await ask(RUN, 1, 1)

        async def too_many(peer: str, question: wire.LedgerAsk) -> wire.LedgerPage:
            return wire.LedgerPage(provider.ledger.since(question.from_round, 3, max_bytes=1 << 20))

        provider.sim.node.on_ask(wire.LedgerAsk, too_many)
        with pytest.raises(ProtocolViolation, match="other certificates"):
            await ask(RUN, 1, 1)

    run_rounds(3, 3, body, tmp_path)


@pytest.mark.parametrize("found", [Relation.APART, Relation.TWICE])
def test_a_chain_that_parts_from_mine_is_reported_once(tmp_path: Path, found: Relation) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        founders = sorted(identities(3), key=lambda it: it.peer_id)
        liars = [identity for identity in founders if identity.peer_id != late.sim.peer]
        mine = [certify(None, 100, roster=founders, signers=liars, mark=b"twice")]
        mine.append(certify(mine[0], 100, roster=founders))
        late.ledger.follow([])
        late.ledger.follow(mine if found is Relation.TWICE else mine[1:])
        late.held.place = position_after(mine[-1], RUN)
        for _ in range(2):
            assert await late.examine([other.member() for other in others])
            assert late.catch_up.provider([other.member() for other in others]) is None
        (event,) = late.named("chain.conflict" if found is Relation.TWICE else "chain.parted")
        assert event["reason"] == found.value
        alarm = late.sim.averager.why_not_average
        assert alarm.startswith("there are two certificates of round 1: ") is (found is Relation.TWICE)

    run_rounds(3, 3, body, tmp_path)


def test_a_head_that_the_certificates_before_it_do_not_lead_to_is_not_believed(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        provider, forged = others[0], grow(None, 6)[-1]
        real = provider.ledger.since

        async def answer(peer: str, question: wire.LedgerAsk) -> wire.LedgerPage:
            if (question.from_round, question.limit) == (6, 1):
                return wire.LedgerPage((pack_certificate(forged),))
            return wire.LedgerPage(real(question.from_round, question.limit, max_bytes=1 << 20))

        provider.sim.node.on_ask(wire.LedgerAsk, answer)
        head = ChainLink.of(forged).head
        claim = provider.member(round=head.round, head=head.hash, chain_tokens=head.tokens, root=value_of(forged).next_root)
        assert not await late.examine([claim])
        assert "do not lead to the head" in str(late.named("head.unproven")[-1]["reason"])
        assert late.catch_up.provider([claim]) is None

    run_rounds(3, 5, body, tmp_path)


def test_what_was_read_is_kept_and_the_next_search_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_PAGE", 2)

    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        giver, asked = others[0], list[int]()

        async def answer(peer: str, question: wire.LedgerAsk) -> wire.LedgerPage:
            if question.limit > 1:
                asked.append(question.from_round)
                if question.from_round == 6 and asked.count(6) == 1:
                    raise NetworkError("the line is full")
            return wire.LedgerPage(giver.ledger.since(question.from_round, question.limit, max_bytes=1 << 20))

        giver.sim.node.on_ask(wire.LedgerAsk, answer)
        assert not await late.examine([giver.member()])
        assert late.ledger.head == giver.ledger.at(5)
        assert late.place.round == 1
        assert await late.examine([giver.member()])
        assert late.catch_up.provider([giver.member()]) is not None
        assert asked == [2, 4, 6, 6, 8]

    run_rounds(3, 8, body, tmp_path)


def test_who_signed_two_certificates_of_one_slot_is_accused_and_everybody_keeps_its_own(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        theirs, before = others[0].place.certificate, late.place.certificate
        assert theirs is not None
        assert before is not None
        voters = [identity for identity in identities(4) if identity.peer_id in {late.sim.peer, *theirs.voters[:2]}]
        other = open_value(certify(before, 100, roster=identities(4), run=RUN).value)
        late.ledger.extend([mine := decided(other, theirs.slot, voters)])
        late.held.place = position_after(mine, RUN)
        claim = next(other.member() for other in others if other.sim.peer not in theirs.voters[:2])
        for _ in range(2):
            assert await late.examine([claim])
            assert late.catch_up.provider([claim]) is None
            await late.examine([])  # It leaves, and comes back: that is one event all the same.
        (conflict,) = late.named("chain.conflict")
        assert conflict["round"] == 2
        assert {event["peer"] for event in late.named("peer.banned")} == set(theirs.voters[:2])

    run_rounds(4, 1, body, tmp_path)


def test_who_could_not_be_asked_for_a_head_is_asked_after_the_others_the_next_time(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm, others: list[RestoringPeer], late: RestoringPeer) -> None:
        members = [other.member() for other in others]
        asked: list[str] = []

        async def refuse(sim: str, peer: str, question: wire.LedgerAsk) -> wire.LedgerPage:
            asked.append(sim)
            raise NetworkError("busy")

        for other in others:
            other.sim.node.on_ask(wire.LedgerAsk, partial(refuse, other.sim.peer))
        for _ in range(2):
            assert not await late.examine(members)
        assert sorted(asked) == sorted(other.sim.peer for other in others)

    run_rounds(5, 1, body, tmp_path)


@pytest.mark.parametrize("is_named", [False, True])
def test_a_newcomer_begins_with_the_first_round_or_with_a_certificate_that_is_named(tmp_path: Path, is_named: bool) -> None:
    async def body(swarm: SimSwarm) -> None:
        first, late = map(RestoringPeer, swarm.sims)
        del swarm.sims[1:]
        await first.rounds(3)
        await first.serve_state()
        await first.rounds(2)
        last = [certificate for number in (3, 4, 5) if (certificate := first.ledger.certificate(number))]
        first.ledger.follow([])
        first.ledger.follow(last)
        await late.held.hash()
        anchor = replace(ChainLink.of(last[1]).head, tokens=0) if is_named else None  # A link names no tokens.
        late.catch_up = CatchUp(late.sim.node, late.held.spec, late.held, late.archive, anchor=anchor)
        members = [first.member()]
        assert await late.examine(members) is is_named
        assert (late.catch_up.provider(members) is not None) is is_named
        if not is_named:
            assert "read up to round 0" in str(late.named("head.unproven")[0]["reason"])
            return
        await late.catch_up.take_from(members[0], members)
        assert late.place.head == first.place.head
        assert [event["round"] for event in late.named("round.replayed")] == [4, 5]
        assert [late.ledger.certificate(number) for number in range(3, 6)] == last  # Back to the checkpoint, by hashes.

    charter = replace(OPEN, founders=frozenset({identities(1)[0].peer_id}))
    run_virtual(lambda: with_swarm(2, body, cells=CELLS, home=(tmp_path, 100), charter=charter))


def test_newcomers_follow_a_chain_whose_certificates_did_not_arrive_at_first(tmp_path: Path) -> None:
    """They are more than the member on it, which has ended all rounds and will never state another head."""
    ahead = identities(1)[0].peer_id

    async def body(swarm: SimSwarm) -> None:
        first, *newcomers = map(RestoringPeer, swarm.sims)
        del swarm.sims[1:]
        await first.rounds(3)
        for newcomer in newcomers:
            await newcomer.held.hash()
        late, members = newcomers[0], [peer.member() for peer in (first, *newcomers)]
        failures = [NetworkError("the line is full")]

        async def answer(peer: str, question: wire.LedgerAsk) -> wire.LedgerPage:
            if question.from_round == 1 and failures:
                raise failures.pop()
            found = first.ledger.since(question.from_round, question.limit, max_bytes=replay.PAGE_BYTES)
            return wire.LedgerPage(found)

        first.sim.node.on_ask(wire.LedgerAsk, answer)
        assert not await late.examine(members)
        assert not failures
        assert await late.examine(members)
        assert late.catch_up.provider(members) == members[0]
        await late.catch_up.take_from(members[0], members)
        assert late.place == first.place

    charter = replace(OPEN, founders=frozenset({ahead}))
    run_virtual(lambda: with_swarm(8, body, cells=CELLS, home=(tmp_path, 100), charter=charter))
