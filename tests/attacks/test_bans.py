"""Bans by proof: equivocation convicts its author, and honest peers are never banned."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from attacks.voters import SLOT, founded, in_turn, until_done
from flockstep.collectives.accountability.bans import (
    EXHIBIT_PATIENCE,
    MAX_GREETING_BYTES,
    MAX_PROOF_BYTES,
    MAX_STRANGERS,
)
from flockstep.collectives.accountability.conduct import Conduct
from flockstep.collectives.accountability.evidence import claim_of
from flockstep.collectives.accountability.trust import newcomer_record
from flockstep.collectives.accountability.waiting import MAX_AWAITED
from flockstep.collectives.vector.lines import CodecChoice
from flockstep.dht.run.admission import Charter
from flockstep.peer import wire
from flockstep.peer.base.digest import digest
from flockstep.peer.base.errors import LocalError, NetworkError
from flockstep.peer.identity import Identity
from flockstep.peer.log.file import LogFile
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.wire import MAX_CLAIM_BYTES, Accusations, Claim
from flockstep.peer.wire.schema import encode
from flockstep.peer.wire.signed import sign
from support.careless import careless
from support.certificates import certify, grow, seats, signed
from support.deeds import ABOUT, VOTE, Step, false
from support.liars import banned, events_of, honest, lies, tells
from support.swarm import RUN, SimPeer, SimSwarm, with_swarm

Body = Callable[[SimSwarm], Awaitable[None]]


def run_rounds(count: int, body: Body, *, home: tuple[Path, int] | None = None, seed: int = 0) -> None:
    run_virtual(partial(with_swarm, count, body, cells=12, home=home, seed=seed, charter=founded(count)), seed=seed)


@pytest.mark.parametrize("step", ["roster", "cut", "commit", "result", *VOTE])
def test_who_tells_two_halves_two_things_is_banned_by_all_and_the_run_goes_on(step: Step) -> None:
    async def body(swarm: SimSwarm) -> None:
        liar = in_turn(swarm.sims)[0]
        others = honest(swarm, liar)
        lies(liar, tells(others[:2], step, ABOUT["owners"] if step == "roster" else false))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(liar.round)
            await until_done(others, 2)
            nursery.cancel_scope.cancel()
        if step in VOTE and not any(banned(others)):
            return  # Nobody was shown both: such a word, told to some, decides nothing where the others are enough.
        assert banned(others) == [{liar.peer}] * 4
        assert {sim.averager.round for sim in others} == {3}
        assert len({sim.root for sim in others}) == 1
        assert all(liar.peer not in sim.outcomes[-1].members for sim in others)
        assert len(events_of(others, "peer.refused")) <= len(others)

    run_rounds(5, body)


def test_bytes_that_are_no_part_convict_who_committed_to_them() -> None:
    async def body(swarm: SimSwarm) -> None:
        liar, *others = swarm.sims
        codec = liar.averager._spec.contribution
        junk = {"encode_chunks": lambda self, chunks, num_cells: b"\xff" * self.num_bytes(num_cells)}
        liar.averager._choice = CodecChoice(type("Spoiling", (type(codec),), junk)(4, 64))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(liar.round)
            await until_done(others, 2)
            nursery.cancel_scope.cancel()
        assert banned(others) == [{liar.peer}] * 4
        assert all("no part" in str(event["reason"]) for event in events_of(others, "peer.banned"))
        assert all(liar.peer not in sim.outcomes[-1].members for sim in others)

    run_rounds(5, body)


@pytest.mark.parametrize("seed", range(6))
def test_an_honest_flock_bans_nobody_whoever_dies_and_comes_back(seed: int, tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        async def go_on(index: int) -> None:
            while swarm.sims[index].averager.round <= 3:
                await swarm.sims[index].round()

        async with trio.open_nursery() as nursery:
            for index in range(1, 4):
                nursery.start_soon(go_on, index)
            with trio.move_on_after(0.05 + 0.06 * seed):
                await go_on(0)
            born_again = await swarm.restart(0)
            with trio.move_on_after(120):
                await born_again.round()
        assert not any(banned(swarm.sims))

    run_rounds(4, body, home=(tmp_path, 10), seed=seed)


def claim(accuser: Identity, *words: wire.Signed, run: str = RUN) -> wire.Signed:
    return sign(accuser, claim_of(run, words))


def told(sim: SimPeer, swarm: SimSwarm, *claims: wire.Signed) -> None:
    sim.node.send([other.peer for other in swarm.sims if other is not sim], Accusations(tuple(map(encode, claims))))


def test_a_false_accusation_bans_its_author_whoever_carries_it() -> None:
    async def body(swarm: SimSwarm) -> None:
        accuser, victim, carrier, *rest = swarm.sims
        word = signed(victim.identity, wire.Prevote(SLOT, bytes(32)))
        told(carrier, swarm, claim(accuser.identity, word, word))
        await trio.sleep(2)
        assert banned([victim, *rest]) == [{accuser.peer}] * 3
        assert all("false accusation" in str(event["reason"]) for event in events_of(rest, "peer.banned"))

    run_rounds(5, body)


def test_an_accusation_that_was_altered_or_is_none_charges_its_carrier_and_bans_nobody() -> None:
    async def body(swarm: SimSwarm) -> None:
        accuser, victim, carrier, *rest = swarm.sims
        pair = [signed(victim.identity, wire.Prevote(SLOT, bytes([n]) * 32)) for n in (1, 2)]
        good = claim(accuser.identity, *pair)
        for bad in (
            replace(good, sender=victim.peer),
            replace(good, code=22),
            replace(good, payload=encode(Claim("other", (b"", b""), 0))),
            claim(accuser.identity, *pair, run="other"),
        ):
            told(carrier, swarm, bad)
            await trio.sleep(2)
        carrier.node.send([sim.peer for sim in rest], Accusations((b"\x00",)))
        await trio.sleep(2)
        assert not any(banned(swarm.sims))
        charged = events_of(rest, "peer.charged")
        assert {event["peer"] for event in charged} == {carrier.peer}
        assert len(charged) == 5 * len(rest)

    run_rounds(5, body)


def test_a_ban_outlives_a_crash_and_a_torn_record(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        liar, accuser, *rest = swarm.sims
        pair = [signed(liar.identity, wire.Prevote(SLOT, bytes([n]) * 32)) for n in (1, 2)]
        told(accuser, swarm, claim(accuser.identity, *pair))
        await trio.sleep(2)
        assert banned(rest) == [{liar.peer}] * 2
        file = tmp_path / rest[0].peer / "evidence" / "bans"
        with file.open("ab") as torn:
            torn.write(b"FSL1\x00\x00\x01\x00 half a record")
        (file.parent / "exhibits").mkdir(exist_ok=True)
        (file.parent / "exhibits" / f".{bytes(32).hex()}.0.draft").write_bytes(b"half an exhibit")
        again = await swarm.restart(2)
        assert banned([again]) == [{liar.peer}]
        assert [event["event"] for event in again.events if str(event["event"]).startswith(("evidence", "file"))] == [
            "file.torn"
        ]
        assert [event["step"] for event in events_of([again], "peer.banned")] == ["from the disk"]
        assert liar.peer in again.node.guard.banned
        liar.node.send(again.peer, signed(liar.identity, wire.Prevote(SLOT, bytes(32))))
        await trio.sleep(2)
        assert len(events_of([again], "peer.refused")) == 1

    run_rounds(4, body, home=(tmp_path, 10))


def test_no_ban_is_on_the_disk_before_the_bytes_that_prove_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(self: LogFile, payload: bytes) -> None:
        raise LocalError("the process was killed here")

    async def body(swarm: SimSwarm) -> None:
        liar, *others = swarm.sims
        liar.averager._choice = CodecChoice(careless(liar.averager._spec.contribution))
        liar.delta = lambda round_: np.full(liar.theta.size, np.nan, np.float32)  # type: ignore[method-assign]
        monkeypatch.setattr("flockstep.collectives.accountability.bans.LogFile.append", die)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(liar.round)
            await until_done(others, 1)
            nursery.cancel_scope.cancel()
        assert banned(others) == [{liar.peer}] * 4
        assert len(events_of(others, "evidence.unwritten")) == 4
        assert all(len(list((tmp_path / sim.peer / "evidence" / "exhibits").iterdir())) == 1 for sim in others)

    run_rounds(5, body, home=(tmp_path, 10))


def test_a_banned_peer_is_neither_heard_nor_served_and_one_event_tells_so() -> None:
    async def body(swarm: SimSwarm) -> None:
        liar, other = swarm.sims
        other.node.ban(liar.peer, "for the test")
        key = bytes(32)
        other.node.blobs.put(key, b"bytes")
        for _ in range(5):
            liar.node.send(other.peer, sign(liar.identity, wire.Ready(SLOT, key, 1, 1.0, 1.0, key)))
            with trio.move_on_after(3):
                with pytest.raises(NetworkError):
                    await liar.node.fetch(other.peer, key, 5)
        assert not other.averager.ready()
        assert len(events_of([other], "peer.refused")) == 1

    run_rounds(2, body)


def contradiction(author: Identity, accuser: Identity) -> wire.Signed:
    return claim(accuser, *(signed(author, wire.Prevote(SLOT, bytes([n]) * 32)) for n in (1, 2)))


def test_keys_of_nobody_that_prove_themselves_guilty_are_not_kept_until_they_are_members(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        attacker, other, third = swarm.sims
        keys = [Identity.from_seed(number.to_bytes(32)) for number in range(100, 102 + MAX_STRANGERS)]
        for key in keys:
            attacker.node.send(other.peer, Accusations((encode(contradiction(key, attacker.identity)),)))
        attacker.node.send(other.peer, Accusations((encode(contradiction(attacker.identity, attacker.identity)),)))
        await trio.sleep(2)
        assert banned([other, third]) == [{attacker.peer}, {attacker.peer}]
        assert len(events_of([other], "evidence.dropped")) == len(keys)
        assert events_of([third], "evidence.dropped") == []  # They are not passed on.
        assert (tmp_path / other.peer / "evidence" / "bans").stat().st_size < 2_000
        for key in (keys[-1], keys[0]):  # The oldest have made room.
            other.node.learn(key.peer_id, (f"/memory/{key.peer_id}",))
            other.averager.add_member(key.peer_id)
        assert banned([other]) == [{attacker.peer, keys[-1].peer_id}]

    run_rounds(3, body, home=(tmp_path, 10))


def test_bans_take_a_bounded_room_and_hold_without_their_proofs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flockstep.collectives.accountability.bans.MAX_PROOF_BYTES", 3_000)
    assert MAX_PROOF_BYTES == 16 << 20

    async def body(swarm: SimSwarm) -> None:
        accuser, other = swarm.sims
        keys = [Identity.from_seed(bytes([100 + number]) * 32) for number in range(20)]
        for key in keys:
            other.node.learn(key.peer_id, (f"/memory/{key.peer_id}",))
            accuser.node.send(other.peer, Accusations((encode(contradiction(key, accuser.identity)),)))
        await trio.sleep(2)
        names = {key.peer_id for key in keys}
        assert banned([other]) == [names]
        kept = other.averager._conduct.bans._kept.values()
        assert 0 < sum(len(ban.claim) for ban in kept) <= 3_000
        assert len(events_of([other], "evidence.unproven")) == sum(not ban.claim for ban in kept)
        again = await swarm.restart(1)
        assert banned([again]) == [names]

    run_rounds(2, body, home=(tmp_path, 10))


def test_a_newcomer_is_sent_one_page_of_the_newest_bans_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flockstep.collectives.accountability.bans.MAX_GREETING_BYTES", 2_000)
    assert MAX_CLAIM_BYTES <= MAX_GREETING_BYTES < 2 * MAX_CLAIM_BYTES  # The longest claim, and not two of them.

    async def body(swarm: SimSwarm) -> None:
        accuser, other, newcomer = swarm.sims
        other.node.watch([])
        keys = [Identity.from_seed(bytes([100 + number]) * 32) for number in range(9)]
        for key in keys:
            for sim in (other, newcomer):
                sim.node.learn(key.peer_id, (f"/memory/{key.peer_id}",))
            accuser.node.send(other.peer, Accusations((encode(contradiction(key, accuser.identity)),)))
        await trio.sleep(2)
        other.node.watch([newcomer.peer])
        sent: list[object] = []
        send = other.node.send

        def spy(peers: Any, message: object) -> None:
            sent.append(message)
            send(peers, message)

        other.node.send = spy  # type: ignore[method-assign]
        for _ in range(3):  # As it comes and goes.
            other.averager.add_member(newcomer.peer)
        await trio.sleep(2)
        (page,) = [message for message in sent if isinstance(message, Accusations)]
        assert sum(map(len, page.claims)) <= 2_000
        assert banned([newcomer]) == [{key.peer_id for key in keys[-len(page.claims) :]}]

    run_rounds(3, body)


def test_who_trickles_an_exhibit_holds_up_no_other_evidence() -> None:
    async def body(swarm: SimSwarm) -> None:
        slow, liar, accuser, target = swarm.sims

        async def trickle(self: Any, peer: str, key: bytes, size: int, *, patience: float) -> bytearray:
            if peer == slow.peer:
                await trio.sleep_forever()  # A byte now and then, so that the patience never ends.
            return await fetch(peer, key, size, patience=patience)

        fetch = target.node.fetch
        target.node.fetch = trickle.__get__(target.node)  # type: ignore[method-assign]
        spec = target.averager._spec
        roster = wire.Roster(SLOT, bytes(32), (slow.peer, liar.peer), (0, 6, 12), seats(2), b"\3", bytes(32))
        opening = signed(slow.identity, roster)
        bad = b"\xff" * spec.contribution.num_bytes(6)
        commit = wire.Commit(SLOT, opening.hash, 1, 1, 0.5, (digest(bad), bytes(32)))
        for number in range(2 * MAX_AWAITED):
            word = signed(accuser.identity, replace(commit, steps=number))
            slow.node.send(target.peer, Accusations((encode(claim(slow.identity, word, opening)),)))
        await trio.sleep(1)
        assert len(events_of([target], "evidence.missing")) == MAX_AWAITED
        accuser.node.blobs.put(digest(bad), bad)
        word = signed(liar.identity, commit)
        accuser.node.send(target.peer, Accusations((encode(claim(accuser.identity, word, opening)),)))
        await trio.sleep(1)
        assert banned([target]) == [{liar.peer}]
        await trio.sleep(MAX_AWAITED * (EXHIBIT_PATIENCE + 1))
        assert len(events_of([target], "evidence.missing")) == 2 * MAX_AWAITED
        assert not target.averager._conduct.bans._exhibits._lanes

    run_rounds(4, body)


def test_what_a_banned_peer_says_is_not_heard_from_others_either() -> None:
    async def body(swarm: SimSwarm) -> None:
        liar, carrier, target = swarm.sims
        pair = [signed(liar.identity, wire.Prevote(SLOT, bytes([n]) * 32)) for n in (1, 2)]
        told(carrier, swarm, claim(carrier.identity, *pair))
        await trio.sleep(1)
        carrier.node.send(target.peer, sign(liar.identity, wire.Ready(SLOT, bytes(32), 1, 1.0, 1.0, bytes(32))))
        await trio.sleep(1)
        assert banned([target]) == [{liar.peer}]
        assert not target.averager.ready()

    run_rounds(3, body)


def test_who_signs_two_results_of_one_slot_is_convicted_by_the_two_certificates() -> None:
    async def body(swarm: SimSwarm) -> None:
        carrier, target = swarm.sims
        signers = [Identity.from_seed(bytes([50 + number]) * 32) for number in range(4)]
        for identity in signers:
            target.node.learn(identity.peer_id, (f"/memory/{identity.peer_id}",))
        for mark in (b"one", b"another"):
            carrier.node.send(target.peer, certify(None, 100, roster=signers, mark=mark))
            await trio.sleep(1)
        assert banned([target]) == [{identity.peer_id for identity in signers}]

    run_rounds(2, body)


def test_trust_is_traced_back_through_the_ledger_where_the_chain_is_another_one() -> None:
    async def body(swarm: SimSwarm) -> None:
        (sim,) = swarm.sims
        chain = grow(None, 6)
        terms, charter = sim.averager._spec.terms, Charter(earned=True)
        conduct = Conduct(sim.node, terms, charter, None, lambda round_: chain[round_ - 1])
        conduct.advance(7, chain[5])
        assert conduct.trust_of("somebody else") == newcomer_record(earned=True)  # All six rounds are known.
        blind = Conduct(sim.node, terms, charter)
        blind.advance(7, chain[5])
        assert blind.trust_of("somebody else") is None

    run_rounds(1, body)
