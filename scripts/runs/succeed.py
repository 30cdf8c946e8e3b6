"""`flockstep run succeed`: ends a run of mine, and has it go on as another one from its last certified state.

It does so by two statements (`dht.run.succession`). After the first one the members stand still; the command asks all that
answer until they show that. The second one names a run whose start this computer holds by then, so that it never lacks one.
Whatever was done when the command is interrupted is found again by the next call, which goes on from there.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from ...collectives.accountability.trust import TRUST_WINDOW
from ...collectives.chain.chain import NOTHING
from ...collectives.chain.fork_choice import training
from ...collectives.picture.fold import ChainView
from ...collectives.picture.picture import RecentRound
from ...collectives.spec import charter_of
from ...collectives.state.archive import CHECKPOINTS_FOLDER
from ...collectives.state.checkpoint_file import load_checkpoint
from ...collectives.state.take_state import fetch_start
from ...collectives.state.transfer import Offer, ask_offers
from ...collectives.vector.codec import CELL
from ...dht.keys import run_key
from ...dht.members.owner_log import publish_pages, read_pages
from ...dht.members.remembered import Remembered
from ...dht.members.table import Member
from ...dht.rendezvous import find_manifest, find_members, visit
from ...dht.run.link import JoinLink
from ...dht.run.manifest import Earned, Manifest, SignedManifest
from ...dht.run.revision import revised_by
from ...dht.run.statements import OwnerStatement, OwnerStatements, OwnerVerb
from ...dht.run.succession import carried, is_ending, manifest_after, successor_of, with_settings
from ...peer.base.background import background
from ...peer.base.config import PeerConfig
from ...peer.base.errors import LocalError, NetworkError, RemoteError, UsageError
from ...peer.base.home_lock import HOME_LOCK, is_locked
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
"""The longest wait for members to stand still, beside the ceiling of a round: they look for statements every 30 s."""
LOOK_PERIOD = 1.0
"""Seconds between two looks at who stands still."""
Say = Callable[[str], None]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the owner wants of the next run: its first voters beside the owner, none for those that are here, and settings."""

    keepers: Sequence[PeerId]
    changes: Mapping[str, Any]


def succeed_run(text: str, keepers: Sequence[PeerId], given: Sequence[str], config: PeerConfig, say: Say) -> tuple[str, bool]:
    """End the run of a link, and publish the run that goes on. Raises `FlockstepError`.

    `keepers` are its first voters beside me; none: those of the run that are here. `given` are settings, `NAME=VALUE`, as a
    revision names them. Returns the new link, and whether this computer is to keep the new run from now on.
    """
    for peer in keepers:
        if not is_peer_id(peer):
            raise UsageError(f"--keepers: {peer!r} is not a peer id", remedy="`flockstep run info LINK --json` shows them")
    is_kept_here = is_locked(config.home / HOME_LOCK)
    link = JoinLink.parse(text)
    after = Succeeding(link, config, Wishes(keepers, dict(map(parse_change, given))), say).run()
    if is_kept_here:
        say("The peer of this home folder follows by itself.")
    return str(replace(link, run_id=after, at=None)), not is_kept_here


