"""`flockstep runs` and `flockstep run list`: the runs that bootstraps list, and the word of an owner that lists one.

What is shown of a run is in its manifest, whose hash is the run id, except how far it is and how many are in it: that is the
bootstrap's word. It has checked the certificates up to that round where it follows the run; else somebody has published it.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import trio

from ...dht.directory.interface import AsksOneServer, Directory
from ...dht.keys import RUNS_KEY, listing_key, run_key
from ...dht.rendezvous import find_manifest, visit
from ...dht.run.link import MAX_VIA, JoinLink
from ...dht.run.listing import LISTING_FILE, MAX_RUN_LIST_BYTES, ListedRun, RunList, sign_listing, why_not_listed
from ...dht.run.manifest import Manifest, SignedManifest
from ...optim.member.reach import as_revised
from ...optim.models.needs import gigabytes, needs_of, num, size_of_gpt
from ...peer.address import split_p2p
from ...peer.base.config import PeerConfig
from ...peer.base.disk import disk_errors, write_whole
from ...peer.base.errors import NetworkError, RemoteError, UsageError
from ...peer.base.plain import plain_text
from ...peer.base.transport import Address, PeerId
from ...peer.identity import Identity, identity_path
from ...peer.log.telemetry import Telemetry, log_path
from ...peer.node.node import Node
from ...peer.wire.schema import decode
from ..peers.agree import WHO_MAY_JOIN

ANY_RUN = "a" * 52
"""In a link that only names bootstraps."""
MANIFESTS_AT_ONCE = 8
MANIFESTS_SECONDS = 30.0
"""The longest that all manifests together may take: a bootstrap can invent runs that nobody has."""


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A listed run: its manifest, verified, and what a bootstrap says of its progress."""

    signed: SignedManifest
    listed: ListedRun
    link: str


@dataclass(frozen=True, slots=True)
class FoundRuns:
    """What was found of the runs that bootstraps list, by name."""

    runs: tuple[FoundRun, ...]
    missing: int
    """Listed runs of which no manifest came."""


def show_runs(via: Sequence[Address], config: PeerConfig, say: Callable[[str], None], *, as_json: bool) -> None:
    """Show the runs that these bootstraps list. Raises `FlockstepError`."""
    found = find_runs(via, config)
    if as_json:
        say(json.dumps([run_figures(run) for run in found.runs]))
        return
    if found.missing:
        say(f"Of {found.missing} listed runs the manifest was not found; they are not shown.")
    elif not found.runs:
        say("No run is listed there at the moment. An owner lists one with `flockstep run list LINK --add`.")
    for run in found.runs:
        for line in describe_listed(run):
            say(plain_text(line))


def describe_listed(run: FoundRun) -> Iterator[str]:
    """Yield what a volunteer wants to know of a run."""
    figures = run_figures(run)
    manifest, listed = run.signed.manifest, run.listed
    size = f"{num(figures['parameters'])} parameters" if figures["parameters"] is not None else manifest.model_name
    certified = "followed by the bootstrap" if listed.is_followed else "claimed"
    is_over = listed.is_followed and listed.round >= manifest.num_rounds
    progress = f"round {listed.round:,} of {max(listed.round, manifest.num_rounds):,}{', over' * is_over} ({certified})"
    peers = "1 peer" if listed.num_peers == 1 else f"{listed.num_peers} peers"
    yield f"{manifest.name}  {size}  {progress}  {peers} (claimed)"
    yield f"    run      {run.signed.run_id}"
    if figures["memory"] is not None:
        yield f"    needs    {gigabytes(figures['memory'])} of memory, {gigabytes(figures['disk'])} of disk"
    yield f"    open to  {WHO_MAY_JOIN[manifest.admission.kind]}"
    over = f"flockstep keep '{run.link}' takes its model"
    yield from (f"    {line}" for line in ((over,) if is_over else how_to_join(manifest, run.link)))


