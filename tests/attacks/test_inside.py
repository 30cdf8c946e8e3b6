"""What one member, or a key without a vote, could do to rounds in which others propose: none of it costs an attempt.

Found by `test_one_field` and by reading; each test fails without the rule that it is about.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
from attacks.voters import founded, in_turn, until_done
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.collectives.allreduce.roster import RosterView
from flockstep.collectives.chain.certificate import value_hash, value_of
from flockstep.peer import wire
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.node.node import Node
from flockstep.peer.wire.signed import sign
from support.deeds import VOTE, step_of
from support.liars import banned, events_of, lies, lies_about, silent
from support.swarm import SimPeer, SimSwarm, identities, with_swarm

Prepare = Callable[[list[SimPeer], list[SimPeer]], Sequence[SimPeer]]
"""(voters in turn, members without a vote) → the liars, prepared."""


def run(
    prepare: Prepare,
    *,
    voters: int = 4,
    free: int = 0,
    rounds: int = 2,
    rule: str = "gramguard",
    keepers_train: bool = True,
    most: Callable[[int], int] = lambda round_: 0,
) -> list[SimPeer]:
    """Make rounds of which at most so many attempts fail; returns the honest members, none of which was charged."""
    found: list[SimPeer] = []

    async def body(swarm: SimSwarm) -> None:
        order, strangers = in_turn(swarm.sims[:voters]), swarm.sims[voters:]
        for sim in order if not keepers_train else ():
            sim.round = partial(keep, sim)  # type: ignore[method-assign]
        liars = prepare(order, strangers)
        others = [sim for sim in swarm.sims if sim not in liars]
        for round_ in range(1, rounds + 1):
            await until_done(others, round_, *liars, within=100.0)
            made = {sim.averager.certificate for sim in others}
            assert max(it.slot.attempt for it in made if it is not None) <= most(round_)
        honest = {sim.peer for sim in others}
        assert not honest & {event["peer"] for event in events_of(others, "peer.charged")}
        assert not any(honest & names for names in banned(others))
        found.extend(others)

    keepers = frozenset(identity.peer_id for identity in identities(voters))
    rules: dict[str, Any] = {"keepers": keepers} if free else {}
    charter = founded(voters, **rules)
    run_virtual(partial(with_swarm, voters + free, body, cells=12, charter=charter, rule=rule))
    return found


async def keep(sim: SimPeer) -> Any:
    """Take part as a keeper, which is ready once those that train are."""
    await trio.sleep(0.5)
    return await SimPeer.round(sim, tokens=0)


def test_a_free_key_that_proposes_and_accepts_junk_ends_nobodys_attempt() -> None:
    """It withholds its output, so that the others look for whoever has accepted a value with it."""

    def prepare(voters: list[SimPeer], free: list[SimPeer]) -> list[SimPeer]:
        liar, junk, told = free[0], b"\xc1junk", set[str]()

        def lie(peer: str, message: wire.RoundMessage) -> wire.RoundMessage | None:
            if step_of(message) == "sketch" and peer not in told:
                told.add(peer)
                for word in (wire.Propose(message.slot, junk, b""), wire.Prevote(message.slot, value_hash(junk))):
                    liar.node.send(peer, sign(liar.identity, word))
            return None if step_of(message) == "result" else message

        lies(liar, lie)
        return [liar]

    others = run(prepare, free=2)
    assert events_of(others, "round.silent")


def test_who_withholds_its_commit_from_a_voter_that_owns_nothing_costs_no_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    relayed: set[str] = set()
    monkeypatch.setattr(Node, "is_relayed", property(lambda node: node.peer_id in relayed))

    def prepare(voters: list[SimPeer], free: list[SimPeer]) -> Sequence[SimPeer]:
        shunned = {sim.peer for sim in voters[1:3]}
        relayed.update(shunned)
        keeps, votes = silent("commit", to=shunned.__contains__), silent(*VOTE[1:])
        lies(voters[-1], lambda peer, message: votes(peer, message) and keeps(peer, message))
        return voters[-1:]

    run(prepare)


def test_a_false_second_sketch_that_is_sent_to_one_voter_convicts_its_author_and_no_owner() -> None:
    """It is false in a part of somebody else's, so that its reader finds that one's output false."""

    def prepare(voters: list[SimPeer], free: list[SimPeer]) -> list[SimPeer]:
        first, victim, _, liar = voters

        def lie(peer: str, message: wire.RoundMessage) -> wire.RoundMessage | None:
            if step_of(message) in VOTE[1:]:
                return None
            if not isinstance(message, wire.Sketch) or step_of(message) != "second sketch" or peer != victim.peer:
                return message
            attempt = liar.averager._work
            assert attempt is not None
            tables = np.frombuffer(message.tables, "<f4").copy().reshape(4, -1)
            tables[attempt.machine.exchange.members.index(first.peer)] *= -2.0
            return replace(message, tables=tables.tobytes())

        lies(liar, lie)
        return [liar]

    others = run(prepare, most=lambda round_: int(round_ == 1))
    (liar,) = set.union(*banned(others))
    assert liar not in {sim.peer for sim in others}


@pytest.mark.parametrize("voters", [4, pytest.param(7, marks=pytest.mark.explore)])
def test_free_keys_that_own_all_parts_and_give_up_after_their_commit_cost_no_attempt(
    voters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All voters are behind relays, and own nothing. One deputy of all parts could not open enough nonces for a cut."""
    relayed: set[str] = set()
    monkeypatch.setattr(Node, "is_relayed", property(lambda node: node.peer_id in relayed))

    def prepare(order: list[SimPeer], free: list[SimPeer]) -> list[SimPeer]:
        relayed.update(sim.peer for sim in order)

        def lie(peer: str, message: wire.RoundMessage) -> wire.RoundMessage | None:
            if step_of(message) == "word":
                return wire.Void(message.slot, "enough")
            return message if step_of(message) in ("ready", "commit") else None

        for sim in free:
            lies(sim, lie)
        return free

    run(prepare, voters=voters, free=6)