class Succeeding:
    """One call of the command."""

    def __init__(self, link: JoinLink, config: PeerConfig, wishes: Wishes, say: Say) -> None:
        self._link, self._config, self._wishes, self._say = link, config, wishes, say
        self._me = Identity.load_or_create(identity_path(config.home))

    def run(self) -> str:
        """End the run unless it has ended, name the next one unless that is named, publish all; returns its id."""
        signed, log = self._go(self._read)
        if not (run := successor_of(log)):
            # A closed run gives its state to members alone, of whom I am one; where my own peer runs, its disk has all.
            is_closed = signed.manifest.admission.kind != "open"
            me = self._me if is_closed and not is_locked(self._config.home / HOME_LOCK) else None
            watched(self._link, self._config, partial(self._try, signed, log), me)
            if not is_ending(log):
                log = self._go(partial(self._state, log, [OwnerStatement(OwnerVerb.SUCCEED, self._me.peer_id)]))
            self._say("The run has ended: its members stand still once they have heard of it, as a rule within a minute.")
            chain, here = watched(self._link, self._config, partial(self._decide, signed, log), me)
            after = self._go(partial(self._take, signed, log, chain, here), me)
            self._go(partial(self._publish, log, after))
            return after.run_id
        self._say(f"This run goes on as run {run} already, and can go on as no other one.")
        with closing(Telemetry()) as telemetry:
            made = Remembered(self._folder(run), run, telemetry).manifest()
        if made is not None:
            self._go(partial(self._publish, log, made))
        return run

    def _folder(self, run: str) -> Path:
        return self._config.home / "runs" / run

    def _go(self, errand: Callable[["Node", "Directory"], Awaitable[_T]], me: Identity | None = None) -> _T:
        with closing(Telemetry(log_path(self._config.home))) as telemetry:
            return visit(self._link, self._config, telemetry, errand, me)

    async def _read(self, node: "Node", directory: "Directory") -> tuple[SignedManifest, OwnerStatements]:
        """Return the run, and what I have stated so far."""
        signed = await find_manifest(directory, self._link.run_id)
        check_owner(signed.manifest, self._me)
        return signed, await self._log(node, directory, signed.run_id)

    async def _log(self, node: "Node", directory: "Directory", run: str) -> OwnerStatements:
        kept = Remembered(self._folder(run), run, node.telemetry)
        return await read_pages(directory, kept.statements(OwnerStatements(run, self._me.peer_id)))

    async def _state(
        self, known: OwnerStatements, stated: Sequence[OwnerStatement], node: "Node", directory: "Directory"
    ) -> OwnerStatements:
        """Sign statements after those that are known, keep them, and publish all."""
        signed = Remembered(self._folder(known.run), known.run, node.telemetry).append(known, self._me, stated)
        await publish_pages(directory, signed, OwnerStatements(known.run, known.owner))
        return signed

    async def _try(self, signed: SignedManifest, log: OwnerStatements, watcher: "RunWatcher") -> None:
        """Make the manifest of the next run as if the run had ended now: what can be refused is refused before it ends."""
        await watcher.look(TRUST_WINDOW)
        view = watcher.chain
        if view.head == NOTHING:
            remedy = "if it has none, publish another run by `flockstep run create`"
            raise UsageError("no certified round of this run is known here: there is no state to go on from", remedy=remedy)
        here = frozenset(member.peer for member in training(watcher.members()))
        SignedManifest.sign(next_manifest(signed, log, self._wishes, view, view.recent[0], here), self._me)

    async def _decide(
        self, signed: SignedManifest, log: OwnerStatements, watcher: "RunWatcher"
    ) -> tuple[ChainView, Sequence[Member]]:
        """Return the chain, and the members that stand still."""
        seconds = STAND_SECONDS + signed.manifest.timing.ceiling
        here = await standing(watcher, log.hash, seconds, self._say)
        await watcher.look(TRUST_WINDOW)
        return watcher.chain, here

    async def _take(
        self,
        signed: SignedManifest,
        log: OwnerStatements,
        chain: ChainView,
        here: Sequence[Member],
        node: "Node",
        directory: "Directory",
    ) -> SignedManifest:
        """Take the newest certified state that these members hold; return the run that goes on from it."""
        await find_members(node, directory, signed.run_id)  # So that their addresses are known.
        peers = [member.peer for member in here]
        offers = await ask_offers(node, peers, signed.run_id, charter=charter_of(signed))
        known = {row.hash: row for row in chain.recent}
        for offer in sorted((*self._held(signed.run_id), *offers), key=lambda offer: -offer.place.round):
            if (row := known.get(offer.place.head.hash.hex())) is None:
                continue  # It is not on the run's chain.
            manifest = next_manifest(signed, log, self._wishes, chain, row, frozenset(peers))
            after = SignedManifest.sign(manifest, self._me)
            mine = self._folder(signed.run_id) / CHECKPOINTS_FOLDER / str(row.round)
            start = self._folder(after.run_id) / CHECKPOINTS_FOLDER / "0"
            try:
                if not start.is_dir() and not mine.is_dir():
                    self._say(f"Taking the state of round {row.round:,} …")
                    await fetch_start(node, signed.run_id, offer, chain.num_cells * CELL, after.run_id, start)
            except (NetworkError, RemoteError) as error:
                self._say(f"The state of round {row.round:,} could not be taken: {error}")
                continue
            Remembered(self._folder(after.run_id), after.run_id, node.telemetry).keep_manifest(after)
            return after
        remedy = "call this again once a member that has it is here"
        raise NetworkError("no member that answers gives a certified state of the run", remedy=remedy)

    def _held(self, run: str) -> Iterator[Offer]:
        """Yield what my own peer has on this disk."""
        for folder in (self._folder(run) / CHECKPOINTS_FOLDER).glob("[0-9]*"):
            with suppress(LocalError):  # A draft, or a damaged one: others have it.
                yield Offer(load_checkpoint(folder).place, ())

    async def _publish(
        self, log: OwnerStatements, after: SignedManifest, node: "Node", directory: "Directory"
    ) -> None:
        """Publish the next run, with what holds in it, then that this one goes on as it."""
        newest = await read_pages(directory, log)
        if successor_of(newest) not in ("", after.run_id):
            what = f"another computer with your key has had it go on as run {successor_of(newest)} meanwhile"
            raise LocalError(what, remedy="keep that one")
        await directory.put(run_key(after.run_id), after.publishable)
        known = await self._log(node, directory, after.run_id)
        again = [] if known.records else carried(newest, after.manifest.admission.keeper_ids)
        await self._state(known, again, node, directory)
        named = OwnerStatement(OwnerVerb.SUCCEED, self._me.peer_id, settings=after.run_id)
        await self._state(newest, [] if successor_of(newest) else [named], node, directory)
        Remembered(self._folder(log.run), log.run, node.telemetry).keep_successor(after.run_id)
        follows, rounds = after.manifest.follows, after.manifest.num_rounds
        self._say(f"It goes on as run {after.run_id[:SHORT_ID]} after round {follows.round:,}, for {rounds:,} rounds.")


