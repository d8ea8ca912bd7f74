"""What the builders share."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from parallax.config import Config
from parallax.graph.variables import Variable
from parallax.strategy.data import VariableStrategy

# A variable below this size is owned whole: splitting it would cost more messages than it saves.
WHOLE_BYTES = 1 << 20


def untouched(variable: Variable) -> VariableStrategy:
    return VariableStrategy("none", why="receives no gradient in this step")


def allreduce(variable: Variable, config: Config) -> VariableStrategy:
    if variable.lookups and not variable.sparse:
        why = f"dense: {variable.dense_reason}"
    elif variable.sparse:
        why = f"replicated: {variable.shard_obstacle}"
    else:
        why = "dense"
    return VariableStrategy("allreduce", average=config.average_dense, why=why)


def allgather(
    variable: Variable, config: Config, why: str = "sparse: all reads look up rows"
) -> VariableStrategy:
    return VariableStrategy("allgather", average=config.average_sparse, why=why)


def rows(variable: Variable, workers: int, config: Config) -> VariableStrategy:
    return VariableStrategy(
        "rows",
        partition="cyclic",
        owners=tuple(range(workers)),
        average=config.average_sparse,
        why="sparse: all reads look up rows",
    )


def bags(variable: Variable, owner: int | None, workers: int, config: Config) -> VariableStrategy:
    """Sums of bags travel: from one owner, or with None from all, each of which has some rows."""
    return VariableStrategy(
        "bags",
        partition="cyclic" if owner is None else "whole",
        owners=tuple(range(workers)) if owner is None else (owner,),
        average=config.average_sparse,
        why=f"sparse: {variable.bags_per_step:.0f} bags of {variable.ids_per_step:.0f} rows",
    )


def sparse(variable: Variable, workers: int, config: Config) -> VariableStrategy:
    """Row servers, or replication with the reason when the update cannot be sharded."""
    if variable.shard_obstacle:
        return allgather(variable, config, f"sparse, but replicated: {variable.shard_obstacle}")
    return rows(variable, workers, config)


class OwnerQueue:
    """Gives whole variables to the worker that owns the fewest bytes so far."""

    def __init__(self, workers: int) -> None:
        self._owned = [(0, worker) for worker in range(workers)]  # a heap: in order to begin with

    def next(self, size: int) -> int:
        owned, owner = self._owned[0]
        heapq.heapreplace(self._owned, (owned + size, owner))
        return owner

    @staticmethod
    def largest_first(variables: Sequence[Variable]) -> list[Variable]:
        return sorted(variables, key=lambda v: (-v.bytes, v.name))
