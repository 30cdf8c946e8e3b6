"""Where a newcomer starts: what more than half of its bootstraps name.

A newcomer holds no certificate, so it cannot tell a chain of the run's voters from one of old or free keys (weak
subjectivity). A join link with `&at=` tells it, and otherwise the bootstraps of its link: each names the chain that it has
followed by its certificates (`follower`). More than half of those that name one must agree. The newcomer takes no chain
without the latest certificate that they agree on, and checks all that follow by their voters. Where the bootstraps disagree
it stops and shows both heads. Where none names a certificate, at a run's start, in a closed run or with older bootstraps, it
chooses among the members' heads.
"""

from collections.abc import Iterable

import trio

from ...dht.directory.interface import AsksOneServer, Directory
from ...dht.keys import named_key
from ...dht.run.link import JoinLink
from ...peer.address import split_p2p
from ...peer.base.errors import NetworkError, RemoteError, UsageError
from ...peer.base.transport import PeerId
from ...peer.log.telemetry import Telemetry
from ..chain.chain import Head
from .marks import Marks, agreement_of, decode_marks

NAMED_SECONDS = 5.0
"""The timeout of a bootstrap's answer in seconds; all are asked at once, and they have been connected to before."""


async def ask_named(directory: Directory, link: JoinLink, telemetry: Telemetry) -> dict[PeerId, Marks | None]:
    """Ask the link's bootstraps which head each follows. Returns those that answer, with None for one that names none."""
    named: dict[PeerId, Marks | None] = {}

    async def ask(server: PeerId, servers: AsksOneServer) -> None:
        reason = f"no answer within {NAMED_SECONDS:g} s"
        with trio.move_on_after(NAMED_SECONDS):
            try:
                value = await servers.held(server, named_key(link.run_id))
                named[server] = None if value is None else decode_marks(value, link.run_id)
                return
            except NetworkError as error:
                reason = str(error)
            except RemoteError as error:
                telemetry.emit("peer.charged", peer=server, step="ask for a head", reason=str(error))
                return
        telemetry.emit("bootstrap.mute", peer=server, step="ask for a head", reason=reason)

    async with trio.open_nursery() as nursery:
        if isinstance(directory, AsksOneServer):
            for server in dict.fromkeys(split_p2p(via)[1] for via in link.bootstraps):
                nursery.start_soon(ask, server, directory)
    return dict(sorted(named.items()))


async def find_anchor(directory: Directory, link: JoinLink, telemetry: Telemetry) -> Head | None:
    """Return the certificate that a newcomer's chain must have; None where its bootstraps name none.

    Raises `UsageError` where they disagree.
    """
    asked = await ask_named(directory, link, telemetry)
    named = {peer: marks for peer, marks in asked.items() if marks is not None}
    if not named:
        telemetry.emit("anchor.none", step="join", reason=f"none of {len(asked)} bootstraps that answer follows this run")
        return None
    agreement = agreement_of(named)
    if agreement.start is None:
        raise UsageError(
            f"the bootstraps of this link disagree on the run: {_shown(named.items())}",
            remedy="ask somebody in the run for a link with &at=, which `flockstep run info` prints",
        )
    for peer in agreement.outvoted:
        reason = f"it names {named[peer].head}, another chain than {len(named) - len(agreement.outvoted)} others"
        telemetry.emit("anchor.outvoted", peer=peer, step="join", reason=reason)
    start = agreement.start
    reason = _shown(named.items())
    if not start.round:
        telemetry.emit("anchor.none", step="join", reason=reason)
        return None
    telemetry.emit("anchor.chosen", step="join", reason=reason, round=start.round)
    return Head(start.round, start.hash, tokens=0)


def _shown(named: Iterable[tuple[PeerId, Marks]]) -> str:
    """Return the heads that bootstraps name, in one line: each head with those that name it."""
    heads: dict[str, list[PeerId]] = {}
    for peer, marks in named:
        heads.setdefault(str(marks.head), []).append(peer)
    return "; ".join(f"{head} by {', '.join(peers)}" for head, peers in heads.items())
