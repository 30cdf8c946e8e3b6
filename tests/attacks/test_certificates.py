"""Foreign certificates and proofs: valid ones that no quorum of my voters has signed end no attempt of mine."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio
from attacks.voters import SLOT, founded, in_turn, until_done
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.collectives.allreduce.words import bits_of
from flockstep.collectives.chain.certificate import check_certificate, genesis, signed_in
from flockstep.collectives.vector.codec import EMPTY
from flockstep.peer import wire
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.base.digest import digest
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.node.node import Node
from flockstep.peer.wire.schema import encode
from flockstep.peer.wire.signed import sign, verify_signed
from support.certificates import decided, seats
from support.liars import banned, events_of, lies
from support.swarm import RUN, SimPeer, SimSwarm, identities, with_swarm

KEYS = [Identity.from_seed(bytes([100 + number]) * 32) for number in range(9)]
"""Keys of nobody."""


def value_by(members: Sequence[str], slot: wire.Slot, base_root: bytes = bytes(32)) -> wire.Value:
    """Return a well-formed value of a roster that its members know nothing of."""
    order, count = tuple(sorted(members)), len(members)
    bounds, everybody = tuple(range(count + 1)), tuple(range(count))
    outputs = (EMPTY,) * count
    return wire.Value(
        *slot.decision, base_root, order, bounds, seats(count), bytes(32), everybody, outputs, b"evil root".ljust(32), 5,
        credit=(5,) + (0,) * (count - 1),
    )


def forged(signers: Sequence[Identity], listed: Sequence[str], slot: wire.Slot) -> wire.Certificate:
    """Return a certificate with valid signatures by its signers."""
    names = [*(identity.peer_id for identity in signers), *listed]
    return decided(value_by(names, slot), slot, signers)


MINE = genesis(RUN)
WHO = ("third with free keys", "third", "stranger")
SLOTS = {
    "mine": (1, MINE, 0),
    "mine, last attempt": (1, MINE, wire.MAX_ATTEMPT),
    **{f"foreign {round_}": (round_, bytes(32), 0) for round_ in (1, 2, 10**6)},
}


def foreign() -> Iterator[Any]:
    """All combinations; of each slot the gate tries two makers, the strongest and another one."""
    for number, (name, slot) in enumerate(SLOTS.items()):
        for place, who in enumerate(WHO):
            marks = [] if place in (0, 1 + number % 2) else [pytest.mark.explore]
            yield pytest.param(who, *slot, marks=marks, id=f"{who}, {name}")


@pytest.mark.parametrize(("who", "round_", "previous", "attempt"), [*foreign()])
def test_whatever_certificate_a_third_or_a_stranger_makes_all_rounds_go_on(
    who: str, round_: int, previous: bytes, attempt: int
) -> None:
    count = 4 if who == "stranger" else 10
    allowed = frozenset(one.peer_id for one in identities(10)) if who == "third" else frozenset[str]()
    charter = founded(count, kind="allow" if allowed else "open", allowed=allowed)
    slot = wire.Slot(RUN, round_, previous, attempt)

    async def body(swarm: SimSwarm) -> None:
        honest = swarm.sims[: 4 if who == "stranger" else 7]
        names = [sim.peer for sim in honest]
        liars = [sim.identity for sim in swarm.sims[len(honest) :]]
        signers = {"stranger": KEYS, "third": liars, "third with free keys": [*liars, *KEYS]}[who]
        made = forged(signers, names[:1], slot)
        check_certificate(made, verify_signed, charter=charter)
        me, telemetry = Identity.from_seed(bytes(32)), Telemetry(clock=trio.current_time)

        async def tell(node: Node) -> None:
            while True:
                node.send(names, made)
                await trio.sleep(0.1)

        transport = swarm.network.transport(me.peer_id, telemetry=telemetry)
        async with Node(transport, me, PeerConfig(), telemetry, inline=True) as stranger, trio.open_nursery() as nursery:
            for name in names:
                stranger.learn(name, (f"/memory/{name}",))
            nursery.start_soon(tell, stranger if who == "stranger" else swarm.sims[9].node)
            await trio.sleep(0.5)
            for _ in range(2):
                async with trio.open_nursery() as rounds:
                    for sim in swarm.sims:
                        rounds.start_soon(sim.round)
            nursery.cancel_scope.cancel()
        ends = {(outcome.kind, outcome.slot.attempt) for sim in honest for outcome in sim.outcomes}
        assert ends == {(OutcomeKind.DONE, 0)}
        assert events_of(honest, "message.refused" if who == "stranger" else "certificate.hint") or round_ == 1
        assert not any({sim.peer for sim in honest} & found for found in banned(honest))

    run_virtual(partial(with_swarm, count, body, cells=12, charter=charter))


@pytest.mark.parametrize("previous", [genesis(RUN), bytes(32)], ids=["mine", "foreign"])
def test_a_certificate_of_my_quorum_ends_my_attempt_where_it_continues_my_state(previous: bytes) -> None:
    """The outputs that it names lead to another state: that is told, and the state of the others is taken."""

    async def body(swarm: SimSwarm) -> None:
        one, *others = swarm.sims
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.round)
            await trio.sleep(0.2)
            slot = wire.Slot(RUN, 1, previous)
            value = value_by([sim.peer for sim in others], slot, one.root)
            others[2].node.send(one.peer, decided(value, slot, [sim.identity for sim in others]))
            await trio.sleep(20)
            assert [outcome.kind for outcome in one.outcomes] == [OutcomeKind.BEHIND] * (previous == genesis(RUN))
            nursery.cancel_scope.cancel()

    run_virtual(partial(with_swarm, 4, body, cells=12, charter=founded(4)))


def test_who_receives_no_confirm_ends_with_the_certificate_that_the_others_made() -> None:
    """Of ten voters seven make a round, which is just a quorum."""

    async def body(swarm: SimSwarm) -> None:
        one, *others = swarm.sims[:7]
        receive = one.averager._receive

        def deaf(carrier: str, word: wire.Signed) -> None:
            if not isinstance(wire.opened(word), wire.Precommit):
                receive(carrier, word)

        one.node.on_message(wire.Signed, deaf)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.round)
            await until_done(others, 1)
            made = others[0].averager.certificate
            assert made is not None
            assert len(made.voters) == 7
            assert one.averager.round == 1
            others[0].node.send(one.peer, made)
        assert one.outcomes[-1].kind is OutcomeKind.DONE
        assert one.root == others[0].root

    run_virtual(partial(with_swarm, 10, body, cells=12, charter=founded(10)))


@pytest.mark.parametrize("how", ["false bytes", "no bytes"])
def test_a_voter_that_provides_a_decided_value_falsely_or_never_keeps_nobody_from_it(how: str) -> None:
    """The first of the voters is asked first, whatever it serves."""

    async def body(swarm: SimSwarm) -> None:
        one, *others = swarm.sims[:7]
        receive = one.averager._receive
        late = (wire.Result, wire.Outputs, wire.Propose, wire.Prevote, wire.Precommit)

        def deaf(carrier: str, word: wire.Signed) -> None:
            if not isinstance(wire.opened(word), late):
                receive(carrier, word)

        one.node.on_message(wire.Signed, deaf)

        def lie(liar: SimPeer) -> None:
            find, made_up = liar.node.blobs.find, dict[bytes, bytes]()

            def other_bytes(key: bytes, reader: str) -> Any:
                found = find(key, reader)
                return made_up.setdefault(key, bytes(len(found))) if found is not None else None

            async def no_bytes(stream: Any, request: wire.Fetch) -> None:
                await trio.sleep_forever()

            if how == "false bytes":
                liar.node.blobs.find = other_bytes  # type: ignore[method-assign]
            else:
                liar.node._bulk._send = no_bytes  # type: ignore[method-assign]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.round)
            await until_done(others, 1)
            made = others[0].averager.certificate
            assert made is not None
            liar = next(sim for sim in others if sim.peer == made.voters[0])
            lie(liar)
            others[0].node.send(one.peer, made)
        assert one.outcomes[-1].kind is OutcomeKind.DONE
        charged = {event["peer"] for event in events_of([one], "peer.charged")}
        assert charged == ({liar.peer} if how == "false bytes" else set())

    run_virtual(partial(with_swarm, 7, body, cells=12, charter=founded(7)))


def test_old_readys_are_answered_with_a_certificate_once_in_a_while() -> None:
    """Each has 500 bytes, and a certificate 15 kB with 64 members: whoever repeats them must not choose what I send."""

    async def body(swarm: SimSwarm) -> None:
        liar, target, *_ = swarm.sims
        old: list[wire.Signed] = []
        receive = liar.averager._receive

        def keep(carrier: str, word: wire.Signed) -> None:
            old.extend([word] * isinstance(wire.opened(word), wire.Ready))
            receive(carrier, word)

        liar.node.on_message(wire.Signed, keep)
        await until_done(swarm.sims, 1)
        told: list[wire.Certificate] = []
        liar.node.on_message(wire.Certificate, lambda carrier, made: told.append(made))
        for _ in range(100):
            liar.node.send(target.peer, old[0])
        await trio.sleep(0.5)
        assert len(told) == 1

    run_virtual(partial(with_swarm, 4, body, cells=12, charter=founded(4)))


@pytest.mark.parametrize("how", ["keys", "unasked", "forged", "stale", "not the proposer"])
def test_nobody_but_the_proposer_makes_a_roster_and_nobody_is_in_it_unasked(how: str) -> None:
    """Of keys that said no Ready, of Readys that are forged or of another slot, or by a voter whose turn it is not."""

    async def body(swarm: SimSwarm) -> None:
        proposer, liar, *others = in_turn(swarm.sims)
        readies: dict[str, wire.Signed] = {}

        def listen(carrier: str, word: wire.Signed) -> None:
            if isinstance(wire.opened(word), wire.Ready):
                readies[word.sender] = word
            receive(carrier, word)

        receive = proposer.averager._receive
        proposer.node.on_message(wire.Signed, listen)
        sent: list[str] = []
        spoilt: dict[str, wire.Basis] = {}

        def spoil(author: SimPeer, how: str) -> None:
            def lie(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
                if not isinstance(message, wire.Roster | wire.Basis) or message.slot != SLOT:
                    return message
                own = [sign(key, wire.Ready(SLOT, author.root, 1, 1.0, 1.0, bytes(32))) for key in KEYS]
                if isinstance(message, wire.Roster):
                    sent.append(how)
                    message = replace(message, basis=digest(encode(spoilt[peer])))
                    if how != "keys":
                        return message
                    # 9 free keys that sign what they like beside 5 honest members.
                    members = (*message.members, *(key.sender for key in own))
                    bounds, bits = (*range(len(members)), message.bounds[-1]), bits_of(range(len(members)))
                    return replace(message, members=members, bounds=bounds, seats=seats(len(members)), training=bits)
                packed = list(message.readys)
                match how:
                    case "keys":
                        packed += map(encode, own)
                    case "unasked":
                        packed[-1] = b""
                    case "forged":
                        last = signed_in(packed[-1]).sender
                        packed[-1] = encode(wire.Signed(last, own[0].code, own[0].payload, bytes(64)))
                    case "stale":
                        stale = wire.Ready(SLOT.at(7), author.root, 1, 1.0, 1.0, bytes(32))
                        packed[0] = encode(sign(author.identity, stale))
                spoilt[peer] = replace(message, readys=tuple(packed))
                return spoilt[peer]

            lies(author, lie)

        spoil(proposer, how)
        if how == "not the proposer":
            lies(proposer, lambda peer, message: None if isinstance(message, wire.Roster) else message)

            async def usurp() -> None:
                await trio.sleep(1)
                sims = [liar, *others]
                basis = wire.Basis(SLOT, tuple(encode(readies[sim.peer]) for sim in sims), (b"none",))
                named, members = digest(encode(basis)), tuple(sim.peer for sim in sims)
                roster = wire.Roster(SLOT, liar.root, members, (0, 3, 6, 9, 12), seats(4), b"\x0f", named)
                for message in (basis, roster):
                    liar.node.send([sim.peer for sim in others], sign(liar.identity, message))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(usurp)
                await until_done([*others, liar], 1, proposer)
        else:
            await until_done([*others, liar], 1, proposer)
            assert sent
            reasons = {str(event["reason"]) for event in events_of(others, "round.roster_refused")}
            assert reasons
        free = {key.peer_id for key in KEYS}
        assert not any(free & {*outcome.members} for sim in others for outcome in sim.outcomes)
        assert {sim.outcomes[-1].slot.attempt for sim in others} == {1}
        assert not any(found - {proposer.peer} for found in banned([*others, liar]))

    allowed = frozenset(one.peer_id for one in identities(5))
    run_virtual(partial(with_swarm, 5, body, cells=12, charter=founded(5, kind="allow", allowed=allowed)))
