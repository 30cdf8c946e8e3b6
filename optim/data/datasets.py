"""What can be shared among peers: anything that is read in units, from a dataset with an index to an endless stream."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from ...peer.base.digest import keyed
from ...peer.base.errors import UsageError
from .units import SOURCE_BYTES, UnitPlan

BLOCK_ITEMS = 256
"""Items of a unit where there is no index: skipped together, so not too few, and left out together at worst."""
BLOCKS = 256
"""Units of an epoch where nobody knows how long the data is: more than all members lease at a time."""
SKIPPED_PER_ITEM = BLOCKS
"""Items of an iterable that are skipped for each one that is read: with so many peers, all blocks but mine are others'."""
MAX_SKIPPED = BLOCKS * BLOCK_ITEMS
"""Items that are skipped at once: an epoch."""


class Units(ABC):
    """A dataset in units, the same on every peer with the same `source`."""

    name: str
    source: bytes
    """A hash by which peers know that they have the same data. `SOURCE_BYTES` long."""
    num_units: int
    """Units of an epoch."""
    forward = False
    """Whether it is best read from front to back."""

    @abstractmethod
    def read(self, epoch: int, unit: int, done: int) -> Iterator[Any]:
        """The items of a unit from number `done` on."""

    def expect(self, units: Sequence[int]) -> None:  # noqa: B027  Most have nothing to prepare.
        """Prepare for these, which I have leased and read next, while I read another one."""


def source_of(*about: object) -> bytes:
    """The hash of what a source is."""
    return keyed("data source", *(repr(part).encode() for part in about))[:SOURCE_BYTES]


def units_of(dataset: Any, seed: int) -> Units:
    """Any dataset as units. Raises `UsageError` for what is empty, and for what can be read only once."""
    if isinstance(dataset, Units):
        return dataset
    if isinstance(dataset, (str, bytes)):
        raise UsageError("a text is no dataset: its items are letters", remedy="give share_of what is read from there")
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset):
        return Indexed(dataset, seed)
    if isinstance(dataset, Iterable):
        return Repeated(dataset)
    raise UsageError(
        f"{type(dataset).__name__} can neither be indexed nor iterated, so it has no shares",
        remedy="give share_of a dataset, or draw batches of your own and pass tokens= to step",
    )


class Indexed(Units):
    """A map-style dataset (`dataset[i]`): its items are the indices. Samples of an epoch come in a shuffled order.

    Two of one class and length pass for the same data, unless they have an attribute `source` of `SOURCE_BYTES` bytes.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        if not len(dataset):
            raise UsageError("the dataset is empty", remedy="give share_of a dataset with at least one sample")
        try:
            dataset[0]
        except (LookupError, TypeError) as error:  # As of a table, whose items are columns.
            reason = f"{type(dataset).__name__}[0] is no sample: {type(error).__name__}: {error}"
            raise UsageError(reason, remedy="give share_of a dataset whose items are samples by their number") from error
        self._cut = UnitPlan(seed, len(dataset))
        self.name = str(getattr(dataset, "name", type(dataset).__qualname__))
        said = getattr(dataset, "source", None)
        if isinstance(said, bytes) and len(said) == SOURCE_BYTES:
            self.source = said
        else:
            self.source = source_of(type(dataset).__qualname__, len(dataset))
        self.num_units = self._cut.num_units

    def read(self, epoch: int, unit: int, done: int) -> Iterator[int]:
        """Indices of samples."""
        return iter(self._cut.items(epoch, unit)[done:].tolist())


class Repeated(Units):
    """Anything that can be iterated again and again: an endless repetition of it, cut into blocks.

    Every peer skips the blocks of the others, which costs what iterating over them costs, and begins anew at the end. The
    others decide how far ahead my next block lies, so what I skip is bounded by what I have read: a block that is further
    is replaced by the nearest one, until reading has made room for more.
    """

    forward = True

    def __init__(self, iterable: Iterable[Any]) -> None:
        if iter(iterable) is iterable:
            raise UsageError(
                f"{type(iterable).__name__} can be read only once, and training goes on until the run ends",
                remedy="give share_of something whose every iter() begins anew, such as an IterableDataset",
            )
        self._iterable = iterable
        self._iterator = iter(iterable)
        self._at = 0
        """How many items of the repetition have been read or skipped."""
        self._begun = 0
        """Where in it the present pass began."""
        self._length: int | None = None
        self._may_skip = MAX_SKIPPED
        """How many items may be skipped now."""
        self.name = type(iterable).__qualname__
        self.source = source_of(self.name, BLOCK_ITEMS)
        self.num_units = BLOCKS

    def read(self, epoch: int, unit: int, done: int) -> Iterator[Any]:
        """Items of a block."""
        first = (epoch * BLOCKS + unit) * BLOCK_ITEMS
        last, first = first + BLOCK_ITEMS, first + min(done, BLOCK_ITEMS)
        self._go_to(first)
        return islice(iter(self._read_next, _NOTHING), last - first)

    def _go_to(self, place: int) -> None:
        passed = 0 if self._length is None else place - place % self._length
        if place < self._at or passed > self._at:  # Else reading on is as near.
            self._iterator, self._at, self._begun = iter(self._iterable), passed, passed
        while self._at < place and self._may_skip:
            self._may_skip -= 1
            self._next()

    def _read_next(self) -> Any:
        self._may_skip = min(self._may_skip + SKIPPED_PER_ITEM, MAX_SKIPPED)
        return self._next()

    def _next(self) -> Any:
        try:
            item = next(self._iterator, _NOTHING)
        except BaseException:  # An iterator that has raised is over, and the data is not.
            self._iterator, self._at = iter(self._iterable), self._begun
            raise
        if item is not _NOTHING:
            self._at += 1
            return item
        self._length = self._at - self._begun
        if not self._length:
            raise UsageError(f"{self.name} holds no items", remedy="give share_of something that does")
        self._iterator, self._begun = iter(self._iterable), self._at
        return self._next()


_NOTHING = object()
