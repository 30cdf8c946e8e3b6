"""One liar whose messages are an honest member's but for one: one field of it, whom it reaches, or when.

On whole peers: production nodes and averagers with real bytes, sketches and signatures on a network in memory. A case is
drawn from a seed: the run (all members vote, or keepers that train nothing beside free keys, or keepers that own nothing),
its rule, who lies (a voter, or a key without a vote), the step of the message, what becomes of it, and whether the liar
also withholds its votes, so that the others can spare nobody. Of two rounds

- all honest members end with one state, and nothing raises in any of them;
- no honest member is banned or charged;
- no attempt fails but those that the liar proposes.
"""

import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import trio
from attacks.voters import founded, in_turn, until_done
from flockstep.collectives.allreduce.actions import Outcome
from flockstep.peer import wire
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.wire.signed import sign
from support.deeds import BYTES, STEPS, VOTE, Forger, step_of
from support.liars import banned, events_of
from support.swarm import SimPeer, SimSwarm, identities, with_swarm

CASES = 100
"""Of a run of the tests on demand; some 0.3 s each."""
GATE_TENS = 1
"""The tens of cases that the gate tries."""
ROUNDS = 2
KINDS = tuple(step for step in STEPS if step not in ("heard", "basis", "weigh", BYTES, *VOTE))
DELAYS = (0.0, 0.0, 0.0, 1.9, 2.1, 4.1, 8.0)
"""Seconds: at once as a rule; or just before or after the deadlines, of which the shortest is 2 s."""


@dataclass(frozen=True)
class Case:
    """What happens in one run, drawn from a seed."""

    seed: int
    voters: int
    free: int
    """Members without a vote; with them the voters are the run's keepers."""
    keepers_train: bool
    rule: str
    place: int
    """Of the liar: in turn among the voters, or among the free keys."""
    is_free: bool
    step: str
    deed: str
    """`field`, `drop`, `late`, `twice`."""
    reaches: str
    """`all`, `one`, `half`, `proposer`, `others`: whom the lie is told."""
    sulks: bool
    """True if the liar accepts and confirms nothing."""

    @classmethod
    def of(cls, seed: int) -> "Case":
        draw = random.Random(seed)
        voters, free = draw.choice([(4, 0), (4, 0), (7, 0), (4, 3), (4, 5), (1, 4)])
        is_free = bool(free) and (voters < 4 or draw.random() < 0.5)
        return cls(
            seed=seed,
            voters=voters,
            free=free,
            keepers_train=not free or draw.random() < 0.5,
            rule=draw.choice(["gramguard", "gramguard", "mean"]),
            place=draw.randrange(free if is_free else voters),
            is_free=is_free,
            step=draw.choice([*KINDS, *KINDS, *VOTE]),
            deed=draw.choice(["field"] * 6 + ["drop", "late", "twice"]),
            reaches=draw.choice(["all", "all", "one", "half", "proposer", "others"]),
            sulks=draw.random() < 0.4,
        )


