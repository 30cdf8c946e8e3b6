"""Pictures of runs that nobody has trained: certificates by the keepers of a run, folded as any reader does."""

import random
from collections.abc import Sequence
from functools import cache

from flockstep.collectives.chain.certificate import certificate_hash, genesis, value_of
from flockstep.collectives.picture.fold import ChainFold, params_of
from flockstep.collectives.picture.picture import (
    Credit,
    MemberShown,
    Picture,
    RunEvaluation,
    RunProgress,
    RunState,
    RunTrouble,
    Sample,
    TroubleKind,
)
from flockstep.collectives.picture.shown import troubles_of
from flockstep.collectives.picture.votes import VotesHere
from flockstep.collectives.spec import charter_of
from flockstep.collectives.vector.codec import EMPTY
from flockstep.peer import wire
from flockstep.peer.identity import Identity
from support.certificates import decided
from support.keepers import key
from support.light import KEEPERS, SIGNED

BEGAN = 1_700_000_000.0
ROUND_SECONDS = 60.0


@cache
def crowd(peers: int) -> tuple[Identity, ...]:
    """The keepers of the run, and others that train."""
    return (*KEEPERS, *(key(100 + number) for number in range(peers - len(KEEPERS))))


def round_of(
    before: wire.Certificate | None, roster: Sequence[Identity], *, contributors: Sequence[int], flagged: Sequence[int] = ()
) -> wire.Certificate:
    """Return the certificate of the round after `before`, decided by the run's keepers."""
    round_ = 1 if before is None else before.slot.round + 1
    slot = wire.Slot(SIGNED.run_id, round_, genesis(SIGNED.run_id) if before is None else certificate_hash(before))
    members = tuple(sorted(identity.peer_id for identity in roster))
    count = len(members)
    credit = tuple(0 if place in flagged else 250_000 for place in contributors)
    value = wire.Value(
        *slot.decision,
        bytes(32),
        members,
        tuple(range(0, 1900 * count + 1, 1900)),
        (wire.Seat(trust=1.0, rounds=20),) * count,
        bytes(32),
        tuple(contributors),
        (EMPTY,) * count,
        round_.to_bytes(4, "big") + bytes(28),
        (0 if before is None else value_of(before).tokens) + sum(credit),
        tuple(flagged),
        credit=credit,
    )
    return decided(value, slot, KEEPERS)


def big_picture(peers: int = 64, rounds: int = 5_000, *, seed: int = 0) -> Picture:
    """Return the picture of a run that has seen everything: absences, flagged work, a falling loss, samples, credit."""
    chance = random.Random(seed)
    roster = crowd(peers)
    fold = ChainFold(charter_of(SIGNED))
    before: wire.Certificate | None = None
    for number in range(1, rounds + 1):
        contributors = [place for place in range(peers) if chance.random() < 0.93] or [0]
        flagged = [contributors[0]] if chance.random() < 0.02 else []
        before = round_of(before, roster, contributors=contributors, flagged=flagged)
        loss = 2.0 + 8.0 * number**-0.3 + chance.gauss(0, 0.02)
        fold.extend([before], {number: loss}, BEGAN + ROUND_SECONDS * number)
    view = fold.view()
    electorate, head, rows = view.electorate, view.head, view.rows
    members = tuple(_member(it, place, head.round, electorate.votes.get(it.peer_id, 0)) for place, it in enumerate(roster))
    times = {row.round: row.time for row in rows}
    troubles = [*troubles_of(view.recent, times), RunTrouble(0, None, TroubleKind.BAN, roster[-1].peer_id, "sent noise")]
    return Picture(
        run=SIGNED.run_id,
        name="a big run",
        model="gpt",
        by="Ada Example",
        contact="",
        data="text:{stdlib}",
        params=params_of(view.num_cells),
        link=f"flockstep://{SIGNED.run_id}?via=/ip4/192.0.2.1/tcp/4001/p2p/{KEEPERS[0].peer_id}",
        owner=SIGNED.manifest.owner,
        taken_at=BEGAN + ROUND_SECONDS * rounds + 10,
        taken_by=roster[0].peer_id,
        decides="its 4 keepers decide, 3 of 4 votes",
        joining="",
        goes_on="",
        verified="every certificate from the first round on",
        progress=RunProgress(
            round=head.round,
            rounds=2 * rounds,
            tokens=head.tokens,
            tokens_per_s=266_667.0,
            seconds_left=ROUND_SECONDS * rounds,
            round_seconds=ROUND_SECONDS,
            claimed=False,
            state=RunState.TRAINING,
            reason="",
        ),
        rounds=rows,
        recent=view.recent,
        members=members,
        votes=VotesHere(head.round, electorate, electorate.voters[:-1]),
        evaluations=tuple(
            RunEvaluation(number, 2.0 + 8.0 * number**-0.3, (roster[-1].peer_id,), (Sample("The ", f"The flock {number}."),))
            for number in range(5, rounds + 1, max(5, rounds // 40))
        ),
        credit=tuple(Credit(one.peer, "", one.tokens, one.rounds) for one in view.credit),
        troubles=tuple(troubles),
    )


def _member(identity: Identity, place: int, round_: int, votes: int) -> MemberShown:
    keeps = place < len(KEEPERS)
    return MemberShown(
        peer=identity.peer_id,
        name="" if place % 3 else f"peer {place}",
        state="keeping" if keeps else "training",
        device="keeper" if keeps else "NVIDIA GeForce RTX 3060",
        version="0.1.0",
        round=round_,
        step=0 if keeps else 50 * round_,
        tokens=0 if keeps else 250_000 * round_,
        tokens_per_s=0.0 if keeps else 4_000.0 + place,
        loss=None if keeps else 2.5 + place / 100,
        rung="direct" if place % 4 else "relayed",
        up=1e6,
        down=4e6,
        sent=10**9 + place,
        received=10**9 - place,
        root=f"{round_:08x}" + 56 * "0",
        votes=votes,
        here=place != 3,
        trust=1.0 - place / 1000,
        rounds=20,
        credit=250_000 * (round_ - place),
    )
