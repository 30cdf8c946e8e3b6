"""Ranks: the processes that together are one peer, one for each GPU, as `torchrun` starts them.

Theory of operation. All ranks train; rank 0 alone speaks with the swarm and holds θ and m. They call the same methods
in the same order, and what rank 0 has done or decided goes to the others, so that all end a phase at the same step.
This crossing has a gloo group of its own: it lives on the CPU, where θ is, and makes no GPU wait. JSON and plain tensors
cross it, nothing pickled. When a rank dies its connections break, and the others raise at their next crossing.

Where there is one process only, every method does nothing and costs nothing.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..peer.errors import LocalError, UsageError

T = TypeVar("T")

PATIENCE = timedelta(days=7)
"""Rank 0 may wait for the network as long as it takes, and the others for rank 0; a death is noticed at once anyway."""


@contextlib.contextmanager
def launched_ranks(device_type: str) -> Iterator[int | None]:
    """Join the processes that `torchrun` started beside this one; this one's number among those of its computer.

    None where there are no others. In the end, and when they break, their connections are closed.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    try:
        yield int(os.environ["LOCAL_RANK"])
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise rank_died(error) from error
    finally:
        dist.destroy_process_group()


class Ranks:
    """The processes of this peer, as torch.distributed knows them; this one alone where it is not in use."""

    def __init__(self) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if several else 0
        self.size = dist.get_world_size() if several else 1
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE) if several else None

    @property
    def first(self) -> bool:
        """Whether this is the rank that speaks with the swarm."""
        return self.rank == 0

    def from_first(self, do: Callable[[], T]) -> T:
        """What `do` returns on rank 0, a JSON value, on every rank; what it raises there is raised everywhere."""
        if self._group is None:
            return do()
        if self.first:
            try:
                value = do()
            except BaseException as error:
                self._cross({"error": str(error), "usage": isinstance(error, UsageError)})
                raise
            self._cross({"value": value})
            return value
        message = self._cross(None)
        if "error" in message:
            kind = UsageError if message["usage"] else LocalError
            raise kind(f"rank 0 of this peer has ended: {message['error']}")
        answer: T = message["value"]
        return answer

    def share(self, values: Tensor) -> None:
        """Give every rank the values that rank 0 has in a contiguous tensor on the CPU, in place."""
        if self._group is not None:
            self._collective(lambda: dist.broadcast(values.view(-1).view(torch.uint8), 0, group=self._group))

    def sum(self, *numbers: float) -> list[float]:
        """The sums of these numbers over all ranks."""
        if self._group is None:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64)
        self._collective(lambda: dist.all_reduce(sums, group=self._group))
        return [float(value) for value in sums]

    def deal(self, batches: Iterator[Any]) -> Iterator[Any]:
        """This rank's piece of every batch that rank 0 draws: the data is read once, and its shares are the peer's.

        A batch is a tensor, or lists and dictionaries of tensors, of numbers or of texts, one for each sample.
        """
        if self._group is None:
            yield from batches
            return
        while True:
            tensors: list[Tensor] = []
            form = self.from_first(lambda: _form(next(batches, None), tensors))  # noqa: B023 - called at once
            if form is None:
                return
            if not self.first:
                tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in _tensors_of(form)]
            for tensor in tensors:
                self.share(tensor)
            yield _piece(form, iter(tensors), self.rank, self.size)

    def _cross(self, message: Any) -> Any:
        """The message of rank 0, on every rank."""
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        length = torch.tensor([len(data)])
        self.share(length)
        if not self.first:
            data = torch.empty(int(length), dtype=torch.uint8)
        self.share(data)
        return json.loads(bytes(data.numpy()))

    def _collective(self, run: Callable[[], object]) -> None:
        try:
            run()
        except RuntimeError as error:
            raise rank_died(error) from error


def rank_died(error: RuntimeError) -> LocalError:
    """What it means when the ranks' connections break."""
    return LocalError(
        f"another process of this peer has died: {str(error).splitlines()[0]}",
        remedy="its own last lines say why; then start the peer again",
    )


def _form(batch: Any, tensors: list[Tensor]) -> Any:
    """A batch as JSON, with its tensors in a list beside it."""
    match batch:
        case Tensor():
            tensors.append(batch.detach().to("cpu").contiguous())
            return {"tensor": [str(batch.dtype).removeprefix("torch."), list(batch.shape)]}
        case dict():
            return {"dict": {key: _form(value, tensors) for key, value in batch.items()}}
        case [first, *_] if isinstance(first, (Tensor, dict, list, tuple)):
            return {"list": [_form(value, tensors) for value in batch]}
        case list() | tuple():
            return {"samples": list(batch)}
    return batch


def _tensors_of(form: Any) -> Iterator[tuple[str, list[int]]]:
    """(dtype, shape) of every tensor in a form, in order."""
    match form:
        case {"tensor": [dtype, shape]}:
            yield dtype, shape
        case {"dict": dict(inner)}:
            for value in inner.values():
                yield from _tensors_of(value)
        case {"list": list(items)}:
            for value in items:
                yield from _tensors_of(value)


def _piece(form: Any, tensors: Iterator[Tensor], rank: int, size: int) -> Any:
    """The part of a batch that belongs to one rank."""
    match form:
        case {"tensor": _}:
            return next(tensors).tensor_split(size)[rank]
        case {"dict": dict(inner)}:
            return {key: _piece(value, tensors, rank, size) for key, value in inner.items()}
        case {"list": list(items)}:
            return [_piece(value, tensors, rank, size) for value in items]
        case {"samples": list(items)}:
            return items[len(items) * rank // size : len(items) * (rank + 1) // size]
    return form
