"""One decision per round on whole peers: hidden Precommits, forged locks, a liar's values, statements of elsewhere."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio
from attacks.voters import SLOT, founded, in_turn, until_done
from flockstep.collectives.accountability.evidence import MAX_STATEMENTS
from flockstep.collectives.chain.certificate import certificate_hash, open_value, value_hash
from flockstep.peer import wire
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.wire.schema import encode
from flockstep.peer.wire.signed import sign
from support.certificates import decided
from support.liars import banned, events_of, lies
from support.swarm import SimPeer, SimSwarm, with_swarm

TIDY = ("peer.charged", "peer.banned")


def heard(sim: SimPeer, words: list[wire.Signed]) -> None:
    """Keep everything that a peer receives."""
    receive = sim.averager._receive

    def keep(carrier: str, word: wire.Signed) -> None:
        words.append(word)
        receive(carrier, word)

    sim.node.on_message(wire.Signed, keep)


def unharmed(others: list[SimPeer]) -> None:
    """Nobody honest was banned or charged, and all hold one value."""
    names = {sim.peer for sim in others}
    for kind in TIDY:
        assert not names & {event["peer"] for event in events_of(others, kind)}
    assert len({sim.averager.certificate and certificate_hash(sim.averager.certificate) for sim in others}) == 1


@pytest.mark.parametrize("cut_off", [1, 2])
def test_a_confirm_that_is_hidden_and_shown_later_leads_to_no_second_value(cut_off: int) -> None:
    """X is confirmed by A, B and M, of which M's is hidden, and C is cut off; later M reveals it."""

    async def body(swarm: SimSwarm) -> None:
        a, b, c, liar = in_turn(swarm.sims)
        confirms: list[wire.Signed] = []
        words: list[wire.Signed] = []
        heard(liar, words)

        def hide(peer: str, message: wire.RoundMessage) -> wire.RoundMessage | None:
            if isinstance(message, wire.Precommit):
                confirms.append(sign(liar.identity, message))
                return None
            return None if confirms and not isinstance(message, wire.Ready) else message

        lies(liar, hide)
        keep = c.node.send

        def mute(peers: Any, message: object) -> None:
            # Nobody receives what C says of the vote in the first attempt: it is as cut off as can be.
            word = wire.opened(message) if isinstance(message, wire.Signed) else None
            if isinstance(word, wire.Precommit) and word.slot.attempt < cut_off:
                return
            keep(peers, message)

        c.node.send = mute  # type: ignore[method-assign]
        await until_done([a, b, c], 1, liar)
        assert confirms
        certificates = {sim.averager.certificate for sim in (a, b, c)}
        (final,) = {certificate.value for certificate in certificates if certificate is not None}
        said = [(word, wire.opened(word)) for word in [*words, *confirms]]
        first = {
            word.sender: word for word, message in said if isinstance(message, wire.Precommit) and message.slot == SLOT
        }
        assert len(first) == 3  # The liar can show a certificate of the first attempt: it is of the same value.
        assert {message.value for _, message in said if isinstance(message, wire.Precommit)} == {value_hash(final)}
        unharmed([a, b, c])

    run_virtual(partial(with_swarm, 4, body, cells=12, charter=founded(4)))


@pytest.mark.parametrize("changes", [{"flagged": (0,)}, {"credit": (1 << 40,) * 5}], ids=["flagged", "credit"])
def test_a_proposer_that_proposes_values_of_its_own_with_a_valid_roster_decides_nothing(changes: dict[str, Any]) -> None:
    async def body(swarm: SimSwarm) -> None:
        liar, *others = in_turn(swarm.sims)
        names = [sim.peer for sim in others]

        def lie(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
            if isinstance(message, wire.Propose):
                evil = encode(replace(open_value(message.value), **changes))
                return replace(message, value=evil if peer == names[0] else bytes(48_000))
            return message

        lies(liar, lie)
        await until_done(others, 2, liar)
        unharmed(others)

    run_virtual(partial(with_swarm, 5, body, cells=12, charter=founded(5)))


@pytest.mark.parametrize("count", [4, 7])
def test_locks_without_a_proof_and_statements_of_elsewhere_cost_less_than_a_turn(count: int) -> None:
    """A liar's Readys name locks that nobody proves; it floods with statements of far slots, other chains and for others."""

    async def body(swarm: SimSwarm) -> None:
        *others, liar = in_turn(swarm.sims)
        names = [sim.peer for sim in others]
        old: list[wire.Signed] = []
        heard(liar, old)

        def lie(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
            if isinstance(message, wire.Ready):
                forged = wire.Lock(message.slot.attempt, b"nobody has proven this one".ljust(32))
                return replace(message, lock=(forged,))
            return message

        async def flood() -> None:
            for number in range(30):
                for slot in (
                    SLOT.at(wire.MAX_ATTEMPT - number),
                    wire.Slot(SLOT.run, 1, bytes(32), number),
                    wire.Slot(SLOT.run, 2 + number, SLOT.previous),
                ):
                    root = others[0].root
                    liar.node.send(names, sign(liar.identity, wire.Ready(slot, root, 1, 1.0, 1.0, bytes([number]) * 32)))
                    liar.node.send(names, sign(liar.identity, wire.Prevote(slot, bytes([number]) * 32)))
                    liar.node.send(names, sign(liar.identity, wire.Void(slot, "for everybody")))
                liar.node.send(names, sign(liar.identity, wire.Propose(SLOT.at(number), bytes(48_000), b"")))
                for word in [*old[-20:]]:
                    liar.node.send(names, word)
                forged = wire.Signed(names[0], 52, encode(wire.Void(SLOT, "it gave up")), bytes(64))
                if number == 0:
                    liar.node.send(names[1:], forged)
                await trio.sleep(0.2)

        assert MAX_STATEMENTS > 30 * 4 * 3
        lies(liar, lie)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood)
            await until_done(others, 2, liar)
            nursery.cancel_scope.cancel()
        assert {sim.outcomes[0].slot.attempt for sim in others} <= {0, 1}
        assert banned(others) in ([set()] * len(others), [{liar.peer}] * len(others))
        unharmed(others)

    run_virtual(partial(with_swarm, count, body, cells=12, charter=founded(count)))


def test_a_certificate_of_another_value_by_a_third_is_refused_and_convicts_its_voters() -> None:
    """Three of ten confirm another value in a slot that is decided: it lacks a quorum, and they have signed twice."""

    async def body(swarm: SimSwarm) -> None:
        *others, one, two, three = in_turn(swarm.sims)
        await until_done(swarm.sims, 1)
        made = others[0].averager.certificate
        assert made is not None
        other = replace(open_value(made.value), next_root=b"another root".ljust(32))
        liars = [one.identity, two.identity, three.identity]
        one.node.send([sim.peer for sim in others], decided(other, made.slot, liars))
        await until_done(others, 2, one, two, three)
        assert banned(others) == [{one.peer, two.peer, three.peer}] * len(others)  # They have signed twice in one slot.
        unharmed(others)

    run_virtual(partial(with_swarm, 10, body, cells=12, charter=founded(10)))
