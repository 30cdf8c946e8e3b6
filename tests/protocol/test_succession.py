"""A run that its owner ends: its members stand still, and follow to no run that they have not agreed to."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio
from flockstep.dht.directory.memory import MemoryDirectory
from flockstep.dht.keys import run_key
from flockstep.dht.members.owner_log import OWNER_PERIOD
from flockstep.dht.run.manifest import Manifest, SignedManifest
from flockstep.dht.run.statements import OwnerStatement, OwnerStatements
from flockstep.dht.run.succession import manifest_after
from flockstep.peer.memory.network import run_virtual
from support.keepers import KeptRun, Peer, all_at, in_memory, kept_run, key

KEEPER = 10
OWNER = key(KEEPER)


def stated(run: KeptRun, *runs: str) -> OwnerStatements:
    log = OwnerStatements(run.signed.run_id, OWNER.peer_id)
    for named in runs:
        log = log.sign(OWNER, OwnerStatement("succeed", OWNER.peer_id, settings=named))
    return log


async def named(run: KeptRun, manifest: Manifest) -> str:
    """Publish a run, and that this one goes on as it."""
    signed = SignedManifest.sign(manifest, OWNER)
    directory = MemoryDirectory(run.board, OWNER.peer_id, (), lambda key, value: 1)
    await directory.put(run_key(signed.run_id), signed.publishable)
    await run.state(stated(run, "", signed.run_id))
    return signed.run_id


def next_of(run: KeptRun, peer: Peer) -> Manifest:
    assert peer.keeper is not None
    kept = peer.keeper.kept
    assert kept is not None
    place = kept.place
    return manifest_after(run.signed, run.signed.manifest, (place.round, place.head.hash), place.root, (), ())


def live(body: object, folder: Path) -> None:
    run_virtual(partial(in_memory, kept_run(2, first=KEEPER), folder, body), seed=0)  # type: ignore[arg-type]


def test_members_stand_still_with_their_state_on_the_disk_until_the_next_run_is_named(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        peers = [run.keep(KEEPER), run.keep(KEEPER + 1), run.train(0), run.train(1)]
        await run.until(lambda: all_at(peers, 3))
        await run.state(stated(run, ""))
        await run.until(lambda: all(peer.named("run.ended") for peer in peers), 3 * OWNER_PERIOD)
        ended = {peer.peer: peer.named("run.ended")[0] for peer in peers}
        before = {peer.peer: len(peer.named("round.done")) for peer in peers}
        for peer in peers:
            kept = [event["round"] for event in peer.named("checkpoint.written")]
            assert kept[-1] == ended[peer.peer]["round"]
        late = run.train(2)
        await run.until(lambda: bool(late.named("run.ended")))
        assert {peer.peer: len(peer.named("round.done")) for peer in peers} == before
        assert {peer.named("run.ended")[0]["root"] for peer in (*peers, late)} == {peers[0].at[1]}

        following = await named(run, next_of(run, peers[0]))
        await run.until(lambda: all(peer.named("run.succeeded") for peer in (*peers, late)), 3 * OWNER_PERIOD)
        assert {peer.named("run.succeeded")[0]["run"] for peer in peers} == {following}
        assert peers[0].keeper is not None
        assert peers[0].keeper.succeeded.is_set()

    live(body, tmp_path)


OTHERS: dict[str, Callable[[Manifest], Manifest]] = {
    "its data differs": lambda it: replace(it, data=replace(it.data, source="text:/home")),
    "another state than the certified one": lambda it: replace(it, start="ee" * 32),
}


@pytest.mark.parametrize("why", OTHERS)
def test_no_member_follows_to_a_run_of_other_data_or_another_state(tmp_path: Path, why: str) -> None:
    async def body(run: KeptRun) -> None:
        peers = [run.keep(KEEPER), run.keep(KEEPER + 1), run.train(0)]
        await run.until(lambda: all_at(peers, 2))
        await run.state(stated(run, ""))
        await run.until(lambda: all(peer.named("run.ended") for peer in peers))
        await named(run, OTHERS[why](next_of(run, peers[0])))
        await run.until(lambda: all(peer.named("succession.refused") for peer in peers))
        assert all(why in str(peer.named("succession.refused")[0]["reason"]) for peer in peers)
        assert not any(peer.named("run.succeeded") for peer in peers)

    live(body, tmp_path)


def test_another_statement_of_the_same_number_begins_no_ended_run_again(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        peers = [run.keep(KEEPER), run.keep(KEEPER + 1), run.train(0)]
        await run.until(lambda: all_at(peers, 2))
        ended, nothing = stated(run, ""), stated(run)
        bans = (nothing.sign(OWNER, OwnerStatement("ban", key(99).peer_id, str(it))) for it in range(1000))
        smaller = next(log for log in bans if log.records[0].signature < ended.records[0].signature)
        await run.state(ended)
        await run.until(lambda: all(peer.named("run.ended") for peer in peers))
        before = [len(peer.named("round.done")) for peer in peers]
        await run.state(smaller)
        await run.until(lambda: all(len(peer.named("owner.stated")) > 1 for peer in peers), 4 * OWNER_PERIOD)
        await trio.sleep(4 * OWNER_PERIOD)  # Of virtual time: in so many seconds there were several rounds.
        assert [len(peer.named("round.done")) for peer in peers] == before

    live(body, tmp_path)
