"""`flockstep run succeed`: ends a run of mine, and has it go on as another one from its last certified state.

It does so by two statements (`dht.run.succession`). After the first one the members stand still; the command asks all that
answer until they show that, and the second one names a run that starts from the newest state that they hold. Whatever was
published when the command is interrupted is found again by the next call, which goes on from there.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import trio

from ...collectives.chain.chain import NOTHING
from ...collectives.chain.fork_choice import head_of, training
from ...collectives.spec import charter_of
from ...dht.keys import run_key
from ...dht.members.owner_log import publish_pages, read_pages
from ...dht.members.remembered import Remembered
from ...dht.members.table import Member
from ...dht.rendezvous import visit
from ...dht.run.link import JoinLink
from ...dht.run.manifest import Earned, SignedManifest
from ...dht.run.revision import revised_by
from ...dht.run.statements import OwnerStatement, OwnerStatements, OwnerVerb
from ...dht.run.succession import carried, is_ending, manifest_after, successor_of, with_settings
from ...peer.base.background import background
from ...peer.base.config import PeerConfig
from ...peer.base.errors import NetworkError, UsageError
from ...peer.base.plain import SHORT_ID
from ...peer.base.transport import PeerId
from ...peer.identity import Identity, identity_path, is_peer_id
from ...peer.log.telemetry import Telemetry, log_path
from ..watch.watching import watched
from .owner import check_owner, parse_change

if TYPE_CHECKING:
    from ...collectives.visit.watcher import RunWatcher
    from ...dht.directory.interface import Directory
    from ...peer.node.node import Node

STAND_SECONDS = 150.0
"""The longest wait for members to stand still: they look for statements every 30 s, and a round in between takes its time."""
LOOK_PERIOD = 1.0
"""Seconds between two looks at who stands still."""


def succeed_run(
    text: str, keepers: Sequence[PeerId], given: Sequence[str], config: PeerConfig, write_line: Callable[[str], None]
) -> tuple[str, bool]:
    """End the run of a link, and publish the run that goes on. Raises `FlockstepError`.

    `keepers` are its first voters beside me; none: those of the run that are here. `given` are settings, `NAME=VALUE`, as a
    revision names them. Returns the new link, and whether I vote in the new run.
    """
    link, changes = JoinLink.parse(text), dict(map(parse_change, given))
    for peer in keepers:
        if not is_peer_id(peer):
            raise UsageError(f"--keepers: {peer!r} is not a peer id", remedy="`flockstep run info LINK --json` shows them")
    identity = Identity.load_or_create(identity_path(config.home))
    with closing(Telemetry(log_path(config.home))) as telemetry:
        signed, ended = visit(link, config, telemetry, Ending(link.run_id, config, identity, bool(keepers)).publish)
    if run := successor_of(ended):
        write_line(f"This run goes on as run {run} already, and can go on as no other one.")
        return str(replace(link, run_id=run, at=None)), False
    write_line("The run has ended: its members stand still once they have heard of it, which takes a minute at most.")

    async def decide(watcher: "RunWatcher") -> SignedManifest:
        here = await standing(watcher, ended.hash, write_line)
        return SignedManifest.sign(next_manifest(watcher, signed, ended, keepers, changes, here), identity)

    as_owner = identity if signed.manifest.admission.kind != "open" else None
    after = watched(link, config, decide, as_owner)
    named = OwnerStatement(OwnerVerb.SUCCEED, identity.peer_id, settings=after.run_id)

    async def publish(node: "Node", directory: "Directory") -> None:
        await directory.put(run_key(after.run_id), after.publishable)
        first = carried(ended, after.manifest.admission.keeper_ids)
        await _state(directory, config, identity, OwnerStatements(after.run_id, identity.peer_id), first, node.telemetry)
        await _state(directory, config, identity, ended, [named], node.telemetry)

    with closing(Telemetry(log_path(config.home))) as telemetry:
        visit(link, config, telemetry, publish)
    follows, charter = after.manifest.follows, charter_of(after)
    rounds = f"after round {follows.round:,}, for {after.manifest.num_rounds:,} rounds"
    write_line(f"It goes on as run {after.run_id[:SHORT_ID]} {rounds}.")
    return str(replace(link, run_id=after.run_id, at=None)), identity.peer_id in charter.founders


class Ending:
    """Ends a run of mine, where it has not ended yet."""

    def __init__(self, run: str, config: PeerConfig, identity: Identity, names_keepers: bool) -> None:
        self._run, self._config, self._identity, self._names_keepers = run, config, identity, names_keepers

    async def publish(self, node: "Node", directory: "Directory") -> tuple[SignedManifest, OwnerStatements]:
        """Return the run, and its owner's statements, the last of which ends it. Raises `FlockstepError`."""
        from ...dht.rendezvous import find_manifest

        signed = await find_manifest(directory, self._run)
        check_owner(signed.manifest, self._identity)
        if self._names_keepers and not charter_of(signed).keepers:
            remedy = 'leave it out: [admission] voters = "members" of this run stays'
            raise UsageError("--keepers: in this run its members vote, or its owner alone", remedy=remedy)
        remembered = Remembered(self._config.home / "runs" / self._run, self._run, node.telemetry)
        known = await read_pages(directory, remembered.statements(OwnerStatements(self._run, self._identity.peer_id)))
        end = [] if is_ending(known) else [OwnerStatement(OwnerVerb.SUCCEED, self._identity.peer_id)]
        return signed, await _state(directory, self._config, self._identity, known, end, node.telemetry)


