"""Reaches a run: host, directory, manifest and node; and the figures of an attempt, for every kind of member."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from ...collectives.allreduce.actions import Outcome, OutcomeKind
from ...collectives.chain.chain import Head
from ...collectives.chain.head import RunValues
from ...collectives.light.anchor import find_anchor
from ...collectives.spec import charter_of, credential
from ...collectives.state.archive import LEDGER_FILE
from ...dht.directory.interface import Directory
from ...dht.keys import listing_key
from ...dht.members.owner_log import read_pages
from ...dht.members.remembered import Remembered
from ...dht.rendezvous import open_bootstraps, take_manifest
from ...dht.run.link import JoinLink
from ...dht.run.listing import LISTING_FILE, RENEWAL_SECONDS, sign_listing
from ...dht.run.manifest import SignedManifest
from ...dht.run.revision import why_not_revise
from ...dht.run.statements import OwnerStatements
from ...peer.config import PeerConfig
from ...peer.errors import NetworkError, RemoteError
from ...peer.identity import Identity, identity_path
from ...peer.node.node import Node
from ...peer.telemetry import Telemetry
from ...peer.transport import Host, Traffic
from ..shards.seeding import Seeds

STATEMENTS_SECONDS = 5.0
"""The members pass on what the owner has stated, too; so a newcomer does not wait longer for a directory."""


@dataclass(frozen=True, slots=True)
class ReachedRun:
    """A run that this computer has reached, before it is a member."""

    node: Node
    host: Host
    directory: Directory
    signed: SignedManifest
    remembered: Remembered
    invite: bytes
    """My credential; empty where the run demands none."""
    folder: Path
    """The run's folder on my disk."""
    anchor: Head | None
    """The certificate that the join link names, or of a newcomer its bootstraps; None if none does."""
    seeds: Seeds
    """The files of the run's data, where members provide them."""


@asynccontextmanager
async def reach_run(link: JoinLink, config: PeerConfig, telemetry: Telemetry) -> AsyncIterator[ReachedRun]:
    """Reach a run; all is closed at the end. Whoever calls it holds the lock of the home folder. Raises `FlockstepError`."""
    identity = Identity.load_or_create(identity_path(config.home))
    folder = config.home / "runs" / link.run_id
    remembered = Remembered(folder, link.run_id, telemetry)
    values = RunValues()
    async with open_bootstraps(identity, link, config, telemetry, values, remembered) as (host, directory):
        signed = await take_manifest(directory, remembered, link.run_id)
        charter = charter_of(signed)
        values.charter_of = {link.run_id: charter}.get
        if charter.kind != "open":
            charter = charter.amended(await _stated(directory, remembered, signed, telemetry))
        entry = 0.0 if has_ledger(folder) else time.time()  # Whoever has been in may come back after the expiry.
        invite = credential(charter, identity.peer_id, config.invite or remembered.ticket(), entry)
        if config.invite:
            remembered.keep_ticket(config.invite)
        anchor = None if link.at is None else Head(*link.at, tokens=0)
        if anchor is None and config.resume and not has_ledger(folder):
            anchor = await find_anchor(directory, link, telemetry)
        async with Node(host, identity, config, telemetry) as node:
            if signed.manifest.owner == identity.peer_id and (folder / LISTING_FILE).exists():
                node.nursery.start_soon(renew_listing, directory, identity, signed.run_id, folder, telemetry)
            seeds = Seeds(node, directory, signed, config.home)
            node.nursery.start_soon(seeds.run)
            yield ReachedRun(node, host, directory, signed, remembered, invite, folder, anchor, seeds)


async def stated_revision(
    directory: Directory, remembered: Remembered, signed: SignedManifest, telemetry: Telemetry
) -> bytes:
    """Return the newest revision of a run that its owner has stated, as far as it is known; empty if there is none."""
    revision = (await _stated(directory, remembered, signed, telemetry)).revision
    return b"" if why_not_revise(signed, revision, b"") else revision


async def _stated(
    directory: Directory, remembered: Remembered, signed: SignedManifest, telemetry: Telemetry
) -> OwnerStatements:
    """Return what a run's owner has stated, as far as my disk and the directory know it."""
    known = remembered.statements(OwnerStatements(signed.run_id, signed.manifest.owner))
    try:
        with trio.move_on_after(STATEMENTS_SECONDS):
            return await read_pages(directory, known)
    except (NetworkError, RemoteError) as error:
        telemetry.emit("directory.failed", step="read the owner's statements", reason=str(error))
    return known


async def renew_listing(
    directory: Directory, identity: Identity, run_id: str, folder: Path, telemetry: Telemetry
) -> None:
    """Renew the listing of a run of mine every day; once it is withdrawn, publish that instead."""
    listed = True
    while listed:
        listed = (folder / LISTING_FILE).exists()
        try:
            record = sign_listing(identity, run_id, time.time(), listed=listed)
            await directory.put(listing_key(run_id, identity.peer_id), record.encode())
        except NetworkError as error:
            telemetry.emit("directory.failed", step="renew the listing", reason=str(error))
        await trio.sleep(RENEWAL_SECONDS)


def has_ledger(folder: Path) -> bool:
    """Return True if I hold certificates of the run: I am no newcomer, and my chain binds me."""
    ledger = folder / LEDGER_FILE
    return ledger.exists() and ledger.stat().st_size > 0


def attempt_figures(outcome: Outcome, seconds: float, before: Traffic, now: Traffic) -> dict[str, Any]:
    """Return the fields of the event that an attempt ends with (`ROUND_EVENTS`), the loss left out."""
    figures: dict[str, Any] = {
        "round": outcome.slot.round,
        "attempt": outcome.slot.attempt,
        "roster": list(outcome.members),
        "seconds": round(seconds, 3),
        "sent": now.sent - before.sent,
        "received": now.received - before.received,
    }
    if outcome.kind is OutcomeKind.DONE:
        return figures | {"cut": list(outcome.cut), "root": outcome.value.next_root.hex()}
    return figures | {"reason": outcome.reason}
