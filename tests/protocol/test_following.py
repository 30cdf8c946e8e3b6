"""A member that cannot follow a setting of a revision keeps the run, and trains again when that is revised back."""

from functools import partial
from pathlib import Path

import pytest
import trio
from flockstep.dht.run.revision import UNREVISED, Revision, revised, settings_of
from flockstep.dht.run.statements import OwnerStatement, OwnerStatements
from flockstep.peer.base.errors import CannotFollow
from flockstep.peer.memory.network import run_virtual
from flockstep.scripts.peers import unfollowed
from flockstep.scripts.peers.unfollowed import Watch
from support.keepers import KeptRun, Peer, in_memory, kept_run, key
from support.revisions import NAMES, WALKED

OWNER, BOB = 10, 1


class Walk:
    """A run that its owner revises again and again."""

    def __init__(self, run: KeptRun) -> None:
        self.run = run
        self.owner, self.bob = run.train(OWNER), run.train(BOB)
        self.everybody = [self.owner, self.bob]
        self.log = OwnerStatements(run.signed.run_id, key(OWNER).peer_id)

    def revise(self, settings: str) -> None:
        self.log = self.log.sign(key(OWNER), OwnerStatement("revise", key(OWNER).peer_id, settings=settings))
        voter = self.owner.conduct if self.owner.keeper is None else None
        kept = None if self.owner.keeper is None else self.owner.keeper.kept
        conduct = voter if kept is None else kept.archive.conduct
        assert conduct is not None
        conduct.revision = self.log.revision

    async def stand_aside(self, peer: Peer) -> tuple[Peer, Watch]:
        """End a member's training: it keeps the run under the newest revision, which it cannot follow."""
        self.run.kill(peer)
        refused = CannotFollow("its data are not there")
        refused.revision = len(self.log)
        kept, watch = self.run.keep(OWNER if peer is self.owner else BOB), Watch(refused, lambda signed: False)
        self.everybody.append(kept)
        await self.run.until(lambda: kept.keeper is not None and kept.keeper.is_settled)
        assert kept.keeper is not None
        assert not watch.ends(kept.keeper)
        return kept, watch

    async def come_back(self, peer: Peer, watch: Watch) -> Peer:
        """Train again once the member that keeps would."""
        keeper = peer.keeper
        assert keeper is not None
        await self.run.until(lambda: watch.ends(keeper))
        self.run.kill(peer)
        back = self.run.train(OWNER if peer is self.owner else BOB)
        self.everybody.append(back)
        return back

    def check_honesty(self) -> None:
        for peer in self.everybody:
            for wrong in ("peer.charged", "peer.banned", "state.drift", "round.void"):
                assert [str(event) for event in peer.named(wrong)] == []


def contributed(peer: Peer) -> bool:
    """Return True once a member has contributed to a round since it was started."""
    return any(peer.peer in event["cut"] for event in peer.named("round.done"))  # type: ignore[operator]  # A list.


def test_a_member_that_cannot_follow_a_setting_keeps_the_run_until_it_is_revised_back(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        walk, watch, settings = Walk(run), None, {}
        await run.until(lambda: contributed(walk.bob))
        for name in (*NAMES, ""):  # Each revision takes the one before it back.
            walk.revise(settings_of(run.signed.manifest, UNREVISED, {name: WALKED[name][0]} if name else {}))
            if watch is not None:
                walk.bob = await walk.come_back(walk.bob, watch)
                assert watch.why == "the run's owner has revised it again", name
            settings[name] = revised(run.signed.manifest, Revision(1, walk.log.statements[-1].settings))
            await run.until(lambda name=name: contributed(walk.bob) and walk.bob.settings[walk.bob.round] == settings[name])  # type: ignore[misc]
            assert walk.owner.settings[walk.bob.round] == settings[name]
            if name:
                walk.bob, watch = await walk.stand_aside(walk.bob)
        await run.until(lambda: walk.owner.at == walk.bob.at)
        walk.check_honesty()

    run_virtual(partial(in_memory, kept_run(1, first=OWNER, evaluate_every=1), tmp_path, body), seed=0)


def test_a_run_that_nobody_can_train_is_revised_all_the_same(tmp_path: Path) -> None:
    """No round is certified that could name the revision: those that keep learn of it from the owner's statements."""

    async def body(run: KeptRun) -> None:
        walk = Walk(run)
        await run.until(lambda: contributed(walk.bob))
        walk.revise('{"data.source":"text:nowhere"}')
        await run.until(lambda: walk.bob.settings[walk.bob.round].data.source == "text:nowhere")
        bob, watch = await walk.stand_aside(walk.bob)
        walk.owner, _ = await walk.stand_aside(walk.owner)
        await run.state(walk.log.sign(key(OWNER), OwnerStatement("revise", key(OWNER).peer_id, settings="{}")))
        bob = await walk.come_back(bob, watch)
        assert watch.why == "the run's owner has revised it again"
        await run.until(lambda: bob.round > 0 and bob.settings[bob.round] == run.signed.manifest)
        walk.check_honesty()

    run_virtual(partial(in_memory, kept_run(1, first=OWNER, evaluate_every=1), tmp_path, body), seed=0)


def test_a_setting_of_training_that_only_a_later_version_knows_ends_no_keeper(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        walk = Walk(run)
        await run.until(lambda: contributed(walk.bob))
        kept, _ = await walk.stand_aside(walk.bob)
        walk.revise('{"inner.future":1,"outer.lr":0.5}')
        await run.until(lambda: kept.keeper is not None and kept.keeper.settings.outer.lr == 0.5)
        now = kept.at[0]
        await run.until(lambda: kept.at[0] > now + 1)
        walk.check_honesty()

    run_virtual(partial(in_memory, kept_run(1, first=OWNER, evaluate_every=1), tmp_path, body), seed=0)


def test_a_member_that_keeps_tries_again_in_time_and_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfollowed, "RETRY_SECONDS", 60.0)

    async def body(run: KeptRun) -> None:
        walk = Walk(run)
        await run.until(lambda: contributed(walk.bob))
        bob, watch = await walk.stand_aside(walk.bob)
        began = trio.current_time()
        bob = await walk.come_back(bob, watch)
        assert watch.why == "1 minutes have passed"
        assert trio.current_time() >= began + 60
        await run.until(lambda: contributed(bob))
        kept, watch = await walk.stand_aside(bob)
        walk.revise('{"outer.rounds":1}')
        await run.until(lambda: kept.keeper is not None and watch.ends(kept.keeper))
        assert watch.end == kept.at == walk.owner.at

    run_virtual(partial(in_memory, kept_run(1, first=OWNER, evaluate_every=1), tmp_path, body), seed=0)
