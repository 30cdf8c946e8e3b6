"""Ten keys without a vote, each of which may lie, fall silent, be late or leave at any step of an attempt of four voters.

Keys are free: whatever runs out by what they do, such as namings of outputs, words, deadlines or attempts, could be used up.
A seeded search over the machines of a round alone (`support.rounds`): each key has one deed at one step, and a moment for
it, some virtual milliseconds after another's or long after. In each case all honest members end with one certified value of
the first attempt, all honest contributors are in it, none of them is charged, and it takes a bounded number of deadlines.
"""

import heapq
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import trio
from attacks.test_every_pair import another, step_of
from attacks.test_silent import catch_up
from attacks.voters import founded, until_done
from flockstep.collectives.agreement.actions import Note
from flockstep.collectives.allreduce.actions import Action, OutcomeKind
from flockstep.collectives.round.machine import Round
from flockstep.peer import wire
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.wire.schema import encode
from flockstep.peer.wire.signed import sign
from support.liars import lies
from support.rounds import PEERS, PENDING, TIMING, ConnectedRounds, Fetch, Mail, signed
from support.swarm import SimPeer, SimSwarm, identities, with_swarm

VOTERS, HONEST, KEYS = PEERS[:4], PEERS[4:6], PEERS[6:]
STEPS = "Ready", "Commit", "Have", "Sketch", "second Have", "Result", "second Sketch", "Second", "bytes"
"""Of members without a vote, which may all own a part."""
DEEDS = "silent", "to some", "twice", "false", "late", "leave", "void", "flap"
GAP = 0.05
DEADLINES = 6 * (TIMING.control + TIMING.transfer) + TIMING.gather
"""The bound on an attempt, in seconds: a deadline, and what follows from it, in GATHER and in each of five phases."""


@dataclass
class Deed:
    step: str
    kind: str
    after: float
    """Virtual seconds from the step to the deed."""


