"""Ranks: the processes of one peer, one for each GPU, as `torchrun` starts them.

Theory of operation. All ranks train; rank 0 alone exchanges messages with the network process and holds θ and m. The
ranks call the same methods in the same order, and rank 0 broadcasts its results and decisions, so that all end a phase
at the same step. The broadcasts use a gloo group of their own, on the CPU, where θ is, and make no GPU wait. They carry
JSON and plain tensors, nothing pickled. When a rank dies its connections break, and the others raise at their next
broadcast. With one process every method does nothing and costs nothing.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...peer.base.errors import LocalError, UsageError
from ...peer.process.typed_json import from_json, to_json

_T = TypeVar("_T")
ModelFunction: TypeAlias = Callable[[nn.Module, Tensor], Tensor]
"""Of a model and int64 tokens."""

RANK_PATIENCE = timedelta(days=7)
"""Rank 0 may wait for the network without limit, and the others for rank 0; a death is detected at once anyway."""


@contextlib.contextmanager
def launched_ranks(device_type: str) -> Iterator[int | None]:
    """Connect the processes that `torchrun` started; yield this one's local rank, or None if there are no others.

    The connections are closed at the end, and when they break. Raises `LocalError` if another rank has died.
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
    """The processes of this peer in torch.distributed; this one alone if it is not in use."""

    def __init__(self) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if several else 0
        self.size = dist.get_world_size() if several else 1
        self._group = dist.new_group(backend="gloo", timeout=RANK_PATIENCE) if several else None

    @property
    def first(self) -> bool:
        """True for rank 0, which exchanges messages with the network process."""
        return self.rank == 0

    def from_first(self, kind: type[_T], do: Callable[[], _T]) -> _T:
        """Run `do` on rank 0, and return its result, of type `kind`, on every rank; its exception is raised on every rank."""
        if self._group is None:
            return do()
        result: _T = from_json(kind, self._json_from_first(lambda: json.loads(to_json(do()))))
        return result

    def _json_from_first(self, do: Callable[[], Any]) -> Any:
        """Run `do` on rank 0, and return its JSON result on every rank."""
        if self.first:
            try:
                value = do()
            except BaseException as error:
                self._broadcast({"error": str(error), "usage": isinstance(error, UsageError)})
                raise
            self._broadcast({"value": value})
            return value
        message = self._broadcast(None)
        if "error" in message:
            error_type = UsageError if message["usage"] else LocalError
            raise error_type(f"rank 0 of this peer has ended: {message['error']}")
        return message["value"]

    def share(self, values: Tensor) -> None:
        """Broadcast the values of rank 0 in a contiguous CPU tensor to every rank, in place."""
        if self._group is not None:
            self._collective(lambda: dist.broadcast(values.view(-1).view(torch.uint8), 0, group=self._group))

    def sum(self, *numbers: float) -> list[float]:
        """Return the sums of these numbers over all ranks."""
        if self._group is None:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64)
        self._collective(lambda: dist.all_reduce(sums, group=self._group))
        return [float(value) for value in sums]

    def deal(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield this rank's slice of every batch that rank 0 draws, so that the peer reads its data once.

        A batch is a tensor, or lists and dictionaries of tensors, of numbers or of texts, one for each sample.
        """
        if self._group is None:
            yield from batches
            return
        while True:
            tensors: list[Tensor] = []
            form = self._json_from_first(lambda: _form(next(batches, None), tensors))  # noqa: B023 - called at once
            if form is None:
                return
            if not self.first:
                tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in _tensors_of(form)]
            for tensor in tensors:
                self.share(tensor)
            yield _piece(form, iter(tensors), self.rank, self.size)

    def led(self, functions: Sequence[ModelFunction]) -> list[ModelFunction]:
        """Return functions for rank 0: at each call the ranks that are in `follow` compute the same of a sharded model."""

        def lead(number: int, model: nn.Module, tokens: Tensor) -> Tensor:
            self._broadcast({"call": number, "shape": list(tokens.shape)})
            self.share(tokens.to("cpu").contiguous())
            return functions[number](model, tokens)

        return [partial(lead, number) for number in range(len(functions))]

    def follow(self, functions: Sequence[ModelFunction], model: nn.Module, device: torch.device) -> None:
        """Compute what rank 0 does by its `led` functions, until it calls `release`."""
        while call := self._broadcast(None):
            tokens = torch.empty(call["shape"], dtype=torch.int64)
            self.share(tokens)
            functions[call["call"]](model, tokens.to(device))

    def release(self) -> None:
        """End `follow` on the other ranks."""
        self._broadcast({})

    def _broadcast(self, message: Any) -> Any:
        """Return the message of rank 0 on every rank."""
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
    """Return the error for broken connections between ranks."""
    return LocalError(
        f"another process of this peer has died: {str(error).splitlines()[0]}",
        remedy="see the last lines of that process, then start the peer again",
    )


def _form(batch: Any, tensors: list[Tensor]) -> Any:
    """Return the structure of a batch as JSON, and append its tensors to `tensors`."""
    match batch:
        case Tensor():
            tensors.append(batch.detach().to("cpu").clone(memory_format=torch.contiguous_format))
            return {"tensor": [str(batch.dtype).removeprefix("torch."), list(batch.shape)]}
        case dict():
            return {"dict": {key: _form(value, tensors) for key, value in batch.items()}}
        case [first, *_] if isinstance(first, (Tensor, dict, list, tuple)):
            return {"list": [_form(value, tensors) for value in batch]}
        case list() | tuple():
            return {"samples": list(batch)}
    return batch


def _tensors_of(form: Any) -> Iterator[tuple[str, list[int]]]:
    """Yield (dtype, shape) of every tensor in a form, in order."""
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
    """Return the slice of a batch for one rank."""
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
