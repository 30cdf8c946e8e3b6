"""CHECK: the proposer names the outputs of all parts, and sketches after them show whether each is the sum. Pure.

All contributors sketch again, under a seed derived from the named outputs; the sum of the sketches must be that of the
output (`robust.checks`). For what the holder of a part contributes to it itself, the sketch by another one of the part's
three counts (`wire.Second`): its own would hide any output. Where a contributor does not sketch, the proposer names it in
the next `Outputs`, and those that hold its parts answer for it. A false output is made again by the others of its three;
where they make another one, the proposer names that. So no contributor, and no owner alone, ends an attempt here.

A `Second` has the sketches of all parts of a contributor that its author, a *giver*, is to answer for: with one message for
each part free keys that fall silent would fill the queue of each session. It waits until the bytes of all these parts are
here, which costs no time, since the check needs the last of them, too. From the deadline on it waits for none: what is made
goes at once, and what follows once an exchange, so that a contributor that withholds one part delays no other one. So a giver
sends one message for each change of its duty (outputs are named, the contributor is named silent, an earlier giver is lost)
and one for each exchange after the deadline. No part is in two of them: two that share one convict (`statements`).
"""

from collections import Counter, defaultdict
from collections.abc import Collection

from ...peer import wire
from ...peer.base.transport import PeerId
from ..agreement.actions import Note
from ..robust.checks import CHECK_COLUMNS, are_alike, masked, with_seconds
from ..robust.sketch import ROWS
from ..vector.codec import EMPTY
from .actions import Action, CheckOutputs, CompareSecond, Forward, SecondPart, Send, Setup, ShowPart
from .collect import CollectPhase
from .facts import MessageLog
from .judge import JudgePhase, SketchExchange
from .outputs import ReducePhase
from .roster import RosterView
from .words import Standing

Pair = tuple[int, int]
"""A part, and a contributor to it."""
TABLE_BYTES = 4 * ROWS * CHECK_COLUMNS
"""The sketch of one part after the outputs."""
CONVICTED_AFTER = 2
"""Turns from when a sketch is shown to those that hold the bytes to when they have convicted its author, if it is false."""


