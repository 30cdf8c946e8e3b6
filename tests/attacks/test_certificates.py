"""Foreign certificates and proofs: valid ones that no quorum of my voters has signed end no attempt of mine."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import trio
from attacks.voters import founded, until_done
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.collectives.chain.certificate import check_certificate, genesis
from flockstep.collectives.vector.codec import EMPTY
from flockstep.peer import wire
from flockstep.peer.base.config import PeerConfig
from flockstep.peer.identity import Identity
from flockstep.peer.log.telemetry import Telemetry
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.node.node import Node
from flockstep.peer.wire.signed import verify_signed
from support.certificates import decided, seats
from support.liars import banned, events_of
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
            marks = [] if place == number % 3 else [pytest.mark.explore]
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
