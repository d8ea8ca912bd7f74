"""What the rewritten graph asks of the runtime: descriptions (data) and operations (words).

A rewritten graph receives runtime objects as its first inputs and calls the functions below on
them. Descriptions are plain frozen data made by the rewriting passes; the runtime makes an object
of each.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch

Way = Literal["pull", "push"]
"""Whether rows travel to those who read them, or their gradients to those who own them."""


@dataclass(frozen=True)
class TableSpec:
    """One table of a row exchange.

    Args:
        name: the variable.
        rows: rows of the whole table.
        row_shape: shape of one row.
        dtype: of rows and of their gradients.
        average: mean over workers, else sum.
        lazy: gradients are sparse tensors (only touched rows are updated).
        padding: the row whose gradient is dropped, or None.
        wraps: negative ids count from the end, as in indexing; else they are errors.
        touched: aggregated gradients are handed on as (row numbers, rows) of touched rows only.
        owner: the worker that owns all its rows; None if row i lives on worker i mod N.
        cast: the dtype as which rows and their gradients travel, if it is another.
        read_as: the dtype as which rows are read, and travel when pulled, if it is another.
        columns: of a row, the first that is read and the one after the last; None for all.
        owners: row i lives on the worker at place i mod n of these; all workers in order if empty.
    """

    name: str
    rows: int
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    average: bool
    lazy: bool
    padding: int | None
    wraps: bool
    touched: bool = False
    owner: int | None = None
    cast: torch.dtype | None = None
    owners: tuple[int, ...] = ()
    read_as: torch.dtype | None = None
    columns: tuple[int, int] | None = None

    def sent_dtype(self, way: Way) -> torch.dtype:
        """As which its rows, or their gradients, travel."""
        return self.cast or (self.read_as if way == "pull" else None) or self.dtype

    @property
    def sent_width(self) -> int:
        """Values of a row, or of its gradient, that travel."""
        return self.width if self.columns is None else self.columns[1] - self.columns[0]

    def dealt(self, worker: int, workers: int) -> int:
        """How many rows live on a worker, of so many."""
        owners = self.owners or range(workers)
        if worker not in owners:
            return 0
        return len(range(owners.index(worker), self.rows, len(owners)))

    @property
    def width(self) -> int:
        count = 1
        for size in self.row_shape:
            count *= size
        return count


@dataclass(frozen=True)
class RowsSpec:
    """Tables whose rows are exchanged together.

    Args:
        tables: in the order of the exchange.
        sharded: by owners, else replicated.
        by_host: rows of sharded tables are merged inside a host before they cross to another.
    """

    tables: tuple[TableSpec, ...]
    sharded: bool
    by_host: bool = False


@dataclass(frozen=True)
class BagFeature:
    """One lookup in bags.

    Args:
        table: its table's number.
        mean: bags are means of their rows, else sums.
        last_offset: offsets have one entry more than there are bags.
    """

    table: int
    mean: bool
    last_offset: bool


@dataclass(frozen=True)
class BagsSpec:
    """Tables that are read in bags, whose sums travel instead of rows."""

    tables: tuple[TableSpec, ...]
    features: tuple[BagFeature, ...]


@dataclass(frozen=True)
class BucketEntry:
    """One gradient of a phase: its place among the phase's gradients and in a bucket.

    ``by_host``: it is summed inside each host before it is summed between hosts. ``pieces``: how
    many parts of its rows travel one by one, for which the bucket is its own. ``encoder``: what it
    is encoded by, with the options that were given. ``reduction``: how it is summed, by workers in
    ``order``; ``broadcast`` to send it to all, each of whom sums what came. ``axis``: along which
    its rows lie, of which owners have some, or pieces: as many as ``shards`` says, or evenly many.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    average: bool
    bucket: int
    by_host: bool = False
    pieces: int = 1
    encoder: str = "none"
    encoder_options: tuple[tuple[str, float], ...] = ()
    reduction: str = "auto"
    order: tuple[int, ...] = ()
    axis: int = 0
    shards: tuple[int, ...] = ()

    @property
    def rows_first(self) -> tuple[int, ...]:
        """The gradient's shape while it travels: with its rows in front."""
        if not self.shape:
            return ()
        return (self.shape[self.axis], *self.shape[: self.axis], *self.shape[self.axis + 1 :])

    def rows(self, piece: int) -> tuple[int, int]:
        """The first row of a piece, and the one after its last."""
        if self.shards:
            first = sum(self.shards[:piece])
            return first, first + self.shards[piece]
        rows = self.shape[self.axis]
        return rows * piece // self.pieces, rows * (piece + 1) // self.pieces


