"""Leases: no unit twice without deaths, none left out with them, and no peer ever waits."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import pytest
from flockstep.collectives.accountability.credit import shares_in, speeds_in
from flockstep.collectives.accountability.trust import YOUNG_ROUNDS, TrustRecord
from flockstep.collectives.chain.certificate import value_of
from flockstep.dht.members.body import MAX_SHARE_BYTES
from flockstep.optim.data.leases import (
    CLAIMED,
    EPOCHS_AHEAD,
    MAX_DONE,
    MAX_EPOCH,
    MAX_JUMP,
    MAX_LEASES,
    PART,
    SETTLE,
    UNSETTLED,
    Lease,
    Leases,
    Ranking,
    Share,
    View,
    look,
    open_share,
)
from flockstep.optim.data.units import MAX_UNITS
from flockstep.peer.base.errors import MalformedMessage
from flockstep.peer.identity import Identity
from flockstep.peer.wire.schema import Between, Size, encode
from support.certificates import certify
from support.lease_swarm import NEWS, SOURCE, UNIT_ITEMS, SimSwarm, found, unit_of_seconds


def seeds(num: int) -> pytest.MarkDecorator:
    """So many seeds, of which the gate tries two."""
    marked = [pytest.param(seed, marks=pytest.mark.explore) for seed in range(2, num)]
    return pytest.mark.parametrize("seed", [0, 1, *marked])


@seeds(7)
def test_nothing_is_trained_twice_while_peers_come_and_leave(seed: int) -> None:
    swarm = SimSwarm(seed, num_units=48)
    speed = unit_of_seconds(swarm.random)
    found(swarm, swarm.random.randint(1, 4), speed, met=True)
    for number in range(4):
        swarm.run(swarm.random.uniform(NEWS[1], 40))
        swarm.join(f"joiner {number}", speed())
        swarm.run(swarm.random.uniform(NEWS[1], 40))
        here = [name for name, peer in swarm.peers.items() if peer.here]
        if number % 2:
            swarm.depart(swarm.random.choice(here), gone_after=NEWS[1] + 0.1, last_message=True)
    swarm.run(200)
    assert swarm.twice == []
    assert swarm.reasons["unsettled"] == 0
    assert swarm.oldest > 0
    assert all(swarm.covered(epoch) for epoch in range(swarm.oldest))


@seeds(7)
def test_what_the_dead_have_not_finished_is_taken_over(seed: int) -> None:
    swarm = SimSwarm(seed, num_units=48)
    speed = unit_of_seconds(swarm.random)
    found(swarm, 5, speed, met=True)
    lost = 0
    for number in range(4):
        swarm.run(swarm.random.uniform(5, 30))
        victim = swarm.peers[f"founder {number}"]
        lost += sum(lease.done is not None for lease in victim.leases.share().leases)
        swarm.depart(victim.name, gone_after=swarm.random.uniform(1, 60), last_message=False)
    swarm.run(400)
    assert swarm.oldest > 0
    assert all(swarm.covered(epoch) for epoch in range(swarm.oldest))
    assert len(swarm.twice) <= lost * UNIT_ITEMS  # Only what each of them had under its hands.


@seeds(5)
def test_strangers_that_begin_together_repeat_at_most_what_they_do_before_they_meet(seed: int) -> None:
    swarm = SimSwarm(seed, num_units=12)  # So few that most of them choose the same.
    found(swarm, 4, lambda: 1.0, met=False)
    swarm.run(2.0 + NEWS[1])
    met = swarm.trained.total()
    swarm.run(120)
    assert len(swarm.twice) <= met
    assert all(swarm.covered(epoch) for epoch in range(swarm.oldest))


@pytest.mark.parametrize("num_units", [1, pytest.param(2, marks=pytest.mark.explore), 5])
def test_nobody_waits_where_units_are_fewer_than_peers(num_units: int) -> None:
    swarm = SimSwarm(1, num_units=num_units)
    found(swarm, 6, lambda: 0.05, met=True)
    swarm.run(30)
    expected = 6 * 30 / 0.05
    assert swarm.trained.total() > 0.9 * expected  # Every step of every peer has trained an item.
    assert all(swarm.covered(epoch) for epoch in range(swarm.oldest))


def view_of(leases: Leases, *others: tuple[str, Share]) -> View:
    return look([(name, share, True) for name, share in others], leases.peer, leases.share(), leases.ranking)


def test_the_ranks_of_those_who_know_each_other_split_every_epoch() -> None:
    ranking = Ranking(7, 100)
    names = ["a", "b", "c"]
    parts = [ranking.ranked(4, name, frozenset(names) - {name}) for name in names]
    assert parts[0] ^ parts[1] ^ parts[2] == (1 << 100) - 1
    assert sum(part.bit_count() for part in parts) == 100
    assert ranking.ranked(4, "a", frozenset()) == (1 << 100) - 1


def test_of_two_who_lease_the_same_unit_the_one_that_has_begun_keeps_it_else_the_higher_rank() -> None:
    ranking = Ranking(7, 1)
    high, low = sorted("ab", key=lambda name: -int(ranking.scores(0, name)[0]))

    def keeps(one: str, begun: bool, other_begun: bool) -> bool:
        mine, theirs = Leases(one, SOURCE, ranking), Leases(low if one == high else high, SOURCE, ranking)
        for leases, begin in ((mine, begun), (theirs, other_begun)):
            leases.claim(0.0)
            if begin:
                leases.begin(0.0)
        dropped = mine.look(view_of(mine, (theirs.peer, theirs.share())), 1.0)
        assert all("better right" in why for _, why in dropped)
        return (0, 0) not in [place for place, _ in dropped]

    for both in (False, True):
        assert keeps(high, both, both)
        assert not keeps(low, both, both)
    for name in (high, low):
        assert keeps(name, True, False)
        assert not keeps(name, False, True)


def test_a_former_life_goes_on_where_it_was() -> None:
    leases = Leases("a", SOURCE, Ranking(7, 20))
    for now in range(5):
        lease, _ = leases.begin(now)
        leases.trained((lease.epoch, lease.unit), 3)
        if now < 4:
            leases.finish((lease.epoch, lease.unit), now)
    again = Leases("a", SOURCE, Ranking(7, 20))
    again.restore(leases.share())
    assert again.begin(9.0)[0] == Lease(lease.epoch, lease.unit, 3)
    assert again.share() == leases.share()


def test_what_the_gone_left_half_finished_is_forgotten_with_its_epoch() -> None:
    leases = Leases("a", SOURCE, Ranking(7, 1))
    gone = Share(SOURCE, 0, (b"",) * EPOCHS_AHEAD, (Lease(0, 0, 3),))
    view = look([("b", gone, False)], "a", leases.share(), leases.ranking)
    assert view.resume == ((0, 0, 3),)
    leases.look(view, 0.0)
    leases.look(replace(view, epoch=MAX_EPOCH, resume=()), 1.0)
    assert leases.begin(2.0)[0] == Lease(MAX_EPOCH, 0, 0)
    leases.finish((MAX_EPOCH, 0), 3.0)
    assert leases.begin(4.0)[0] == Lease(0, 0, 0)  # Epochs have begun anew: nothing of this one was trained.


class LyingSwarm(SimSwarm):
    """Nine honest peers with units of one speed, and a tenth member at its caps that states what it likes."""

    HONEST = 9

    def __init__(self, statement: Callable[["LyingSwarm"], Share], *, is_here: bool = True) -> None:
        super().__init__(1, num_units=64)
        self.statement, self.is_here = statement, is_here
        for number in range(self.HONEST):
            self.join(f"honest {number}", 1.0)
        self.run(150)
        self.trained.clear()
        self.lie()

    def certify(self) -> None:
        self.since["liar"] = 10**9
        super().certify()

    def lie(self) -> None:
        for peer in self.peers.values():
            peer.heard["liar"], peer.news = (open_share(encode(self.statement(self))), self.is_here), True
        self.after(1.0, self.lie)

    def others(self) -> list[tuple[int, int]]:
        """The units that honest peers train now, but for the target."""
        leases = [lease for peer in self.peers.values() for lease in peer.leases.share().leases]
        return sorted({(it.epoch, it.unit) for it in leases if it.done is not None and it.unit != TARGET})


TARGET = 7


def all_but_the_target(swarm: LyingSwarm) -> tuple[bytes, ...]:
    return (((1 << 64) - 1 & ~(1 << TARGET)).to_bytes(8, "little"),) * EPOCHS_AHEAD


def half_finished(swarm: LyingSwarm) -> Share:
    first = int(swarm.now) * MAX_LEASES
    places = [(swarm.oldest + at // 64 % EPOCHS_AHEAD, at % 64) for at in range(first, first + MAX_LEASES)]
    return Share(SOURCE, swarm.oldest, (), tuple(Lease(*it, MAX_DONE) for it in places if it[1] != TARGET))


LIES: dict[str, tuple[Callable[[LyingSwarm], Share], bool]] = {
    "all but one are finished": (lambda swarm: Share(SOURCE, swarm.oldest, all_but_the_target(swarm)), True),
    "so they are in far epochs": (lambda swarm: Share(SOURCE, swarm.oldest + 1000, all_but_the_target(swarm)), True),
    "I have begun what you train": (
        lambda swarm: Share(
            SOURCE, swarm.oldest, (), tuple(Lease(*place, 3) for place in swarm.others()[:MAX_LEASES])
        ),
        True,
    ),
    "I had trained nearly all of them": (half_finished, False),
}


@pytest.mark.parametrize("lie", LIES)
def test_one_liar_of_ten_has_no_unit_trained_twice_as_often_as_is_fair(lie: str) -> None:
    swarm = LyingSwarm(LIES[lie][0], is_here=LIES[lie][1])
    swarm.run(500)
    items = Counter[int]()
    for (_, unit, _), times in swarm.trained.items():
        items[unit] += times
    fair = items.total() / 64
    assert fair > 10 * UNIT_ITEMS  # Epochs enough to see how often a unit comes.
    assert max(items.values()) < 2 * fair
    assert min(items[unit] for unit in range(64)) > 0.25 * fair


def test_an_epoch_that_others_call_finished_ends_once_a_peer_has_trained_its_certified_part() -> None:
    leases = Leases("a", SOURCE, Ranking(7, 20))
    begun = []
    for now in range(24):
        told = Share(SOURCE, leases.epoch, (bytes([255, 255, 15]),) * EPOCHS_AHEAD)
        leases.look(look([("b", told, True)], "a", leases.share(), leases.ranking, {"a": 10, "b": 10}), now)
        lease, why = leases.begin(now)
        assert why == CLAIMED
        begun.append(lease.epoch)
        leases.finish((lease.epoch, lease.unit), now)
    part = round(0.5 * 20 * PART)
    assert begun == [epoch for epoch in (1, 2, 3) for _ in range(part)]  # A newcomer takes their word for the first.


def test_a_unit_that_a_peer_gave_up_is_continued_where_it_was() -> None:
    leases = Leases("a", SOURCE, Ranking(7, 20))
    lease, _ = leases.begin(0.0)
    leases.trained((0, lease.unit), 3)
    above = next(name for name in "bcdefgh" if not leases.ranking.ranked(0, "a", frozenset(name)) >> lease.unit & 1)
    rival = Share(SOURCE, 0, (), (Lease(0, lease.unit, 1),))
    assert leases.look(view_of(leases, (above, rival)), 1.0) == [((0, lease.unit), "another peer has the better right to it")]
    leases.look(view_of(leases), 2.0)  # It has left.
    begun = [leases.begin(3.0)[0] for _ in range(20)]
    assert Lease(0, lease.unit, 3) in begun


def test_members_with_half_of_the_others_certified_tokens_take_a_peer_along() -> None:
    def epoch(*stated: tuple[str, int], **credit: int) -> int:
        others = [(name, Share(SOURCE, at), True) for name, at in stated]
        return look(others, "me", Share(SOURCE, 1), Ranking(7, 20), credit).epoch

    assert epoch(("a", 3), ("b", 2), ("c", 0), a=1, b=1, c=1) == 2
    assert epoch(("a", 3), ("b", 0), ("c", 0), a=1, b=1, c=1) == 1
    assert epoch(("a", 3), ("b", 0), a=2, b=1) == 3
    assert epoch(("a", 3), me=1) == 1  # A key without certified tokens takes nobody along.
    assert epoch(("a", 3), ("b", 3), ("c", 3)) == 1  # Before the first certificate keys are free.


def test_the_largest_share_fits_a_member_record() -> None:
    lease = Lease(MAX_EPOCH + EPOCHS_AHEAD, MAX_UNITS - 1, MAX_DONE)
    largest = Share(SOURCE, MAX_EPOCH, (bytes(MAX_UNITS // 8),) * EPOCHS_AHEAD, (lease,) * MAX_LEASES)
    assert len(encode(largest)) <= MAX_SHARE_BYTES
    assert open_share(encode(largest)) == largest
    assert open_share(b"") == Share()


ALL_DONE = (b"\xff" * (MAX_UNITS // 8),) * EPOCHS_AHEAD
FAR = tuple(Lease(MAX_EPOCH + EPOCHS_AHEAD, unit, MAX_DONE) for unit in range(MAX_LEASES))


@pytest.mark.parametrize("epoch", [MAX_EPOCH, MAX_EPOCH - 1, MAX_EPOCH - EPOCHS_AHEAD])
@pytest.mark.parametrize("finished", [(), ALL_DONE])
@pytest.mark.parametrize("leases", [(), FAR])
def test_one_view_moves_my_epoch_by_a_few_and_a_newcomers_not_without_bounds(
    epoch: int, finished: tuple[bytes, ...], leases: tuple[Lease, ...]
) -> None:
    mine = Leases("a", SOURCE, Ranking(7, 20))
    for turn in range(4):
        mine.look(view_of(mine, ("b", open_share(encode(Share(SOURCE, epoch, finished, leases))))), 0.0)
        assert mine.epoch <= MAX_JUMP + EPOCHS_AHEAD + 2 * EPOCHS_AHEAD * turn
        mine.claim(0.0)
        begun, _ = mine.begin(0.0)
        mine.trained((begun.epoch, begun.unit), 1)
        assert open_share(encode(mine.share())) == mine.share()
        mine.finish((begun.epoch, begun.unit), 0.0)


def test_contributors_without_tenure_neither_move_an_epoch_nor_do_its_work_however_many_they_are() -> None:
    """Keys are free, and contribute from their first round on."""
    roster = [Identity.from_seed(bytes([number]) * 32) for number in range(1, 25)]
    me, *others = (identity.peer_id for identity in roster)
    honest = {me, *others[:5]}

    def trust_of(peer: str) -> TrustRecord:
        return TrustRecord(1.0, YOUNG_ROUNDS if peer in honest else 1)

    value = value_of(certify(None, 24, roster=roster, trust_of=trust_of, credit=(1,) * 24))
    mine, far = Leases(me, SOURCE, Ranking(7, 20)), Share(SOURCE, MAX_EPOCH, ALL_DONE)
    shares = [(peer, mine.share() if peer in honest else far, True) for peer in others]
    speeds = speeds_in(value, {peer: 100.0 if peer in honest else 1e9 for peer in [me, *others]}, earned=True)
    view = look(shares, me, mine.share(), mine.ranking, shares_in(value, earned=True), speeds)
    assert (view.epoch, view.peers) == (0, 24)
    assert view.work == pytest.approx(len(honest) / 0.8)
    assert look(shares, me, mine.share(), mine.ranking, shares_in(value, earned=False)).epoch > 0


def test_who_does_not_count_or_has_not_said_what_its_data_is_moves_no_epoch() -> None:
    mine = Leases("a", SOURCE, Ranking(7, 20))
    far, nameless = Share(SOURCE, MAX_EPOCH, ALL_DONE, FAR), Share(b"", 3, ALL_DONE, (Lease(3, 1, 5),))
    view = look([("gone", far, False), ("new", nameless, True)], "a", mine.share(), mine.ranking)
    assert (view.epoch, view.peers) == (0, 2)
    assert not any((*view.finished, *view.taken, *view.resume))


def test_a_peer_that_was_told_of_the_last_epoch_before_it_was_killed_goes_on_from_there() -> None:
    mine = Leases("a", SOURCE, Ranking(7, 2))
    mine.restore(Share(SOURCE, MAX_EPOCH, (b"\xfd",), (Lease(MAX_EPOCH, 1, MAX_DONE),)))
    epochs = []
    for now in range(4):
        mine.look(view_of(mine), now)
        mine.claim(now)
        lease, _ = mine.begin(now)
        mine.trained((lease.epoch, lease.unit), 1)
        assert open_share(encode(mine.share())) == mine.share()
        mine.finish((lease.epoch, lease.unit), now)
        epochs.append(lease.epoch)
    assert epochs == [MAX_EPOCH, 0, 0, 1]


def test_more_leases_than_a_record_holds_are_published_with_the_begun_ones_first() -> None:
    mine = Leases("a", SOURCE, Ranking(7, 40))
    mine.claim(0.0)
    for _ in range(MAX_LEASES):
        mine.begin(0.0)
    mine.claim(0.0)
    share = open_share(encode(mine.share()))
    assert [lease.done for lease in share.leases] == [0] * MAX_LEASES


@pytest.mark.parametrize("share", [(MAX_EPOCH + 1, 0, 0), (0, MAX_EPOCH + EPOCHS_AHEAD + 1, 0), (0, 0, MAX_DONE + 1)])
def test_a_share_beyond_its_limits_is_malformed(share: tuple[int, int, int]) -> None:
    @dataclass(frozen=True, slots=True)
    class AnyLease:
        epoch: Annotated[int, Between(0, 2**53 - 1)]
        unit: Annotated[int, Between(0, 0)]
        done: Annotated[int, Between(0, 2**53 - 1)]

    @dataclass(frozen=True, slots=True)
    class AnyShare:
        source: Annotated[bytes, Size(16)]
        epoch: Annotated[int, Between(0, 2**53 - 1)]
        finished: Annotated[tuple[Annotated[bytes, Size(0)], ...], Size(0)]
        leases: Annotated[tuple[AnyLease, ...], Size(1)]

    epoch, lease_epoch, done = share
    with pytest.raises(MalformedMessage, match="is not between"):
        open_share(encode(AnyShare(SOURCE, epoch, (), (AnyLease(lease_epoch, 0, done),))))


def test_a_newcomer_begins_where_nobody_else_is_until_it_is_known() -> None:
    ranking = Ranking(7, 20)
    other = Leases("b", SOURCE, ranking).share()
    for peers, now, epoch in [((), 0.0, 0), ((("b", other),), 0.0, EPOCHS_AHEAD - 1), ((("b", other),), SETTLE, 0)]:
        leases = Leases("a", SOURCE, ranking)
        leases.look(view_of(leases, *peers), 0.0)
        lease, why = leases.begin(now)
        assert (lease.epoch, why) == (epoch, "by rank")


def test_a_lease_counts_once_it_has_been_known_for_a_while() -> None:
    ranking = Ranking(7, 20)
    other = Leases("b", SOURCE, ranking).share()
    for now, expected in [(SETTLE - 0.1, "by rank"), (SETTLE, "settled")]:
        leases = Leases("a", SOURCE, ranking)
        leases.look(view_of(leases, ("b", other)), 0.0)
        leases.claim(0.0)
        assert leases.begin(now)[1] == expected


def test_what_another_peer_has_finished_meanwhile_is_dropped() -> None:
    leases = Leases("a", SOURCE, Ranking(7, 20))
    lease, _ = leases.begin(0.0)
    bits = (1 << lease.unit).to_bytes(3, "little")
    dropped = leases.look(view_of(leases, ("b", Share(SOURCE, lease.epoch, (bits,)))), 1.0)
    assert dropped == [((lease.epoch, lease.unit), "another peer has finished it")]
    assert not leases.holds((lease.epoch, lease.unit))


def test_by_rank_nobody_takes_what_somebody_else_ranks_higher_for() -> None:
    ranking = Ranking(7, 1)
    other = Leases("b", SOURCE, ranking).share()
    leases = Leases("a", SOURCE, ranking)
    leases.look(view_of(leases, ("b", other)), 0.0)
    mine = [epoch for epoch in range(EPOCHS_AHEAD) if ranking.ranked(epoch, "a", frozenset("b"))]
    assert 0 < len(mine) < EPOCHS_AHEAD
    begun = [leases.begin(SETTLE) for _ in range(len(mine) + 1)]
    assert [lease.epoch for lease, why in begun if why == "by rank"] == mine
    assert begun[-1][1] == UNSETTLED
