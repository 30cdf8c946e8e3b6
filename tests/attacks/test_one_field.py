"""One liar whose messages are an honest member's but for one: one field of it, whom it reaches, or when.

On whole peers: production nodes and averagers with real bytes, sketches and signatures on a network in memory. A case is
drawn from a seed: the run (all members vote, or keepers that train nothing beside free keys, or keepers that own nothing),
its rule, who lies (a voter, or a key without a vote), the kind of the message, what becomes of it, and whether the liar
also withholds its votes, so that the others can spare nobody. Of two rounds

- all honest members end with one state, and nothing raises in any of them;
- no honest member is banned or charged;
- no attempt fails but those that the liar proposes.
"""

import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import trio
from attacks.voters import founded, in_turn, until_done
from flockstep.collectives.allreduce.actions import Outcome
from flockstep.collectives.chain.certificate import open_value
from flockstep.peer import wire
from flockstep.peer.base.digest import DIGEST_BYTES
from flockstep.peer.base.errors import FlockstepError
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.wire.schema import Between, Size, decode, encode
from flockstep.peer.wire.signed import sign
from support.liars import banned, events_of
from support.swarm import SimPeer, SimSwarm, identities, with_swarm

CASES = 100
"""Of a run of the tests on demand; some 0.3 s each."""
GATE_TENS = 1
"""The tens of cases that the gate tries."""
ROUNDS = 2
KINDS = (wire.Ready, wire.Roster, wire.Commit, wire.Have, wire.Cut, wire.Sketch, wire.Result, wire.Outputs, wire.Second)
VOTES = (wire.Propose, wire.Prevote, wire.Precommit)
DELAYS = (0.0, 0.0, 0.0, 1.9, 2.1, 4.1, 8.0)
"""Seconds: at once as a rule; or just before or after the deadlines, of which the shortest is 2 s."""
PACKED: dict[str, type] = {"value": wire.Value, "readys": wire.Signed}
"""Fields of bytes that hold a message themselves."""


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
    kind: type
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
            kind=draw.choice([*KINDS, *KINDS, *VOTES]),
            deed=draw.choice(["field"] * 6 + ["drop", "late", "twice"]),
            reaches=draw.choice(["all", "all", "one", "half", "proposer", "others"]),
            sulks=draw.random() < 0.4,
        )


