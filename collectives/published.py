"""What the directory of a run keeps: what `dht.runs` says, and the head of the chain of certificates.

The head is the newest certificate itself, packed. It needs nobody's signature but its quorum's, so whoever has it may
publish it, and of several the one whose chain is better wins. It tells who comes alone that a run has gone on, and how
far; it decides nothing, since certificates alone do not say who was entitled to make them.
"""

from ..dht.run import manifest as runs
from ..peer import wire
from ..peer.errors import MalformedMessage
from .chain.certificate import verify
from .chain.packed import checked, unpack


def validate(key: str, value: bytes) -> int:
    """The sequence of a value that the directory may keep under a key. Raises `RemoteError` for any other value or key.

    Heads are ordered by their tokens, then by their rounds.
    """
    match key.split("/"):
        case ["", "flockstep", run_id, "head"]:
            if len(value) > wire.MAX_PACKED_BYTES:
                raise MalformedMessage(f"a head of {len(value)} bytes, at most {wire.MAX_PACKED_BYTES} are allowed")
            (link,) = checked([unpack(value)], run_id, verify)
            return link.head.tokens * (wire.MAX_COUNT + 1) + link.head.round
    return runs.validate(key, value)