@dataclass
class FreeKeys(ConnectedRounds):
    """A round in which keys do these deeds, with events in virtual time."""

    deeds: dict[str, Deed] = field(default_factory=dict)
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    banned: set[tuple[str, str]] = field(default_factory=set)
    """By whom, and whom."""

    def __post_init__(self) -> None:
        self.broken = self._withheld
        for peer in self.peers:
            is_banned = partial(self._has_banned, peer)
            self.setups.setdefault(peer, {}).update(is_banned=is_banned, cells=range(4 * len(self.peers)))
        super().__post_init__()

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (time, len(self.done) + len(self.events) + self.random.randrange(1 << 30), event))

    def tick(self) -> None:
        """Let time pass until the next event, or until somebody has to react to it."""
        due = [it.deadline for peer, it in self.machines.items() if it.outcome is None]
        if not self.events or min(due) < self.events[0][0]:
            return super().tick()
        self.now = max(self.now, self.events[0][0])
        while self.events and self.events[0][0] <= self.now:
            heapq.heappop(self.events)[2]()
        return None

    def _withheld(self, peer: str, fetch: Fetch) -> str | None:
        deed = self.deeds.get(fetch.source)
        if deed is None or deed.step != "bytes" or peer == fetch.source:
            return None
        if deed.kind == "to some" and self.peers.index(peer) % 2:
            return None
        return "refused" if deed.kind in ("false", "leave", "void") else PENDING

    def _do(self, peer: str, machine: Round, action: Action) -> None:
        super()._do(peer, machine, action)
        if isinstance(action, Note) and action.event == "round.equivocation" and action.peer in self.deeds:
            for other in self.peers:
                self.at(self.now + self.random.choice([0.0, GAP]), lambda other=other: self._ban(other, action.peer))  # type: ignore[misc]

    def _has_banned(self, peer: str, key: str) -> bool:
        return (peer, key) in self.banned

    def _ban(self, peer: str, key: str) -> None:
        if (peer, key) not in self.banned and peer != key:
            self.banned.add((peer, key))
            self.do(peer, self.machines[peer].lose(key, "banned", self.now))

    def _leave(self, key: str) -> None:
        """Say Goodbye: all honest members lose it, one after the other."""
        for peer in self.random.sample([*VOTERS, *HONEST], len(VOTERS) + len(HONEST)):
            self.do(peer, self.machines[peer].lose(key, "it left", self.now))

    def _return(self, key: str) -> None:
        for peer in [*VOTERS, *HONEST]:
            self.do(peer, self.machines[peer].add_member(key, self.now))

    def _begin(self, key: str, deed: Deed) -> None:
        """Do what a key does once at its step."""
        if key in self.done:
            return
        self.done.add(key)
        if deed.kind in ("leave", "flap"):
            self.at(self.now + deed.after, lambda: self._leave(key))
        if deed.kind == "flap":
            self.at(self.now + 2 * deed.after, lambda: self._return(key))
            self.at(self.now + 3 * deed.after, lambda: self._leave(key))
        if deed.kind == "void":
            void = signed(key, wire.Void(self.machines[key].slot, "it gives up"))
            self.at(self.now + deed.after, lambda: ConnectedRounds.post(self, VOTERS, void, key))

    def post(self, to: Collection[str], mail: Mail, sender: str) -> None:
        """Post mail; of a key's own messages what its deed makes of them."""
        deed = self.deeds.get(sender)
        if deed is None or not isinstance(mail, wire.Signed) or mail.sender != sender:
            return super().post(to, mail, sender)
        message = wire.opened(mail)
        step = step_of(message)
        if step != deed.step and not (deed.step == "bytes" and step == "Commit"):
            is_silent = deed.kind in ("leave", "void", "flap") and sender in self.done
            return None if is_silent else super().post(to, mail, sender)
        self._begin(sender, deed)
        some = [peer for peer in to if self.peers.index(peer) % 2 == 0]
        lie = signed(sender, another(message))
        match "" if deed.step == "bytes" else deed.kind:
            case "silent" | "leave" | "void" | "flap":
                return None
            case "to some":
                super().post(some, mail, sender)
            case "twice":
                super().post(some, mail, sender)
                super().post([peer for peer in to if peer not in some], lie, sender)
            case "false":
                super().post(to, lie, sender)
            case "late":
                self.at(self.now + deed.after, lambda: ConnectedRounds.post(self, to, mail, sender))
            case _:
                super().post(to, mail, sender)
        return None


def deeds_of(seed: int, steps: Collection[str], kinds: Collection[str]) -> Iterator[tuple[str, Deed]]:
    """Draw what each key does: at one step all of them, at two, or at any; one after the other, or at any moment."""
    draw = random.Random(seed)
    some = draw.sample(sorted(steps), min(draw.choice([1, 1, 2, len(steps)]), len(steps)))
    same = draw.sample(sorted(kinds), min(draw.choice([1, 2, len(kinds)]), len(kinds)))
    for place, key in enumerate(KEYS):
        after = draw.choice([GAP * place, GAP * (1 + place), draw.uniform(0, TIMING.control + TIMING.transfer)])
        yield key, Deed(draw.choice(some), draw.choice(same), after)


