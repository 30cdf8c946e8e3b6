"""Layouts: what a run trains, by name and shape, as its manifest pins it. Pure, without torch.

A pin is a function of names and shapes, and a manifest has one as text. Who trains computes it from its model, who keeps from
the checkpoint on its disk; of a member that states only the hash, and how long its state is, these are compared.

Dtypes are no part of it. θ and m are float32 on every peer, and an outer step is computed from them and from decoded outputs
alone. A parameter of another dtype is a rounded copy of θ on one peer; its rounding is no part of Δ (`FlatLayout`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Self

from ...peer.base.digest import DIGEST_BYTES, keyed
from ...peer.base.errors import UsageError

UNPINNED = "the run's manifest pins no layout, so its first members decide which model it trains"
"""What its owner reads, and whoever joins it."""
MAX_PARAMS = 10**15 - 1
"""4 PB of weights; a manifest has 15 digits for it."""
NO_LAYOUT = bytes(DIGEST_BYTES)
"""The layout that a keeper states."""


@dataclass(frozen=True, slots=True)
class LayoutPin:
    """The trained tensors of a model: a 32-byte hash of their names and shapes in order, and two counts for people."""

    hash: bytes
    num_tensors: int
    num_params: int

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> Self:
        """Return the pin of tensors, each a name and a shape, in the order of the flat vector.

        Raises `UsageError` for more parameters than a manifest can name.
        """
        named = tuple(tensors)
        hashed = keyed("layout", *(f"{name} {shape}".encode() for name, shape in named))
        num_params = sum(prod(shape) for _, shape in named)
        if num_params > MAX_PARAMS:
            why = f"the model has {num_params:,} parameters, more than any computer holds"
            raise UsageError(why, remedy="make it smaller")
        return cls(hashed, len(named), num_params)

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read what a valid manifest says (`Manifest.layout`); None if it pins nothing."""
        if not text:
            return None
        hashed, tensors, params = text.split("/")
        return cls(bytes.fromhex(hashed), int(tensors), int(params))

    def __str__(self) -> str:
        return f"{self.hash.hex()}/{self.num_tensors}/{self.num_params}"

    def check(self, pinned: "LayoutPin | None", what: str = "this model") -> None:
        """Raise `UsageError` for another layout than a manifest pins; None pins nothing. `what` has mine, for people."""
        if pinned in (None, self):
            return
        assert pinned is not None
        alike = (pinned.num_tensors, pinned.num_params) == (self.num_tensors, self.num_params)
        wanted = f"{pinned.num_tensors} tensors with {pinned.num_params:,} parameters"
        found = f"{self.num_tensors} with {self.num_params:,}"
        found += ", under other names or in other shapes" if alike else ""
        remedy = "train the model that the run was published for; another model is another run"
        raise UsageError(f"the run trains {wanted}, {what} has {found}", remedy=remedy)

    def cells(self, cell: int) -> range:
        """Return how many cells of `cell` elements these tensors can take, of which each begins a cell of its own."""
        fewest = max(self.num_tensors, -(-self.num_params // cell))
        return range(fewest, (self.num_params - self.num_tensors) // cell + self.num_tensors + 1)
