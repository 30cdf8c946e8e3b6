"""`flockstep keep --publish`: certified checkpoints, as models for other programs, on the hub or in a bucket.

Theory of operation. A keeper has neither torch nor the names of parameters. So each publication is a process of its own:

    echo '["LINK", "HOME", "hf://org/name"]' | python -P -m flockstep.scripts.checkpoints.publish

It finds out whether the target may be written, exports the newest checkpoint, writes a card beside it, uploads all, and
prints the round. It ends without doing so where the round has been published. The keeper starts one when it begins, and
after every n-th checkpoint; until one has succeeded, after every checkpoint. A failure is one event, and the keeper goes on.
"""

import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import trio

from ...collectives.accountability.credit import Credits, PeerCredit
from ...collectives.chain.certificate import certificate_hash, value_of
from ...collectives.chain.chain import ChainPosition
from ...collectives.chain.packed import unpack_certificate
from ...collectives.light.own_ledger import OwnLedger
from ...collectives.spec import charter_of
from ...dht.members.remembered import Remembered
from ...dht.run.link import JoinLink
from ...dht.run.manifest import SignedManifest
from ...optim.consent import is_hub_id
from ...peer import wire
from ...peer.base.disk import disk_errors, write_whole
from ...peer.base.errors import FlockstepError, LocalError, UsageError
from ...peer.base.plain import plain_text
from ...peer.base.transport import PeerId
from ...peer.log.telemetry import Event, Telemetry
from ...peer.wire.schema import encode
from .card import Published, card_of
from .newest import find_checkpoint, manifest_beside
from .upload import check_target, open_target

STATE = "published.json"
"""In a run's folder: what was published last, and the losses that were seen (`PublishedState`)."""
DRAFT = "publishing"
"""The folder of an export, in a run's folder, until it is uploaded."""
Point = tuple[int, float]
"""A round, and the loss on held-out data after it."""
PUBLISH_SECONDS = 6 * 3600.0
"""A hang's limit: 16 GB at 10 Mbit/s take four hours."""


def check_publishing(signed: SignedManifest, to: str) -> None:
    """Raise `FlockstepError` where a keeper can publish nothing of a run, or not there."""
    check_target(to)
    manifest = signed.manifest
    if manifest.is_own or (":" in manifest.model.name and not manifest.model.name.startswith("hf:")):
        raise UsageError(
            "--publish: the run's model is custom code, so a keeper does not know its names and shapes",
            remedy="publish from a peer that trains, by `flockstep export HOME FOLDER --to …`",
        )
    if find_spec("torch") is None:
        what = "--publish needs torch, which knows the names and shapes of the run's model"
        raise LocalError(what, remedy="install it: pytorch.org names the command for your computer")


class Publisher:
    """The keeper's side: starts the process of each publication, and turns its end into an event."""

    def __init__(self, link: JoinLink, home: Path, to: str, every: int, telemetry: Telemetry) -> None:
        self._link, self._home, self._to, self._every = link, home, to, every
        self._telemetry = telemetry
        self._curve: list[Point] = []

    async def run(self) -> None:
        """Publish until cancelled."""
        token = trio.lowlevel.current_trio_token()
        written, checkpoints = trio.open_memory_channel[None](math.inf)

        def take(event: Event) -> None:
            """Listen, in whatever thread an event is emitted."""
            round_, loss = event.get("round"), event.get("loss")
            if event["event"] == "checkpoint.written":
                token.run_sync_soon(written.send_nowait, None)
            elif event["event"] == "eval.result" and isinstance(round_, int) and isinstance(loss, float):
                self._curve.append((round_, loss))

        self._telemetry.subscribe(take)
        num_due = self._every
        while True:
            if num_due >= self._every and await self._publish():
                num_due = 0
            await checkpoints.receive()
            num_due += 1

    async def _publish(self) -> bool:
        """Publish the newest checkpoint; return True if it is there."""
        began = trio.current_time()
        question = json.dumps([str(self._link), str(self._home), self._to, self._curve]).encode()
        command = [sys.executable, "-P", "-m", __name__]
        reason = f"it took more than {PUBLISH_SECONDS / 3600:g} hours"
        with trio.move_on_after(PUBLISH_SECONDS):
            try:
                done = await trio.run_process(
                    command, stdin=question, capture_stdout=True, capture_stderr=True, check=False
                )
            except OSError as error:
                reason = f"no process could be started: {error}"
            else:
                if done.returncode == 0:
                    if (round_ := json.loads(done.stdout.splitlines()[-1])) is not None:
                        seconds = round(trio.current_time() - began, 3)
                        self._telemetry.emit("checkpoint.published", round=round_, to=self._to, seconds=seconds)
                    return round_ is not None
                lines = done.stderr.decode(errors="replace").strip().splitlines()
                reason = plain_text(lines[-1]) if lines else f"its process ended with {done.returncode}"
        self._telemetry.emit("checkpoint.unpublished", step="publish", reason=reason)
        return False


