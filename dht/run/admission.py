"""Admission: which peers may take part in a run, and whose signature its certificates need. Pure.

Theory of operation. A run is `open` to all peers, or to the peers that its manifest lists (`allow`), or to those that its
owner has invited (`invite`). What others see of an invitation admits nobody else:

    Invitation   signed by the owner: it names one peer, or the public key of the invitation and a count of peers
    Ticket       what the owner sends to those it invites: the invitation and, unless it names a peer, its secret key
    Credential   what a peer shows: the invitation and, unless it names the peer, a signature of its key over the peer id

A credential travels in its holder's member record, in its `Ready`, and in its seat of the roster, so that every peer can
check for itself whether the peers of a record, a roster or a certificate are admitted. An invitation for a count is bound
to the first so many peers that a member table sees with it, and no roster may seat more.

What the owner states later (`statements`) makes another `Charter`. A withdrawn admission is for what is to come:
certificates of earlier rounds are validated by the rules of the manifest alone, else the run's past would be invalid.
"""

import base64
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Self

from ...peer.base.errors import MalformedMessage, UsageError
from ...peer.base.transport import PeerId
from ...peer.identity import Identity, verify
from ...peer.wire import MAX_INVITE_BYTES, RunId
from ...peer.wire.schema import Between, Size, decode, encode
from .layout import NO_LAYOUT
from .manifest import Earned, Manifest
from .statements import OwnerStatements, is_voucher

INVITATION_CONTEXT = b"flockstep 2 invitation\0"
BINDING_CONTEXT = b"flockstep 2 invited peer\0"
MAX_HOLDERS = 4096
MAX_EXPIRES = 1 << 40


@dataclass(frozen=True, slots=True)
class Invitation:
    """The owner's signed permission for one peer, or for `count` holders of a key. Make it with `sign`."""

    run: RunId
    key: Annotated[PeerId, Size(64)]
    """The id of the peer that it names; with a count, the invitation's own public key, written as a peer id."""
    count: Annotated[int, Between(0, MAX_HOLDERS)]
    """How many peers may use it; 0 if it names one."""
    expires: Annotated[int, Between(0, MAX_EXPIRES)]
    """Unix time in seconds, after which it lets in no peer that is not known already."""
    signature: Annotated[bytes, Size(64, least=64)]

    @classmethod
    def sign(cls, owner: Identity, run: str, key: PeerId, *, count: int = 0, expires: int = MAX_EXPIRES) -> Self:
        """Sign an invitation. Raises `LocalError` if a field breaks its limit."""
        blank = cls(run, key, count, expires, bytes(64))
        return replace(blank, signature=owner.sign(INVITATION_CONTEXT + encode(blank)))