def run(deeds: dict[str, Deed], *, keep: bool, seed: int = 0) -> FreeKeys:
    """Run one case; with `keep` the voters train nothing. Raises `AssertionError` if the others suffer from it."""
    setups: dict[str, dict[str, Any]] = {voter: {"tokens": 0} for voter in VOTERS} if keep else {}
    rounds = FreeKeys(PEERS, seed=seed, voters=VOTERS, attempts=2, deeds=deeds, setups=setups)
    rounds.start(*HONEST)
    rounds.deliver_all()  # Else voters that keep may be Ready before anybody that trains.
    rounds.start(*VOTERS, *KEYS)
    rounds.settle()
    honest = [*VOTERS, *HONEST]
    outcomes = [it for peer in honest if (it := rounds.machines[peer].outcome) is not None]
    reasons = {it.reason for peer in honest for it in rounds.ended[peer] if it.kind is not OutcomeKind.DONE}
    assert {it.kind for it in outcomes} == {OutcomeKind.DONE}, reasons
    assert len({encode(it.value) for it in outcomes}) == 1
    assert outcomes[0].slot.attempt == 0, reasons
    left_out = {*honest} - {*outcomes[0].cut} - ({*VOTERS} if keep else set())
    assert not left_out, f"it left out {left_out}"
    charged = {note.peer for note in rounds.notes if note.event == "peer.charged"} & {*honest}
    assert not charged, f"honest members were charged: {charged}"
    assert rounds.now < DEADLINES, f"it took {rounds.now:.1f} s"
    return rounds


@pytest.mark.parametrize("keep", [False, True], ids=["voters train", "voters keep"])
@pytest.mark.parametrize("seed", [19, 50, *(pytest.param(seed, marks=pytest.mark.explore) for seed in range(19))])
def test_ten_keys_end_no_attempt_whatever_they_do_and_when(seed: int, keep: bool) -> None:
    run(dict(deeds_of(seed, STEPS, DEEDS)), keep=keep, seed=seed)


@pytest.mark.parametrize(
    ("step", "field"),
    [("Ready", "idle"), ("Commit", "idle"), ("Result", "late"), ("second Sketch", "unsketched")],
)
def test_who_leaves_is_remembered_like_who_is_silent(step: str, field: str) -> None:
    """A moment before a deadline it costs as much, and it could come back in each round."""
    for kind in ("silent", "leave"):
        key = KEYS[0]
        rounds = run({key: Deed(step, kind, GAP)}, keep=False)
        blamed = [getattr(it, field) for peer in VOTERS if (it := rounds.machines[peer].outcome) is not None]
        assert [key in each for each in blamed] == [True] * len(VOTERS), kind


def test_eight_keys_that_give_up_one_after_the_other_use_up_no_naming_and_are_remembered() -> None:
    """None of them sketches after the outputs, and each gives up 50 ms after another one: no round was ever made."""
    ends: list[float] = []

    async def body(swarm: SimSwarm) -> None:
        keeper, honest, liars = swarm.sims[0], swarm.sims[1:6], swarm.sims[6:]
        keeper.trains = False

        async def give_up(liar: SimPeer, place: int, slot: wire.Slot) -> None:
            await trio.sleep(GAP * place)
            liar.node.send([keeper.peer], sign(liar.identity, wire.Void(slot, "it gives up")))

        def begin(liar: SimPeer, place: int, nursery: trio.Nursery) -> None:
            done: set[wire.Slot] = set()

            def lie(peer: str, message: wire.RoundMessage) -> wire.RoundMessage | None:
                if not isinstance(message, wire.Sketch) or not message.outputs:
                    return message
                if message.slot not in done:
                    done.add(message.slot)
                    nursery.start_soon(give_up, liar, place, message.slot)
                return None

            lies(liar, lie)

        async with trio.open_nursery() as nursery:
            for place, liar in enumerate(liars):
                begin(liar, place, nursery)
            for round_ in (1, 2):
                began = trio.current_time()
                await until_done([*honest, keeper], round_, *liars, within=4.0)
                ends.append(trio.current_time() - began)
                for liar in liars:
                    catch_up(liar, keeper)
            nursery.cancel_scope.cancel()
        assert all({sim.peer for sim in honest} <= {*outcome.cut} for outcome in keeper.outcomes if outcome.certificate)

    charter = founded(1, keepers=frozenset(it.peer_id for it in identities(1)))
    run_virtual(partial(with_swarm, 14, body, cells=17, charter=charter, rule="gramguard"))
    assert ends[0] < 2.0
    assert ends[1] < 1.2
