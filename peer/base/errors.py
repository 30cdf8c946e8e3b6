"""The tree of errors: the party at fault decides how an error is handled. Pure.

FlockstepError
├── LocalError            my bug or my setting: shown to the user, nobody is charged
│   └── UsageError        a wrong argument, file or link (exit code 2)
├── RemoteError           a peer sent what it must not: counts against that peer
│   ├── MalformedMessage  bytes that do not decode, or break a stated limit
│   │   └── OtherProtocol   a run or a checkpoint of another protocol number
│   ├── BadSignature      a signature that does not match its bytes
│   └── ProtocolViolation a well-formed message that breaks a rule
│       └── NoRightToVote   signed by voters that show no right to it: not the fault of whoever passes it on
└── NetworkError          nobody's fault: the connection failed
    ├── ConnectFailed     no rung of the ladder reached the peer
    ├── RequestRefused    the peer answers that it does not answer this
    ├── StreamClosed      the stream or its connection has ended
    └── DeadlineExceeded  the timeout of an answer
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class FlockstepError(Exception):
    """The root of all errors that flockstep raises on purpose.

    `str(error)` is one line: what was wrong, and where. `remedy` is what to do about it; it may be empty.
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
    """Bytes that do not decode under their protocol, or exceed a stated limit."""


class OtherProtocol(MalformedMessage):
    """A run or a checkpoint of another protocol number; `remedy` says what to do."""


class BadSignature(RemoteError):
    """A signature that does not match its bytes and its sender."""


class ProtocolViolation(RemoteError):
    """A well-formed message that breaks a rule of its protocol."""


class NoRightToVote(ProtocolViolation):
    """A certificate whose voters show no right to vote. Whoever passes it on may not know the rules of that run."""


class NetworkError(FlockstepError):
    """The connection failed; nobody is charged."""


@dataclass(frozen=True, slots=True)
class DialAttempt:
    """One failed dial: the address, its rung, and the cause."""

    address: str
    rung: str
    cause: str


class ConnectFailed(NetworkError):
    """No rung of the ladder reached the peer; `attempts` holds each failed dial."""

    def __init__(self, peer: str, attempts: Sequence[DialAttempt], *, remedy: str = "") -> None:
        tried = "; ".join(f"{a.address} ({a.rung}): {a.cause}" for a in attempts) or "no address is known"
        super().__init__(f"cannot reach {peer}: {tried}", remedy=remedy)
        self.peer = peer
        self.attempts = tuple(attempts)


class RequestRefused(NetworkError):
    """The peer is there, and refuses to answer; the text is its reason."""


class StreamClosed(NetworkError):
    """The stream, or its connection, has ended."""


class DeadlineExceeded(NetworkError):
    """No answer arrived before the timeout."""


def sole_error(error: BaseException) -> BaseException:
    """Return the first plain exception of nested groups, as nurseries raise them; any other exception as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the known name closest to `word`; empty if none is close."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