def how_to_join(manifest: Manifest, link: str) -> Iterator[str]:
    """Yield the lines that say how to join a run: the command, or that it takes a program, and the link for that."""
    if manifest.joining:
        yield manifest.joining
        yield f"link     {link}"
    else:
        yield f"flockstep join '{link}'"


def run_figures(run: FoundRun) -> dict[str, Any]:
    """One run for programs."""
    manifest, listed = run.signed.manifest, run.listed
    size = needs = None
    # Another model is built to be counted, which a stranger's options can make long.
    if manifest.model.name == "gpt" and not manifest.is_own:
        try:
            size = size_of_gpt(manifest.model.options)
            needs = needs_of(manifest, size)
        except UsageError:  # The owner's options make no model.
            size = None
    return {
        "run": run.signed.run_id,
        "name": manifest.name,
        "owner": manifest.owner,
        "model": manifest.model_name,
        "parameters": size.num_trained if size is not None else None,
        "round": listed.round,
        "rounds": manifest.num_rounds,
        "followed": listed.is_followed,
        "peers": listed.num_peers,
        "memory": needs.memory if needs is not None else None,
        "disk": needs.disk if needs is not None else None,
        "admission": manifest.admission.kind,
        "joining": manifest.joining,
        "link": run.link,
    }


def find_runs(via: Sequence[Address], config: PeerConfig) -> FoundRuns:
    """Ask bootstraps for the runs that they list, and fetch their manifests. Raises `FlockstepError`."""
    link = JoinLink.parse(str(JoinLink(ANY_RUN, tuple(via)[:MAX_VIA])))

    async def ask(node: Node, directory: Directory) -> FoundRuns:
        return await find_listed(directory, link, node.telemetry)

    with closing(Telemetry(log_path(config.home) if config.home.exists() else None)) as telemetry:
        return visit(link, config, telemetry, ask)


async def find_listed(directory: Directory, link: JoinLink, telemetry: Telemetry) -> FoundRuns:
    """Ask the bootstraps of a link for the runs that they list, and for their manifests."""
    assert isinstance(directory, AsksOneServer)
    answered = await _ask_all(directory, link, telemetry)
    listed: dict[str, dict[PeerId, ListedRun]] = {}
    for server, runs in answered.items():
        for one in runs:
            listed.setdefault(one.run, {})[server] = one
    found: list[FoundRun] = []
    missing = set(listed)
    silent: set[PeerId] = set()
    slots = trio.Semaphore(MANIFESTS_AT_ONCE)

    async def fetch(run: str, entries: Mapping[PeerId, ListedRun]) -> None:
        async with slots:
            signed = await _manifest_of(directory, run, entries, silent, telemetry)
        if signed is None:
            return
        missing.discard(run)
        one, reason = best_listed(entries.values(), signed.manifest.owner, time.time())
        if one is None:
            telemetry.emit("listing.ignored", step="list runs", reason=f"{run}: {reason}")
        else:
            found.append(FoundRun(await as_revised(directory, signed, telemetry), one, str(JoinLink(run, link.via))))

    with trio.move_on_after(MANIFESTS_SECONDS) as scope:
        async with trio.open_nursery() as nursery:
            for run, entries in listed.items():
                nursery.start_soon(fetch, run, entries)
    if scope.cancelled_caught:
        reason = f"not all of {len(listed)} manifests were found within {MANIFESTS_SECONDS:g} s"
        telemetry.emit("listing.ignored", step="list runs", reason=reason)
    found.sort(key=lambda run: (run.signed.manifest.name, run.signed.run_id))
    return FoundRuns(tuple(found), len(missing))


