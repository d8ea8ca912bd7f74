"""Choices that several builders make, each with its reason."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from parallax.graph.variables import Variable
from parallax.strategy.builders.base import ClusterFacts
from parallax.strategy.data import VariableStrategy

# A variable below this size is owned whole: splitting it would cost more messages than it saves.
WHOLE_BYTES = 1 << 20


def averages(variable: Variable, cluster: ClusterFacts) -> bool:
    """Whether the settings ask for a mean over workers of this variable's gradients."""
    config = cluster.config
    return config.average_sparse if variable.sparse else config.average_dense


def allreduce(variable: Variable, cluster: ClusterFacts, why: str = "") -> VariableStrategy:
    """Gradients are summed by all."""
    if not why and variable.lookups and not variable.sparse:
        why = f"dense: {variable.dense_reason}"
    elif not why and variable.sparse:
        why = f"replicated: {variable.shard_obstacle}"
    return VariableStrategy("allreduce", average=averages(variable, cluster), why=why or "dense")


def allgather(
    variable: Variable, cluster: ClusterFacts, why: str = "sparse: all reads look up rows"
) -> VariableStrategy:
    """Gradients of looked-up rows go to all."""
    return VariableStrategy("allgather", average=cluster.config.average_sparse, why=why)


def rows(variable: Variable, cluster: ClusterFacts) -> VariableStrategy:
    """Row i lives on worker i mod N."""
    return VariableStrategy(
        "rows",
        partition="cyclic",
        owners=cluster.everyone,
        average=cluster.config.average_sparse,
        why="sparse: all reads look up rows",
    )


def bags(variable: Variable, owner: int | None, cluster: ClusterFacts) -> VariableStrategy:
    """Sums of bags travel: from one owner, or with None from all, each of which has some rows."""
    return VariableStrategy(
        "bags",
        partition="cyclic" if owner is None else "whole",
        owners=cluster.everyone if owner is None else (owner,),
        average=cluster.config.average_sparse,
        why=f"sparse: {variable.bags_per_step:.0f} bags of {variable.ids_per_step:.0f} rows",
    )


def sparse(variable: Variable, cluster: ClusterFacts) -> VariableStrategy:
    """Row servers, or replication with the reason when the update cannot be sharded."""
    if variable.shard_obstacle:
        return allgather(variable, cluster, f"sparse, but replicated: {variable.shard_obstacle}")
    return rows(variable, cluster)


def owned(
    variable: Variable, cluster: ClusterFacts, owners: Iterable[int], why: str = "dense"
) -> VariableStrategy:
    """Owners update it and send new values: one whole, or several a block of rows each."""
    several = tuple(owners)
    return VariableStrategy(
        "owner",
        partition="whole" if len(several) == 1 else "block",
        owners=several,
        average=averages(variable, cluster),
        why=why,
    )


def replicated(variable: Variable, cluster: ClusterFacts) -> VariableStrategy:
    """For a dense variable of which an owner could not update a part: summed by all."""
    return allreduce(variable, cluster, f"dense, but replicated: {variable.shard_obstacle}")


class OwnerQueue:
    """Gives whole variables to the worker that owns the fewest bytes so far."""

    def __init__(self, workers: int) -> None:
        self._owned = [(0, worker) for worker in range(workers)]  # a heap: in order to begin with

    def next(self, size: int) -> int:
        """The owner of something of ``size`` bytes."""
        owned, owner = self._owned[0]
        heapq.heapreplace(self._owned, (owned + size, owner))
        return owner

    @staticmethod
    def largest_first(variables: Iterable[Variable]) -> list[Variable]:
        """Variables in the order in which they are given out."""
        return sorted(variables, key=lambda v: (-v.bytes, v.name))
