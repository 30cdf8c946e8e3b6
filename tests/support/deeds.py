"""What a member does wrong in a round, as (who, deed, step), and which messages of today's round a step is made of.

A *step* is what a member says on the way from a Ready to a certificate, in the order of docs/round.md, or `BYTES`, which it
serves. A *deed* is what it does there instead. This file alone knows which message belongs to which step and how a false one
looks, so that a test outlives the messages that it is about.
"""

import heapq
import random
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Annotated, Any, TypeAlias, get_args, get_origin, get_type_hints

from flockstep.collectives.agreement.actions import Note
from flockstep.collectives.allreduce.actions import Action
from flockstep.collectives.chain.certificate import open_value
from flockstep.collectives.round.machine import Round
from flockstep.collectives.vector.partition import split
from flockstep.peer import wire
from flockstep.peer.base.digest import DIGEST_BYTES, keyed
from flockstep.peer.base.errors import FlockstepError
from flockstep.peer.wire.schema import Between, Size, decode, encode
from support.rounds import PENDING, ConnectedRounds, Fetch, Mail, signed

Step: TypeAlias = str
Change: TypeAlias = Callable[[Any], Any]


def _shorter(word: wire.Have) -> wire.Have:
    """Return a word that lacks the last member that it lists."""
    listed = sorted({index for _, held in word.parts for index in held})
    names = word.names[: wire.NAME_BYTES * (len(listed) - 1)]
    parts = tuple((part, tuple(index for index in held if index != listed[-1])) for part, held in word.parts)
    return replace(word, parts=parts, names=names)


def _without_last(bounds: tuple[int, ...]) -> tuple[int, ...]:
    return (*split(range(bounds[-1]), [1.0] * (len(bounds) - 2)), bounds[-1])


def _other_vote(vote: wire.Prevote | wire.Precommit) -> wire.RoundMessage:
    return replace(vote, value=keyed("another", vote.value))


_SAID: dict[Step, tuple[type, Callable[[Any], bool] | None, Change]] = {
    "ready": (wire.Ready, None, lambda it: replace(it, tokens=it.tokens + 7, control=9.0)),
    "heard": (wire.Heard, None, lambda it: replace(it, readys=it.readys[: len(it.readys) - 2 * wire.MARK_BYTES])),
    "basis": (wire.Basis, None, lambda it: replace(it, heards=it.heards[1:])),
    "roster": (wire.Roster, None, lambda it: replace(it, training=b"")),
    "commit": (wire.Commit, None, lambda it: replace(it, parts=tuple(keyed("another", part) for part in it.parts))),
    "word": (wire.Have, lambda it: not it.cut, _shorter),
    "cut": (wire.Cut, lambda it: not it.before, lambda it: replace(it, words=it.words[:-1])),
    "sketch": (wire.Sketch, lambda it: not it.outputs, lambda it: replace(it, tables=b"\x01" * len(it.tables))),
    "second word": (wire.Have, lambda it: bool(it.cut), _shorter),
    "second cut": (wire.Cut, lambda it: bool(it.before), lambda it: replace(it, words=it.words[:-1])),
    "weigh": (wire.Weigh, None, lambda it: replace(it, weights=it.weights[1:])),
    "result": (wire.Result, None, lambda it: replace(it, output=keyed("another", it.output))),
    "outputs": (wire.Outputs, None, lambda it: replace(it, outputs=(keyed("another", it.outputs[0]), *it.outputs[1:]))),
    "second sketch": (wire.Sketch, lambda it: bool(it.outputs), lambda it: replace(it, tables=b"\x01" * len(it.tables))),
    "propose": (wire.Propose, None, lambda it: replace(it, value=it.value[:-1] + bytes([it.value[-1] ^ 1]))),
    "prevote": (wire.Prevote, None, _other_vote),
    "precommit": (wire.Precommit, None, _other_vote),
}
"""By step, in their order: the class of its messages, which of these, and another one, as of a liar that gains by it."""
BYTES: Step = "bytes"
STEPS: tuple[Step, ...] = (*_SAID, BYTES)
VOTE = "propose", "prevote", "precommit"
ALONE = "commit", "word", "ready", "result", "sketch", BYTES, "second word", "second sketch"
"""The steps of a member without a vote, in the order from which the seeds of tests draw."""
JUNK = b"x" * 32
ABOUT: dict[str, Change] = {
    "state": lambda ready: replace(ready, base_root=JUNK),
    "line": lambda ready: replace(ready, upload=1e15, rates=b"\xff" + bytes(len(ready.rates) - 1) if ready.rates else b""),
    "nonce": lambda it: replace(it, nonce=JUNK) if isinstance(it, wire.Have) else replace(it, nonce_hash=JUNK),
    "owners": lambda roster: replace(roster, bounds=_without_last(roster.bounds)),
}
"""False about one thing: what a Ready or a word states of the common state, of its author's line, or of its nonce; and a
roster that is as valid, in which the last member owns nothing."""