class Liar:
    """Sends what a member signs, but for the messages of one step."""

    def __init__(self, case: Case, sim: SimPeer, honest: Sequence[SimPeer]) -> None:
        self.case, self.sim = case, sim
        self.draw = random.Random(case.seed + 1)
        self.peers = [other.peer for other in honest]
        self.told = {
            "all": set(self.peers),
            "one": {self.draw.choice(self.peers)},
            "half": {peer for peer in self.peers if self.draw.random() < 0.5},
        }
        self.num_lies = 0
        self._send = sim.node.send
        self._forger = Forger(self.draw, self.peers, partial(sign, sim.identity))
        self._made: dict[bytes, wire.RoundMessage | None] = {}
        sim.node.send = self.send  # type: ignore[method-assign]

    def send(self, peers: str | Iterable[str], message: object) -> None:
        """Send a message of the liar's own to each peer as the case says, and any other one as it is."""
        if not isinstance(message, wire.Signed) or message.sender != self.sim.peer:
            return self._send(peers, message)
        truth, case = wire.opened(message), self.case
        if case.sulks and step_of(truth) in VOTE[1:]:
            return None
        self._forger.hear(truth)
        for peer in (peers,) if isinstance(peers, str) else tuple(peers):
            if step_of(truth) == case.step and self._is_told(peer):
                self._lie(peer, message, truth)
            else:
                self._send(peer, message)
        return None

    def _is_told(self, peer: str) -> bool:
        attempt = self.sim.averager._work
        proposer = attempt.machine.vote.proposer if attempt is not None else ""
        match self.case.reaches:
            case "proposer":
                return peer == proposer
            case "others":
                return peer != proposer
        return peer in self.told[self.case.reaches]

    def _lie(self, peer: str, message: wire.Signed, truth: wire.RoundMessage) -> None:
        self.num_lies += 1
        match self.case.deed:
            case "drop":
                return
            case "late":
                self.sim.node.nursery.start_soon(self._later, peer, message)
                return
            case "twice":
                self._send(peer, message)
        if message.hash not in self._made:  # All that are told a lie are told the same one.
            self._made[message.hash] = self._forger.changed(truth)
        if (lie := self._made[message.hash]) is not None:
            self._send(peer, sign(self.sim.identity, lie))

    async def _later(self, peer: str, message: wire.Signed) -> None:
        await trio.sleep(self.draw.choice(DELAYS))
        self._send(peer, message)


async def keep(round_: Callable[..., Awaitable[Outcome]]) -> Outcome:
    """Take part as a keeper, which is ready once those that train are."""
    await trio.sleep(0.5)
    return await round_(tokens=0)


def run(case: Case) -> int:
    """Run one case; returns how many lies were told. Raises `AssertionError` if the others suffer from them."""
    told: list[Liar] = []
    keepers = frozenset(identity.peer_id for identity in identities(case.voters))

    async def body(swarm: SimSwarm) -> None:
        voters = swarm.sims[: case.voters]
        order = in_turn(voters)
        liar = swarm.sims[case.voters :][case.place] if case.is_free else order[case.place]
        others = [sim for sim in swarm.sims if sim is not liar]
        told.append(Liar(case, liar, others))
        for sim in voters if not case.keepers_train else ():
            sim.round = partial(keep, sim.round)  # type: ignore[method-assign]
        for round_ in range(1, ROUNDS + 1):
            first = others[0].averager.electorate.proposer(round_, 0)
            await until_done(others, round_, liar, within=400.0)
            made = {sim.averager.certificate for sim in others}
            last = max(certificate.slot.attempt for certificate in made if certificate is not None)
            # Its own attempt, and the one after it where the others have left that one at different times.
            most = 2 if first == liar.peer else 0
            most += any(liar.peer in found for found in banned(others))  # It may spend its membership on one more.
            assert last <= most, f"round {round_} took attempt {last}, at most {most} are the liar's"
        names = {sim.peer for sim in others}
        assert not any(names & found for found in banned(others)), "an honest member was banned"
        charged = [event for event in events_of(others, "peer.charged") if event["peer"] in names]
        assert not charged, f"an honest member was charged: {charged[:1]}"

    rules: dict[str, Any] = {"keepers": keepers} if case.free else {}
    charter = founded(case.voters, **rules)
    run_virtual(partial(with_swarm, case.voters + case.free, body, cells=12, charter=charter, rule=case.rule))
    return told[0].num_lies


@pytest.mark.parametrize(
    "ten", [pytest.param(ten, marks=[pytest.mark.explore] * (ten >= GATE_TENS)) for ten in range(CASES // 10)]
)
def test_one_other_field_one_reader_or_one_moment_costs_the_others_nothing(ten: int) -> None:
    for seed in range(10 * ten, 10 * ten + 10):
        run(Case.of(seed))
