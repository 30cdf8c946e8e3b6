"""Long verification of what peers sent, beside the event loop: one at a time, members first.

Theory of operation. A Void, a certificate or a page of records holds dozens of signatures, of 0.1 ms each. Checked where
they arrive they would hold up heartbeats, so that a flood of them takes a peer out of its round. So they are queued and
checked in a worker thread, and only the result comes back into the event loop. The queue is short, since each entry
keeps its message: what a peer sends beyond its share of it, or strangers beyond theirs, is dropped.
"""

from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import trio

from ..base.errors import NetworkError, RemoteError
from ..base.transport import PeerId

MAX_CHECKS = 64
"""Queued verifications of members, and as many of strangers. Of messages of 1 MiB at most."""
CHECKS_PER_PEER = 8
"""Of them one peer's: an honest one sends one Void and one certificate in a round."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What is to be checked for a peer: `work` runs in a thread, and its result goes to `then` in the event loop."""

    peer: PeerId
    step: str
    work: Callable[[], Any]
    then: Callable[[Any], None]


class VerificationQueue:
    """One node's queue. `charge` is called with what breaks a rule, `refuse` with what is dropped."""

    def __init__(
        self,
        compute: Callable[..., Awaitable[Any]],
        charge: Callable[[PeerId, str, RemoteError], None],
        refuse: Callable[[PeerId, str, str], None],
    ) -> None:
        self._compute = compute
        self._charge = charge
        self._refuse = refuse
        self._queues: dict[bool, deque[Verification]] = {True: deque(), False: deque()}
        self._queued: Counter[PeerId] = Counter()
        self._filled = trio.Event()

    def add(self, check: Verification, *, is_member: bool) -> None:
        """Queue one."""
        queue = self._queues[is_member]
        if len(queue) >= MAX_CHECKS or self._queued[check.peer] >= CHECKS_PER_PEER:
            self._refuse(check.peer, check.step, "too much to verify is waiting already")
            return
        queue.append(check)
        self._queued[check.peer] += 1
        self._filled.set()

    async def run(self) -> None:
        """Do one after the other until cancelled."""
        while True:
            while not any(self._queues.values()):
                self._filled = trio.Event()
                await self._filled.wait()
            check = (self._queues[True] or self._queues[False]).popleft()
            self._queued[check.peer] -= 1
            if not self._queued[check.peer]:
                del self._queued[check.peer]
            try:
                check.then(await self._compute(check.work))
            except RemoteError as error:
                self._charge(check.peer, check.step, error)
            except NetworkError as error:
                self._refuse(check.peer, check.step, type(error).__name__)  # Its text may name anybody: kinds are few.
