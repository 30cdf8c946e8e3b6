"""How long one member can make a run wait: in ever fewer rounds, and never for an attempt that another one proposes.

Whom it tells what, and how late, is its choice. Times are virtual: of a network whose messages take some milliseconds, where
the shortest deadline is 2 seconds, and an honest round takes 0.7.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio
from attacks.test_silent import catch_up
from attacks.voters import founded, in_turn, until_done
from flockstep.collectives.allreduce.actions import Phase
from flockstep.collectives.allreduce.roster import RosterView
from flockstep.collectives.round.deadlines import Deadlines
from flockstep.peer import wire
from flockstep.peer.memory.network import run_virtual
from support.deeds import Step, step_of
from support.liars import banned, events_of, lies, only, silent
from support.swarm import SimPeer, SimSwarm, identities, with_swarm

VOTERS, FREE, ROUNDS = 4, 3, 8
Prepare = Callable[[SimPeer, trio.Nursery], None]
"""Make a liar of a peer, which owns a part."""
Whom = Callable[[RosterView, str], bool]
"""(roster, reader) → True if the liar lets it wait."""

everybody: Whom = lambda table, reader: True  # noqa: E731
the_proposer: Whom = lambda table, reader: reader == table.members[0]  # noqa: E731
every_other: Whom = lambda table, reader: table.places[reader] % 2 == 0  # noqa: E731


def seconds_of_rounds(prepare: Prepare, voters: int = VOTERS, free: int = FREE, rounds: int = ROUNDS) -> list[float]:
    """Return how long each round takes the others; none of their attempts fails, and nobody honest is charged or blamed.

    The liar has no vote, where somebody has none.
    """
    seconds: list[float] = []

    async def body(swarm: SimSwarm) -> None:
        *others, liar = [*in_turn(swarm.sims[:voters]), *swarm.sims[voters:]]
        async with trio.open_nursery() as nursery:
            prepare(liar, nursery)
            for round_ in range(1, rounds + 1):
                began = trio.current_time()
                await until_done(others, round_, liar)
                seconds.append(trio.current_time() - began)
                assert {sim.averager.certificate.slot.attempt for sim in others} == {0}  # type: ignore[union-attr]
                catch_up(liar, others[0])
            nursery.cancel_scope.cancel()
        honest = {sim.peer for sim in others}
        assert not any(honest & names for names in banned(others))
        assert not honest & {event["peer"] for event in events_of(others, "peer.charged")}
        assert not honest & {peer for sim in others for outcome in sim.outcomes for peer in outcome.unsketched}

    keepers: dict[str, Any] = {"keepers": frozenset(it.peer_id for it in identities(voters))} if free else {}
    charter = founded(voters, **keepers)
    run_virtual(partial(with_swarm, voters + free, body, cells=28, charter=charter, rule="gramguard"))
    return seconds


def roster_of(liar: SimPeer) -> RosterView | None:
    attempt = liar.averager._work
    return attempt.machine.exchange.table if attempt is not None and attempt.machine.has_roster else None


def withholds(*steps: Step, whom: Whom = everybody) -> Prepare:
    """Return a liar that does not send the messages of these steps to some."""

    def prepare(liar: SimPeer, _: trio.Nursery) -> None:
        def is_kept(peer: str) -> bool:
            return (table := roster_of(liar)) is not None and whom(table, peer)

        lies(liar, silent(*steps, to=is_kept))

    return prepare


def is_ready_to(is_told: Callable[[int], bool]) -> Prepare:
    """Return a liar that is Ready to some members alone, by their place among all."""
    places = {identity.peer_id: place for place, identity in enumerate(identities(VOTERS + FREE))}

    def prepare(liar: SimPeer, _: trio.Nursery) -> None:
        lies(liar, silent("ready", to=lambda peer: not is_told(places[peer])))

    return prepare


def hangs(blobs: str, whom: Whom) -> Prepare:
    """Return a liar that begins to send some members the bytes of its contribution, or of its outputs, and stops."""

    def prepare(liar: SimPeer, _: trio.Nursery) -> None:
        send = liar.node._bulk._send_memory

        async def hold_back(stream: Any, blob: Any, request: wire.Fetch) -> None:
            attempt, table = liar.averager._work, roster_of(liar)
            if attempt is not None and table is not None and whom(table, stream.remote):
                mine = attempt.mine if blobs == "contribution" else attempt.outputs.values()
                if any(blob is it for it in mine):
                    await trio.sleep_forever()
            await send(stream, blob, request)

        liar.node._bulk._send_memory = hold_back  # type: ignore[method-assign]

    return prepare


def sends_late(step: Step, seconds: float = 1.9) -> Prepare:
    """Return a liar that sends the messages of a step later: a moment before the shortest deadline."""

    def prepare(liar: SimPeer, nursery: trio.Nursery) -> None:
        send = liar.node.send

        async def later(to: Any, mail: Any) -> None:
            await trio.sleep(seconds)
            send(to, mail)

        def hold_back(to: Any, mail: Any) -> None:
            if isinstance(mail, wire.Signed) and step_of(wire.opened(mail)) == step:
                nursery.start_soon(later, to, mail)
            else:
                send(to, mail)

        liar.node.send = hold_back  # type: ignore[method-assign, assignment]

    return prepare


WORDS = "word", "second word"


@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param(withholds(*WORDS, whom=the_proposer), id="words"),
        pytest.param(withholds("result", whom=the_proposer), id="outputs"),
        pytest.param(withholds("second sketch", whom=the_proposer), id="second sketches"),
        pytest.param(hangs("outputs", the_proposer), id="bytes of outputs"),
        pytest.param(is_ready_to(lambda place: place % 2 == 0), id="Readys"),
    ],
)
def test_what_is_kept_from_some_costs_no_deadline(prepare: Prepare) -> None:
    assert max(seconds_of_rounds(prepare, rounds=2)) < 1.3


@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param(withholds("second sketch"), id="second sketches"),
        pytest.param(hangs("contribution", everybody), id="bytes for all"),
        pytest.param(hangs("contribution", every_other), id="bytes for every other"),
        pytest.param(hangs("outputs", everybody), id="outputs for all"),
        pytest.param(sends_late("result"), id="late outputs"),
        pytest.param(withholds(*WORDS), id="words for all"),
        pytest.param(is_ready_to(lambda place: False), id="Readys for all"),
    ],
)
def test_who_lets_others_wait_does_so_in_ever_fewer_rounds_and_for_no_longer_each_time(prepare: Prepare) -> None:
    seconds = seconds_of_rounds(prepare)
    assert sum(it > 1.0 for it in seconds) <= 4
    assert max(seconds[ROUNDS // 2 :]) <= seconds[0] + 2.5


@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param(hangs("contribution", every_other), id="bytes for every other"),
    ],
)
def test_a_voter_lets_others_wait_in_ever_fewer_rounds(prepare: Prepare) -> None:
    seconds = seconds_of_rounds(prepare, voters=7, free=0)
    assert sum(it > 1.0 for it in seconds) <= 5


@pytest.mark.parametrize(
    ("withheld", "waits"),
    [
        pytest.param("commit", [1, 3, 6], id="commits"),
        pytest.param("second sketch", [1, 2, 4, 7], id="second sketches"),
    ],
)
def test_free_keys_that_take_turns_let_others_wait_no_more_often_than_one_does(
    withheld: Step, waits: list[int]
) -> None:
    """Each of them contributes to the other rounds as it should. Without a memory that they share each had a first time.

    An honest key that is Ready later, and whose commit takes a third longer than those of most, is in all rounds.
    """
    keys, seconds = 2, list[float]()

    def keeps_in_turn(place: int, _: str, message: wire.RoundMessage) -> wire.RoundMessage | None:
        return None if step_of(message) == withheld and message.slot.round % keys == place else message

    async def body(swarm: SimSwarm) -> None:
        voters, honest, liars = swarm.sims[:VOTERS], swarm.sims[VOTERS], swarm.sims[VOTERS + 1 :]
        for place, liar in enumerate(liars):
            lies(liar, partial(keeps_in_turn, place))
        async with trio.open_nursery() as nursery:
            sends_late("commit", 0.02)(honest, nursery)
            sends_late("ready", 0.2)(honest, nursery)
            for round_ in range(1, ROUNDS + 1):
                began = trio.current_time()
                await until_done([*voters, honest], round_, *liars)
                seconds.append(trio.current_time() - began)
                for liar in liars:
                    catch_up(liar, voters[0])
            nursery.cancel_scope.cancel()
        assert all(honest.peer in outcome.cut for sim in voters for outcome in sim.outcomes)
        assert {len(sim.outcomes) for sim in voters} == {ROUNDS}

    charter = founded(VOTERS, keepers=frozenset(it.peer_id for it in identities(VOTERS)), earned=True)
    run_virtual(partial(with_swarm, VOTERS + 1 + keys, body, cells=44, charter=charter, rule="gramguard"))
    assert [round_ for round_, it in enumerate(seconds, 1) if it > 1.5] == waits


def test_free_keys_that_keep_something_from_the_proposer_use_up_no_relay_of_it() -> None:
    """Each relay serves one reader with eight authors. A voter withholds its second sketches from it, too."""
    voters, keys, seconds = 7, 9, list[float]()

    async def body(swarm: SimSwarm) -> None:
        victim, liar, *others = in_turn(swarm.sims[:voters])
        for sim in swarm.sims[voters:]:
            lies(sim, silent("sketch", "second sketch", to=victim.peer.__eq__))
        lies(liar, silent("second sketch", to=victim.peer.__eq__))
        await until_done([victim, *others], 1, liar, *swarm.sims[voters:])
        seconds.append(trio.current_time())

    charter = founded(voters, keepers=frozenset(it.peer_id for it in identities(voters)), earned=True)
    run_virtual(partial(with_swarm, voters + keys, body, cells=48, charter=charter, rule="gramguard"))
    assert max(seconds) < 1.3, seconds


@pytest.mark.parametrize(
    ("prepare", "waits"),
    [
        pytest.param(hangs("outputs", every_other), [1, 2, 3, 4], id="bytes of outputs for some"),
    ],
)
def test_two_voters_of_seven_void_no_attempt_but_their_own_and_lengthen_ever_fewer(
    prepare: Prepare, waits: list[int]
) -> None:
    """Of some parts they are two of the three: then all other voters answer."""
    voters, lengths = 7, dict[int, float]()

    async def body(swarm: SimSwarm) -> None:
        *others, one, other = in_turn(swarm.sims)
        async with trio.open_nursery() as nursery:
            for liar in (one, other):
                prepare(liar, nursery)
            for round_ in range(1, 6):
                began = trio.current_time()
                await until_done(others, round_, one, other)
                if round_ % voters not in (0, voters - 1):  # In the other two they propose, one after the other.
                    lengths[round_] = trio.current_time() - began
                    assert {it.slot.attempt for sim in others for it in sim.outcomes if it.slot.round == round_} == {0}
                for liar in (one, other):
                    catch_up(liar, others[0])
            nursery.cancel_scope.cancel()
        assert not any({sim.peer for sim in others} & names for names in banned(others))

    run_virtual(partial(with_swarm, voters, body, cells=28, charter=founded(voters), rule="gramguard"))
    assert [round_ for round_, it in lengths.items() if it > 1.0] == waits
    assert max(lengths.values()) < 5.0


def test_a_voter_and_a_key_that_say_nothing_but_ready_lengthen_nobodys_deadlines() -> None:
    """Some honest voters wait for these to a deadline, and others for them with their votes: that is no exchange's length."""
    lengths: list[float] = []

    async def body(swarm: SimSwarm) -> None:
        *others, one, other = [*swarm.sims[VOTERS:-1], *in_turn(swarm.sims[:VOTERS]), swarm.sims[-1]]
        for liar in (one, other):
            lies(liar, only("ready"))
        for round_ in (1, 2, 3):
            began = trio.current_time()
            await until_done(others, round_, one, other)
            lengths.append(trio.current_time() - began)
            for liar in (one, other):
                catch_up(liar, others[0])

    charter = founded(VOTERS, keepers=frozenset(it.peer_id for it in identities(VOTERS)), earned=True)
    run_virtual(partial(with_swarm, VOTERS + FREE, body, cells=28, charter=charter, rule="gramguard"))
    assert max(lengths[1:]) < 5.0, lengths


