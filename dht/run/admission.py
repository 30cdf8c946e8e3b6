"""Who may take part in a run, and whose signature it demands: what its manifest says, ready to be asked. Pure.

Theory of operation. A run is `open`; or for the peers that its manifest lists (`allow`); or for who holds an invitation
that its owner has signed (`invite`), bound to one peer id, or to a count: at most so many of its holders take part in
one round. An invitation travels in its holder's member record, in its `Ready`, and in its seat of the roster, so that
whoever is shown a record, a roster or a certificate can tell for itself whether each peer in it was admitted.
"""

import base64
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Self

from ...peer.errors import MalformedMessage, UsageError
from ...peer.identity import Identity, verify
from ...peer.transport import PeerId
from ...peer.wire.fields import MAX_INVITE_BYTES, RunId
from ...peer.wire.schema import Between, Size, decode, encode

CONTEXT = b"flockstep 1 invitation\0"
MAX_HOLDERS = 4096
SERIAL_BYTES = 8


@dataclass(frozen=True, slots=True)
class Invitation:
    """The owner's word that a peer, or any `count` peers at a time, may take part. Make it with `sign`."""

    run: RunId
    serial: Annotated[bytes, Size(SERIAL_BYTES, least=SERIAL_BYTES)]
    """Tells two invitations of one run apart."""
    peer: Annotated[PeerId, Size(64)]
    """Whom it is bound to; empty where it is bound to a count."""
    count: Annotated[int, Between(1, MAX_HOLDERS)]
    signature: Annotated[bytes, Size(64, least=64)]

    @classmethod
    def sign(cls, owner: Identity, run: str, serial: bytes, *, peer: PeerId = "", count: int = 1) -> Self:
        """The invitation of `owner`. Raises `LocalError` where a field breaks its limit."""
        blank = cls(run, serial, peer, count, bytes(64))
        return replace(blank, signature=owner.sign(CONTEXT + encode(blank)))

    def __str__(self) -> str:
        return base64.b32encode(encode(self)).decode().rstrip("=").lower()

    @classmethod
    def parse(cls, text: str) -> Self:
        """The invitation in a text as people paste it. Raises `UsageError`."""
        plain = "".join(text.split()).upper()
        try:
            data = base64.b32decode(plain + "=" * (-len(plain) % 8))
            return decode(cls, data, max_bytes=MAX_INVITE_BYTES)
        except (ValueError, MalformedMessage) as error:
            remedy = "copy it again from where the run's owner sent it; `flockstep run invite` makes a new one"
            raise UsageError("not a whole invitation", remedy=remedy) from error


@dataclass(frozen=True, slots=True)
class Charter:
    """Who takes part in a run, and who decides."""

    run: str = ""
    owner: PeerId = ""
    kind: str = "open"
    """`open`, `invite` or `allow`."""
    allowed: frozenset[PeerId] = frozenset()
    authority: PeerId | None = None
    """The peer without whose signature no certificate counts, if there is one."""
    earned: bool = False
    """Whether weight must be earned (see `collectives.trust`)."""
    min_peers: int = 1
    """No roster of fewer counts, whoever shows it."""

    def bars(self, peer: PeerId, invite: bytes) -> str:
        """Why a peer that shows this invitation may not take part; empty if it may."""
        if self.kind == "allow" and peer not in self.allowed:
            return "the run's manifest does not list it"
        if self.kind == "invite" and peer != self.owner:
            invitation = opened(invite, self.owner)
            if invitation is None or invitation.run != self.run:
                return "it shows no invitation that the run's owner has signed"
            if invitation.peer not in ("", peer):
                return "it shows somebody else's invitation"
        return ""

    def admits(self, peer: PeerId, invite: bytes) -> bool:
        """Whether a peer that shows this invitation may take part."""
        return not self.bars(peer, invite)

    def overbooked(self, invites: Iterable[bytes]) -> str:
        """Why these invitations may not take part together; empty if they may."""
        if self.kind == "invite":
            for invite, holders in Counter(invites).items():
                invitation = opened(invite, self.owner)
                if invitation is not None and not invitation.peer and holders > invitation.count:
                    return f"{holders} peers share an invitation for {invitation.count}"
        return ""


OPEN = Charter()
"""Anybody takes part, and a quorum decides."""


@lru_cache(maxsize=4096)  # Comes with every record, roster and certificate of its holder; 0.1 ms to check.
def opened(invite: bytes, owner: PeerId) -> Invitation | None:
    """The invitation in these bytes, if `owner` has signed it."""
    try:
        invitation = decode(Invitation, invite, max_bytes=MAX_INVITE_BYTES)
    except MalformedMessage:
        return None
    blank = replace(invitation, signature=bytes(64))
    return invitation if verify(owner, CONTEXT + encode(blank), invitation.signature) else None
