"""A run whose owner revises each of its settings in turn: all members follow it, and no keeper ends by an unknown one."""

from functools import partial
from pathlib import Path

from flockstep.dht.run.revision import UNREVISED, Revision, revised, settings_of
from flockstep.dht.run.statements import OwnerStatement, OwnerStatements
from flockstep.peer.memory.network import run_virtual
from support.keepers import KeptRun, Peer, in_memory, kept_run, key
from support.revisions import NAMES, WALKED

OWNER, BOB = 10, 1


class Walk:
    """A run that its owner revises again and again."""

    def __init__(self, run: KeptRun) -> None:
        self.run = run
        self.everybody = self.owner, self.bob = run.train(OWNER), run.train(BOB)
        self.log = OwnerStatements(run.signed.run_id, key(OWNER).peer_id)

    def revise(self, settings: str) -> None:
        self.log = self.log.sign(key(OWNER), OwnerStatement("revise", key(OWNER).peer_id, settings=settings))
        assert self.owner.conduct is not None
        self.owner.conduct.revision = self.log.revision

    def check_honesty(self) -> None:
        for peer in self.everybody:
            for wrong in ("peer.charged", "peer.banned", "state.drift", "round.void"):
                assert [str(event) for event in peer.named(wrong)] == []


def contributed(peer: Peer) -> bool:
    """Return True once a member has contributed to a round since it was started."""
    return any(peer.peer in event["cut"] for event in peer.named("round.done"))  # type: ignore[operator]  # A list.


def test_every_setting_that_can_be_revised_is_followed_at_one_boundary(tmp_path: Path) -> None:
    async def body(run: KeptRun) -> None:
        walk = Walk(run)
        await run.until(lambda: contributed(walk.bob))
        for name in (*NAMES, ""):  # Each revision takes the one before it back.
            walk.revise(settings_of(run.signed.manifest, UNREVISED, {name: WALKED[name][0]} if name else {}))
            wanted = revised(run.signed.manifest, Revision(1, walk.log.statements[-1].settings))
            await run.until(lambda wanted=wanted: walk.bob.settings[walk.bob.round] == wanted)  # type: ignore[misc]
            assert walk.owner.settings[walk.bob.round] == wanted, name
        await run.until(lambda: walk.owner.at == walk.bob.at)
        walk.check_honesty()

    run_virtual(partial(in_memory, kept_run(1, first=OWNER, evaluate_every=1), tmp_path, body), seed=0)
