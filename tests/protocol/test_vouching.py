"""The owner's keeper vouches by itself: a run that was published from a laptop outlives it."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
from flockstep.collectives.accountability import tenure
from flockstep.optim.member import vouching
from flockstep.peer import wire
from flockstep.peer.errors import NetworkError
from flockstep.peer.memory.network import run_virtual
from flockstep.peer.node.bulk import Blob
from flockstep.peer.node.file_blob import FileBlob
from flockstep.peer.transport import PeerId
from support.keepers import KeptRun, Peer, all_at, in_memory, kept_run, key

OWNER = 10
KEEPERS = (20, 21)
TRAINERS = (0, 1, 2)


def live(body: Callable[[KeptRun], Any], folder: Path, vouch_after: int) -> None:
    signed = kept_run(1, first=OWNER, vouch_after=vouch_after)
    run_virtual(partial(in_memory, signed, folder, body), seed=0)


def scatter(run: KeptRun, numbers: Sequence[int]) -> None:
    """Give each of these peers a network of its own."""
    run.networks |= {key(number).peer_id: f"192.0.{number}.0/24" for number in numbers}


def vouched(owner: Peer) -> list[tuple[int, PeerId]]:
    return [(int(str(event["round"])), str(event["peer"])) for event in owner.named("owner.vouched")]


def voters(keeper: Peer) -> set[PeerId]:
    assert keeper.keeper is not None
    assert keeper.keeper.kept is not None
    return set(keeper.keeper.kept.averager.electorate.voters)


def times(peer: Peer) -> list[float]:
    return [float(str(event["time"])) for event in peer.named("round.done")]


def test_a_run_outlives_its_owners_computer_without_a_pause(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        scatter(run, (*KEEPERS, *TRAINERS))
        owner, *keepers = [run.keep(number) for number in (OWNER, *KEEPERS)]
        trainers = [run.train(number) for number in TRAINERS]
        await run.until(lambda: all_at([*keepers, *trainers], 18))
        stated = vouched(owner)
        assert [peer for _, peer in stated[:2]] == sorted(keeper.peer for keeper in keepers)  # Those that keep, first.
        assert stated[0][0] == stated[1][0] >= 4  # A pair, when both had the rounds,
        assert all(after - before >= 5 for (before, _), (after, _) in pairwise(stated[1:]))  # then one in five rounds.
        assert stated[2][0] - stated[1][0] >= 10
        everybody = {peer.peer for peer in (owner, *keepers, *trainers)}
        assert voters(keepers[0]) == {owner.peer, *(peer for _, peer in stated)} <= everybody
        assert len(voters(keepers[0])) >= 4

        run.kill(owner)
        await run.until(lambda: all_at([*keepers, *trainers], 34))
        assert owner.peer not in voters(keepers[0])
        for peer in trainers:  # Virtual time: a phase of five seconds, and what its peers need to become ready.
            assert max(after - before for before, after in pairwise(times(peer)[4:])) < 12.0
            assert not peer.named("agreement.stalled")
        shown = {event["reason"] for keeper in keepers for event in keeper.named("owner.stated")}
        assert f"4 rounds by round {stated[0][0]}, seen in 192.0.20.0/24" in shown

    live(body, tmp_path, 4)


def test_an_owner_that_trains_votes_and_vouches_too(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        scatter(run, (0, 1))
        owner, *trainers = [run.train(number) for number in (OWNER, 0, 1)]
        await run.until(lambda: all_at([owner, *trainers], 10))
        assert {peer for _, peer in vouched(owner)} == {peer.peer for peer in trainers}
        run.kill(owner)
        await run.until(lambda: all_at(trainers, 14))  # Two of three votes: after a stall, by majority.

    live(body, tmp_path, 4)


def test_one_of_a_network_counts_and_whoever_is_not_seen_in_one_does_not(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        scatter(run, (*KEEPERS, 0))
        run.networks[key(1).peer_id] = run.networks[key(20).peer_id]
        owner, *keepers = [run.keep(number) for number in (OWNER, *KEEPERS)]
        trainers = [run.train(number) for number in TRAINERS]
        await run.until(lambda: all_at([owner, *keepers, *trainers], 18))
        assert {peer for _, peer in vouched(owner)} == {key(number).peer_id for number in (*KEEPERS, 0)}
        refused = {str(event["peer"]): str(event["reason"]) for event in owner.named("owner.not_vouched")}
        assert refused[key(1).peer_id] == f"of its network, 192.0.20.0/24, another one counts: {key(20).peer_id}"
        assert refused[key(2).peer_id] == "its network is not known: it is reached through a relay"
        assert len(owner.named("owner.not_vouched")) == 2  # Said once.
        assert not [event for peer in (*keepers, *trainers) for event in peer.named("owner.not_vouched")]

    live(body, tmp_path, 3)


def test_nobody_becomes_the_second_of_two_voters(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        scatter(run, (20,))
        owner, keeper, trainer = run.keep(OWNER), run.keep(20), run.train(0)
        await run.until(lambda: all_at([owner, keeper, trainer], 4))
        examined = examinations(keeper)
        await run.until(lambda: all_at([owner, keeper, trainer], 12))
        assert vouched(owner) == []
        assert 1 <= len(examined) <= 2  # Once in five rounds: a leaf has 4 MiB.
        assert voters(owner) == {owner.peer}
        scatter(run, (0,))
        await run.until(lambda: all_at([owner, keeper, trainer], 18))
        assert {peer for _, peer in vouched(owner)} == {keeper.peer, trainer.peer}

    live(body, tmp_path, 5)


def test_a_restart_counts_the_same_rounds_and_repeats_no_statement(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        scatter(run, (*KEEPERS, *TRAINERS))
        owner, *keepers = [run.keep(number) for number in (OWNER, *KEEPERS)]
        trainers = [run.train(number) for number in TRAINERS]
        await run.until(lambda: len(vouched(owner)) == 2)
        first = vouched(owner)
        run.kill(owner)
        await trio.sleep(60)
        again = run.keep(OWNER)
        await run.until(lambda: all_at([again, *keepers, *trainers], first[0][0] + 12))
        later = vouched(again)
        assert not {peer for _, peer in first} & {peer for _, peer in later}
        assert later[0][0] >= first[0][0] + 10  # The pair counts for two.
        assert later[0][0] <= first[0][0] + 12  # Its rounds before the restart count.

    live(body, tmp_path, 4)


@pytest.mark.parametrize("hides", ["checkpoints", "leaves"])
def test_a_peer_that_shows_no_state_is_not_vouched_for(tmp_path: Path, hides: str) -> None:
    async def body(run: KeptRun) -> None:
        scatter(run, (*KEEPERS, *TRAINERS))
        owner, *keepers = [run.keep(number) for number in (OWNER, *KEEPERS)]
        trainers = [run.train(number) for number in TRAINERS]
        await run.until(lambda: all_at([owner, *keepers, *trainers], 2))
        (hides_state if hides == "checkpoints" else hides_leaves)(keepers[0])
        await run.until(lambda: all_at([owner, *keepers, *trainers], 12))
        assert keepers[0].peer not in {peer for _, peer in vouched(owner)}
        assert len(vouched(owner)) >= 2
        assert [event["peer"] for event in owner.named("owner.not_vouched")] == [keepers[0].peer]

    live(body, tmp_path, 4)


def test_where_half_of_the_log_is_full_nobody_is_vouched_for_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (tenure, vouching):
        monkeypatch.setattr(module, "MAX_STATED", 2)

    async def body(run: KeptRun) -> None:
        scatter(run, (*KEEPERS, *TRAINERS))
        owner, *keepers = [run.keep(number) for number in (OWNER, *KEEPERS)]
        trainers = [run.train(number) for number in TRAINERS]
        await run.until(lambda: all_at([owner, *keepers, *trainers], 18))
        assert len(vouched(owner)) == 2
        (event,) = owner.named("owner.not_vouched")
        assert (event["peer"], "by hand only" in str(event["reason"])) == (owner.peer, True)

    live(body, tmp_path, 5)


def examinations(peer: Peer) -> list[PeerId]:
    """Return a list that fills with those that ask a keeper which checkpoints it has."""
    found: list[PeerId] = []
    assert peer.node is not None
    answer = peer.node._ask_handlers[wire.StateAsk]

    async def count(asker: PeerId, question: wire.StateAsk) -> object:
        found.append(asker)
        return await answer(asker, question)

    peer.node.on_ask(wire.StateAsk, count)
    return found


def hides_state(peer: Peer) -> None:
    """Let a keeper refuse to say which checkpoints it has."""

    async def refuse(asker: PeerId, question: wire.StateAsk) -> object:
        raise NetworkError("I give no state")

    assert peer.node is not None
    peer.node.on_ask(wire.StateAsk, refuse)


def hides_leaves(peer: Peer) -> None:
    """Let a keeper name the leaves of its checkpoints, and serve none of them."""
    assert peer.node is not None
    blobs, find = peer.node.blobs, peer.node.blobs.find

    def hide(key: bytes, reader: PeerId) -> Blob | FileBlob | None:
        found = find(key, reader)
        return None if isinstance(found, FileBlob) else found

    blobs.find = hide  # type: ignore[method-assign]
