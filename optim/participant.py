"""What runs in the network process: one peer's host, directory, membership, rounds and state, at its trainer's command.

The trainer (`swarm`) calls `open`, `attach`, `join`, `sync`, `average`, `applied`, `leave`, and posts `progress` and
`share`; this side posts every event and, a few times a second, a `pulse` with what the trainer's pace and its share of
the data depend on. θ and m are written by the trainer, except during `join` and `sync`; g is left in `exchange`. Beside
the training this side writes the checkpoints. NumPy only: torch would cost 300 MB and two seconds.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio

from ..collectives.averager import Averaged, Averager, Contribution
from ..collectives.chain.fork_choice import alike, lagging, told_of, training
from ..collectives.chain.head import Heads
from ..collectives.codec import CELL
from ..collectives.place import Place
from ..collectives.published import validate
from ..collectives.round.actions import OutcomeKind
from ..collectives.state.archive import Archive
from ..collectives.state.checkpoint_file import read_tensors
from ..dht.members.gossip import Gossip
from ..dht.members.remembered import Remembered
from ..dht.members.table import MemberBody, MemberState, MemberTable
from ..dht.rendezvous import door, take_manifest
from ..dht.run.link import JoinLink
from ..peer.config import PeerConfig
from ..peer.digest import DIGEST_BYTES
from ..peer.identity import Identity
from ..peer.node.node import Node
from ..peer.process.bridge import Channel, Payload
from ..peer.process.shared import SharedVectors
from ..peer.telemetry import Telemetry
from ..peer.wire import Certificate
from ..peer.wire.framing import MAX_FRAME_BYTES
from ..peer.wire.schema import decode, encode
from .member.apply import decode_outputs, keep_rest, next_root, spans
from .member.catch_up import CatchUp
from .neighbours import Neighbours
from .outer import OuterSettings
from .pinned import charter_of, invitation, spec_of

BLANK = Place(0, bytes(DIGEST_BYTES), 0, None)
"""Of a trainer that has just begun."""
VECTORS = ("theta", "momentum", "exchange", "residual")
PULSE_PERIOD = 0.25
SYNC_PATIENCE = 15.0
"""Seconds that a newcomer waits for other newcomers to settle which of them the run starts from."""
FINISH_SECONDS = 2.0
"""For who leaves to end a round that is all but done, before it says goodbye; else its deputies do its work again."""
ANNOUNCE_PERIOD = 2.0
"""Seconds between announcements of mere progress; a change of state is announced at once."""


class Participant:
    """The state and the commands of the network process."""

    def __init__(self, channel: Channel, nursery: trio.Nursery) -> None:
        self._channel = channel
        self._nursery = nursery
        self._telemetry = Telemetry()
        self._telemetry.subscribe(lambda event: channel.post("event", {"event": event}))
        self._opened = False
        self._told: Payload = {}
        self._body = MemberBody(state=MemberState.SYNCING)
        self._announced = 0.0
        self.handlers = {
            "open": self._open,
            "attach": self._attach,
            "join": self._join,
            "sync": self._sync,
            "average": self._average,
            "applied": self._applied,
            "progress": self._progress,
            "share": self._share,
            "leave": self._leave,
        }

    async def _open(self, payload: Payload) -> Payload:
        """Reach the run: host, directory, manifest, node."""
        answer: Payload = await self._nursery.start(self._live, payload)
        return answer

    async def _live(self, payload: Payload, *, task_status: Any) -> None:
        settings = payload["config"]
        config = PeerConfig(**{**settings, "home": Path(settings["home"]), "announce": tuple(settings["announce"])})
        identity = Identity.load_or_create(config.home / "identity.key")
        self._link = link = JoinLink.parse(payload["link"])
        self._folder = folder = config.home / "runs" / link.run_id
        self._resume = config.resume
        self._remembered = Remembered(folder, link.run_id, self._telemetry)
        async with door(identity, link, config, self._telemetry, validate, self._remembered) as (host, directory):
            signed = await take_manifest(directory, self._remembered, link.run_id)
            self._invite = invitation(signed, identity.peer_id, config.invite)
            self._host, self._directory, self._signed = host, directory, signed
            async with Node(host, identity, config, self._telemetry) as self._node:
                self._opened = True
                task_status.started(
                    {
                        "manifest": signed.publishable.hex(),
                        "peer_id": identity.peer_id,
                        "addresses": list(host.addresses()),
                        "port": host.port,
                    }
                )
                await trio.sleep_forever()

    async def _attach(self, payload: Payload) -> Payload:
        """Map the trainer's vectors, and set up what needs their size."""
        manifest = self._signed.manifest
        size = payload["num_cells"] * CELL
        self._vectors = SharedVectors.attach(Path(payload["path"]), VECTORS, size)
        self._outer = OuterSettings(lr=manifest.outer.lr, momentum=manifest.outer.momentum)
        run, me = self._signed.run_id, self._node.peer_id
        self._table = MemberTable(run, me, sequence=int(time.time() * 1000), charter=charter_of(self._signed))
        self._neighbours = Neighbours(self._table, me)
        self._gossip = Gossip(
            self._node, self._table, self._directory, run, seed=manifest.seed, remembered=self._remembered
        )
        spec = self._spec = spec_of(self._signed, payload["num_cells"], self._invite)
        self._archive = await Archive.open(
            self._node,
            spec,
            self._folder,
            read_tensors(payload["tensors"]),
            every=manifest.outer.checkpoint_every,
            resume=self._resume,
        )
        self._averager = Averager(self._node, spec, self._trainers, self._archive.outputs, self._archive.conduct)
        self._state = self._vectors["theta"], self._vectors["momentum"]
        self._catch_up = CatchUp(self._node, spec, self._outer, self._state, self._archive)
        self._heads = Heads(self._directory, run, self._telemetry)
        self._gossip.on_newcomer(self._averager.greet)
        return {}

    async def _join(self, payload: Payload) -> Payload:
        """Become a member that is not waited for yet: with the trainer's state, or where it has none, my disk's."""
        written = bytes.fromhex(payload["certificate"])
        certificate = decode(Certificate, written, max_bytes=MAX_FRAME_BYTES) if written else None
        place = Place(payload["round"], bytes.fromhex(payload["root"]), payload["tokens"], certificate)
        await self._catch_up.resume(place)
        if place == BLANK and self._resume:
            await self._catch_up.restore()
            place = self._place
        self._body = replace(
            self._body,
            state=MemberState.SYNCING,
            invite=self._invite,
            device=payload["device"],
            version=payload["version"],
            layout=bytes.fromhex(payload["layout"]),
            frozen=bytes.fromhex(payload["frozen"]),
            **told_of(place),
        )
        self._announce()
        self._nursery.start_soon(self._gossip.run)
        self._nursery.start_soon(self._heads.look, self._place.head)
        self._nursery.start_soon(self._pulse)
        return {}

    async def _sync(self, payload: Payload) -> Payload:
        """Hold the run's state: my own where I start the run, else that of the others."""
        catch_up, began = self._catch_up, time.monotonic()
        catch_up.changed, before, source = False, catch_up.num_bytes, None
        leaves = await catch_up.hash_state()
        if self._body.state != MemberState.TRAINING or catch_up.giver(self._gossip.active()) is not None:
            self._body = replace(self._body, state=MemberState.SYNCING)
            self._announce()
            with trio.move_on_after(SYNC_PATIENCE):
                await self._gossip.looked.wait()
                await self._heads.looked.wait()
            # Who gives up what the disk holds wants to begin anew.
            published, rounds = self._heads.ahead if self._resume else None, self._signed.manifest.outer.rounds
            leaves, source = await catch_up.reach(self._gossip, SYNC_PATIENCE, published=published, rounds=rounds)
        await catch_up.advance(self._place)
        self._averager.expect(self._place.round + 1, self._place.certificate)
        self._settle(leaves)
        figures: dict[str, Any] = {"bytes": catch_up.num_bytes - before, "seconds": round(time.monotonic() - began, 3)}
        figures |= {"round": self._place.round, "root": self._place.root.hex()}
        self._telemetry.emit("state.synced", peer=source or "", **figures)
        self._tell()  # What was said before of another state would have the trainer ask again.
        return {**self._standing(), "changed": catch_up.changed}

    async def _average(self, payload: Payload) -> Payload:
        """One attempt of the next round with what the trainer left in `exchange`."""
        vectors = self._vectors
        exchange, residual = vectors["exchange"], vectors["residual"]
        before = self._host.traffic()
        began = time.monotonic()
        await self._node.compute(lambda: exchange.__iadd__(residual))
        contribution = Contribution(
            vector=exchange,
            round=self._place.round + 1,
            base_root=self._place.root,
            tokens=payload["tokens"],
            steps=payload["steps"],
            loss=payload["loss"],
            grace=payload["grace"],
            seconds=payload["seconds"],
            ramp=payload["ramp"],
        )
        self._gossip.attend(self._averager.drawn())
        self._round_over = trio.Event()
        averaged = await self._averager.average(contribution, self._next_root)
        self._round_over.set()
        outcome = averaged.outcome
        traffic = self._host.traffic()
        figures: dict[str, Any] = {
            "round": outcome.slot.round,
            "attempt": outcome.slot.attempt,
            "roster": list(outcome.members),
            "seconds": round(time.monotonic() - began, 3),
            "sent": traffic.sent - before.sent,
            "received": traffic.received - before.received,
        }
        if outcome.kind is OutcomeKind.DONE:
            await self._node.compute(self._land, averaged)
            await self._catch_up.advance(Place(outcome.slot.round, outcome.root, outcome.tokens, outcome.certificate))
            if outcome.members[0] == self._node.peer_id:  # One publishes, and the convener rotates.
                self._nursery.start_soon(self._heads.publish, outcome.certificate)
            figures |= {"cut": list(outcome.cut), "root": outcome.root.hex(), "loss": payload["loss"]}
            self._telemetry.emit("round.done", **figures)
        else:
            self._telemetry.emit(f"round.{outcome.kind}", reason=outcome.reason, **figures)
        return {"kind": outcome.kind.value, "reason": outcome.reason, **figures, **self._standing()}

    def _next_root(self, bounds: Any, outputs: Any) -> bytes:
        vectors = self._vectors
        return next_root(vectors["theta"], vectors["momentum"], self._outer, self._spec.output, bounds, outputs)

    def _land(self, averaged: Averaged) -> None:
        """Error feedback, then g into `exchange`: in this order, since both need what is there now."""
        outcome, exchange = averaged.outcome, self._vectors["exchange"]
        if self._node.peer_id in outcome.cut:
            keep_rest(exchange, self._spec.contribution, outcome.bounds, averaged.mine, self._vectors["residual"])
        for span in spans(outcome.bounds):
            decode_outputs(self._spec.output, outcome.bounds, averaged.outputs, span, exchange[span])

    async def _applied(self, payload: Payload) -> Payload:
        """The trainer has made the outer step: check that it led to the certified root, and be waited for."""
        certified = self._place.root
        leaves = await self._catch_up.hash_state()
        if self._place.root != certified:
            reason = f"the outer step led to {self._place.root.hex()[:8]}, certified is {certified.hex()[:8]}"
            self._telemetry.emit("state.drift", step="apply", reason=reason)
            return {**self._standing(), "drifted": True}
        self._settle(leaves)
        return {**self._standing(), "drifted": False}

    async def _progress(self, payload: Payload) -> None:
        self._body = replace(self._body, **payload)
        if trio.current_time() - self._announced >= ANNOUNCE_PERIOD:
            self._announce()

    async def _share(self, payload: Payload) -> Payload | None:
        """Which part of the data I train; what is known of the others' parts."""
        self._body = replace(self._body, share=self._neighbours.tell(payload))
        if payload["urgent"] or trio.current_time() - self._announced >= ANNOUNCE_PERIOD:
            self._announce()
        return self._neighbours.view()

    async def _leave(self, payload: Payload) -> None:
        if not self._opened:
            return
        if hasattr(self, "_gossip"):
            if self._averager.finishing:
                with trio.move_on_after(FINISH_SECONDS):
                    await self._round_over.wait()
            self._body = replace(self._body, state=MemberState.LEFT)
            self._announce()
        await self._node.leave(payload["reason"])

    def _settle(self, leaves: tuple[list[bytes], list[bytes]]) -> None:
        """I hold the state of my place: keep it if it is time for a checkpoint, and be waited for."""
        last = self._place.round >= self._signed.manifest.outer.rounds
        write = self._archive.checkpoints.write
        self._nursery.start_soon(write, self._place, self._state, leaves[0] + leaves[1], last)
        self._body = replace(self._body, state=MemberState.TRAINING, root=self._place.root, **told_of(self._place))
        self._announce()

    @property
    def _place(self) -> Place:
        """Where my state stands."""
        return self._catch_up.place

    def _trainers(self) -> frozenset[str]:
        return frozenset(member.peer for member in training(alike(self._gossip.active(), self._node.peer_id)))

    def _standing(self) -> Payload:
        place = self._place
        return {
            "at_round": place.round,
            "at_root": place.root.hex(),
            "at_tokens": place.tokens,
            # The trainer keeps it for the next network process, should this one die.
            "at_certificate": encode(place.certificate).hex() if place.certificate is not None else "",
        }

    def _announce(self) -> None:
        self._announced = trio.current_time()
        traffic = self._host.traffic()
        self._body = replace(
            self._body,
            addresses=self._host.addresses(),  # Another network may have come since.
            rung=self._host.standing.rung,
            up=self._node.upload_rate,
            down=self._node.download_rate,
            sent=traffic.sent,
            received=traffic.received,
        )
        self._gossip.announce(self._body)

    async def _pulse(self) -> None:
        while True:
            self._tell()
            await trio.sleep(PULSE_PERIOD)

    def _tell(self) -> None:
        """Tell the trainer, only when it changes, what its pace depends on."""
        traffic = self._host.traffic()
        me, members = self._node.peer_id, self._gossip.active()
        pulse: Payload = {
            "round": self._averager.round,
            "ready": sorted(self._averager.ready() - {me}),
            "active": len(self._trainers() | {me}),
            "hindrance": self._averager.hindrance,
            "behind": self._averager.behind or (not self._averager.busy and self._catch_up.outrun(members)),
            "lagging": lagging(self._catch_up.proofs.credible(members), self._place),
            "kept": self._archive.checkpoints.kept,
            "sent": traffic.sent,
            "received": traffic.received,
            "share": self._neighbours.view(),
            "rungs": {peer: rung for peer in self._gossip.others() if (rung := self._host.rung(peer)) is not None},
        }
        if self._body.addresses != self._host.addresses():
            self._announce()
        if pulse != self._told:
            self._channel.post("pulse", pulse)
            self._told = pulse


async def main(channel: Channel) -> None:
    """The network process, until its trainer closes the pipe."""
    async with trio.open_nursery() as nursery:
        await channel.serve(Participant(channel, nursery).handlers)
        nursery.cancel_scope.cancel()
