"""Admission: which peers may take part in a run, and whose signature its certificates need. Pure.

Theory of operation. A run is `open` to all peers, or to the peers that its manifest lists (`allow`), or to the holders
of an invitation that its owner has signed (`invite`). An invitation is bound to one peer id or to a count: at most so
many of its holders take part in one round. It travels in its holder's member record, in its `Ready`, and in its seat of
the roster, so that every peer can check for itself whether the peers of a record, a roster or a certificate are admitted.
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
from ...peer.wire import MAX_INVITE_BYTES, RunId
from ...peer.wire.schema import Between, Size, decode, encode

INVITATION_CONTEXT = b"flockstep 1 invitation\0"
MAX_HOLDERS = 4096
SERIAL_BYTES = 8


@dataclass(frozen=True, slots=True)
class Invitation:
    """The owner's signed permission for one peer, or for any `count` peers at a time. Make it with `sign`."""

    run: RunId
    serial: Annotated[bytes, Size(SERIAL_BYTES, least=SERIAL_BYTES)]
    """Distinguishes two invitations of one run."""
    peer: Annotated[PeerId, Size(64)]
    """The peer that it is bound to; empty if it is bound to a count."""
    count: Annotated[int, Between(1, MAX_HOLDERS)]
    signature: Annotated[bytes, Size(64, least=64)]

    @classmethod
    def sign(cls, owner: Identity, run: str, serial: bytes, *, peer: PeerId = "", count: int = 1) -> Self:
        """Sign an invitation. Raises `LocalError` if a field breaks its limit."""
        blank = cls(run, serial, peer, count, bytes(64))
        return replace(blank, signature=owner.sign(INVITATION_CONTEXT + encode(blank)))

    def __str__(self) -> str:
        return base64.b32encode(encode(self)).decode().rstrip("=").lower()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an invitation from pasted text. Raises `UsageError`."""
        plain = "".join(text.split()).upper()
        try:
            data = base64.b32decode(plain + "=" * (-len(plain) % 8))
            return decode(cls, data, max_bytes=MAX_INVITE_BYTES)
        except (ValueError, MalformedMessage) as error:
            remedy = "copy it again from where the run's owner sent it; `flockstep run invite` makes a new one"
            raise UsageError("not a whole invitation", remedy=remedy) from error


@dataclass(frozen=True, slots=True)
class Charter:
    """The admission rules of one run."""

    run: str = ""
    owner: PeerId = ""
    kind: str = "open"
    """`open`, `invite` or `allow`."""
    allowed: frozenset[PeerId] = frozenset()
    authority: PeerId | None = None
    """The peer whose signature every certificate needs; None if none is needed."""
    earned: bool = False
    """True if a peer must earn its weight (`collectives.accountability.trust`)."""
    min_peers: int = 1
    """The smallest valid roster."""

    def why_not_admit(self, peer: PeerId, invite: bytes) -> str:
        """Return why a peer with this invitation may not take part; empty if it may."""
        if self.kind == "allow" and peer not in self.allowed:
            return "the run's manifest does not list it"
        if self.kind == "invite" and peer != self.owner:
            invitation = open_invitation(invite, self.owner)
            if invitation is None or invitation.run != self.run:
                return "it shows no invitation that the run's owner has signed"
            if invitation.peer not in ("", peer):
                return "it shows somebody else's invitation"
        return ""

    def admits(self, peer: PeerId, invite: bytes) -> bool:
        """Return True if a peer with this invitation may take part."""
        return not self.why_not_admit(peer, invite)

    def overbooked(self, invites: Iterable[bytes]) -> str:
        """Return why the holders of these invitations may not take part together; empty if they may."""
        if self.kind == "invite":
            for invite, holders in Counter(invites).items():
                invitation = open_invitation(invite, self.owner)
                if invitation is not None and not invitation.peer and holders > invitation.count:
                    return f"{holders} peers share an invitation for {invitation.count}"
        return ""


OPEN = Charter()
"""Admission of an open run: any peer takes part, and a quorum decides."""


@lru_cache(maxsize=4096)  # Comes with every record, roster and certificate of its holder; 0.1 ms to check.
def open_invitation(invite: bytes, owner: PeerId) -> Invitation | None:
    """Decode an invitation; None if it is malformed or not signed by `owner`."""
    try:
        invitation = decode(Invitation, invite, max_bytes=MAX_INVITE_BYTES)
    except MalformedMessage:
        return None
    blank = replace(invitation, signature=bytes(64))
    return invitation if verify(owner, INVITATION_CONTEXT + encode(blank), invitation.signature) else None