def test_a_voter_from_another_state_that_is_ready_early_spoils_nobodys_roster() -> None:
    """Others have forwarded its Ready to the proposer long before the roster, which cannot include it."""

    def prepare(voters: list[SimPeer], free: list[SimPeer]) -> list[SimPeer]:
        *_, late, liar = voters
        lies(liar, lies_about("state", "ready"))
        began = set[int]()

        async def slowly() -> Any:
            if late.averager.round not in began:
                began.add(late.averager.round)
                await trio.sleep(4.0)
            return await SimPeer.round(late)

        late.round = slowly  # type: ignore[method-assign, assignment]
        for sim in voters:
            sim.phase_seconds = 60.0
        return [liar]

    run(prepare)


def test_a_keeper_that_lets_only_its_own_key_contribute_is_refused() -> None:
    """Those that train have no vote. The keeper proposes in rounds 1 and 5, and names the words of these two alone."""

    def prepare(voters: list[SimPeer], free: list[SimPeer]) -> list[SimPeer]:
        liar, friend = voters[0], free[0]

        def lie(peer: str, message: wire.RoundMessage) -> wire.RoundMessage:
            if not isinstance(message, wire.Cut):
                return message
            attempt = liar.averager._work
            assert attempt is not None
            both = {attempt.machine.exchange.table.places[sim.peer] for sim in (liar, friend)}
            return replace(message, words=tuple(word for word in message.words if word[0] in both))

        lies(liar, lie)
        return [liar, friend]

    most = lambda round_: int(round_ in (1, 5))  # noqa: E731
    others = run(prepare, free=4, rounds=5, keepers_train=False, most=most)
    certificate = others[0].averager.certificate
    assert certificate is not None
    assert len(value_of(certificate).contributors) == 4
    charged = events_of(others, "peer.charged")
    assert {it["step"] for it in charged} == {"Cut"}
    assert all("it opens the nonces of a third" in str(it["reason"]) for it in charged)


def serves(liar: SimPeer, whom: Callable[[RosterView, int, str], bool]) -> None:
    """Serve a part of its contribution to these readers only: `whom` (roster, part, reader)."""
    find = liar.node.blobs.find

    def hide(key: bytes, reader: str) -> Any:
        attempt, found = liar.averager._work, find(key, reader)
        if reader == liar.peer or attempt is None or not any(found is part for part in attempt.mine):
            return found
        table = attempt.machine.exchange.table
        mine = table.commits().get(table.me)
        parts = [part for part in table.owners if mine is not None and mine.parts[part] == key]
        return found if any(whom(table, part, reader) for part in parts) else None

    liar.node.blobs.find = hide  # type: ignore[method-assign]


def to_deputies_that_know_of_the_owners_word(table: RosterView, part: int, reader: str) -> bool:
    """The owners then deny what both of their deputies hold."""
    has_spoken = part in table.words(b"")
    return has_spoken and reader in {table.members[index] for index in table.deputies(part)}


@pytest.mark.parametrize(
    "whom",
    [
        to_deputies_that_know_of_the_owners_word,
        lambda table, part, reader: table.places[reader] % 2 == 0,
        lambda table, part, reader: part % 3 > 0,
        lambda table, part, reader: False,
    ],
    ids=["deputies", "every other owner", "some parts", "nobody"],
)
def test_who_serves_its_parts_to_some_only_moves_nobody_elses(
    whom: Callable[[RosterView, int, str], bool],
) -> None:
    """Each such key took the parts of all honest owners from them, and left most of their contributions out."""

    def prepare(order: list[SimPeer], strangers: list[SimPeer]) -> Sequence[SimPeer]:
        for liar in strangers[-2:]:
            serves(liar, whom)
        return strangers[-2:]

    others = run(prepare, free=7, keepers_train=False)
    honest = {sim.peer for sim in others[4:]}
    for sim in others:
        for outcome in (it for it in sim.outcomes if it.kind is OutcomeKind.DONE):
            members = outcome.value.members
            assert honest <= {*outcome.cut}
            assert all(honest <= {members[index] for index in counted} for counted in outcome.counted.values())
