"""Takes over what version 0.1 has left in a run's folder: its state is the start of a new chain.

Theory of operation. No certificate of this version can follow one of version 0.1 (`first_version`), so the chain begins
anew. Its start state is the newest whole checkpoint there, which is compared with the root that its certificate names.
The others take it as they take any start state: the founders' counts (`chain.fork_choice.start_root`), which vote on the
first round. To turn a checkpoint into that start state, only its description is written, in one step: a process that is
killed before has changed nothing that the next one cannot do again.

Ledger, signing guard and evidence speak of messages that are signed no more. They are moved aside and never read again.
Outputs lead from state to state only with the ledger, and are deleted.
"""

import shutil
import zlib
from pathlib import Path

from ...peer.disk import disk_errors, rename, write_whole
from ...peer.errors import LocalError, RemoteError, UsageError
from ...peer.log_file import read_records
from ...peer.telemetry import Telemetry
from ..chain.chain import start_of_run
from ..chain.ledger import LENGTH_BYTES
from ..chain.packed import MAX_PLAIN_BYTES
from ..spec import Spec
from .checkpoint_file import (
    DESCRIPTION,
    MAX_DESCRIPTION_BYTES,
    Checkpoint,
    describe_checkpoint,
    load_checkpoint,
    read_description,
)
from .first_version import FIRST, is_first

ASIDE = "version-0.1"
"""The folder, in that of the run, for the files of version 0.1 that are kept and not read."""
OF_FIRST = ("ledger", "spoken", "evidence")
OUTPUTS_OF_FIRST = "outputs"


def carry_over(folder: Path, spec: Spec, telemetry: Telemetry, *, resume: bool = True) -> None:
    """Make what version 0.1 has left in a run's folder the start of a new chain, with an event; else do nothing.

    Without `resume` its state is not used. Raises `LocalError` if the disk fails, and `UsageError` if all rounds of the run
    were done.
    """
    checkpoint = newest_of_first(folder / "checkpoints") if resume else None
    if checkpoint is None and not _is_of_first(folder / OF_FIRST[0]):
        return
    if checkpoint is not None and spec.settings is not None:
        rounds = spec.settings(b"").num_rounds
        if checkpoint.place.round >= rounds:
            raise UsageError(
                f"all {rounds} rounds of the run are done, by version {FIRST}; nothing is left to train",
                remedy=f"`flockstep export {folder} OUT` makes files of its model; [model] from begins a new run with it",
            )
    with disk_errors(f"move the files of version {FIRST} in {folder} aside"):
        for name in OF_FIRST:
            if (folder / name).exists():
                (folder / ASIDE).mkdir(exist_ok=True)
                shutil.rmtree(folder / ASIDE / name, ignore_errors=True)  # That of an earlier update stands in the way.
                rename(folder / name, folder / ASIDE / name)
        shutil.rmtree(folder / OUTPUTS_OF_FIRST, ignore_errors=True)
    begins = "its rounds count from 1 again, and the chain of its certificates begins anew"
    if checkpoint is None:
        why = "no whole checkpoint of a round is left" if resume else "it is not to be used"
        reason = f"version {FIRST} has trained this run: the key is kept, the state is not, since {why}; {begins}"
        telemetry.emit("state.carried_over", step="load", reason=reason, round=0, root="")
        return
    place = checkpoint.place
    start = describe_checkpoint(checkpoint.run, start_of_run(place.root), checkpoint.tensors)
    write_whole(checkpoint.folder / DESCRIPTION, start)
    after = f"the state after round {place.round}, with root {place.root.hex()[:8]}"
    reason = f"version {FIRST} has trained this run: the key and {after}, are kept; {begins} from that state"
    telemetry.emit("state.carried_over", step="load", reason=reason, round=place.round, root=place.root.hex())


def newest_of_first(folder: Path) -> Checkpoint | None:
    """Return the newest whole checkpoint in `folder` if version 0.1 has written it; None if there is no such one."""
    rounds = [path for path in folder.glob("*") if path.name.isdecimal()]
    for path in sorted(rounds, key=lambda path: int(path.name), reverse=True):
        try:
            if _wrote_first(path):
                return load_checkpoint(path)
            return None
        except LocalError:
            continue  # It is an event when the checkpoints are loaded.
    return None


def _wrote_first(folder: Path) -> bool:
    """Whether version 0.1 has written a checkpoint, by its description alone. Raises `LocalError` if that is unreadable."""
    try:
        with (folder / DESCRIPTION).open("rb") as file:
            _, place, _ = read_description(file.read(MAX_DESCRIPTION_BYTES + 1))
    except (OSError, RemoteError) as error:
        raise LocalError(f"{folder} is not a whole checkpoint: {error}") from error
    return place.round > 0 and place.certificate is None


def _is_of_first(ledger: Path) -> bool:
    """Whether a ledger begins with a certificate of version 0.1."""
    try:
        for record in read_records(ledger):
            length = int.from_bytes(record.payload[:LENGTH_BYTES], "big")
            packed = record.payload[LENGTH_BYTES : LENGTH_BYTES + length]
            return is_first(zlib.decompressobj().decompress(packed, MAX_PLAIN_BYTES))
    except (OSError, zlib.error):
        pass  # It is an event when the ledger is opened.
    return False