def test_the_turns_of_as_many_proposers_as_may_lie_lengthen_nobodys_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two proposers say no outputs: with four voters one of them was honest, and slower than the deadlines."""
    lengthened: list[int] = []
    give_more_time = Deadlines.give_more_time

    async def body(swarm: SimSwarm) -> None:
        order = in_turn(swarm.sims)
        for sim in order[:2]:
            lies(sim, silent("outputs"))

        def spied(deadlines: Deadlines, phase: Phase) -> None:
            lengthened.append(next(len(sim.outcomes) for sim in order if sim.averager._deadlines is deadlines))
            give_more_time(deadlines, phase)

        monkeypatch.setattr(Deadlines, "give_more_time", spied)
        await until_done(order, 1)

    run_virtual(partial(with_swarm, 4, body, cells=28, charter=founded(4), rule="gramguard"))
    assert set(lengthened) == {1}


@pytest.mark.parametrize("is_made", [False, True], ids=["no output", "no sketch"])
def test_an_owner_and_a_key_that_alone_hold_bytes_void_no_attempt(is_made: bool) -> None:
    """The key serves its contribution to that part to the owner alone, which makes no output, or does not answer for it."""
    voided: list[int] = []

    async def body(swarm: SimSwarm) -> None:
        *others, owner, key = [*swarm.sims[VOTERS:-1], *in_turn(swarm.sims[:VOTERS]), swarm.sims[-1]]
        serve, send = key.node._bulk._send_memory, owner.node._bulk._send_memory

        async def to_the_owner(stream: Any, blob: Any, request: wire.Fetch) -> None:
            attempt, table = key.averager._work, roster_of(key)
            mine = attempt.mine if attempt is not None else []
            is_read = table is not None and mine and owner.peer in table.places and stream.remote != owner.peer
            if is_read and table is not None and blob is mine[table.places[owner.peer]]:
                await trio.sleep_forever()
            await serve(stream, blob, request)

        async def of_itself(stream: Any, blob: Any, request: wire.Fetch) -> None:
            work = owner.averager._work
            if work is not None and not any(blob is it for it in (*work.mine, *(work.outputs.values() if is_made else ()))):
                await trio.sleep_forever()
            await send(stream, blob, request)

        key.node._bulk._send_memory = to_the_owner  # type: ignore[method-assign]
        owner.node._bulk._send_memory = of_itself  # type: ignore[method-assign]
        lies(owner, silent(*([] if is_made else ["result"])))
        lies(key, silent("second sketch"))
        for round_ in range(1, 4):
            await until_done(others, round_, owner, key)
            certificate = others[0].averager.certificate
            assert certificate is not None
            if certificate.slot.attempt and round_ % VOTERS:  # In its own turn it may do what it likes.
                voided.append(round_)
            for liar in (owner, key):
                catch_up(liar, others[0])

    charter = founded(VOTERS, keepers=frozenset(it.peer_id for it in identities(VOTERS)), earned=True)
    run_virtual(partial(with_swarm, VOTERS + FREE, body, cells=28, charter=charter, rule="gramguard"))
    assert voided == [], "that part counts as zeros"