def best_listed(entries: Iterable[ListedRun], owner: PeerId, now: float) -> tuple[ListedRun | None, str]:
    """Return what counts of all that bootstraps say of one run, or None and a reason.

    Only what its owner lists counts: else one bootstrap could hide the run behind a listing that is none. Of that counts
    the word of a bootstrap that follows the run, and the later round.
    """
    reason, best = "", list[ListedRun]()
    for one in entries:
        try:
            refused = why_not_listed(one.run, one.listing, owner, now)
        except RemoteError as error:
            refused = str(error)
        if refused:
            reason = refused
        else:
            best.append(one)
    return max(best, key=lambda one: (one.is_followed, one.round), default=None), reason


async def _manifest_of(
    directory: AsksOneServer, run: str, listed_by: Iterable[PeerId], silent: set[PeerId], telemetry: Telemetry
) -> SignedManifest | None:
    """Return the manifest of a run from a bootstrap that lists it, or None; adds who does not answer to `silent`."""
    for server in listed_by:
        if server in silent:
            continue
        try:
            value = await directory.held(server, run_key(run))
            if value is not None:
                return SignedManifest.decode(value, run)
            reason = "it lists this run, and does not hold it"
        except NetworkError as error:
            silent.add(server)
            reason = str(error)
        except RemoteError as error:
            reason = str(error)
        telemetry.emit("listing.ignored", step="list runs", reason=f"{run} of {server}: {reason}")
    return None


async def _ask_all(
    directory: AsksOneServer, link: JoinLink, telemetry: Telemetry
) -> dict[PeerId, tuple[ListedRun, ...]]:
    """Ask each bootstrap for its list; returns those that answer."""
    answered: dict[PeerId, tuple[ListedRun, ...]] = {}

    async def ask(server: PeerId) -> None:
        try:
            value = await directory.held(server, RUNS_KEY)
            runs = () if value is None else decode(RunList, value, max_bytes=MAX_RUN_LIST_BYTES).runs
            answered[server] = runs
        except NetworkError as error:
            telemetry.emit("bootstrap.mute", peer=server, step="list runs", reason=str(error))
        except RemoteError as error:
            telemetry.emit("peer.charged", peer=server, step="list runs", reason=str(error))

    async with trio.open_nursery() as nursery:
        for server in dict.fromkeys(split_p2p(address)[1] for address in link.bootstraps):
            nursery.start_soon(ask, server)
    return dict(sorted(answered.items()))


def manifest_of(link: JoinLink, config: PeerConfig) -> SignedManifest:
    """Return the manifest of a run, as its owner has revised it. Raises `FlockstepError`."""

    async def fetch(node: Node, directory: Directory) -> SignedManifest:
        return await as_revised(directory, await find_manifest(directory, link.run_id), node.telemetry)

    with closing(Telemetry(log_path(config.home) if config.home.exists() else None)) as telemetry:
        return visit(link, config, telemetry, fetch)


def list_run(text: str, config: PeerConfig, say: Callable[[str], None], *, listed: bool) -> None:
    """List a run of mine at its bootstraps, or withdraw that. Raises `FlockstepError`."""
    link = JoinLink.parse(text)
    identity = Identity.load_or_create(identity_path(config.home))

    async def publish(node: Node, directory: Directory) -> None:
        owner = (await find_manifest(directory, link.run_id)).manifest.owner
        if owner != identity.peer_id:
            remedy = "name the home folder with the owner's key by --home"
            raise UsageError(f"only its owner {owner} lists this run, not {identity.peer_id}", remedy=remedy)
        record = sign_listing(identity, link.run_id, time.time(), listed=listed)
        await directory.put(listing_key(link.run_id, owner), record.encode())

    mark = config.home / "runs" / link.run_id / LISTING_FILE
    if not listed:
        with disk_errors(f"remove {mark}"):
            mark.unlink(missing_ok=True)
    with closing(Telemetry(log_path(config.home))) as telemetry:
        visit(link, config, telemetry, publish)
    if listed:
        write_whole(mark, b"")
        say("The run is listed for a week; your peer in it (`flockstep keep` or `join`) renews that every day.")
    else:
        say("The run is listed no more. Who kept the listing could show it for a week at most.")
