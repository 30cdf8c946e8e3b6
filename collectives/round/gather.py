"""GATHER: the roster of a round, and what makes one valid. Pure.

Theory of operation. The proposer closes the gathering by its own Heard, the marks of the Readys that it holds. Each
voter answers with its own Heard, after those of its Readys that the proposer lacks. The roster shows the Heards of a
quorum: a Ready has a place if its author is one of these voters, or if voters with more than a third of the votes hold
it. So members, bounds and revision are a function of bytes that everybody sees, and a peer that is Ready to some only
is in the roster of all, or of nobody. What a voter knows alone, such as a ban, enters through its word.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

from ...dht.run.admission import Charter
from ...dht.run.revision import open_revision
from ...peer import wire
from ...peer.base.digest import digest
from ...peer.base.errors import ProtocolViolation, RemoteError
from ...peer.base.transport import PeerId
from ...peer.wire.schema import encode
from ..accountability.trust import misstated, newcomer_record, seat_of
from ..agreement.electorate import Electorate
from ..allreduce.actions import Setup
from ..allreduce.roster import readies_of
from ..allreduce.words import bits_of, places_in
from ..chain.certificate import signed_in, why_not_seats
from ..chain.quorum import ranked, ranked_in_draw
from ..vector.lines import StatedLines, measured_in
from ..vector.partition import check_bounds, num_parts
from .vote import Vote

SignedReady = tuple[wire.Signed, wire.Ready]

BASIS_BYTES, WORD_BYTES = 1_000, 250
"""Bytes of a roster's basis, at most, beside Readys and Heards, and of a voter's Heard beside its marks."""
PLACE_BYTES, MOST_PLACES_BYTES = 58, 58_000
"""Bytes of a member in a packed certificate, at most, beside its invitation and voucher; of all members, where there are more
than `MAX_PARTS`."""


def mark_of(signed: wire.Signed) -> bytes:
    """Return what stands for a Ready in a Heard; `wire.MARK_BYTES` bytes."""
    return digest(signed.sender.encode() + signed.payload)[: wire.MARK_BYTES]


def marks_in(heard: wire.Heard) -> list[bytes]:
    """Return the marks of the Readys that a voter holds, its own first."""
    return list(_marks(heard.readys))


@lru_cache(maxsize=256)  # A proposer looks at all Heards with each that arrives.
def _marks(readys: bytes) -> tuple[bytes, ...]:
    size = wire.MARK_BYTES
    return tuple(readys[at : at + size] for at in range(0, len(readys) - size + 1, size))


def willing(setup: Setup, vote: Vote) -> dict[PeerId, SignedReady]:
    """Return the Readys that I would be in a roster with, as many as have room: mine, of the voters, of who was drawn, then
    of others.

    Honest members that were not drawn are not Ready: without the draw, keys that are Ready all the same would take the seats.
    """
    fit = {peer: it for peer, it in vote.ready.items() if _fits(setup, vote, peer, it[1])}
    voters, drawn = vote.electorate.votes, setup.active

    def place(peer: PeerId) -> tuple[bool, bool, bool]:
        return peer != vote.me, peer not in voters, peer not in drawn

    order = sorted(ranked(vote.slot, fit), key=place)
    taken: dict[PeerId, SignedReady] = {}
    room = wire.MAX_SIGNED_BYTES - BASIS_BYTES - WORD_BYTES * len(voters)
    # A voter has a place by its own word; of less than a third the words may be as long as any.
    room -= wire.MAX_READY_BYTES * len(voters.keys() - fit.keys()) + wire.MAX_HEARD_BYTES * (len(voters) // 3)
    for peer in order[: wire.MAX_ROSTER]:
        signed, _ = fit[peer]
        size = len(encode(signed)) + wire.MARK_BYTES * len(voters)
        if size <= room and not setup.conduct.charter.overbooked([it.invite for _, it in (*taken.values(), fit[peer])]):
            taken[peer], room = fit[peer], room - size
    return taken


def _fits(setup: Setup, vote: Vote, peer: PeerId, ready: wire.Ready) -> bool:
    """Return True if I would be in a roster with this Ready, by what I know of its author."""
    return (
        ready.slot == vote.slot
        and not ready.lock
        and ready.base_root == setup.ready.base_root
        and setup.conduct.charter.admits(peer, ready.invite)
        and not (ready.voucher and peer in setup.conduct.charter.revoked)
        and _shows_nothing_else(setup.conduct.charter, peer, ready)
        and peer not in setup.conduct.bans
    )


def _shows_nothing_else(charter: Charter, peer: PeerId, ready: wire.Ready) -> bool:
    """Return True if all that a Ready shows is of use: else free keys take the room of eight members each."""
    has_use = charter.keepers is not None and charter.may_vote(peer, ready.invite, ready.voucher)
    return (charter.kind != "open" or not ready.invite) and (has_use or not ready.voucher)


def why_not_close(setup: Setup, vote: Vote) -> str:
    """Return why no roster can come of the Readys that I would be in a roster with; empty if one can."""
    readies = willing(setup, vote)
    voters = [peer for peer in readies if peer in vote.electorate.votes]
    if vote.me not in readies or not vote.electorate.is_quorum(voters):
        return f"{len(voters)} voters start from this state, which is no quorum"
    if len(readies) < setup.spec.min_peers:
        return f"{len(readies)} members start from this state, the run asks for {setup.spec.min_peers}"
    return "" if any(ready.tokens for _, ready in readies.values()) else "no member that trains is ready"


def heard(setup: Setup, vote: Vote) -> wire.Heard | None:
    """Return my word on whose Readys I hold; None if I could not be in a roster of them."""
    readies = willing(setup, vote)
    if vote.me not in readies:
        return None
    marks = b"".join(mark_of(signed) for signed, _ in readies.values())
    return wire.Heard(vote.slot, marks, _number(setup, _revision(setup)))


def _revision(setup: Setup) -> wire.PackedRevision:
    """Return the newest revision that I hold and a roster can name: none beyond the limits, nor older than what holds."""
    return setup.revision if setup.spec.why_not_revise(setup.conduct.revision, setup.revision) else setup.conduct.revision


def _number(setup: Setup, revision: wire.PackedRevision) -> int:
    """Return the number of a revision: a greater one replaces it. Raises `RemoteError` if it is none of this run."""
    return open_revision(revision, setup.spec.run, "").number


def places(heards: Mapping[PeerId, wire.Heard], proposer: PeerId, electorate: Electorate) -> list[bytes]:
    """Return the marks that have a place in a roster: of these voters, and what a third of the votes hold.

    One of these is honest, and holds a Ready that could be in a roster; no liar has one to itself. Where there are more than
    `MAX_PARTS`, of the rest those in the proposer's own list, which has room for them: a mark can be ground, and free keys
    can each have the votes of a few.
    """
    first = {mark: place for place, mark in enumerate(marks_in(heards[proposer]))}
    votes, own = Counter[bytes](), {marks_in(heard)[0] for heard in heards.values()}
    for voter, said in heards.items():
        votes.update(dict.fromkeys(marks_in(said), electorate.votes_of([voter])))
    held = [mark for mark in votes if mark in own or votes[mark] >= electorate.third]
    order = sorted(held, key=lambda mark: (mark not in own, first.get(mark, len(first)), mark))[: wire.MAX_ROSTER]
    return [mark for place, mark in enumerate(order) if place < wire.MAX_PARTS or mark in first]


def seated(
    slot: wire.Slot, proposer: PeerId, shown: Sequence[SignedReady], electorate: Electorate, charter: Charter
) -> dict[PeerId, SignedReady]:
    """Return the members of a roster of these Readys, in order: the proposer, the voters by rank, the others by rank.

    Of two Readys of one peer the first counts that has room: of those that share an invitation as many as it is for. The
    first `MAX_PARTS` may own a part, those that may vote in the next round before others.
    """
    taken: dict[PeerId, SignedReady] = {}
    size = 0
    for signed, ready in shown:
        invites, more = [it.invite for _, it in taken.values()], PLACE_BYTES + len(ready.invite) + len(ready.voucher)
        if signed.sender in taken or charter.overbooked([*invites, ready.invite]):
            continue
        if len(taken) < wire.MAX_PARTS or size + more <= MOST_PLACES_BYTES:
            taken[signed.sender], size = (signed, ready), size + more

    def place(peer: PeerId) -> tuple[bool, bool, bool]:
        _, ready = taken[peer]
        may_vote = charter.may_vote(peer, ready.invite, ready.voucher)
        return peer != proposer, peer not in electorate.votes, not may_vote

    # The voters take turns with the attempts; who else may own a part is the same in all of them, and known before.
    voters = ranked(slot, taken.keys() & electorate.votes)
    others = ranked_in_draw(slot, taken.keys() - electorate.votes)
    return {peer: taken[peer] for peer in sorted((*voters, *others), key=place)}


def held(vote: Vote, passed_on: Iterable[SignedReady] = ()) -> Mapping[bytes, SignedReady]:
    """Return the Readys of my slot that I hold, by mark; `passed_on` are those that voters have shown me."""
    readys = (*passed_on, *vote.ready.values())
    return {mark_of(signed): (signed, ready) for signed, ready in readys if ready.slot == vote.slot}


def proposal(
    setup: Setup,
    vote: Vote,
    heards: Mapping[PeerId, tuple[wire.Signed, wire.Heard]],
    held: Mapping[bytes, SignedReady],
) -> tuple[wire.Roster, wire.Basis] | str:
    """Return the roster of a proposer and its basis, or why there is none.

    `heards` are the voters' words of my slot, `held` the Readys that I hold, by mark. A voter that names another one does
    not count, nor one whose own Ready I would not be in a roster with: its word alone would give that a place.
    """
    base, electorate = setup.ready.base_root, vote.electorate
    said = {
        voter: it
        for voter, (_, it) in sorted(heards.items())
        if voter in electorate.votes
        and all(mark in held and not held[mark][1].lock and held[mark][1].base_root == base for mark in marks_in(it))
        and held[marks_in(it)[0]][0].sender == voter
        and _fits(setup, vote, voter, held[marks_in(it)[0]][1])
    }
    if vote.me not in said or not electorate.is_quorum(said):
        return f"{len(said)} voters that start from this state have said whom they hold, which is no quorum"
    shown = [held[mark] for mark in places(said, vote.me, electorate)]
    members = seated(vote.slot, vote.me, shown, electorate, vote.charter)
    if len(members) < setup.spec.min_peers:
        return f"{len(members)} members start from this state, the run asks for {setup.spec.min_peers}"
    revision = _revision(setup)
    if _number(setup, revision) < _least_revision(said, electorate):
        return "the voters hold a newer revision of the run than this peer"
    rest = [encode(signed) for signed, ready in shown if (signed, ready) not in members.values()]
    readies = {peer: ready for peer, (_, ready) in members.items()}
    first = {peer: readies[peer] for peer in [*readies][: num_parts(members)]}
    lines = StatedLines(first, measured_in(setup.before), electorate.frontier)
    able = lines.able(setup.cells)
    bounds = lines.proposal(setup.cells, setup.conduct.may_own, lambda without: bool(_why_not_left_out(vote, able, without)))
    fresh = newcomer_record(setup.conduct.charter.earned)
    seats = tuple(seat_of(ready, setup.conduct.trust_of(peer) or fresh) for peer, ready in readies.items())
    packed = (*(encode(signed) for signed, _ in members.values()), *rest)
    words = tuple(encode(heards[voter][0]) for voter in said)
    basis = wire.Basis(vote.slot, packed, words)
    training = _training(readies.values())
    return wire.Roster(vote.slot, base, tuple(members), bounds, seats, training, _hash_of(basis), revision), basis


def _training(readies: Iterable[wire.Ready]) -> bytes:
    return bits_of(place for place, ready in enumerate(readies) if ready.tokens)


def _hash_of(basis: wire.Basis) -> bytes:
    return digest(encode(basis))


def _least_revision(heards: Mapping[PeerId, wire.Heard], electorate: Electorate) -> int:
    """Return the number of the newest revision that voters with more than a third of the votes hold."""
    return electorate.frontier({voter: it.revision for voter, it in heards.items()}) or 0


def is_training(setup: Setup, vote: Vote, here: Collection[PeerId]) -> bool:
    """Return True if I train, or a member that is here and was Ready for the round does."""
    return bool(setup.ready.tokens) or any(ready.tokens and peer in here for peer, (_, ready) in vote.ready.items())


def starts_elsewhere(setup: Setup, vote: Vote) -> bool:
    """Return True if most votes that are ready for the first round start from another state than I; at a tie the smaller
    root's. Keys without a vote count nothing.

    Later ones begin with the state that the certificate before names.
    """
    electorate, roots = vote.electorate, Counter[bytes]()
    if vote.slot.round > 1 or len(vote.ready) < electorate.fewest:
        return False
    for peer in vote.reached:
        roots[vote.ready[peer][1].base_root] += electorate.votes_of([peer])
    best = min(roots, key=lambda root: (-roots[root], root), default=setup.ready.base_root)
    return roots.total() >= electorate.quorum and best != setup.ready.base_root


def why_not_ready(setup: Setup, vote: Vote, here: Collection[PeerId]) -> str:
    """Return why there is no roster at the timeout, in one line for a person: who was ready and is lost is missing, too."""
    ready, electorate = [peer for peer in vote.reached if peer in here], vote.electorate
    missing = [peer for peer in electorate.voters if peer and peer not in ready]
    if missing:
        return f"{electorate.votes_of(ready)} of {electorate.quorum} votes are ready and here; missing: {', '.join(missing)}"
    return f"{len(ready)} members are ready and here, {max(setup.spec.min_peers, 1)} are needed"


def misfit(setup: Setup, vote: Vote, sender: PeerId, roster: wire.Roster) -> str | None:
    """Return why nobody can take a roster of my slot by what it shows itself; None if one can.

    Who has no vote looks at nothing else: a liar that proposes another one than follows has lost its turn.
    """
    if sender != vote.proposer or roster.members[0] != sender:
        return f"its sender is not the proposer of this attempt, but {vote.proposer}"
    if (flaw := why_not_seats(roster.members, roster.seats, vote.charter)) is not None:
        return flaw
    if places_in(roster.training) - {*range(len(roster.members))}:
        return "it names more than its members that train"
    try:
        check_bounds(roster.bounds, num_parts(roster.members), setup.cells)
    except RemoteError as error:
        return str(error)
    return None


def refusal(setup: Setup, vote: Vote, sender: PeerId, roster: wire.Roster, basis: wire.Basis) -> str | None:
    """Return why no voter accepts a roster of my slot that is no misfit; None if it is valid, even one without me.

    Its validity follows from its basis and the certificate before: not from whom I have heard, or when.
    """
    if _hash_of(basis) != roster.basis:
        return "it names another basis than its proposer shows"
    try:
        shown, heards = _shown(setup, roster, basis), _heards(setup, vote, basis)
        number = _number(setup, roster.revision)
    except RemoteError as error:
        return str(error)
    electorate, by_mark = vote.electorate, {mark_of(signed): (signed, ready) for signed, ready in shown}
    if sender not in heards or not electorate.is_quorum(heards):
        return "it does not show whom its proposer and a quorum of the voters hold"
    due = places(heards, sender, electorate)
    if set(due) != by_mark.keys() or len(by_mark) != len(shown):
        return "it does not show the Readys that enough voters hold, and no others"
    for voter, it in heards.items():
        if by_mark[marks_in(it)[0]][0].sender != voter:
            return f"it shows a word of {voter} that does not begin with its own Ready"
    members = seated(vote.slot, sender, [by_mark[mark] for mark in due], electorate, vote.charter)
    if roster.members != tuple(members) or shown[: len(members)] != [*members.values()]:
        return "its members do not follow from whom the voters hold"
    if (flaw := setup.spec.why_not_revise(roster.revision, setup.revision)) and roster.base_root == setup.ready.base_root:
        return flaw
    if number < _least_revision(heards, electorate):
        return "it names a revision that the owner has replaced"
    for peer, seat, (_, ready) in zip(roster.members, roster.seats, shown, strict=False):
        record = setup.conduct.trust_of(peer)
        if record is not None and misstated(seat, record):
            return f"it states a trust of {seat.trust:.3f} for {peer}, the chain {record.trust:.3f}"
        if (ready.invite, ready.voucher, ready.is_leaving) != (seat.invite, seat.voucher, seat.is_leaving):
            return f"it misquotes the Ready of {peer}"
    if roster.training != _training(ready for _, ready in shown[: len(members)]):
        return "it misquotes who trains"
    first, last = roster.members[: num_parts(roster.members)], measured_in(setup.before)
    able, without, bounds = _owners(first, basis.readys, roster.bounds, last, setup.cells, vote.electorate)
    if bounds != roster.bounds:
        return "its parts do not follow from the lines that its Readys state"
    return _why_not_left_out(vote, able, without)


def _shown(setup: Setup, roster: wire.Roster, basis: wire.Basis) -> list[SignedReady]:
    """Return the Readys that a roster follows from, its members' first. Raises `RemoteError`."""
    found: list[SignedReady] = []
    if len(basis.readys) < len(roster.members):
        raise ProtocolViolation(f"{len(basis.readys)} Readys for {len(roster.members)} members")
    for place, data in enumerate(basis.readys):
        signed = signed_in(data)
        ready = wire.opened(signed)
        peer = roster.members[place] if place < len(roster.members) else signed.sender
        if not isinstance(ready, wire.Ready) or signed.sender != peer or ready.slot != roster.slot or ready.lock:
            raise ProtocolViolation(f"it shows no Ready of {peer} in this slot, without a lock")
        if ready.base_root != roster.base_root:
            raise ProtocolViolation(f"it shows a Ready of {peer}, which starts from another state")
        if not setup.verify(signed):
            raise ProtocolViolation(f"it shows a Ready of {peer} that {peer} has not signed")
        found.append((signed, ready))
    return found


