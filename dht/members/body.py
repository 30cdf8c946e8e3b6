"""What a member says of itself: the body of a member record, its limits, and what is clamped to them. Pure."""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Annotated

from ...peer.base.config import MAX_NAME_BYTES
from ...peer.base.digest import DIGEST_BYTES
from ...peer.base.errors import MalformedMessage, ProtocolViolation
from ...peer.base.transport import Address, Rung
from ...peer.wire import MAX_COUNT, Invite
from ...peer.wire.schema import Between, Size, decode
from ..records import MAX_SEQUENCE, Record
from ..run.statements import MAX_OWNER_LOG_BYTES

MEMBER_KIND = "member"
MAX_MEMBER_BYTES = 6_000
MEMBER_ADDRESSES = 16
MEMBER_ADDRESS_BYTES = 256
LAST_ADDRESSES = 4
"""Of more addresses than fit, so many of the last ones stay: those at relays, which may be the only ones that work."""
CACHED_BODY_BYTES = 1500
"""Longer ones than a usual record has are not cached: 4,096 of the longest would take 50 MB, and anybody can make them."""
MAX_RATE = 1e15
MAX_SHARE_BYTES = 1024
"""The largest share that `optim.data.leases` writes has 726 bytes."""

_Count = Annotated[int, Between(0, MAX_SEQUENCE)]
_Rate = Annotated[float, Between(0.0, MAX_RATE)]


class MemberState(StrEnum):
    """What a member is doing."""

    SYNCING = "syncing"
    TRAINING = "training"
    LEAVING = "leaving"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class MemberBody:
    """A member's statement about itself. Name the fields when you make one; rates are bytes a second, as measured."""

    state: Annotated[str, Size(16)]
    """A `MemberState`."""
    addresses: Annotated[tuple[Annotated[Address, Size(MEMBER_ADDRESS_BYTES)], ...], Size(MEMBER_ADDRESSES)] = ()
    rung: Annotated[str, Size(16)] | None = None
    """How others reach this member, a `Rung`; None before it knows."""
    device: Annotated[str, Size(64)] = ""
    version: Annotated[str, Size(32)] = ""
    round: _Count = 0
    root: Annotated[bytes, Size(DIGEST_BYTES, least=DIGEST_BYTES)] = bytes(DIGEST_BYTES)
    """The state root at the start of that round; zeros until its process holds the run's state for the first time."""
    step: _Count = 0
    tokens: _Count = 0
    tokens_per_s: _Rate = 0.0
    loss: float | None = None
    up: _Rate = 0.0
    down: _Rate = 0.0
    sent: _Count = 0
    received: _Count = 0
    head: Annotated[bytes, Size(DIGEST_BYTES, least=DIGEST_BYTES)] = bytes(DIGEST_BYTES)
    """The hash of the certificate that this state comes from; zeros at the start of a run."""
    chain_tokens: Annotated[int, Between(0, MAX_COUNT)] = 0
    """All tokens of the run up to that certificate."""
    layout: Annotated[bytes, Size(DIGEST_BYTES, least=DIGEST_BYTES)] = bytes(DIGEST_BYTES)
    """A hash of the names and shapes of the parameters that it trains; zeros for a keeper, which has no model."""
    num_cells: _Count = 0
    """The codec's cells of its state; 0 while it does not know them."""
    frozen: Annotated[bytes, Size(DIGEST_BYTES, least=DIGEST_BYTES)] = bytes(DIGEST_BYTES)
    """A hash of the parameters that it does not train; zeros if there are none."""
    share: Annotated[bytes, Size(MAX_SHARE_BYTES)] = b""
    """Its lease of the data, in bytes that only `optim.data.leases` reads; empty while it has none."""
    invite: Invite = b""
    """Its invitation, if the run demands one (`dht.run.admission`)."""
    statements: Annotated[bytes, Size(DIGEST_BYTES, least=DIGEST_BYTES)] = bytes(DIGEST_BYTES)
    """The hash of the owner's statements that it holds, under which it serves them (`owner_log`); zeros without any."""
    statements_bytes: Annotated[int, Between(0, MAX_OWNER_LOG_BYTES)] = 0
    """Their size."""
    name: Annotated[str, Size(MAX_NAME_BYTES)] = ""
    """What its holder wants to be called; anybody may call itself anything (`peer.base.plain` before it is shown)."""

    def __post_init__(self) -> None:
        # A schema field is exactly a str: members of the two enumerations are stored as their text.
        try:
            object.__setattr__(self, "state", MemberState(self.state).value)
            object.__setattr__(self, "rung", None if self.rung is None else Rung(self.rung).value)
        except ValueError as error:
            raise MalformedMessage(f"MemberBody: {error}") from error


def fitted(body: MemberBody) -> tuple[MemberBody, str]:
    """Clamp what a record has no room for; returns the body, and what was clamped in words, empty if nothing was.

    Others have a part in these figures: the loss is that of the run's state, a bootstrap says where others reach me.
    """
    clamped = []
    addresses = tuple(address for address in body.addresses if len(address.encode()) <= MEMBER_ADDRESS_BYTES)
    if len(addresses) > MEMBER_ADDRESSES:
        addresses = addresses[: MEMBER_ADDRESSES - LAST_ADDRESSES] + addresses[-LAST_ADDRESSES:]
    if addresses != body.addresses:
        clamped.append(f"{len(body.addresses)} addresses to {len(addresses)}")
    loss = body.loss
    if loss is not None and not math.isfinite(loss):
        clamped.append(f"the loss {loss}")
        loss = None
    rate = min(body.tokens_per_s, MAX_RATE)
    if rate != body.tokens_per_s:
        clamped.append(f"{body.tokens_per_s:g} tokens/s")
    return replace(body, addresses=addresses, loss=loss, tokens_per_s=rate), ", ".join(clamped)


def open_member(record: Record) -> MemberBody:
    """Decode the body of a `member` record and check its signature. Raises `RemoteError`."""
    return _opened(record) if len(record.body) <= CACHED_BODY_BYTES else _opened.__wrapped__(record)


@lru_cache(maxsize=4096)  # Most records come several times; a signature check takes 0.1 ms.
def _opened(record: Record) -> MemberBody:
    if record.kind != MEMBER_KIND:
        raise ProtocolViolation(f"expected a {MEMBER_KIND!r} record, got {record.kind!r}")
    body = decode(MemberBody, record.body, max_bytes=MAX_MEMBER_BYTES)
    record.check()
    return body