@dataclass(frozen=True)
class BucketsSpec:
    """Dense gradients of one phase, in the order in which backward makes them.

    With ``owners`` (one tuple of row ranges per entry, one range per worker) each worker receives
    only its own rows; without, every worker receives all. ``phase`` is its number in the step.
    """

    entries: tuple[BucketEntry, ...]
    owners: tuple[tuple[tuple[int, int], ...], ...] = ()
    phase: int = 0


@dataclass(frozen=True)
class PullSpec:
    """Dense values that their owners send to all workers after the update.

    ``owners``: of each, by worker, the rows that it has; ``axes``: along which rows lie.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    owners: tuple[tuple[tuple[int, int], ...], ...]
    axes: tuple[int, ...]


@dataclass(frozen=True)
class ReductionSpec:
    """One partial value that the owners combine."""

    kind: Literal["norm", "sum", "mean", "amax", "amin"]
    order: float
    elements: int
    dtype: torch.dtype


@dataclass(frozen=True)
class CombineSpec:
    """Partial values of one point of the step, exchanged in one message."""

    reductions: tuple[ReductionSpec, ...]


@dataclass(frozen=True)
class RowIdsSpec:
    """Lookups of tables that are read in place: (variable, rows, whether negative ids wrap).

    ``shared``: a failure is told to all workers with the step's control words; else it is raised.
    """

    tables: tuple[tuple[str, int, bool], ...]
    shared: bool


@dataclass(frozen=True)
class MessageSpec:
    """An object whose numbered messages :func:`start` and :func:`finish` exchange.

    Args:
        names: the variables that it is for.
    """

    names: tuple[str, ...]

    carries_words: ClassVar[bool] = False
    """The control words of the step travel with its messages."""

    def message(self, number: int) -> tuple[str, tuple[str, ...]]:
        """Of a message that :func:`start` starts by its number: its kind, as the cost model has
        it (``MessageKind``), and the variables that are in it."""
        return "owned", self.names

    def operations(self, number: int, workers: int) -> int:
        """Multiplications and additions that follow when a message has arrived."""
        return 0


@dataclass(frozen=True)
class OwnSpec(MessageSpec, ABC):
    """What a synchroniser of its own asks of the runtime; subclasses add what they need to know."""

    @abstractmethod
    def make(self, world: Any, control: Any) -> Any:
        """The runtime object: with ``start(number, *args)`` and ``finish(number, *args)``, which
        the graph calls.

        Args:
            world: this worker and the others (:class:`parallax.runtime.comm.World`).
            control: the step's control words (:class:`parallax.runtime.control.StepControl`).
        """


ResourceSpec = RowsSpec | BagsSpec | BucketsSpec | PullSpec | CombineSpec | RowIdsSpec | MessageSpec


Function = TypeVar("Function", bound=Callable[..., Any])


def effect(function: Function) -> Function:
    """Mark an operation that must run in its place although nobody may use its value."""
    function.parallax_effect = True  # type: ignore[attr-defined]
    return function


def starts(function: Function) -> Function:
    """Mark an effect that starts a message: the sooner it runs, the sooner that is under way."""
    function.parallax_starts = True  # type: ignore[attr-defined]
    return effect(function)


def fixed_sizes(function: Function) -> Function:
    """Mark an operation whose results have the same sizes in every step of a graph."""
    function.parallax_fixed_sizes = True  # type: ignore[attr-defined]
    return function


@starts
def start(resource: Any, number: int, *args: Any) -> Any:
    """Start a message of the runtime object of a :class:`MessageSpec`."""
    return resource.start(number, *args)


@effect
@fixed_sizes
def finish(resource: Any, number: int, *args: Any) -> Any:
    """Wait for a message of it; what it brought."""
    return resource.finish(number, *args)


@starts
def pull_rows(
    exchange: Any,
    ids: Sequence[Sequence[torch.Tensor]],
    shards: Sequence[torch.Tensor],
    messages: Sequence[Sequence[int]],
) -> list[Any]:
    """Start to fetch the rows that this step looks up.

    Args:
        exchange: the runtime object of a :class:`RowsSpec`.
        ids: per table, what each lookup reads by.
        shards: per table, this worker's rows.
        messages: tables whose rows travel together, in the order in which they are needed.

    Returns, for each table: the count of its unique rows, and the positions of each lookup's ids
    among them (one tensor per lookup); and a handle last.
    """
    result: list[Any] = exchange.pull(ids, shards, messages)
    return result


@effect
def pulled_rows(exchange: Any, handle: Any, table: int) -> torch.Tensor:
    """The unique rows of a table that :func:`pull_rows` started to fetch."""
    rows: torch.Tensor = exchange.pulled(handle, table)
    return rows


@starts
def unique_rows(exchange: Any, ids: Sequence[Sequence[torch.Tensor]]) -> list[Any]:
    """As :func:`pull_rows` for replicated tables: only unique ids, no rows are fetched."""
    result: list[Any] = exchange.unique(ids)
    return result


@starts
def push_rows(
    exchange: Any, handle: Any, tables: Sequence[int], gradients: Sequence[torch.Tensor]
) -> Any:
    """Start sending gradients of unique rows to the tables' owners (or to all workers)."""
    return exchange.push(handle, tables, gradients)


