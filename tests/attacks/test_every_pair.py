"""Liars among four voters and three contributors, or two among seven voters, and what they can do at the steps of an attempt.

The machines of a round alone (`support.rounds`), with every validity function in them. At each *step* of an attempt a
liar is honest, or does one of the `DEEDS`: each deed of the proposer, of another voter and of a key without a vote is tried,
the same deed of two voters of seven, and the pairs of deeds that once failed. Where the voters alone judge, as in a roster
with more members than parts, a key without a vote only contributes. In each case

- all honest members end with one certified value, all honest contributors are in it, and nothing raises in any of them; if
  a liar proposed it, at least one of them ends with it, and the others know that they are behind;
- no attempt fails but the one that a liar proposes;
- no honest member is charged.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import pytest
from flockstep.collectives.allreduce.actions import OutcomeKind
from flockstep.peer import wire
from flockstep.peer.base.digest import keyed
from flockstep.peer.wire.schema import encode
from support.rounds import PEERS, PENDING, ConnectedRounds, Fetch, Mail, order_of, signed

VOTERS, MEMBERS = PEERS[:4], PEERS[:7]
SEVEN = MEMBERS
Step: TypeAlias = str
STEPS: tuple[Step, ...] = (
    *("Ready", "Heard", "Basis", "Roster", "Commit", "Have", "Cut", "Sketch", "second Have", "second Cut", "Weigh"),
    *("Result", "Outputs", "second Sketch", "Second", "Propose", "Prevote", "Precommit", "bytes"),
)
DEEDS = "silent", "to some", "to others", "twice", "false"
"""To nobody; to every second member; to the others; to these another one; to all another one."""
Deeds: TypeAlias = dict[Step, str]
PLACES = "proposer", "voter", "contributor"
OTHER, NEXT = "other contributor", "next voter"
Lies: TypeAlias = dict[str, Deeds]
"""By place."""


def step_of(message: wire.RoundMessage) -> Step:
    """Return the step of an attempt that a message is of."""
    is_second = bool(getattr(message, "before", b"") or getattr(message, "outputs", b""))
    if isinstance(message, wire.Have):
        is_second = bool(message.cut)
    name = type(message).__name__
    return f"second {name}" if is_second and name in ("Have", "Cut", "Sketch") else name


def another(message: wire.RoundMessage) -> wire.RoundMessage:
    """Return another message of the kind, as one would be that lies to gain by it."""
    match message:
        case wire.Ready():
            return replace(message, tokens=message.tokens + 7, control=9.0)
        case wire.Heard():
            return replace(message, readys=message.readys[: len(message.readys) - 2 * wire.MARK_BYTES])
        case wire.Basis(heards=heards):
            return replace(message, heards=heards[1:])
        case wire.Roster():
            return replace(message, training=b"")
        case wire.Weigh(weights=weights):
            return replace(message, weights=weights[1:])
        case wire.Commit(parts=parts):
            return replace(message, parts=tuple(keyed("another", part) for part in parts))
        case wire.Have(parts=parts):
            listed = sorted({index for _, held in parts for index in held})
            kept = [index for index in listed if index != listed[-1]]
            names = b"".join(
                message.names[wire.NAME_BYTES * at : wire.NAME_BYTES * (at + 1)]
                for at, index in enumerate(listed)
                if index in kept
            )
            fewer = tuple((part, tuple(index for index in held if index in kept)) for part, held in parts)
            return replace(message, parts=fewer, names=names)
        case wire.Cut(words=words):
            return replace(message, words=words[:-1])
        case wire.Sketch(tables=tables):
            return replace(message, tables=b"\x01" * len(tables))
        case wire.Result():
            return replace(message, output=keyed("another", message.output))
        case wire.Outputs(outputs=outputs):
            return replace(message, outputs=(keyed("another", outputs[0]), *outputs[1:]))
        case wire.Second(tables=tables):
            return replace(message, tables=tuple((part, b"\x01" * len(table)) for part, table in tables))
        case wire.Propose(value=value):
            return replace(message, value=value[:-1] + bytes([value[-1] ^ 1]))
        case wire.Prevote() | wire.Precommit():
            return replace(message, value=keyed("another", message.value))
    return message


@dataclass
class Lied(ConnectedRounds):
    """A round in which some members do these deeds at these steps."""

    lies: dict[str, Deeds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.broken = self._withheld
        super().__post_init__()

    def _is_some(self, peer: str) -> bool:
        return self.peers.index(peer) % 2 == 0

    def _withheld(self, peer: str, fetch: Fetch) -> str | None:
        """Return why a liar's bytes do not come, from it or from another one that has them; None if they do."""
        deed = self.lies.get(fetch.source, {}).get("bytes")
        if deed is None or fetch.source in (peer, *self.dead):
            return None
        if any(self._is_served(other, deed) for other in (peer, *fetch.others) if other not in self.lies):
            return None
        return PENDING if deed == "twice" else "refused"

    def _is_served(self, peer: str, deed: str) -> bool:
        match deed:
            case "to some":
                return self._is_some(peer)
            case "to others":
                return not self._is_some(peer)
            case "twice":  # Begun to all, and hung to some.
                return self._is_some(peer)
        return False

    def post(self, to: Collection[str], mail: Mail, sender: str) -> None:
        """Post mail; of a liar's own messages what its deeds make of them."""
        if not isinstance(mail, wire.Signed) or mail.sender != sender or sender not in self.lies:
            return super().post(to, mail, sender)
        message = wire.opened(mail)
        lie = signed(sender, other) if (other := another(message)) != message else mail
        some = [peer for peer in to if self._is_some(peer)]
        others = [peer for peer in to if not self._is_some(peer)]
        match self.lies[sender].get(step_of(message)):
            case None:
                super().post(to, mail, sender)
            case "to some":
                super().post(some, mail, sender)
            case "to others":
                super().post(others, mail, sender)
            case "twice":
                super().post(some, mail, sender)
                super().post(others, lie, sender)
            case "false":
                super().post(to, lie, sender)
        return None


