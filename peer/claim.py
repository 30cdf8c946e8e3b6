"""Accusations: what a peer says has been proved against another one. Who is guilty, `collectives.evidence` decides."""

from dataclasses import dataclass
from typing import Annotated

from .wire.fields import Index, RunId
from .wire.schema import Size

MAX_STATEMENT_BYTES = 32_000
"""Of one signed statement: the roster of 64 members, the longest of them, has up to 20 kB."""
MAX_CLAIMS = 8
"""In one message: its frame stays below the limit of all messages."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Statements of one peer that contradict each other, or the bytes that they name. An accuser signs it.

    Either two statements on one subject; or a commit and its roster, where the bytes of `part` are no encoding of one; or
    a result, its cut and its roster, where those of the output are not. Each is an encoded `wire.Signed`.
    """

    run: RunId
    statements: Annotated[tuple[Annotated[bytes, Size(MAX_STATEMENT_BYTES)], ...], Size(3, 2)]
    part: Index


@dataclass(frozen=True, slots=True)
class Accusations:
    """Claims, each an encoded `wire.Signed` of its accuser, whoever carries them."""

    claims: Annotated[tuple[Annotated[bytes, Size(4 * MAX_STATEMENT_BYTES)], ...], Size(MAX_CLAIMS, 1)]
