"""What a step that compares rows of the batch with each other asks of other workers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from parallax.ops.specs import MessageSpec


@torch.library.custom_op("parallax::whole_rows", mutates_args=())
def whole_rows(rows: torch.Tensor, dim: int, outer: int, inner: int, count: int) -> torch.Tensor:
    """Of all workers' batches, one after the other, what this worker has of its own.

    Args:
        rows: of this worker.
        dim: along which the rows of the batch lie.
        outer, inner: a dimension may have several places for each row: so many times all rows, and
            of each row so many.
        count: how many rows all batches have.
    """
    raise NotImplementedError  # rewriting puts an exchange in its place


@whole_rows.register_fake
def _(rows: torch.Tensor, dim: int, outer: int, inner: int, count: int) -> torch.Tensor:
    shape = list(rows.shape)
    shape[dim] = outer * inner * count
    return rows.new_empty(shape)


@torch.library.custom_op("parallax::own_rows", mutates_args=())
def own_rows(
    whole: torch.Tensor, batch: torch.Tensor, dim: int, outer: int, inner: int, scaled: bool
) -> torch.Tensor:
    """Of all batches' rows those of this worker.

    Args:
        whole: of all workers.
        batch: a tensor of this worker's batch.
        dim, outer, inner: as of :func:`whole_rows`.
        scaled: it is a gradient, of a loss that all workers have: those of variables are averaged,
            and batches count by their rows in them, so it is multiplied by how many times as many
            rows all batches have.
    """
    raise NotImplementedError


@own_rows.register_fake
def _(
    whole: torch.Tensor, batch: torch.Tensor, dim: int, outer: int, inner: int, scaled: bool
) -> torch.Tensor:
    shape = list(whole.shape)
    shape[dim] = outer * inner * batch.shape[0]
    return whole.new_empty(shape)


def count_rows() -> int:
    """How many rows the batches of all workers have."""
    raise NotImplementedError


def quotient(one: float, other: float) -> float:
    """``one / other``, which is no error of Python's where a batch has one row, or none, but what
    PyTorch has then."""
    if other:
        return one / other
    return math.copysign(math.inf, one) if one else math.nan


WHOLE_ROWS = torch.ops.parallax.whole_rows.default
OWN_ROWS = torch.ops.parallax.own_rows.default


@dataclass(frozen=True)
class GatheredRows:
    """A tensor of which each worker has some rows.

    Args:
        dtype: of its elements.
        shape: with one along the dimension of the rows.
        dim, outer, inner: as of :func:`whole_rows`.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    dim: int
    outer: int
    inner: int

    @property
    def row_bytes(self) -> int:
        """Of each row of the batch."""
        return self.outer * self.inner * math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WholeBatchSpec(MessageSpec):
    """Rows of the batches of all workers in one.

    ``start(0, rows)`` tells how many rows this worker's batch has, and ``finish(0)`` gives how many
    all batches have. Of message n from one on, ``start(n, tensors)`` sends tensors, and
    ``finish(n)`` gives each with the rows of all batches, in the order of the workers.

    Args:
        messages: by message its tensors, those with large elements first.
        layout: a hash of what is compared, which is alike on all workers.
        line: where rows are compared first.
    """

    messages: tuple[tuple[GatheredRows, ...], ...] = ()
    layout: int = 0
    line: str = field(default="", compare=False, repr=False)

    def message(self, number: int) -> tuple[str, tuple[str, ...]]:
        return "words", self.names
