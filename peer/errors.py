"""One tree of errors: whose fault it is decides what happens next.

FlockstepError
├── LocalError            my bug or my setting: tell the user, charge nobody
│   └── UsageError        a wrong argument, file or link (exit code 2)
├── RemoteError           a peer sent what it must not: counts against that peer
│   ├── MalformedMessage  bytes that do not decode, or break a stated limit
│   ├── BadSignature      a signature that does not match its bytes
│   └── ProtocolViolation a well-formed message that breaks a rule
└── NetworkError          nobody's fault: the road is bad
    ├── ConnectFailed     no rung of the ladder reached the peer
    ├── StreamClosed      the other end, or the road to it, is gone
    └── DeadlineExceeded  no answer in time
"""

from collections.abc import Sequence
from dataclasses import dataclass


class FlockstepError(Exception):
    """The root: everything that flockstep raises on purpose.

    `str(error)` says what was wrong and where, in one line; `remedy` says what to do about it (it may be empty).
    """

    def __init__(self, what: str, *, remedy: str = "") -> None:
        super().__init__(what)
        self.remedy = remedy


class LocalError(FlockstepError):
    """My bug or my setting."""


class UsageError(LocalError):
    """A wrong argument, file or link: the command ends with exit code 2."""


class RemoteError(FlockstepError):
    """A peer's bug or malice: counts against that peer."""


class MalformedMessage(RemoteError):
    """Bytes that do not decode as their protocol says, or exceed a stated limit."""


class BadSignature(RemoteError):
    """A signature that does not match its bytes and its sender."""


class ProtocolViolation(RemoteError):
    """A well-formed message that breaks a rule of its protocol."""


class NetworkError(FlockstepError):
    """The road is bad; nobody is charged."""


@dataclass(frozen=True, slots=True)
class DialAttempt:
    """One try to reach a peer: the address, the rung of the ladder that it stands for, and why it failed."""

    address: str
    rung: str
    cause: str


class ConnectFailed(NetworkError):
    """No rung of the ladder reached the peer; `attempts` names each try and its cause."""

    def __init__(self, peer: str, attempts: Sequence[DialAttempt], *, remedy: str = "") -> None:
        tried = "; ".join(f"{a.address} ({a.rung}): {a.cause}" for a in attempts) or "no address is known"
        super().__init__(f"cannot reach {peer}: {tried}", remedy=remedy)
        self.peer = peer
        self.attempts = tuple(attempts)


class StreamClosed(NetworkError):
    """The other end of a stream, or the road to it, is gone."""


class DeadlineExceeded(NetworkError):
    """No answer came before the deadline."""


def sole_error(error: BaseException) -> BaseException:
    """The first plain exception in a group of groups, as nurseries raise them; any other exception as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