def publish_newest(link: JoinLink, home: Path, to: str, curve: Sequence[Point]) -> int | None:
    """Publish the newest checkpoint of a home folder, unless it has been; return its round, None if none is certified yet.

    `curve` has the losses that this keeper has seen since it began. Raises `FlockstepError`.
    """
    target = open_target(to)
    target.check()
    folder = home / "runs" / link.run_id
    try:
        found = find_checkpoint(folder)
    except UsageError:
        return None
    if int(found.name) == 0:  # The start of a run, which nobody has certified.
        return None
    before = PublishedState.read(folder / STATE)
    losses = sorted((dict(before.curve) | dict(curve)).items())
    if (before.to, before.round) == (to, int(found.name)):
        return before.round
    from .export import export  # Loads torch, which nothing above needs.

    draft = folder / DRAFT
    shutil.rmtree(draft, ignore_errors=True)
    try:
        place = export(folder, draft, lambda line: None)
        _describe(link, manifest_beside(found), folder, draft, place, losses)
        target.put(draft, f"round-{place.round:06}")
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    state = PublishedState(to, place.round, tuple(losses))
    write_whole(folder / STATE, json.dumps(asdict(state)).encode())
    return place.round


@dataclass(frozen=True, slots=True)
class PublishedState:
    """What a keeper has published last, where, and the losses that it has seen."""

    to: str = ""
    round: int = -1
    curve: tuple[Point, ...] = ()

    @classmethod
    def read(cls, path: Path) -> "PublishedState":
        """Read the state; an empty one where there is none: then a checkpoint is published once more, and no harm is done."""
        try:
            values = json.loads(path.read_bytes())
            curve = tuple((int(round_), float(loss)) for round_, loss in values["curve"])
            return cls(str(values["to"]), int(values["round"]), curve)
        except (OSError, ValueError, TypeError, KeyError):
            return cls()


def _describe(
    link: JoinLink, signed: SignedManifest, folder: Path, draft: Path, place: ChainPosition, curve: Sequence[Point]
) -> None:
    """Write the card beside an exported model, and of an open run its certificate and manifest.

    Those of a closed run are for its members only, and so is who they are.
    """
    certificate = place.certificate if charter_of(signed).kind == "open" else None
    credit, first, names = _credit_of(signed, folder, place.round) if certificate is not None else ((), 1, {})
    published = Published(
        signed=signed,
        link="" if certificate is None else str(link),
        round=place.round,
        root=place.root.hex(),
        tokens=place.tokens,
        certificate="" if certificate is None else certificate_hash(certificate).hex(),
        signers=0 if certificate is None else len(certificate.voters),
        curve=curve,
        credit=credit,
        credit_from=first,
        names=names,
    )
    is_adapter, base = (draft / "adapter_config.json").exists(), signed.manifest.model.name.removeprefix("hf:")
    library = "peft" if is_adapter else "transformers" if (draft / "config.json").exists() else "safetensors"
    card = card_of(published, library, base if is_adapter and is_hub_id(base) else "")
    figures = {"run": link.run_id, "round": place.round, "root": place.root.hex(), "tokens": place.tokens}
    with disk_errors(f"write {draft}"):
        (draft / "README.md").write_text(card, encoding="utf-8")
        if certificate is not None:
            figures["certificate"] = encode(certificate).hex()
            (draft / "manifest.flockstep").write_bytes(signed.publishable)
        (draft / "flockstep.json").write_text(json.dumps(figures, indent=1))


def _credit_of(
    signed: SignedManifest, folder: Path, last: int
) -> tuple[tuple[PeerCredit, ...], int, Mapping[PeerId, str]]:
    """Return the credit of each contributor up to a round, the first round that is counted, and how they call themselves."""
    with closing(Telemetry()) as telemetry:
        bodies = Remembered(folder, signed.run_id, telemetry).bodies()
        ledger = OwnLedger.of(folder, charter_of(signed), telemetry)
    counted, first = Credits(), 1 if ledger is None else ledger.first
    round_ = first
    while (
        ledger is not None
        and round_ <= last
        and (page := ledger.page(round_, min(wire.MAX_PAGE, last + 1 - round_)).certificates)
    ):
        for data in page:
            counted.take(value_of(unpack_certificate(data)))
        round_ += len(page)
    return counted.all(), first, {peer: body.name for peer, body in bodies.items() if body.name}


if __name__ == "__main__":
    try:
        asked = json.load(sys.stdin)
        sys.stdout.write(
            json.dumps(publish_newest(JoinLink.parse(asked[0]), Path(asked[1]), asked[2], asked[3])) + "\n"
        )
    except FlockstepError as error:
        sys.exit(f"{error} — {error.remedy}" if error.remedy else f"{error}")
