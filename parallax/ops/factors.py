"""What the synchronisers of factors ask of the runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from parallax.ops.kernels import onednn_product
from parallax.ops.patches import as_matrices
from parallax.ops.resources import effect
from parallax.ops.specs import MessageSpec

aten: Any = torch.ops.aten

SIZES, WORDS = -1, -2
"""Messages besides those of factors: what sizes these have, with the control words; and these
words once more, of phases in which nothing else carries them."""


WHOLE = -1
"""Told in place of sizes by a worker whose gradient is no product, and travels as it is."""

Shape = tuple[int | None, ...]
"""Of a factor, samples first; None for a size that may differ, which each worker tells."""


def shapes_of_factors(shape: tuple[int, ...]) -> tuple[Shape, Shape]:
    """Of U and V, for the gradient of a matrix or of a convolution's weight."""
    if len(shape) == 2:
        return (None, shape[0]), (None, shape[1])
    return (None,) * len(shape), (None,) * len(shape)


@dataclass(frozen=True)
class FactorEntry:
    """One gradient that is a product of two factors, each with a row for every sample.

    Args:
        name: the variable.
        shape: of its gradient.
        dtype: of the gradient and its factors.
        average: mean over workers, else sum.
        message: that its factors travel in.
        settings: how the convolution works that it is the gradient of: stride, padding, dilation,
            transposed, output padding and groups. Empty for U'V of matrices.
        owner: the worker that they are sent to; None if to all.
        multiplied: the gradient is handed on, else the factors of all workers.
        operations: that the product of this worker's factors takes.
        size: bytes of this worker's factors.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    average: bool
    message: int
    settings: tuple[Any, ...] = ()
    owner: int | None = None
    multiplied: bool = True
    operations: int = field(default=0, repr=False, compare=False)  # differs as batches do
    size: int = field(default=0, repr=False, compare=False)

    @property
    def told(self) -> int:
        """How many sizes a worker tells of its factors."""
        return sum(shape.count(None) for shape in shapes_of_factors(self.shape))

    def shapes(self, told: Sequence[int]) -> list[list[int]]:
        """The shapes of a worker's factors, or of its gradient, by what it told."""
        if WHOLE in told:
            return [list(self.shape)]
        sizes = iter(told)
        return [
            [next(sizes) if size is None else size for size in shape]
            for shape in shapes_of_factors(self.shape)
        ]

    def product(
        self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, onednn: bool = False
    ) -> torch.Tensor:
        """The gradient of stacked factors, the same to the last bit on every worker that is alike.

        Args:
            left, right: U and V.
            out: of the gradient's shape; the product may be written there.
            onednn: let oneDNN multiply matrices, of float32 numbers on the CPU.
        """
        if self.is_of_matrices:
            if self.settings:  # one product, of a row for each pixel that comes out
                stride, padding, dilation, *_ = self.settings
                left, right = as_matrices(left, right, self.shape[2:], stride, padding, dilation)
            if onednn:
                return onednn_product(left.t(), right.t()).view(self.shape)
            torch.mm(left.t(), right, out=out.view(len(out), -1))
            return out
        mask = [False, True, False]
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
            found = aten.convolution_backward(left, right, out, None, *self.settings, mask)
        gradient: torch.Tensor = found[1]
        return gradient

    @property
    def is_of_matrices(self) -> bool:
        """Whether it is computed as one product: for matrices, and for a convolution of images of
        which every channel sees every other."""
        if not self.settings:
            return True
        *_, transposed, _, groups = self.settings
        return len(self.shape) == 4 and groups == 1 and not transposed


@dataclass(frozen=True)
class FactorsSpec(MessageSpec):
    """Gradients of one phase that travel as factors, ordered by message.

    ``alone``: nothing else of the phase carries the control words at its end. ``phase`` is its
    number in the step. ``turns``: of the message with sizes, then by message of factors, its turn
    among the messages of the phase; they start where the graph says if there are none.
    """

    entries: tuple[FactorEntry, ...]
    alone: bool
    phase: int = 0
    turns: tuple[int, ...] = ()

    carries_words: ClassVar[bool] = True

    def message(self, number: int) -> tuple[str, tuple[str, ...]]:
        if number < 0:
            return "words", ()
        return "factors", tuple(e.name for e in self.entries if e.message == number)

    def packed(self, number: int, workers: int) -> int:
        # Side by side for every worker.
        return 2 * workers * sum(e.size for e in self.entries if e.message == number)

    def operations(self, number: int, workers: int) -> int:
        return workers * sum(e.operations for e in self.entries if e.message == number)

    def passed(self, number: int, workers: int) -> int:
        # What came is stacked; and images become patches, one for each pixel of a result.
        patches = sum(
            workers * e.operations // e.shape[0] * e.dtype.itemsize
            for e in self.entries
            if e.message == number and e.settings and e.is_of_matrices
        )
        return self.packed(number, workers) + patches


BLOCK_BYTES = 1 << 19
"""Of a gradient that is multiplied block by block: with the state, it stays in the cache."""


@effect
def update_by_product(
    body: Callable[..., Sequence[torch.Tensor]],
    factors: tuple[torch.Tensor, torch.Tensor],
    shards: Sequence[torch.Tensor],
    others: Sequence[Any],
) -> list[torch.Tensor]:
    """Run an update whose gradient is U'V on blocks of its rows, each multiplied when it is needed.

    Args:
        body: the update of one block; changes its shards in place and returns new state.
        factors: U [K, rows] and V [K, columns].
        shards: state with as many rows.
        others: what every block sees whole (numbers).

    Returns:
        New state that the update made.
    """
    left, right = factors
    rows, columns = left.shape[1], right.shape[1]
    size = max(BLOCK_BYTES // max(columns * right.element_size(), 1), 1)
    scratch = right.new_empty((min(size, rows), columns))
    created: list[torch.Tensor] = []
    for first in range(0, rows, size):
        last = min(first + size, rows)
        block = torch.mm(left[:, first:last].t(), right, out=scratch[: last - first])
        made = body(block, *[shard[first:last] for shard in shards], *others)
        if not created:
            created = [new.new_empty((rows, *new.shape[1:])) for new in made]
        for whole, new in zip(created, made, strict=True):
            whole[first:last] = new
    return created
