"""Relays: what a member signs reaches a member that has no session with it through two others. Drives no round.

Theory of operation. A member that loses another one does not know whether that one has failed, or only the connection
between the two. It asks two *relays*, members that it has a session with: `Unheard`. A relay that has a session with the
lost member passes on its statements of the round, those that it holds and those to come. A relay that has lost it, too,
answers so. Once no relay is left, the member is lost. So a failed member is lost as late as the slower of two relays
notices, and a pair that cannot talk loses nothing but the direct way.

Statements are signed and name their slot: a relay can withhold them and delay them, and nothing else. It is chosen by the
hash of both members and the attempt, so that one that withholds is another one next time. What a relay passes on is
bounded for each pair and round, and it serves few pairs of one reader, and of all readers without a vote: asking for much
costs it little, also with many keys.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from ...peer import wire
from ...peer.base.digest import keyed
from ...peer.base.transport import PeerId
from ...peer.node.node import Node

NUM_RELAYS = 2
"""One may lie, or be cut off itself."""
MAX_PAIRS = 8
"""Members that one reader is served with by one relay, and that one member seeks: more are a partition, not a pair."""
MAX_OTHER_PAIRS = 64
"""Pairs of all readers without a vote that one relay serves in a round: keys are free, and each pair costs it some 100 kB."""
MAX_PASSED_MESSAGES, MAX_PASSED_BYTES = 256, 1 << 20
"""Of one author, to one reader, in one round: a few attempts with all their results and sketches."""

Said = wire.Signed | wire.Proof


@dataclass(slots=True)
class _Passed:
    """What was passed on of one author to one reader in one round."""

    messages: set[bytes] = field(default_factory=set)
    """Their signatures: a message that arrives twice is passed on once."""
    num_bytes: int = 0


class Relays:
    """The relays of one peer, and those that it is a relay for."""

    def __init__(
        self,
        node: Node,
        run: str,
        held: Callable[[PeerId], Iterable[Said]],
        lose: Callable[[PeerId, str], None],
        voters: Callable[[], Collection[PeerId]],
    ) -> None:
        """`held` returns the statements of a member in my round, and `lose` takes a member that nobody here hears.

        `voters` returns those of my round, which are served first.
        """
        self._node = node
        self._run = run
        self._held = held
        self._lose = lose
        self._voters = voters
        self._round = 0
        self._secret = node.identity.sign(f"relays of {run}".encode())
        """Nobody else can foresee which relays I choose: else two keys could be made to be mine."""
        self._salt = self._secret
        self._sought: dict[PeerId, set[PeerId]] = {}
        """The relays to each member that I have lost, and they have not."""
        self._passed: dict[tuple[int, PeerId, PeerId], _Passed] = {}
        """By round, author and reader."""
        self._untold: set[tuple[PeerId, PeerId]] = set()
        """Authors that I still have a session with, and who has asked for them in a round that is not mine."""
        node.on_message(wire.Unheard, self._receive)

    @property
    def sought(self) -> frozenset[PeerId]:
        """The members that I have lost, and my relays have not."""
        return frozenset(self._sought)

    def enter(self, round_: int, attempt: int, members: Collection[PeerId]) -> None:
        """Enter an attempt: other relays are asked for the members that I have lost. `members` may be relays."""
        self._round, self._salt = round_, self._secret + f"{round_} {attempt}".encode()
        self._passed = {pair: passed for pair, passed in self._passed.items() if pair[0] >= round_}
        for peer in sorted(self._sought):
            self._seek(peer, "no relay to it is here", members)

    def lost(self, peer: PeerId, reason: str, members: Collection[PeerId]) -> None:
        """React to the loss of a session: seek its peer, and whom it was the last relay to."""
        for round_, author, reader in [pair for pair in self._passed if pair[1] == peer]:
            del self._passed[round_, author, reader]
            self._node.send(reader, wire.Unheard(self._run, round_, peer, asks=False))
        for pair in sorted(pair for pair in self._untold if pair[0] == peer):
            self._untold.discard(pair)
            self._node.send(pair[1], wire.Unheard(self._run, self._round, peer, asks=False))
        self._seek(peer, reason, members)
        for author in sorted(author for author, relays in self._sought.items() if peer in relays):
            self._without(author, peer)
            if author not in self._sought:
                self._seek(author, f"{peer}, the last relay to it, was lost", members)

    def heard(self, peer: PeerId) -> None:
        """Record that a member has sent me something itself: it needs no relay."""
        self._sought.pop(peer, None)

    def pass_on(self, round_: int, author: PeerId, message: Said) -> None:
        """Pass a checked statement of a member on to those that have lost it."""
        readers = [reader for at, by, reader in self._passed if (at, by) == (round_, author)] if self._passed else ()
        for reader in readers:
            self._send(reader, self._passed[round_, author, reader], author, message)

    def _seek(self, peer: PeerId, reason: str, members: Collection[PeerId]) -> None:
        """Ask relays for a member; it is lost if there are none, or if it is banned."""
        known = (self._node.watched & set(members)) - {peer} - self._sought.keys()
        ranked = sorted(known, key=lambda relay: keyed("relay", self._salt, *map(str.encode, (peer, relay))))
        self._sought.pop(peer, None)
        if not ranked or len(self._sought) >= MAX_PAIRS or peer in self._node.guard.banned:
            self._lose(peer, reason)
            return
        self._sought[peer] = set(ranked[:NUM_RELAYS])
        self._node.telemetry.emit("relay.sought", peer=peer, step="round", reason=reason, round=self._round)
        self._node.send(ranked[:NUM_RELAYS], wire.Unheard(self._run, self._round, peer, asks=True))

    def _without(self, peer: PeerId, relay: PeerId) -> None:
        self._sought[peer].discard(relay)
        if not self._sought[peer]:
            del self._sought[peer]

    def _receive(self, carrier: PeerId, message: wire.Unheard) -> None:
        node, peer, round_ = self._node, message.peer, message.round
        if message.run != self._run or not node.is_member(carrier):
            node.refuse(carrier, "relay", "it is no member of this run")
        elif not message.asks:
            if carrier in self._sought.get(peer, ()):
                self._without(peer, carrier)
                if peer not in self._sought:
                    self._lose(peer, "its relays have lost it, too")
        elif peer not in node.watched:  # Whatever the round: who waits for my answer counts a dead member as here.
            if round_ == self._round and not self._serves_enough(round_, peer, carrier):
                self._show(carrier, round_, peer)  # A cut may name what it has said before.
            node.send(carrier, wire.Unheard(self._run, round_, peer, asks=False))
        elif not self._round <= round_ <= self._round + 1:
            node.refuse(carrier, "relay", f"round {round_} is not mine")
            if len(self._untold) < MAX_OTHER_PAIRS:
                self._untold.add((peer, carrier))
        elif self._serves_enough(round_, peer, carrier):
            node.send(carrier, wire.Unheard(self._run, round_, peer, asks=False))
        else:
            self._show(carrier, round_, peer)

    def _show(self, reader: PeerId, round_: int, author: PeerId) -> None:
        """Pass on what a member has said in a round so far, and what it will say."""
        passed = self._passed.setdefault((round_, author, reader), _Passed())
        for statement in self._held(author) if round_ == self._round else ():
            self._send(reader, passed, author, statement)

    def _serves_enough(self, round_: int, author: PeerId, reader: PeerId) -> bool:
        if (round_, author, reader) in self._passed:
            return False
        readers = [by for at, _, by in self._passed if at == round_]
        voters = self._voters()
        is_full = sum(by not in voters for by in readers) >= MAX_OTHER_PAIRS
        return readers.count(reader) >= MAX_PAIRS or (is_full and reader not in voters)

    def _send(self, reader: PeerId, passed: _Passed, author: PeerId, message: Said) -> None:
        key = message.signature if isinstance(message, wire.Signed) else b"".join(message.signatures)
        size = len(message.payload) if isinstance(message, wire.Signed) else len(message.value) + len(key)
        if key in passed.messages:
            return
        if len(passed.messages) >= MAX_PASSED_MESSAGES or passed.num_bytes + size > MAX_PASSED_BYTES:
            self._node.refuse(author, "relay", "more than is passed on of one member in a round")
            return
        passed.messages.add(key)
        passed.num_bytes += size
        self._node.send(reader, message)
