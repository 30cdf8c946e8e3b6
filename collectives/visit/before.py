"""The credit of the runs that a run goes on from, by their certificates, which its members and this computer still have."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...dht.directory.interface import Directory
from ...dht.rendezvous import find_manifest
from ...dht.run.manifest import Follows, Manifest, SignedManifest
from ...peer import wire
from ...peer.base.errors import NetworkError, RemoteError
from ...peer.base.transport import PeerId
from ...peer.node.node import Node
from ..accountability.credit import Credits
from ..chain.certificate import certificate_hash, value_of
from ..chain.reader import ChainReader
from ..chain.replay import ask_certificates
from ..light.own_ledger import OwnLedger
from ..spec import charter_of


@dataclass(frozen=True, slots=True)
class _Givers:
    """Whom to ask for certificates of a run that has ended: members of the next one, or the disk of this computer."""

    node: Node
    own: OwnLedger | None

    async def ask(self, peer: PeerId, message: Any, *, timeout: float) -> Any:
        """Ask a member, or under this node's id the disk. Raises as `Node.ask`."""
        if self.own is not None and peer == self.node.peer_id:
            return await self.node.compute(self.own.page, message.from_round, message.limit)
        return await self.node.ask(peer, message, timeout=timeout)

    async def compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run long work beside the event loop."""
        return await self.node.compute(function, *arguments)


async def credit_before(
    node: Node, directory: Directory, after: Manifest, members: Sequence[PeerId], home: Path, credit: Credits
) -> int:
    """Add the credit of all runs that the one of a manifest goes on from; return how many rounds they had.

    A manifest names the last certificate of the run before, and each certificate the one before it, so `members`, of the run
    that goes on, can show no others. Raises `NetworkError` where nobody shows them all.
    """
    rounds, owner, follows = 0, after.owner, after.follows
    while follows.run:
        signed = await find_manifest(directory, follows.run)
        if signed.manifest.owner != owner:
            raise NetworkError(f"run {follows.run} has another owner: nothing of it belongs to this one")
        own = OwnLedger.of(home / "runs" / follows.run, charter_of(signed), node.telemetry)
        givers = _Givers(node, own)
        for peer in (*([] if own is None else [node.peer_id]), *members):
            try:
                found = await _credit_of(givers, signed, follows, peer)
            except NetworkError as error:
                node.telemetry.emit("head.unproven", peer=peer, step="credit", reason=str(error), round=follows.round)
            except RemoteError as error:
                node.charge(peer, "show the run before", error)
            else:
                credit.add(found)
                break
        else:
            remedy = "ask again while members are here that took part in it"
            raise NetworkError(f"no member shows all certificates of the run before, {follows.run}", remedy=remedy)
        rounds, follows = rounds + follows.round, signed.manifest.follows
    return rounds


async def _credit_of(givers: _Givers, signed: SignedManifest, follows: Follows, peer: PeerId) -> Credits:
    """Return the credit in all rounds of a run, up to the one that `follows` names. Raises `NetworkError`, `RemoteError`."""
    page = await ask_certificates(givers, peer, wire.LedgerAsk(signed.run_id, follows.round, 1))
    if not page or certificate_hash(page[0]).hex() != follows.hash:
        raise NetworkError("it does not show the last certificate of the run before")
    found = Credits()
    found.take(value_of(page[0]))

    async def take(earlier: list[wire.Certificate], _losses: Mapping[int, float]) -> bool:
        for certificate in earlier:
            found.take(value_of(certificate))
        return True

    oldest = await ChainReader(givers, signed.run_id, charter_of(signed)).fill(page[0], 1, peer, take)
    if oldest.slot.round > 1:
        raise NetworkError(f"it has no certificates before round {oldest.slot.round}")
    return found
