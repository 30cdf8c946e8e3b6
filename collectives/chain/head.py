"""The head of the run's chain in its directory: published by who convened the round, read by who comes.

A hint and no more (see `collectives.published`): members say themselves how far they are, and their states prove it.
Only who comes with nothing to a run of which nobody is here acts on it: it does not begin that run anew, but waits.
"""

import math

import trio

from ...dht.directory.kademlia import Directory
from ...dht.run.manifest import head_key
from ...peer.errors import LocalError, NetworkError
from ...peer.telemetry import Telemetry
from ...peer.wire import Certificate
from .chain import Head, Link, better
from .packed import pack, unpack

PERIOD = 30.0
"""Seconds between publications by one peer, as often as its member record: a walk through the directory is not free."""


class Heads:
    """One peer's view of the published head."""

    def __init__(self, directory: Directory, run: str, telemetry: Telemetry) -> None:
        self._directory = directory
        self._run = run
        self._telemetry = telemetry
        self._published = -math.inf
        self.ahead: Head | None = None
        """A better chain than mine that was published when I looked; None if there was none."""
        self.looked = trio.Event()
        """Set once I have looked."""

    async def publish(self, certificate: Certificate) -> None:
        """Publish the newest certificate, unless I published another one a moment ago."""
        if trio.current_time() - self._published < PERIOD:
            return
        self._published = trio.current_time()
        try:
            await self._directory.put(head_key(self._run), pack(certificate))
        except (NetworkError, LocalError) as error:
            self._telemetry.emit("head.unpublished", step="publish the head", reason=str(error))

    async def look(self, mine: Head) -> None:
        """Say so if a better chain than mine is published: who comes alone learns that the run has gone on."""
        try:
            packed = await self._directory.get(head_key(self._run))
        except NetworkError as error:
            self._telemetry.emit("directory.failed", step="find the head", reason=str(error))
            return
        finally:
            self.looked.set()
        head = mine if packed is None else Link.of(unpack(packed)).head
        if better(head, mine):
            self.ahead = head
            reason = "a better chain than mine is published: who holds its state can give it"
            self._telemetry.emit("head.ahead", step="join", reason=reason, round=head.round, tokens=head.tokens)
