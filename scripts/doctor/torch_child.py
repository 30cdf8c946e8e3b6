"""The child process of `flockstep doctor` that loads torch, finds the device, and sizes a model.

    python -m flockstep.scripts.doctor.torch_child <device>

writes a JSON object about torch and the device. Then it answers the hex of a signed manifest, a line, by
one about its model. It ends with its input, even while it loads, so that it does not outlive its parent.
"""

import json
import os
import queue
import sys
import threading
from typing import Any

from ...dht.run.manifest import SignedManifest
from ...peer.base.errors import FlockstepError


def main() -> None:
    """Run the process."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    _write(_device(sys.argv[1]))
    while True:
        _write(_size(SignedManifest.decode(bytes.fromhex(lines.get()))))


def _read(lines: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        lines.put(line.strip())
    os._exit(0)


def _device(name: str) -> dict[str, Any]:
    try:
        import torch

        from ...optim.train.device import choose_device
        from ...optim.train.trainer import device_memory
    except ImportError as error:
        return {"torch": "", "cause": str(error), "remedy": "install torch: pytorch.org names the command for your device"}
    found: dict[str, Any] = {"torch": torch.__version__}
    try:
        device = choose_device(name)
    except FlockstepError as error:
        return {**found, "device": "", "cause": str(error), "remedy": error.remedy}
    own = device_memory(device)
    title = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    return {**found, "device": str(device), "title": title, "memory": [own.total, own.free] if own else None}


def _size(signed: SignedManifest) -> dict[str, Any]:
    from ...optim.models.registry import size_of_model

    try:
        size = size_of_model(signed.manifest.model.name, signed.manifest.model.options)
    except FlockstepError as error:
        return {"cause": str(error), "remedy": error.remedy}
    return {"trained": size.num_trained, "weights": size.weight_bytes} if size else {}


def _write(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)  # noqa: T201  The parent process reads it.


if __name__ == "__main__":
    main()
