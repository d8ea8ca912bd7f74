"""What the rewritten graph asks of the runtime, as operations.

A rewritten graph receives runtime objects as its first inputs and calls the functions below on
them; :mod:`parallax.ops.specs` describes the objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

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
    """Start a message of the runtime object of a :class:`parallax.ops.specs.MessageSpec`."""
    return resource.start(number, *args)


@effect
@fixed_sizes
def finish(resource: Any, number: int, *args: Any) -> Any:
    """Wait for a message of it; what it brought."""
    return resource.finish(number, *args)


@effect
def own_part(
    resource: Any, whole: torch.Tensor, dim: int, outer: int, inner: int, scaled: bool
) -> torch.Tensor:
    """Of what is computed of all workers' batches, this worker's rows.

    Args:
        resource: the runtime object of a :class:`parallax.ops.whole_batch.WholeBatchSpec`.
        whole, dim, outer, inner, scaled: as of :func:`parallax.ops.whole_batch.own_rows`.
    """
    own: torch.Tensor = resource.own(whole, dim, outer, inner, scaled)
    return own


@starts
def pull_rows(
    exchange: Any,
    ids: Sequence[Sequence[torch.Tensor]],
    shards: Sequence[torch.Tensor],
    messages: Sequence[Sequence[int]],
) -> list[Any]:
    """Start to fetch the rows that this step looks up.

    Args:
        exchange: the runtime object of a :class:`parallax.ops.specs.RowsSpec`.
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
        exchange: the runtime object of a :class:`parallax.ops.specs.BagsSpec`.
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
def wait_gradients(
    buckets: Any, changed: tuple[int, ...] = (), late: tuple[int, ...] = ()
) -> list[torch.Tensor | None]:
    """The aggregated dense gradients of a phase, after all workers agreed on it.

    ``changed`` says which of them the graph changes in place, or gives away: by their numbers.
    ``late`` are those that a late update waits for: None in the result.
    """
    result: list[torch.Tensor | None] = buckets.wait(changed, late)
    return result


@effect
@fixed_sizes
def wait_late(
    buckets: Any, entries: tuple[int, ...], changed: tuple[int, ...]
) -> list[torch.Tensor]:
    """As :func:`wait_gradients`, for the gradients of a late update alone."""
    result: list[torch.Tensor] = buckets.wait_late(entries, changed)
    return result


@effect
def settle(late: Any, number: int, changes: Sequence[torch.Tensor]) -> None:
    """Finish an update that the step before has left, if it has: in front of the first use.

    Args:
        late: the runtime object of a :class:`parallax.ops.specs.LateSpec`.
        number: of the update.
        changes: the state that it changes.
    """
    late.settle(number)


@effect
def leave(late: Any, inputs: Sequence[Sequence[Any]]) -> None:
    """Leave this step's late updates, by what each needs."""
    late.leave(inputs)


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
        check: the runtime object of a :class:`parallax.ops.specs.RowIdsSpec`.
        ids: what lookups read by.
        tables: which of its tables they read.
    """
    result: torch.Tensor = check.check(ids, tables)
    return result