async def standing(watcher: "RunWatcher", statements: bytes, seconds: float, say: Say) -> Sequence[Member]:
    """Wait until all members that hold a state and answer show that they hold these statements; return those that do.

    Who has not shown it after so many seconds is left out. Raises `NetworkError` where nobody has.
    """
    until, said = trio.current_time() + seconds, ""
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
                say(said := line)
        nursery.cancel_scope.cancel()
    for member in here:
        if member not in found:
            say(f"It goes on without {member.peer}, which has not answered in {seconds:g} s.")
    return found


def next_manifest(
    signed: SignedManifest,
    log: OwnerStatements,
    wishes: Wishes,
    chain: ChainView,
    last: RecentRound,
    here: frozenset[PeerId],
) -> Manifest:
    """Return the manifest of the run that goes on from the state of the round `last`, while these members are here.

    Raises `UsageError` for settings that cannot change, and for a run that is over where they say no number of rounds.
    """
    now, charter = revised_by(signed, chain.revision), charter_of(signed).amended(log)
    if now.num_rounds <= last.round and not {"outer.rounds", "rounds"} & wishes.changes.keys():
        remedy = "say for how many it goes on: --set rounds=60"
        raise UsageError("the run is over: all of its rounds are certified", remedy=remedy)
    keepers = frozenset() if charter.keepers is None else charter.keepers | charter.vouched
    voters = set(wishes.keepers) or keepers & here
    if banned := sorted(set(wishes.keepers) & log.bans.keys()):
        raise UsageError(f"--keepers: {banned[0]} is banned", remedy="`flockstep run pardon LINK ID` lifts that")
    earned = [Earned(peer, it.trust, it.rounds) for peer, it in chain.trust.items() if peer not in log.bans]
    at, root = (last.round, bytes.fromhex(last.hash)), bytes.fromhex(last.root)
    manifest = manifest_after(signed, now, at, root, voters - log.bans.keys(), earned)
    return with_settings(manifest, wishes.changes)