class Liar:
    """Sends what a member signs, but for the messages of one kind."""

    def __init__(self, case: Case, sim: SimPeer, honest: Sequence[SimPeer]) -> None:
        self.case, self.sim = case, sim
        self.draw = random.Random(case.seed + 1)
        self.peers = [other.peer for other in honest]
        self.told = {
            "all": set(self.peers),
            "one": {self.draw.choice(self.peers)},
            "half": {peer for peer in self.peers if self.draw.random() < 0.5},
        }
        self.heard: list[Any] = []
        """Values of every type that have been said: a lie may be true elsewhere."""
        self.num_lies = 0
        self._send = sim.node.send
        self._made: dict[bytes, wire.RoundMessage | None] = {}
        sim.node.send = self.send  # type: ignore[method-assign]

    def send(self, peers: str | Iterable[str], message: object) -> None:
        """Send a message of the liar's own to each peer as the case says, and any other one as it is."""
        if not isinstance(message, wire.Signed) or message.sender != self.sim.peer:
            return self._send(peers, message)
        truth, case = wire.opened(message), self.case
        if case.sulks and isinstance(truth, wire.Prevote | wire.Precommit):
            return None
        self.heard += [truth, *(getattr(truth, part.name) for part in fields(truth))]
        for peer in (peers,) if isinstance(peers, str) else tuple(peers):
            if isinstance(truth, case.kind) and self._is_told(peer):
                self._lie(peer, message, truth)
            else:
                self._send(peer, message)
        return None

    def _is_told(self, peer: str) -> bool:
        attempt = self.sim.averager._attempt
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
            self._made[message.hash] = self.changed(truth)
        if (lie := self._made[message.hash]) is not None:
            self._send(peer, sign(self.sim.identity, lie))

    async def _later(self, peer: str, message: wire.Signed) -> None:
        await trio.sleep(self.draw.choice(DELAYS))
        self._send(peer, message)

    def changed(self, truth: Any) -> Any:
        """Return a message with one other field that its class allows; None if none was found."""
        hints = get_type_hints(type(truth), include_extras=True)
        for _ in range(20):
            name = self.draw.choice([part.name for part in fields(truth)])
            lie = replace(truth, **{name: self._other(hints[name], getattr(truth, name), name)})
            try:
                if lie != truth and encode(lie):
                    return lie
            except FlockstepError:
                continue
        return None

    def _other(self, hint: Any, value: Any, name: str = "") -> Any:
        """Return another value of an annotated type: an extreme one, one that was said elsewhere, or a part of it changed."""
        inner, limit = hint, None
        if get_origin(hint) is Annotated:
            inner, *extra = get_args(hint)
            limit = next((it for it in extra if isinstance(it, Size | Between)), None)
        if (origin := get_origin(inner)) is tuple:
            return self._other_tuple(get_args(inner), value, limit, name)
        if is_dataclass(inner):
            return self._other_fields(value)
        assert origin is None, hint
        seen = [it for it in self.heard[-200:] if type(it) is type(value)]
        return self.draw.choice([*self._extremes(value, limit, name), *([self.draw.choice(seen)] if seen else [])])

    def _extremes(self, value: Any, limit: Size | Between | None, name: str) -> list[Any]:
        match value:
            case bool():
                return [not value]
            case int():
                low, high = (int(limit.low), int(limit.high)) if isinstance(limit, Between) else (0, 0)
                return [low, high, high - 1, value - 1, value + 1, 2 * value, 0, 1]
            case float():
                return [0.0, -0.0, 1.0, -1.0, 5e-324, 1e15, 1e308, -1e308, float("inf"), float("-inf"), 0.5 * value]
            case str():
                return ["", "x", "x" * 16, value[::-1], *self.draw.choices(self.peers, k=2), "\x1b[2J", "lloyd2", "fp32"]
            case bytes():
                most = limit.most if isinstance(limit, Size) else 0
                turned = bytes([*value[:-1], value[-1] ^ 1]) if value else b"\x01"
                found = [b"", bytes(len(value)), b"\xff" * len(value), turned, value[: len(value) // 2], b"\xff" * most]
                return [*found, *self._repacked(value, name)]
        raise AssertionError(value)

    def _repacked(self, value: bytes, name: str) -> list[bytes]:
        """Return the bytes of a message with one other field of what they hold; signed messages are signed by the liar."""
        kind = PACKED.get(name)
        if kind is None or len(value) <= DIGEST_BYTES:  # Of a value its hash, in a vote.
            return []
        if kind is wire.Value:
            inner = self.changed(open_value(value))
            return [encode(inner)] * 6 if inner is not None else []
        ready = wire.opened(decode(wire.Signed, value, max_bytes=wire.MAX_SIGNED_BYTES))
        inner = self.changed(ready)
        return [encode(sign(self.sim.identity, inner))] * 3 if inner is not None else []

    def _other_fields(self, value: Any) -> Any:
        hints = get_type_hints(type(value), include_extras=True)
        name = self.draw.choice([part.name for part in fields(value)])
        return replace(value, **{name: self._other(hints[name], getattr(value, name), name)})

    def _other_tuple(self, args: tuple[Any, ...], value: Any, limit: Size | Between | None, name: str) -> Any:
        if args[-1] is not Ellipsis:
            place = self.draw.randrange(len(args))
            return (*value[:place], self._other(args[place], value[place], name), *value[place + 1 :])
        most = limit.most if isinstance(limit, Size) else len(value)
        many = (value * most)[:most] if value else ()
        found = [(), value[:-1], value[1:], value[::-1], value * 2, many, (*value, *value[:1])]
        if value:
            place = self.draw.randrange(len(value))
            other = self._other(args[0], value[place], name)
            found += [(*value[:place], other, *value[place + 1 :])] * 4 + [(other,), (*value, other)]
        return self.draw.choice(found)


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