class CheckPhase:
    """One member's verification of the outputs of one cut."""

    def __init__(
        self,
        setup: Setup,
        facts: MessageLog,
        table: RosterView,
        phases: tuple[CollectPhase, JudgePhase, ReducePhase],
        standing: Standing,
    ) -> None:
        self.failure = ""
        self.named: wire.Outputs | None = None
        """The proposer's newest outputs."""
        self._first: wire.Outputs | None = None
        """The first ones: who is named silent in later ones was named just now, and nobody is late to answer for it."""
        self.is_late = False
        self._may_name = self._is_forced = False
        """This proposer may name the outputs once more, since it has looked or a check has failed; be it without outputs
        that are to come in the place of others."""
        self._setup = setup
        self._facts = facts
        self._table = table
        self._collect_phase, self._judge_phase, self._reduce_phase = phases
        self._standing = standing
        self._cut = self._judge_phase.stage.hash
        self._exchanges: dict[tuple[bytes, ...], SketchExchange] = {}
        self._seconds: dict[tuple[bytes, Pair], dict[int, tuple[wire.Signed, bytes]]] = {}
        """The sketches by others by seed and pair, and by their author."""
        self._making: set[tuple[bytes, Pair]] = set()
        """The sketches that I make or have made of what others contribute."""
        self._at_work: Counter[tuple[bytes, int]] = Counter()
        """How many of them are not made yet, by seed and contributor."""
        self._made: defaultdict[tuple[bytes, int], dict[int, bytes]] = defaultdict(dict)
        """Those that I have not sent yet, by part."""
        self._lacking: dict[int, bool] = {}
        """Contributors of which I lack bytes that I am to sketch; False if others have answered for these parts."""
        self._differs_in: int | None = None
        """The turn in which what others sketch for a silent contributor was found to differ from its sketch after the cut."""
        self._turn = 0
        """The number of my present turn: one begins with each exchange after the deadline."""
        self._sent_in: dict[tuple[bytes, int], int] = {}
        """The turn in which I have last sent sketches of a contributor while I lacked bytes of it."""
        self._comparing: set[tuple[bytes, Pair, int]] = set()
        self._asked: set[object] = set()
        self._passed: set[tuple[bytes, ...]] = set()
        self._false: dict[tuple[bytes, ...], frozenset[int]] = {}
        """By outputs, the parts whose output seems false."""
        self._doubtful: frozenset[int] = frozenset()
        self._covered: set[int] = set()
        """Contributors whose two sketches differ, and the holders that alone vouch for both: others were shown no bytes."""
        self._tried: dict[int, set[bytes]] = {}
        """By part, the outputs that I, the proposer, have named."""
        self._read = 0
        self.mute: set[PeerId] = set()
        """Whose Second counts first, and had not come at the deadline."""

    def close(self, active: Collection[PeerId]) -> None:
        """Wait for nobody any more, at the deadline."""
        self.is_late = self._may_name = True
        if self._first is not None and self.named is not None and self._first.outputs == self.named.outputs:
            self.mute |= {self._table.members[index] for index in self.unseconded(active, self._first.silent)}

    def look(self) -> None:
        """Let the proposer name once more: for each change alone it would use up its namings."""
        self._may_name = True

    def advance(self, active: Collection[PeerId]) -> list[Action]:
        """Return all actions that the messages allow."""
        actions = [*self._fail(), *self._take(), *self._name(active)]
        named = self.named
        if named is None or not self._is_sketched:
            return actions
        pairs = self._collect_phase.pairs(self._judge_phase.order)
        counting = [(part, index) for part, index in pairs if index in self._judge_phase.counted[part]]
        actions += self._judge_phase.sketches.advance(pairs)  # A part that I hold only now may show that one was false.
        for exchange in self._exchanges.values():
            actions += exchange.advance(counting)
        actions += self._answer(active, self._exchanges[named.outputs])
        actions += self._compare(counting)
        return actions

    def check(self, active: Collection[PeerId]) -> list[Action]:
        """Verify the named outputs, which are here, once all sketches are."""
        named, outputs = self.named, self._reduce_phase.hashes()
        if named is None or outputs != named.outputs or self.is_checked(outputs):
            return []
        exchange = self._exchanges[outputs]
        second = self._tables(active, exchange, named)
        if second is None:
            return []
        key = named.number, second  # The sketches by others of a silent contributor may be the very ones that it made.
        if key in self._asked:
            return []
        self._asked.add(key)
        made = dict(self._reduce_phase.outputs)
        first, weights = self._judge_phase.first, self._judge_phase.weights
        return [CheckOutputs(exchange.seed, made, weights, first, second, named.silent)]

    def checked(self, action: CheckOutputs, false: Collection[int], doubtful: Collection[Pair]) -> list[Action]:
        """Take the false outputs, by part, and the pairs of part and contributor, in the order of the cut, whose two
        sketches differ.
        """
        named, order, members = self.named, self._judge_phase.order, self._table.members
        if named is None or {part: named.outputs[part] for part in action.outputs} != dict(action.outputs):
            return []
        pairs = [(part, order[place]) for part, place in doubtful]
        self._doubtful = frozenset(index for _, index in pairs)
        liars = self._doubtful & set(action.silent)
        if not liars:
            self._differs_in = None
            self._covered.clear()
        if not false and not doubtful:
            self._passed.add(named.outputs)
            return self._blame(named.outputs)
        self._false[named.outputs], self._may_name = frozenset(false), True
        actions: list[Action] = []
        for part in false:
            self._reduce_phase.do_without(part)
            # Or a contributor has sent me another sketch than to the holder: both together convict that one.
            makers = tuple(members[index] for index, _ in self._reduce_phase.offers(part))
            actions += [Forward(makers, signed) for signed in self._signed(named.outputs)]
        if liars:
            # Others have sketched it now. One of them lies, and the bytes convict it; or a holder let a false sketch pass.
            if self._differs_in is None:
                self._differs_in = self._turn
            shown, seed = defaultdict[wire.Signed, set[PeerId]](set), self._exchanges[named.outputs].seed
            for part, index in (pair for pair in pairs if pair[1] in liars):
                said, holder = self._seconds.get((seed, (part, index)), {}), self._standing.holders[part]
                for signed, _ in said.values():
                    shown[signed].update(self._table.others_with(part, ()))
                self._covered |= {holder, index} if said.keys() == {holder} else set()
            actions += [Forward(tuple(sorted(to)), signed) for signed, to in shown.items()]
        return actions

    def _fail(self) -> list[Action]:
        """Give up where the sketch after the cut is the false one: its author is convicted, or in time nobody is."""
        if self.named is None or self._differs_in is None:
            return []
        liars = [self._table.members[index] for index in sorted(self._doubtful & {*self.named.silent})]
        if self._turn < self._differs_in + CONVICTED_AFTER and not all(map(self._setup.is_banned, liars)):
            return []
        reason = "the sketches after the cut and after the outputs cannot be of one contribution"
        self.failure = f"{reason}: that of {', '.join(liars)}"
        return [Note("round.sketches_differ", liar, "check", reason) for liar in liars]

    def _blame(self, outputs: tuple[bytes, ...]) -> list[Action]:
        """Refuse the outputs that seemed false and were replaced: now others have passed the check in their place."""
        self._false.pop(outputs, None)
        earlier = [(part, it[part]) for it, parts in self._false.items() for part in parts if it[part] != outputs[part]]
        return [action for part, output in sorted(set(earlier)) for action in self._reduce_phase.refuse(part, output)]

    def seconded(self, action: SecondPart, table: bytes) -> None:
        """Take a sketch that I made of what another one contributes; it is sent with others."""
        key = action.seed, action.contributor
        self._at_work[key] -= 1
        self._made[key][action.part] = table

    def begin_turn(self) -> None:
        """Begin a turn: of each contributor that I lack bytes of I send once more what I have sketched."""
        self._turn += 1
        self._may_name = self._is_forced = True

    def unanswered(self) -> set[int]:
        """Return who leaves a part of a contribution without a sketch by others.

        They are who says in its word that it holds it, and its author, if that is silent: to others neither shows the bytes.
        """
        found, named, words = set[int](), self.named, self._judge_phase.stage.words
        exchange = self._exchanges.get(named.outputs) if named is not None else None
        for part, index in self._required() if exchange is not None else ():
            if exchange is not None and named is not None and not self._seconds.get((exchange.seed, (part, index))):
                found |= {by for by, word in words.items() if by != index and index in word.get(part, ())}
                found |= {index} & {*named.silent}
        return found

    def is_checked(self, outputs: tuple[bytes, ...]) -> bool:
        """Return True if these outputs are named, and need no check or have passed it."""
        is_named = self.named is not None and self.named.outputs == outputs
        return is_named and (self._setup.rule.blind or outputs in self._passed)

    def disputants(self) -> tuple[PeerId, ...]:
        """Return who sketches a part of its contribution otherwise than another one of the part's three, and who covers it.

        The bytes would convict one of the two. Where neither shows them they are of one mind, and end the attempt.
        """
        exchange = self._exchanges.get(self.named.outputs) if self.named is not None else None
        if exchange is None:
            return ()
        found, members = {*self._covered}, self._table.members
        for part, index in self._required():
            if exchange.signed(index) is None:
                continue
            mine = exchange.tables(index)[TABLE_BYTES * part : TABLE_BYTES * (part + 1)]
            for author, (_, table) in self._seconds.get((exchange.seed, (part, index)), {}).items():
                if not any(self._setup.is_banned(members[it]) for it in (author, index)):
                    found |= set() if are_alike(mine, table) else {author, index}
        return tuple(members[index] for index in sorted(found))

    def sketches(self, seed: bytes) -> list[SketchExchange]:
        """Return the exchange under a seed, if there is one."""
        return [exchange for exchange in self._exchanges.values() if exchange.seed == seed]

    def requires(self, author: int, second: wire.Second) -> bool:
        """Return True for sketches all of which may count: by who may give them, of what the proposer has named."""
        index, counted, holders = second.contributor, self._judge_phase.counted, self._standing.holders
        if self.named is None or not self.sketches(second.seed):
            return False
        is_silent, parts = index in self.named.silent, [part for part, _ in second.tables]
        are_due = all(index in counted.get(part, ()) and (is_silent or index == holders[part]) for part in parts)
        return are_due and all(author in self._all_givers((part, index)) for part in parts)

    def second_by(self, action: CompareSecond) -> wire.Signed | None:
        """Return the Second that I am to compare."""
        said = self._seconds.get((action.seed, (action.part, action.contributor)), {}).get(action.author)
        return said[0] if said is not None else None

    def missing(self) -> frozenset[int]:
        """Return the contributors whose sketches have not arrived, without those that others answer for."""
        if self.named is None or not self._is_sketched:
            return frozenset()
        return self._exchanges[self.named.outputs].missing - {*self.named.silent}

    def lacks(self, contributor: int) -> bool:
        """Return True if a contributor's sketches after the named outputs are not here."""
        return self.named is not None and self._is_sketched and contributor in self._exchanges[self.named.outputs].missing

    def unseconded(self, active: Collection[PeerId], silent: Collection[int] | None = None) -> dict[int, list[PeerId]]:
        """Return whose Second counts first and has not come, and the contributors that it is about, who may have it.

        `silent` are the contributors that others answer for (None: those that the newest outputs name).
        """
        members, found = self._table.members, dict[int, list[PeerId]]()
        if self.named is None or not self._is_sketched:
            return found
        seed = self._exchanges[self.named.outputs].seed
        for pair in self._required(silent):
            said = self._seconds.get((seed, pair), {})
            first = self._due(pair, active)
            if first is not None and first not in said:
                found.setdefault(first, []).append(members[pair[1]])
        return found

    def waits_for(self) -> str:
        """Return what this waits for, in one line for a person."""
        members = self._table.members
        if self.named is None:
            return f"Outputs from {members[0]}"
        if missing := self.missing():
            return f"Sketch from {', '.join(members[index] for index in sorted(missing))}"
        if false := self._false.get(self.named.outputs):
            return f"another output of part {min(false)}"
        return "sketches by others, of what holders contribute themselves"

    @property
    def _is_sketched(self) -> bool:
        """True if sketches show whether an output is the sum: else nothing is checked."""
        return not self._setup.rule.blind

    def _standing_name(self, index: int) -> bytes:
        standing = self._collect_phase.stage.standing
        assert standing is not None
        return standing.names[index]

    def _take(self) -> list[Action]:
        """Take the proposer's newest outputs, and the Seconds that have arrived."""
        table, order, actions = self._table, self._judge_phase.order, list[Action]()
        proposer = table.members[0]
        for signed, outputs in self._facts.every(wire.Outputs, table.slot):
            is_newer = self.named is None or outputs.number > self.named.number
            fits = len(outputs.outputs) == table.num_parts and set(outputs.silent) <= set(order)
            if signed.sender == proposer and outputs.cut == self._cut and is_newer and fits:
                if self._first is None:
                    self._first = outputs
                    actions += self._show_own()
                self.named = outputs
                actions += self._reduce_phase.follow(outputs.outputs)
                if self._is_sketched and outputs.outputs not in self._exchanges:
                    exchange = SketchExchange(self._facts, table, order, self._cut, outputs.outputs)
                    self._exchanges[outputs.outputs] = exchange
        news = self._facts.since(wire.Second, self._read)
        self._read += len(news)
        for signed, second in news:
            author, index = table.places[signed.sender], second.contributor
            fits = second.slot == table.slot and index in order and second.commit == self._standing_name(index)
            for part, it in dict(second.tables).items() if fits else ():
                if part in table.owners and author in self._all_givers((part, index)) and len(it) == TABLE_BYTES:
                    self._seconds.setdefault((second.seed, (part, index)), {})[author] = signed, it
        return actions

    def _show_own(self) -> list[Action]:
        """Show all voters what I contribute to a part that I hold, now that nobody can contribute it any more."""
        table, me = self._table, self._table.me
        mine = table.commits().get(me)
        if mine is None or not self._is_sketched:
            return []
        voters = tuple(table.members[index] for index in sorted(table.seating.voters))
        own = [part for part, holder in self._standing.holders.items() if holder == me]
        return [ShowPart(part, mine.parts[part], voters) for part in own]

    def _name(self, active: Collection[PeerId]) -> list[Action]:
        """As the proposer, name the outputs; again where one is false, or where contributors do not sketch."""
        table, named, reduced = self._table, self.named, self._reduce_phase
        if table.me != 0:
            return []
        if named is None:
            best = {part: reduced.first(part, active) for part in table.owners}
            if None in best.values():
                return []
            silent = self._without(active)
            return [self._outputs(0, {part: it for part, it in best.items() if it is not None}, silent)]
        false, before = self._false.get(named.outputs, ()), {part: named.outputs[part] for part in table.owners}
        gone = {part for part in reduced.withheld if part not in reduced.outputs}
        others = {part: reduced.best(part, self._tried.setdefault(part, {before[part]})) for part in {*false} | gone}
        chosen = before | {part: other for part, other in others.items() if other is not None}
        late = self.missing() if self.is_late else ()
        silent = {*named.silent, *self._without(active), *late, *self._doubtful}
        is_same, waits = silent == {*named.silent}, None in others.values() and not self._is_forced
        if not self._may_name or (is_same and (waits or chosen == before)):
            return []
        for part in table.owners:
            self._tried.setdefault(part, set()).add(chosen[part])
        self._may_name = self._is_forced = False
        if named.number + 1 >= wire.MAX_OUTPUTS:
            self.failure = f"{wire.MAX_OUTPUTS} times naming the outputs were not enough"
            return []
        return [self._outputs(named.number + 1, chosen, silent)]

    def _without(self, active: Collection[PeerId]) -> set[int]:
        """Return the contributors that were lost, banned or are not waited for, and have not sketched after the outputs."""
        members, named = self._table.members, self.named
        if not self._is_sketched:
            return set()
        here = self._exchanges[named.outputs].missing if named is not None else frozenset(self._judge_phase.order)
        banned = {index for index in self._judge_phase.order if self._setup.is_banned(members[index])}
        late = {it for it in here if not self._setup.awaits_sketch(members[it])}
        known = self._table.seating.known & {*self._judge_phase.order}
        late = late if 3 * len(late & known) <= len(known) else set()  # Else it is no single member's fault.
        return banned | late | {it for it in here if members[it] not in active}

    def _outputs(self, number: int, chosen: dict[int, bytes], silent: Collection[int]) -> Action:
        table = self._table
        outputs = tuple(chosen.get(part, EMPTY) for part in range(table.num_parts))
        return Send(table.members, wire.Outputs(table.slot, self._cut, number, outputs, tuple(sorted(silent))))

    def _required(self, silent: Collection[int] | None = None) -> list[Pair]:
        """Return the pairs for which another one's sketch counts, where these are silent (None: those named newest)."""
        seating = self._table.seating
        if silent is None:
            silent = () if self.named is None else self.named.silent
        found: list[Pair] = []
        for part, counted in sorted(self._judge_phase.counted.items()):
            own = {self._standing.holders[part]} if seating.witnesses else set()
            found += [(part, index) for index in sorted(counted & own.union(silent))]
        return found

    def _all_givers(self, pair: Pair) -> list[int]:
        """Return who may answer for a contributor to a part: others of its three, and for its holder all voters.

        The two others of the three may both lie. A holder shows any voter what it contributes itself.
        """
        part, contributor = pair
        seating, is_own = self._table.seating, self._standing.holders[part] == contributor
        others = dict.fromkeys((*seating.three(part), *(sorted(seating.voters) if is_own else ())))
        return [index for index in others if index != contributor]

    def _givers(self, pair: Pair) -> list[int]:
        """Return who answers: others of its three, its holder last, before it who is late; of what that adds all voters.

        These only where none of the three has at the deadline, or did lately.
        """
        part, contributor = pair
        awaits, named, members = self._setup.awaits_sketch, self.named, self._table.members
        holder, three = self._standing.holders[part], self._table.seating.three(part)
        givers = self._all_givers(pair)
        others = [index for index in givers if index in three]
        order = sorted(others, key=lambda index: (index == holder, not awaits(members[index])))
        if named is None or contributor in named.silent:
            return order
        said = self._seconds.get((self._exchanges[named.outputs].seed, pair), {})
        is_answered = any(index in said if self.is_late else awaits(members[index]) for index in others)
        return order if is_answered else [*order, *(index for index in givers if index not in three)]

    def _due(self, pair: Pair, active: Collection[PeerId]) -> int | None:
        """Return whose answer I wait for; None if nobody that may give it is here."""
        here = [index for index in self._givers(pair) if self._table.members[index] in active]
        return next((it for it in here if self._setup.awaits_sketch(self._table.members[it])), here[0] if here else None)

    def _answer(self, active: Collection[PeerId], exchange: SketchExchange) -> list[Action]:
        """Sketch what others contribute, where that is mine to do, and send what is made."""
        actions: list[Action] = []
        self._lacking.clear()
        for pair in self._required():
            me, seed = self._table.me, exchange.seed
            if (seed, pair) in self._making or me not in self._all_givers(pair):
                continue
            if self._due(pair, active) != me and not (self.is_late and me in self._givers(pair)):
                continue
            if self._collect_phase.has(*pair):
                self._making.add((seed, pair))
                self._at_work[seed, pair[1]] += 1
                actions.append(SecondPart(seed, *pair))
            else:
                self._collect_phase.hold([pair])
                self._lacking[pair[1]] = self._lacking.get(pair[1], False) or not self._seconds.get((seed, pair))
        return [*actions, *self._send_made(exchange.seed)]

    def _send_made(self, newest: bytes) -> list[Action]:
        """Send what I have sketched of each contributor once that is all that is due; what may not wait once a turn."""
        table, actions = self._table, list[Action]()
        for key in [key for key in self._made if not self._at_work[key]]:
            seed, index = key
            if seed == newest and index in self._lacking:
                waits = self._lacking[index] and not self.is_late
                if waits or self._sent_in.get(key) == self._turn:
                    continue
                self._sent_in[key] = self._turn
            tables = tuple(sorted(self._made.pop(key).items()))
            second = wire.Second(table.slot, seed, index, self._standing_name(index), tables)
            actions.append(Send(table.voters, second))
        return actions

    def _compare(self, holding: Collection[Pair]) -> list[Action]:
        """Compare what others sketch for a contributor with the bytes that I hold."""
        actions: list[Action] = []
        mine = {*holding}
        for (seed, pair), said in self._seconds.items():
            for author in said if pair in mine and self.sketches(seed) else ():
                if author != self._table.me and (seed, pair, author) not in self._comparing:
                    self._comparing.add((seed, pair, author))
                    actions.append(CompareSecond(seed, *pair, author))
        return actions

    def _tables(
        self, active: Collection[PeerId], exchange: SketchExchange, named: wire.Outputs
    ) -> tuple[bytes, ...] | None:
        """Return the sketches after the outputs, in order; None if one that counts has not come."""
        judge, parts = self._judge_phase, self._table.num_parts
        if self.missing():
            return None
        seconds: dict[int, dict[int, bytes]] = {}
        for part, index in self._required():
            own = b"" if index in named.silent else exchange.tables(index)
            found = self._second(active, exchange, (part, index), own)
            if found is None:
                return None
            seconds.setdefault(index, {})[part] = found
        tables: list[bytes] = []
        for index in judge.order:
            whole = bytes(TABLE_BYTES * parts) if index in named.silent else exchange.tables(index)
            counts = [index in judge.counted.get(part, ()) for part in range(parts)]
            tables.append(masked(with_seconds(whole, parts, seconds.get(index, {})), counts))
        return tuple(tables)

    def _second(self, active: Collection[PeerId], exchange: SketchExchange, pair: Pair, own: bytes) -> bytes | None:
        """Return the sketch of a pair that counts; None if it has not come, or where one of two different ones is false.

        `own` are the contributor's own sketches of all its parts, where they count for the rest.
        """
        members, part = self._table.members, pair[0]
        said = self._seconds.get((exchange.seed, pair), {})
        mine = own[TABLE_BYTES * part : TABLE_BYTES * (part + 1)]
        givers = [index for index in self._givers(pair) if not self._setup.is_banned(members[index])]
        for index in givers:
            if index in said:
                table = said[index][1]
                # Who has signed the false one will be banned.
                return None if mine and not self.is_late and not are_alike(mine, table) else table
            if index == self._due(pair, active) and not self.is_late:
                return None
        return mine if mine and not any(members[index] in active for index in givers) else None

    def _signed(self, outputs: tuple[bytes, ...]) -> list[wire.Signed]:
        exchange = self._exchanges.get(outputs)
        found = [exchange.signed(index) for index in self._judge_phase.order] if exchange is not None else []
        return [signed for signed in found if signed is not None]