@effect
def receive_rows(exchange: Any, pending: Any) -> list[torch.Tensor]:
    """The aggregated gradients that :func:`push_rows` started, on this worker's shards."""
    result: list[torch.Tensor] = exchange.receive(pending)
    return result


@starts
def pull_bags(
    exchange: Any,
    inputs: Sequence[tuple[torch.Tensor, torch.Tensor | int]],
    shards: Sequence[torch.Tensor],
) -> Any:
    """Start to fetch the sums of this step's bags.

    Args:
        exchange: the runtime object of a :class:`BagsSpec`.
        inputs: per lookup, ids and offsets as ``torch.nn.EmbeddingBag`` takes them; or in place of
            offsets, how many ids each bag has.
        shards: per table, this worker's rows.
    """
    return exchange.pull(inputs, shards)


@effect
@fixed_sizes
def pulled_bags(exchange: Any, handle: Any) -> list[torch.Tensor]:
    """The bags of each lookup that :func:`pull_bags` started to fetch."""
    result: list[torch.Tensor] = exchange.pulled(handle)
    return result


@starts
def push_bags(
    exchange: Any, handle: Any, features: Sequence[int], gradients: Sequence[torch.Tensor]
) -> Any:
    """Start sending gradients of bags to the owners of their rows."""
    return exchange.push(handle, features, gradients)


@effect
def receive_bags(exchange: Any, pending: Any, tables: Sequence[int]) -> list[torch.Tensor]:
    """The aggregated gradients that :func:`push_bags` started, on this worker's shards."""
    result: list[torch.Tensor] = exchange.receive(pending, tables)
    return result


@starts
def put_gradient(buckets: Any, index: int, gradient: torch.Tensor, piece: int = 0) -> None:
    """Copy a dense gradient, or a piece of it, to its bucket, and start sending what is full."""
    buckets.put(index, gradient, piece)


@effect
@fixed_sizes
def wait_gradients(buckets: Any) -> list[torch.Tensor]:
    """The aggregated dense gradients of a phase, after all workers agreed on it."""
    result: list[torch.Tensor] = buckets.wait()
    return result


