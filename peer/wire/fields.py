"""Limits of control messages, and the field types that several of them share. Pure."""

from typing import Annotated, TypeAlias

from ..base.digest import DIGEST_BYTES
from .schema import Between, Size

MAX_PARTS = 64
"""Parts of a round, and voters. The members that may own a part send control messages to each other, so these grow with its
square."""
MAX_ROSTER = 1000
"""Members of one round's roster, as far as its value has room. Those beyond `MAX_PARTS` own no part and have no vote."""
MAX_OUTPUTS = 8
"""Times that a proposer may name outputs in an attempt: once, and again for each that was silent or false meanwhile."""
MAX_CARRIED_RECORD_BYTES = 70_000
MAX_STATEMENT_BYTES = 250_000
"""The limit of one round message but a `Basis`: the word of a holder of 64 parts, and a proposed value with 64 Readys."""
MAX_SIGNED_BYTES = 510_000
"""The limit of what is signed. A claim carries two round messages: whatever a member may sign, others can show. So long is a
`Basis`, too, which nobody has to show: a signed Ready of each member takes 350 bytes, and 2 kB where it shows the longest
invitation and the longest voucher; the Heard of each voter 8 bytes a member."""
MAX_ATTEMPT = 1 << 20
MAX_MISSED = 2
"""Certified rosters in a row that a voter may miss and keep its vote."""
MAX_READY_BYTES = 2_000
MARK_BYTES = 8
"""Bytes of a Ready's hash that stand for it: nobody finds a second Ready for a given mark while a roster is open."""
MAX_HEARD_BYTES = 8_700
NAME_BYTES = 16
"""Bytes of a statement's hash that name it where others refer to it: nobody finds two statements of one name."""
MAX_VALUE_BYTES = 100_000
"""1,000 members take 98 kB at most, and 64 of them 60 kB where each shows the longest invitation and the longest voucher."""
MAX_COUNT = 1 << 62
MAX_PAGE = 16
"""Certificates in one answer: a hostile one can make me unpack at most 4 MiB."""
MAX_PACKED_BYTES = 64_000
"""The limit of one packed certificate: 64 members take about 10 kB, 1,000 some 55 kB, and it must fit into a directory
record."""
MAX_INVITE_BYTES = 320
"""The limit of a credential of an invited peer (`dht.run.admission`)."""
MAX_SKETCH_BYTES = 24_576
"""The limit of one member's sketches: 16 parts of 128 columns, or 64 of 32 (`collectives.robust.checks`)."""
MAX_REASON = 300
"""Characters; in UTF-8 each takes up to four bytes."""

Hash: TypeAlias = Annotated[bytes, Size(DIGEST_BYTES, DIGEST_BYTES)]
Peer: TypeAlias = Annotated[str, Size(64, 40)]
RunId: TypeAlias = Annotated[str, Size(64, 1)]
Reason: TypeAlias = Annotated[str, Size(4 * MAX_REASON)]
Count: TypeAlias = Annotated[int, Between(0, MAX_COUNT)]
Rate: TypeAlias = Annotated[float, Between(0, 1e15)]
MAX_PHASE_SECONDS = 1e9
"""Thirty years: a phase lasts as long as no round is possible."""
Invite: TypeAlias = Annotated[bytes, Size(MAX_INVITE_BYTES)]
Index: TypeAlias = Annotated[int, Between(0, MAX_ROSTER - 1)]
MAX_VOUCHER_BYTES = 450
"""The limit of an owner's statement that vouches for a peer (`dht.run.statements`)."""
Voucher: TypeAlias = Annotated[bytes, Size(MAX_VOUCHER_BYTES)]
MAX_REVISION_BYTES = 950
"""The limit of an owner's statement, of which those that revise a run's settings are the longest (`dht.run.revision`)."""
PackedRevision: TypeAlias = Annotated[bytes, Size(MAX_REVISION_BYTES)]
PackedHeard: TypeAlias = Annotated[bytes, Size(MAX_HEARD_BYTES)]
PackedReady: TypeAlias = Annotated[bytes, Size(MAX_READY_BYTES)]
PackedValue: TypeAlias = Annotated[bytes, Size(MAX_VALUE_BYTES)]
Bytes: TypeAlias = Annotated[bytes, Size(MAX_SIGNED_BYTES)]