def _heards(setup: Setup, vote: Vote, basis: wire.Basis) -> dict[PeerId, wire.Heard]:
    """Return the voters' words that a roster follows from. Raises `RemoteError`."""
    found: dict[PeerId, wire.Heard] = {}
    for data in basis.heards:
        signed = signed_in(data)
        word = wire.opened(signed)
        voter = signed.sender
        if not isinstance(word, wire.Heard) or word.slot != basis.slot or voter not in vote.electorate.votes:
            raise ProtocolViolation(f"it shows no Heard of {voter} in this slot, or not of a voter")
        if found and voter <= max(found):
            raise ProtocolViolation("it does not show its Heards once each, in order")
        if not setup.verify(signed):
            raise ProtocolViolation(f"it shows a Heard of {voter} that {voter} has not signed")
        found[voter] = word
    return found


@lru_cache(maxsize=8)  # In a simulation all members of a roster share one process.
def _owners(
    members: tuple[PeerId, ...],
    readys: tuple[bytes, ...],
    bounds: tuple[int, ...],
    last: tuple[PeerId, ...],
    cells: range,
    electorate: Electorate,
) -> tuple[Collection[PeerId], Collection[PeerId], tuple[int, ...]]:
    """Return who can own a part by the lines that Readys state, who has none in these bounds, and those that follow."""
    lines = StatedLines(readies_of(members, readys), last, electorate.frontier)
    without = lines.without(bounds)
    return lines.able(cells), without, lines.bounds(cells, without)


def _why_not_left_out(vote: Vote, able: Collection[PeerId], without: Collection[PeerId]) -> str | None:
    """Return why a proposer must not leave out all `without` a part, of those that are `able` to own one; None if it may.

    Honest ones leave out owners that lied or were silent; voters with more than a third of the votes are not all such.
    Free keys may be left out as long as voters own parts; where no voter can, half of those that can must own some.
    """
    dropped, votes = set(able) & set(without), vote.electorate.votes_of
    if votes(dropped) >= vote.electorate.third:
        return "it leaves voters with a third of the votes without a part"
    if 2 * votes(dropped) > votes(able) or (not votes(able) and 2 * len(dropped) > len(able)):
        return "it leaves more than half of those that can own without a part"
    return "it gives the whole vector to one member" if len(able) > 2 and len(able) - len(dropped) < 2 else None