@effect
def pull_values(pull: Any, values: Sequence[torch.Tensor]) -> None:
    """Bring every worker's dense values up to date from their owners, in place."""
    pull.run(values)


@fixed_sizes
def partial_reduction(value: torch.Tensor, kind: str, order: float) -> torch.Tensor:
    """A reduction over this worker's rows, as a float64 number that the owners combine.

    A shard without rows gives what leaves the combined value as it is.
    """
    if value.layout is torch.sparse_coo:
        value = value.coalesce().values()
    if kind in ("sum", "mean"):
        return value.sum(dtype=torch.float64)
    if value.numel() == 0:
        empty = {"amax": -math.inf, "amin": math.inf}.get(kind, 0.0)
        if kind == "norm" and order == -math.inf:
            empty = math.inf
        return torch.tensor(empty, dtype=torch.float64, device=value.device)
    if kind == "amax":
        result = value.amax()
    elif kind == "amin":
        result = value.amin()
    else:
        result = torch.linalg.vector_norm(value, order)
    return result.to(torch.float64)


@effect
@fixed_sizes
def combine(combiner: Any, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Reductions over all shards from every worker's :func:`partial_reduction`."""
    result: list[torch.Tensor] = combiner.run(values)
    return result


def spread_rows(
    ids: torch.Tensor, rows: torch.Tensor, factors: Sequence[torch.Tensor], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Touched rows before they are multiplied: all ``count`` rows if a factor is not finite.

    Zero times infinity is NaN, so a dense gradient would become NaN in untouched rows as well.
    """
    if all(bool(torch.isfinite(factor).all()) for factor in factors):
        return ids, rows
    whole = rows.new_zeros((count, *rows.shape[1:]))
    whole.index_copy_(0, ids, rows)
    return torch.arange(count, device=ids.device), whole


BLOCK_ROWS = 16384


@effect
def update_in_blocks(
    body: Callable[..., Sequence[torch.Tensor]],
    ids: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    shards: Sequence[torch.Tensor],
    others: Sequence[Any],
    count: int,
) -> list[torch.Tensor]:
    """Run an update on blocks of a shard's rows.

    Args:
        body: the update of one block; changes its shards in place and returns new state.
        ids: sorted numbers of the touched rows.
        gradients: values of the touched rows; zero in all other rows.
        shards: state with ``count`` rows.
        others: what every block sees whole (numbers, norms).
        count: rows of the shard.

    Returns:
        New state of ``count`` rows that the update made.
    """
    created: list[torch.Tensor] = []
    bounds = torch.arange(0, max(count, 1) + BLOCK_ROWS, BLOCK_ROWS, device=ids.device)
    places = torch.searchsorted(ids, bounds).tolist()
    for block, first in enumerate(range(0, max(count, 1), BLOCK_ROWS)):
        last = min(first + BLOCK_ROWS, count)
        low, high = places[block], places[block + 1]
        near = ids[low:high] - first
        dense = [
            g.new_zeros((last - first, *g.shape[1:])).index_copy_(0, near, g[low:high])
            for g in gradients
        ]
        made = body(*dense, *[shard[first:last] for shard in shards], *others)
        if not created:
            created = [new.new_empty((count, *new.shape[1:])) for new in made]
        for whole, new in zip(created, made, strict=True):
            whole[first:last] = new
    return created


def coalesce(gradient: torch.Tensor) -> torch.Tensor:
    """A sparse gradient with every row once, as optimizers expect."""
    return gradient.coalesce()


@fixed_sizes
def checked_ids(check: Any, ids: torch.Tensor, tables: tuple[int, ...]) -> torch.Tensor:
    """``ids``, after making sure that these tables have such rows.

    Args:
        check: the runtime object of a :class:`RowIdsSpec`.
        ids: what lookups read by.
        tables: which of its tables they read.
    """
    result: torch.Tensor = check.check(ids, tables)
    return result
