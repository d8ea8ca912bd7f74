"""What the rewritten graph asks of the runtime, as data: one description for each runtime object.

The rewriting passes make them, the runtime makes an object of each, and the graph calls
:mod:`parallax.ops.resources` on the objects, which are its first inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

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
    """Dense gradients of one phase.

    With ``owners`` (one tuple of row ranges per entry, one range per worker) each worker receives
    only its own rows; without, every worker receives all. ``phase`` is its number in the step.
    ``turns``: by bucket, its turn (or that of its first piece) among the messages of the phase, if
    they start in an order that does not depend on this worker's graph; else a bucket starts when it
    is full.
    """

    entries: tuple[BucketEntry, ...]
    owners: tuple[tuple[tuple[int, int], ...], ...] = ()
    phase: int = 0
    turns: tuple[int, ...] = ()


@dataclass(frozen=True)
class PullSpec:
    """Dense values that their owners send to all workers after the update.

    ``owners``: of each, by worker, the rows that it has; ``axes``: along which rows lie; ``ring``:
    the workers in the order in which values go from one to the next, None where all send to all.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    owners: tuple[tuple[tuple[int, int], ...], ...]
    axes: tuple[int, ...]
    ring: tuple[int, ...] | None = None


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
class BatchNormsSpec:
    """Layers that normalise over all workers' batches.

    ``average``: gradients are the mean over all rows (else the sum over workers).
    """

    average: bool


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

    def packed(self, number: int, workers: int) -> int:
        """Bytes that are read and written to put a message together."""
        return 0

    def operations(self, number: int, workers: int) -> int:
        """Multiplications and additions that follow when a message has arrived."""
        return 0

    def passed(self, number: int, workers: int) -> int:
        """Bytes that are read and written then, beside what these products read."""
        return 0


@dataclass(frozen=True)
class OwnSpec(MessageSpec, ABC):
    """What a synchroniser of its own asks of the runtime; subclasses add what they need to know."""

    @abstractmethod
    def make(self, world: Any, control: Any) -> Any:
        """The runtime object: with ``start(number, *args)`` and ``finish(number, *args)``, which
        the graph calls.

        Args:
            world: this worker and the others (:class:`parallax.runtime.comm.world.World`).
            control: the step's control words (:class:`parallax.runtime.comm.control.StepControl`).
        """


@dataclass(frozen=True)
class LateSpec:
    """Updates that are finished in the step that follows.

    Args:
        names: by update, the variables whose gradients it waits for.
        messages: by update, the buckets that they are in: by the name of their input, and number.
    """

    names: tuple[tuple[str, ...], ...]
    messages: tuple[tuple[tuple[str, int], ...], ...]


ResourceSpec = (
    RowsSpec
    | BagsSpec
    | BucketsSpec
    | PullSpec
    | CombineSpec
    | RowIdsSpec
    | BatchNormsSpec
    | LateSpec
    | MessageSpec
)