@dataclass(frozen=True, slots=True)
class Credential:
    """What a peer shows of its invitation."""

    invitation: Invitation
    binding: Annotated[bytes, Size(64)]
    """The signature of the invitation's key over this peer's id; empty if the invitation names the peer."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What the owner sends to the peers that it invites."""

    invitation: Invitation
    seed: Annotated[bytes, Size(32)]
    """The secret of the invitation's key; empty if the invitation names a peer."""

    def credential(self, peer: PeerId) -> bytes:
        """The encoded credential of a peer that holds this ticket."""
        bound = BINDING_CONTEXT + peer.encode()
        binding = Identity.from_seed(self.seed).sign(bound) if len(self.seed) == 32 else b""
        return encode(Credential(self.invitation, binding))

    def __str__(self) -> str:
        return base64.b32encode(encode(self)).decode().rstrip("=").lower()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a ticket from pasted text. Raises `UsageError`."""
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
    earned: bool = False
    """True if a peer must earn its weight (`collectives.accountability.trust`)."""
    min_peers: int = 1
    """The smallest valid roster."""
    founders: frozenset[PeerId] = frozenset()
    """The voters of the first round, in every run that decides; they also vote after a roster in which nobody may."""
    keepers: frozenset[PeerId] | None = None
    """The peers that may vote; None if every member may."""
    vouched: frozenset[PeerId] = frozenset()
    """The peers for which the owner vouches since (`statements`)."""
    revoked: frozenset[PeerId] = frozenset()
    """The peers, and the keys of invitations, that the owner has withdrawn from a closed run since."""

    layout: bytes = b""
    """The hash of what the run trains (`layout.LayoutPin`), as its manifest pins it; empty: it pins nothing."""
    cells: range = range(0)
    """How many cells a state of that layout may have."""
    manifest: Manifest | None = None
    """The settings that a certificate may revise; None in a run without a manifest."""

    @property
    def carried(self) -> tuple[Earned, ...]:
        """What its members have earned in the run that it goes on from."""
        return () if self.manifest is None else self.manifest.follows.members

    @property
    def line(self) -> str:
        """The run that invitations name: the first of its line (`manifest.Follows`)."""
        follows = "" if self.manifest is None else self.manifest.follows.first
        return follows or self.run

    def amended(self, statements: OwnerStatements) -> Self:
        """Return these rules as the owner's statements change them."""
        return replace(self, vouched=statements.vouched, revoked=statements.revoked)

    def may_vote(self, peer: PeerId, invite: bytes, voucher: bytes) -> bool:
        """Return True if a member that shows these votes in the round after a roster that it was in.

        That depends on nothing but the manifest and what the member shows, so that nobody counts voters differently.
        """
        if self.keepers is None:
            return self.admits(peer, invite)
        return peer in self.keepers or (bool(voucher) and is_voucher(voucher, self.owner, self.run, peer))

    def why_not_train(self, layout: bytes, num_cells: int) -> str:
        """Return why a peer that states this layout, and a state of so many cells, is no member; empty if it may be one.

        So who trains another model than the manifest pins exists for nobody, whichever peers are first. Nobody is charged:
        an honest user may have built the wrong model. A keeper, which has none, and 0 cells, not known yet, pass.
        """
        if not self.layout or layout == NO_LAYOUT:
            return ""
        if layout != self.layout:
            return "it trains another model than the run's manifest pins"
        return self.why_not_cells(num_cells) if num_cells else ""

    def why_not_cells(self, num_cells: int) -> str:
        """Return why no state of the pinned layout has so many cells; empty if one may."""
        if not self.layout or num_cells in self.cells:
            return ""
        fits = " to ".join(f"{cells:,}" for cells in dict.fromkeys((self.cells[0], self.cells[-1])))
        return f"its state has {num_cells:,} cells, one of the layout that the run's manifest pins has {fits}"

    def why_not_admit(self, peer: PeerId, invite: bytes) -> str:
        """Return why a peer with this invitation may not take part; empty if it may."""
        if self.kind != "open" and peer in self.revoked:
            return "the run's owner has withdrawn its admission"
        if self.kind == "allow" and peer not in self.allowed and not self._is_added(peer, invite):
            return "the run's manifest does not list it, and it shows no invitation by its id"
        if self.kind == "invite" and peer != self.owner:
            invitation = open_credential(invite, self.owner, self.line)
            if invitation is None:
                return "it shows no invitation that the run's owner has signed"
            if not _is_holder(invite, peer):
                return "it shows somebody else's invitation"
            if invitation.key in self.revoked:
                return "the run's owner has withdrawn its invitation"
        return ""

    def why_not_enter(self, peer: PeerId, invite: bytes, others: Iterable[bytes], time: float) -> str:
        """Return why an admitted peer may not become a member; empty if it may.

        `others` are the credentials of the members so far, `time` is Unix time in seconds.
        """
        invitation = open_credential(invite, self.owner, self.line) if self.kind != "open" else None
        if invitation is None or peer == self.owner or peer in self.allowed or any(it.peer == peer for it in self.carried):
            return ""  # Whoever was in the run before is no newcomer.
        if time > invitation.expires:
            return "its invitation has expired"
        if invitation.count:
            users = sum(self._key(other) == invitation.key for other in others)
            if users >= invitation.count:
                return f"its invitation is spent: {users} of {invitation.count} peers use it"
        return ""

    def admits(self, peer: PeerId, invite: bytes) -> bool:
        """Return True if a peer with this invitation may take part."""
        return not self.why_not_admit(peer, invite)

    def overbooked(self, invites: Iterable[bytes]) -> str:
        """Return why the peers with these credentials may not take part together; empty if they may."""
        if self.kind == "invite":
            opened = [open_credential(invite, self.owner, self.line) for invite in invites]
            for invitation, holders in Counter(found for found in opened if found is not None).items():
                if invitation.count and holders > invitation.count:
                    return f"{holders} peers share an invitation for {invitation.count}"
        return ""

    def is_one_invitation(self, one: bytes, other: bytes) -> bool:
        """Return True if two credentials show the same invitation."""
        return bool(key := self._key(one)) and key == self._key(other)

    def _is_added(self, peer: PeerId, invite: bytes) -> bool:
        """Return True if the owner's invitation names a peer: so it adds one to a list that the manifest has fixed."""
        invitation = open_credential(invite, self.owner, self.line)
        return invitation is not None and not invitation.count and invitation.key == peer

    def _key(self, invite: bytes) -> PeerId:
        invitation = open_credential(invite, self.owner, self.line)
        return invitation.key if invitation else ""


OPEN = Charter()
"""Admission of an open run: any peer takes part, and a quorum decides."""


@lru_cache(maxsize=4096)  # Comes with every record, roster and certificate of its holder; 0.1 ms to check.
def open_credential(invite: bytes, owner: PeerId, run: str) -> Invitation | None:
    """Return the invitation of a credential; None if it is malformed, for another run, or not signed by `owner`."""
    try:
        invitation = decode(Credential, invite, max_bytes=MAX_INVITE_BYTES).invitation
    except MalformedMessage:
        return None
    blank = replace(invitation, signature=bytes(64))
    signed = invitation.run == run and verify(owner, INVITATION_CONTEXT + encode(blank), invitation.signature)
    return invitation if signed else None


@lru_cache(maxsize=4096)
def _is_holder(invite: bytes, peer: PeerId) -> bool:
    """Return True if a credential belongs to `peer`: its invitation names it, or its key has signed the peer's id."""
    credential = decode(Credential, invite, max_bytes=MAX_INVITE_BYTES)
    if not credential.invitation.count:
        return credential.invitation.key == peer
    return verify(credential.invitation.key, BINDING_CONTEXT + peer.encode(), credential.binding)
