"""Holds the state (θ, m) of one peer, its position in the run, and the ledger that follows it.

Theory of operation. A state moves by the outer step of a certified round: of one that I took part in (`step`), or of
one that is replayed from its certificate and its outputs (`replay`). A replayed step is made only after a check that it
leads to the certified root, so that the state is that of some certified round at every moment. The ledger follows the
state (`advance`), and is ahead of it where that is behind the run.

Error feedback and the progress since the last round belong to the trainer, and stay as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from ...collectives.chain.certificate import genesis, value_of
from ...collectives.chain.chain import ChainPosition
from ...collectives.chain.packed import checked
from ...collectives.chain.replay import fetch_outputs
from ...collectives.spec import Spec
from ...collectives.state.archive import Archive
from ...collectives.vector.arrays import Floats
from ...peer import wire
from ...peer.base.digest import DIGEST_BYTES
from ...peer.base.errors import NetworkError, ProtocolViolation, RemoteError, sole_error
from ...peer.base.transport import PeerId
from ...peer.node.bulk import Blob
from ...peer.node.node import Node
from ...peer.wire.signed import verify_signed
from ..step.outer import OuterSettings
from .apply import LeafHashes, OuterState


class HeldState:
    """One peer's state (θ, m) and its position in the run."""

    def __init__(
        self, node: Node, spec: Spec, outer: OuterSettings, vectors: tuple[Floats, Floats], archive: Archive
    ) -> None:
        self._node = node
        self._spec = spec
        self._outer = outer
        self._archive = archive
        self._state = OuterState(*vectors, outer.at(1), spec.output)
        self._place = ChainPosition(0, bytes(DIGEST_BYTES), 0, None)
        self.next_root = self._state.next_root
        self.forget = self._state.forget
        self.num_bytes = 0
        """Bytes fetched so far."""
        self.changed = False
        """Whether θ or m may have changed since this was last set to False."""
        self.is_blank = True
        """Whether it is what this process began with, neither from its disk nor from another member."""

    @property
    def vectors(self) -> tuple[Floats, Floats]:
        """θ and m."""
        return self._state.theta, self._state.momentum

    @property
    def leaves(self) -> LeafHashes:
        """The hashes of θ's leaves and of m's."""
        return self._state.leaves

    @property
    def place(self) -> ChainPosition:
        """Where the state stands; the settings of the round after it are those that its certificate names."""
        return self._place

    @place.setter
    def place(self, place: ChainPosition) -> None:
        self._place = place
        settings = self._outer if self._spec.settings is None else OuterSettings.of(self._spec.settings(self._revision))
        self._state.use(settings.at(place.round + 1), self.spec.output)

    @property
    def spec(self) -> Spec:
        """What holds in the next round."""
        return self._spec.under(self._revision)

    @property
    def is_last(self) -> bool:
        """Whether the run ends with my state."""
        settings = self._spec.settings
        return settings is not None and self._place.round >= settings(self._revision).num_rounds

    @property
    def _revision(self) -> bytes:
        return b"" if self._place.certificate is None else value_of(self._place.certificate).revision

    async def hash(self) -> None:
        """Hash the leaves of the vectors: they decide which root my position has, whatever others claimed."""
        self.forget()
        await self._node.compute(lambda: self.leaves)
        self.place = replace(self.place, root=self._state.root)

    async def step(self, bounds: Sequence[int], outputs: Sequence[Blob]) -> None:
        """Make the outer step of a certified round; my position has the root that it led to."""
        self.changed = True
        await self._node.compute(self._state.apply, bounds, outputs)
        self.place = replace(self.place, root=self._state.root)

    async def restore(self) -> None:
        """Begin where my disk ends: at my newest checkpoint, after replaying the rounds whose outputs are kept here.

        Certificates beyond stay in the ledger until I have searched for providers. Raises `LocalError`.
        """
        ledger, node = self._archive.ledger, self._node
        checkpoint = self._archive.checkpoints.newest(ledger)
        if checkpoint is None:
            return
        await node.compute(checkpoint.copy_to, self.vectors)
        self.forget()
        self.place, self.changed, self.is_blank = checkpoint.place, True, False
        if self.place.certificate is not None and ledger.at(self.place.round) != self.place.head:
            await self.advance(self.place)
        rounds = range(self.place.round + 1, ledger.head.round + 1)
        try:
            for number in rounds:
                certificate = await node.compute(ledger.certificate, number)
                if certificate is None:
                    raise NetworkError(f"the certificate of round {number} is not here")
                await self._step_over(certificate, (), set())
        except (NetworkError, RemoteError, BaseExceptionGroup) as raised:
            self.report_stop("restore", judged(node, node.peer_id, "restore", raised))
        place = self.place
        node.telemetry.emit(
            "state.restored", round=place.round, root=place.root.hex(), checkpoint=checkpoint.place.round
        )

    async def advance(self, place: ChainPosition) -> None:
        """Move my position to `place`, and the ledger with it."""
        self.place = place
        certificates = () if place.certificate is None else (place.certificate,)
        await self._node.compute(self._archive.ledger.follow, certificates)

    async def replay(self, certificate: wire.Certificate, holders: Sequence[PeerId], backed_off: set[PeerId]) -> None:
        """Replay the next round, with its outputs from my disk or from these holders. Raises what a holder did wrong."""
        outputs = await self._step_over(certificate, holders, backed_off)
        self.num_bytes += sum(len(data) for data in outputs.values())
        await self._archive.outputs.keep(self.place.round, outputs)
        if self._archive.ledger.at(self.place.round) != self.place.head:
            await self.advance(self.place)

    async def _step_over(
        self, certificate: wire.Certificate, holders: Sequence[PeerId], backed_off: set[PeerId]
    ) -> Mapping[bytes, Blob]:
        """Make the outer step of the next round. Returns its outputs by hash, from my disk or from these holders."""
        node, spec, place = self._node, self._spec, self.place
        value = value_of(certificate)
        follows = (spec.run, place.round + 1, previous_of(spec.run, place), place.root)
        if (value.run, value.round, value.previous, value.base_root) != follows:
            raise NetworkError(f"its round {value.round} does not follow from my state")
        await node.compute(
            partial(checked, [certificate], spec.run, verify_signed, spec.charter, before=place.certificate)
        )
        outputs = await fetch_outputs(
            node, self.spec.output, spec.cells_of(value.round), value, certificate.voters, holders, backed_off
        )
        blobs = [outputs[key] for key in value.outputs]
        root = await node.compute(self.next_root, value.bounds, blobs)
        if root != value.next_root:
            raise ProtocolViolation(f"the outputs of round {value.round} do not lead to its certified state")
        await self.step(value.bounds, blobs)
        self.place = ChainPosition(value.round, root, value.tokens, certificate)
        num_bytes = sum(len(data) for data in outputs.values())
        node.telemetry.emit("round.replayed", round=value.round, root=root.hex(), bytes=num_bytes)
        return outputs

    def report_stop(self, step: str, error: BaseException, peer: PeerId = "") -> None:
        """Emit why the replay stopped."""
        reason = str(error)
        self._node.telemetry.emit("replay.failed", peer=peer, step=step, reason=reason, round=self.place.round + 1)


def previous_of(run: str, place: ChainPosition) -> bytes:
    """Return the hash that the certificate of the round after a state must name as its predecessor."""
    return genesis(run) if place.certificate is None else place.head.hash


def judged(node: Node, peer: PeerId, step: str, raised: BaseException) -> BaseException:
    """Return the sole error of a group; a `RemoteError` is charged to `peer`, a bug is raised again."""
    error = sole_error(raised)
    if isinstance(error, RemoteError):
        node.charge(peer, step, error)
    elif not isinstance(error, NetworkError):
        raise raised
    return error