async def _state(
    directory: "Directory",
    config: PeerConfig,
    identity: Identity,
    known: OwnerStatements,
    stated: Sequence[OwnerStatement],
    telemetry: Telemetry,
) -> OwnerStatements:
    """Sign statements after those that are known, keep them, and publish all."""
    remembered = Remembered(config.home / "runs" / known.run, known.run, telemetry)
    signed = remembered.append(known, identity, stated)
    await publish_pages(directory, signed, OwnerStatements(known.run, known.owner))
    return signed


async def standing(watcher: "RunWatcher", statements: bytes, write_line: Callable[[str], None]) -> Sequence[Member]:
    """Wait until all members that hold a state and answer show that they hold these statements; return those that do.

    Who has not shown it after `STAND_SECONDS` is left out. Raises `NetworkError` where nobody has.
    """
    until, said = trio.current_time() + STAND_SECONDS, ""
    async with background() as nursery:
        nursery.start_soon(watcher.run)
        while True:
            await trio.sleep(LOOK_PERIOD)
            away = {member.peer for member in watcher.picture().members if member.here is False}
            here = [member for member in training(watcher.members()) if member.peer not in away]
            found = [member for member in here if member.body.statements == statements]
            is_over = trio.current_time() >= until
            if found and (is_over or len(found) == len(here)):
                break
            if is_over:
                remedy = "start a member that has the run's state on its disk, then call this again"
                raise NetworkError("no member of the run with a state has answered that it stands still", remedy=remedy)
            if (line := f"{len(found)} of {len(here)} members stand still.") != said and here:
                write_line(said := line)
        nursery.cancel_scope.cancel()
    for member in here:
        if member not in found:
            write_line(f"It goes on without {member.peer}, which has not answered in {STAND_SECONDS:g} s.")
    return found


def next_manifest(
    watcher: "RunWatcher",
    signed: SignedManifest,
    statements: OwnerStatements,
    keepers: Sequence[PeerId],
    changes: Mapping[str, Any],
    here: Sequence[Member],
) -> Any:
    """Return the manifest of the run that goes on from the newest certified state that these members hold."""
    chain = watcher.chain
    if chain.head == NOTHING:
        remedy = "publish another run by `flockstep run create`"
        raise UsageError("no round of this run is certified: there is no state to go on from", remedy=remedy)
    if chain.head not in {head_of(member) for member in here}:
        remedy = "call this again once a member that has it is here"
        what = f"round {chain.head.round} is certified, and no member that answers holds its state"
        raise NetworkError(what, remedy=remedy)
    now, charter = revised_by(signed, chain.revision), charter_of(signed).amended(statements)
    if now.num_rounds <= chain.head.round and not {"outer.rounds", "rounds"} & changes.keys():
        remedy = "say for how many it goes on: --set rounds=60"
        raise UsageError("the run is over: all of its rounds are certified", remedy=remedy)
    present = {member.peer for member in here}
    voters = set(keepers) or ((charter.keepers or frozenset()) | charter.vouched) & present
    earned = [Earned(peer, it.trust, it.rounds) for peer, it in chain.trust.items()] if charter.earned else []
    newest = chain.recent[0]
    at, root = (chain.head.round, chain.head.hash), bytes.fromhex(newest.root)
    manifest = manifest_after(signed, now, at, root, voters, earned)
    return with_settings(manifest, changes)
