"""The limits of control messages, and the types of their fields that several of them share."""

from typing import Annotated, TypeAlias

from ..digest import DIGEST_BYTES
from .schema import Between, Size

MAX_ROSTER = 64
"""Members of one round's roster (DESIGN §8): control messages go to everybody, so they grow with its square."""
MAX_RECUTS = 2
"""DESIGN §8: two re-cuts, then void."""
MAX_RECORD_BYTES = 70_000
MAX_SIGNED_BYTES = 200_000
"""A Void of a full roster carries 64 results of 2.4 kB, each with its signature."""
MAX_COUNT = 1 << 62
MAX_PAGE = 16
"""Certificates in one answer: what a hostile one can make me unpack stays at 4 MiB."""
MAX_PACKED_BYTES = 64_000
"""Of one certificate; one of 64 members has about 15 kB, and it must also fit into a record of the directory."""
MAX_INVITE_BYTES = 256
"""Of an invitation to a run (`dht.admission`)."""
MAX_SKETCH_BYTES = 24_576
"""Of one member's sketches of all parts: 16 parts of 128 columns, or 64 of 32 (`collectives.judging`)."""
MAX_REASON = 300
"""Characters; in UTF-8 each takes up to four bytes."""

Hash: TypeAlias = Annotated[bytes, Size(DIGEST_BYTES, DIGEST_BYTES)]
Peer: TypeAlias = Annotated[str, Size(64, 40)]
RunId: TypeAlias = Annotated[str, Size(64, 1)]
Reason: TypeAlias = Annotated[str, Size(4 * MAX_REASON)]
Count: TypeAlias = Annotated[int, Between(0, MAX_COUNT)]
Rate: TypeAlias = Annotated[float, Between(0, 1e15)]
Prefix: TypeAlias = Annotated[str, Size(16)]
Invite: TypeAlias = Annotated[bytes, Size(MAX_INVITE_BYTES)]
Index: TypeAlias = Annotated[int, Between(0, MAX_ROSTER - 1)]
Bytes: TypeAlias = Annotated[bytes, Size(MAX_SIGNED_BYTES)]