def step_of(message: object) -> Step | None:
    """Return the step that a message is of."""
    for step, (kind, is_it, _) in _SAID.items():
        if isinstance(message, kind) and (is_it is None or is_it(message)):
            return step
    return None


def of(*steps: Step) -> Callable[[Any], bool]:
    """Return a predicate that is true for the messages of these steps."""
    return lambda message: step_of(message) in steps


def false(message: Any) -> Any:
    """Return another message of the step, as of a liar that gains by it."""
    step = step_of(message)
    return message if step is None else _SAID[step][2](message)


@dataclass(frozen=True)
class Deed:
    """What a member does at a step: `silent`, `to some` (every second member), `to others`, `twice` (to these another
    message), `false`, `late`, `leave`, `void` (it gives up) or `flap` (it leaves, comes and leaves).

    Bytes are hung (`silent`, `late`, and `twice` to some) or refused.
    """

    kind: str
    after: float = 0.0
    """Virtual seconds from the step to a deed that is late."""


GONE = "leave", "void", "flap"
Lies: TypeAlias = dict[str, dict[Step, Deed]]
"""By who, and by step."""


@dataclass
class Lied(ConnectedRounds):
    """A round in which some members do deeds at steps, with events in virtual time."""

    lies: Lies = field(default_factory=dict)
    bans_within: float | None = None
    """A proof of two statements of a liar's reaches others at once, or so many seconds later (None: never)."""
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    banned: set[tuple[str, str]] = field(default_factory=set)
    """By whom, and whom."""

    def __post_init__(self) -> None:
        self.broken = self._withheld
        for peer in self.peers:
            self.setups.setdefault(peer, {}).setdefault("is_banned", partial(self._has_banned, peer))
        super().__post_init__()

    @property
    def honest(self) -> list[str]:
        """The members that do no deed."""
        return [peer for peer in self.peers if peer not in self.lies]

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

    def _is_some(self, peer: str) -> bool:
        return self.peers.index(peer) % 2 == 0

    def _withheld(self, peer: str, fetch: Fetch) -> str | None:
        """Return why a liar's bytes do not come, from it or from another one that has them; None if they do."""
        deed = self.lies.get(fetch.source, {}).get(BYTES)
        if deed is None or fetch.source in (peer, *self.dead):
            return None
        some = {"to some": (True,), "twice": (True,), "to others": (False,)}.get(deed.kind, ())
        if any(self._is_some(other) in some for other in (peer, *fetch.others) if other not in self.lies):
            return None
        return PENDING if deed.kind in ("silent", "late", "twice") else "refused"

    def _do(self, peer: str, machine: Round, action: Action) -> None:
        super()._do(peer, machine, action)
        within = self.bans_within
        if within is None or not isinstance(action, Note) or action.event != "round.equivocation":
            return
        for other in self.peers if action.peer in self.lies else ():
            self.at(self.now + self.random.choice([0.0, within]), partial(self._ban, other, action.peer))

    def _has_banned(self, peer: str, liar: str) -> bool:
        return (peer, liar) in self.banned

    def _ban(self, peer: str, liar: str) -> None:
        if (peer, liar) not in self.banned and peer != liar:
            self.banned.add((peer, liar))
            self.do(peer, self.machines[peer].lose(liar, "banned", self.now))

    def _leave(self, liar: str) -> None:
        """Say Goodbye: all honest members lose it, one after the other."""
        for peer in self.random.sample(self.honest, len(self.honest)):
            self.do(peer, self.machines[peer].lose(liar, "it left", self.now))

    def _return(self, liar: str) -> None:
        for peer in self.honest:
            self.do(peer, self.machines[peer].add_member(liar, self.now))

    def _begin(self, liar: str, deed: Deed) -> None:
        """Do what is done once, from a step on."""
        if liar in self.done:
            return
        self.done.add(liar)
        if deed.kind in ("leave", "flap"):
            self.at(self.now + deed.after, partial(self._leave, liar))
        if deed.kind == "flap":
            self.at(self.now + 2 * deed.after, partial(self._return, liar))
            self.at(self.now + 3 * deed.after, partial(self._leave, liar))
        if deed.kind == "void":
            void = signed(liar, wire.Void(self.machines[liar].slot, "it gives up"))
            self.at(self.now + deed.after, lambda: ConnectedRounds.post(self, self.voters or self.honest, void, liar))

    def post(self, to: Collection[str], mail: Mail, sender: str) -> None:
        """Post mail; of a liar's own messages what its deeds make of them."""
        deeds = self.lies.get(sender)
        if deeds is None or not isinstance(mail, wire.Signed) or mail.sender != sender:
            return super().post(to, mail, sender)
        message = wire.opened(mail)
        step = step_of(message)
        deed = deeds.get(step or "")
        if begun := deeds.get(BYTES) if step == "commit" else deed:
            self._begin(sender, begun)
        if deed is None:
            is_gone = sender in self.done and any(it.kind in GONE for it in deeds.values()) and begun is None
            return None if is_gone else super().post(to, mail, sender)
        lie = signed(sender, other) if (other := false(message)) != message else mail
        some = [peer for peer in to if self._is_some(peer)]
        others = [peer for peer in to if peer not in some]
        told: dict[str, list[tuple[Collection[str], Mail]]] = {
            "to some": [(some, mail)],
            "to others": [(others, mail)],
            "twice": [(some, mail), (others, lie)],
            "false": [(to, lie)],
        }
        for whom, it in told.get(deed.kind, []):
            super().post(whom, it, sender)
        if deed.kind == "late":
            self.at(self.now + deed.after, lambda: ConnectedRounds.post(self, to, mail, sender))
        return None


PACKED: dict[str, type] = {"value": wire.Value, "readys": wire.Signed}
"""Fields of bytes that hold a message themselves."""


class Forger:
    """Makes other messages of what was said, by the fields of their classes alone: each of these stays within its limits."""

    def __init__(self, draw: random.Random, peers: list[str], sign: Callable[[wire.RoundMessage], wire.Signed]) -> None:
        self.draw, self.peers, self._sign = draw, peers, sign
        self.heard: list[Any] = []
        """Values of every type that have been said: a lie may be true elsewhere."""

    def hear(self, message: Any) -> None:
        """Remember a message, and what its fields hold."""
        self.heard += [message, *(getattr(message, part.name) for part in fields(message))]

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
        with suppress(FlockstepError):  # It is forged already.
            if kind is wire.Value:
                return [encode(inner)] * 6 if (inner := self.changed(open_value(value))) is not None else []
            ready = wire.opened(decode(wire.Signed, value, max_bytes=wire.MAX_SIGNED_BYTES))
            return [encode(self._sign(inner))] * 3 if (inner := self.changed(ready)) is not None else []
        return []

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