def run(lies: Lies, seed: int = 0, voters: list[str] = VOTERS) -> None:
    """Run one case. Raises `AssertionError` if the others suffer from it."""
    order = order_of(voters)
    places = {"proposer": order[0], "voter": order[2], NEXT: order[3], "contributor": MEMBERS[-1], OTHER: MEMBERS[-2]}
    liars = {places[place]: deeds for place, deeds in lies.items()}
    rounds = Lied(MEMBERS, seed=seed, voters=voters, attempts=4, lies=liars)
    rounds.false.add(keyed("another", b""))
    rounds.start()
    rounds.settle()
    ended = {peer: rounds.machines[peer].outcome for peer in MEMBERS if peer not in liars}
    outcomes = [outcome for outcome in ended.values() if outcome is not None]
    done = [outcome for outcome in outcomes if outcome.kind is OutcomeKind.DONE]
    assert len({encode(outcome.value) for outcome in done}) == 1, "honest members ended with no value, or with two"
    value, (slot,) = done[0].value, {outcome.slot for outcome in done}
    if value.members[0] not in liars:  # Who proposes may leave some out, in its turn; they catch up.
        assert len(done) == len(ended), {peer[-2:]: it.reason for peer, it in ended.items() if it and it not in done}
        assert {*done[0].cut} >= ended.keys(), f"it left out {ended.keys() - {*done[0].cut}}"
    most = 1 if "proposer" in lies else 0
    assert slot.attempt <= most, f"it took attempt {slot.attempt}"
    charged = {note.peer for note in rounds.notes if note.event == "peer.charged"} - liars.keys()
    assert not charged, f"honest members were charged: {charged}"


def singles() -> Iterator[Deeds]:
    yield from ({step: deed} for step in STEPS for deed in DEEDS)


@pytest.fixture
def voters_alone_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_PARTS", len(VOTERS))


@pytest.mark.parametrize("place", PLACES)
def test_no_single_deed_of_one_member_costs_the_others_more_than_its_own_attempt(place: str) -> None:
    for deeds in singles():
        run({place: deeds})


@pytest.mark.usefixtures("voters_alone_judge")
def test_no_single_deed_of_who_only_contributes_costs_anything() -> None:
    for deeds in singles():
        run({"contributor": deeds})


@pytest.mark.parametrize("deeds", [{"second Have": "false"}, {"Sketch": "twice"}])
def test_who_is_not_asked_first_has_what_others_withhold(deeds: Deeds) -> None:
    """Two members that lack a sketch asked each other for it, once."""
    run({"voter": {"Second": "to some"}, OTHER: deeds})


@pytest.mark.parametrize("seed", range(6))
def test_what_deputies_were_told_otherwise_of_its_holder_answers_for(seed: int) -> None:
    """A voter commits to other bytes before some, and is silent after the outputs, in its own turn and in those of others."""
    run({"proposer": {"Commit": "twice", "second Sketch": "silent"}}, seed)


def test_two_voters_of_seven_that_do_the_same_cost_the_others_no_attempt() -> None:
    for deeds in singles():
        run({"voter": deeds, NEXT: deeds}, voters=SEVEN)


def test_an_output_that_was_named_and_replaced_is_known_when_it_is_named_again() -> None:
    """The owner offers an output that it does not send; the proposer has the one that a deputy made, and named the other."""
    run({"proposer": {"second Have": "false"}, NEXT: {"Result": "false", "bytes": "false"}}, voters=SEVEN)
