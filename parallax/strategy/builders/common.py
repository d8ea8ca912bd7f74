"""Choices that several builders make, each with its reason."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from parallax.graph.analysis.variables import Variable
from parallax.strategy.builders.base import ClusterFacts, GraphFacts
from parallax.strategy.data import VariableStrategy

# A variable below this size is owned whole: splitting it would cost more messages than it saves.
WHOLE_BYTES = 1 << 20


def averages(variable: Variable, cluster: ClusterFacts) -> bool:
    """Whether the settings ask for a mean over workers of this variable's gradients."""
    return cluster.average_sparse if variable.sparse else cluster.average_dense


def allreduce(variable: Variable, cluster: ClusterFacts, why: str = "") -> VariableStrategy:
    """Gradients are summed by all."""
    if not why and variable.lookups and not variable.sparse:
        why = f"dense: {variable.dense_reason}"
    elif not why and variable.sparse:
        why = f"replicated: {variable.shard_obstacle}"
    return VariableStrategy("allreduce", average=averages(variable, cluster), why=why or "dense")


def factors(variable: Variable, cluster: ClusterFacts, why: str = "") -> VariableStrategy:
    """The two factors of its gradient go to all, each of whom multiplies them."""
    return VariableStrategy("factors", average=averages(variable, cluster), why=why)


def allgather(
    variable: Variable, cluster: ClusterFacts, why: str = "sparse: all reads look up rows"
) -> VariableStrategy:
    """Gradients of looked-up rows go to all."""
    return VariableStrategy("allgather", average=cluster.average_sparse, why=why)


def rows(variable: Variable, cluster: ClusterFacts) -> VariableStrategy:
    """Row i lives on worker i mod N."""
    return VariableStrategy(
        "rows",
        partition="cyclic",
        owners=cluster.everyone,
        average=cluster.average_sparse,
        why="sparse: all reads look up rows",
    )


def bags(variable: Variable, owners: Sequence[int], cluster: ClusterFacts) -> VariableStrategy:
    """Sums of bags travel: from one owner, or from several, each of which has some rows."""
    return VariableStrategy(
        "bags",
        partition="whole" if len(owners) == 1 else "cyclic",
        owners=tuple(owners),
        average=cluster.average_sparse,
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
    """Gives variables to the workers that own the fewest bytes so far."""

    def __init__(self, workers: int) -> None:
        # A heap: in order to begin with.
        self._owned = [(0.0, worker) for worker in range(workers)]

    def next(self, size: float) -> int:
        """The owner of something of ``size`` bytes."""
        owned, owner = self._owned[0]
        heapq.heapreplace(self._owned, (owned + size, owner))
        return owner

    def several(self, size: float, count: int) -> tuple[int, ...]:
        """The owners of even parts of something of ``size`` bytes, by their numbers."""
        least = [heapq.heappop(self._owned) for _ in range(count)]
        for owned, owner in least:
            heapq.heappush(self._owned, (owned + size / count, owner))
        return tuple(sorted(owner for _, owner in least))

    def filled(self, size: float, rows: int) -> dict[int, int]:
        """By owner, its rows of something of ``size`` bytes that fills all up to the same level.

        Those that own more than that already get none.
        """
        least = sorted(self._owned)
        left, level, count = size, least[0][0], 0
        for count, (_, above) in enumerate(zip(least, [*least[1:], (math.inf, 0)], strict=True), 1):
            step = above[0] - level
            if step * count >= left:
                break
            level += step
            left -= step * count
        level += left / count
        ends = list(itertools.accumulate((level - owned) / size for owned, _ in least[:count]))
        bounds = [0, *(round(rows * end) for end in ends[:-1]), rows]
        shards = {
            owner: end - start
            for (_, owner), (start, end) in zip(
                least[:count], itertools.pairwise(bounds), strict=True
            )
        }
        self._owned = [(o + size * shards.get(owner, 0) / rows, owner) for o, owner in self._owned]
        heapq.heapify(self._owned)
        return shards

    @staticmethod
    def largest_first(variables: Iterable[Variable]) -> list[Variable]:
        """Variables in the order in which they are given out."""
        return sorted(variables, key=lambda v: (-v.bytes, v.name))


def merged(
    graph: GraphFacts,
    chosen: Mapping[str, VariableStrategy],
    size: Callable[[Variable], float],
    limit: float,
) -> dict[str, VariableStrategy]:
    """Gradients of one kind put together, up to a limit, in the order in which backward makes them.

    Args:
        graph: the variables; backward is taken to go from the last to the first.
        chosen: how each is synchronised.
        size: what a gradient takes up of the limit.
        limit: of one message; a gradient that is larger travels alone.

    Returns:
        The choices with their groups, numbered from 1.
    """
    grouped = dict(chosen)
    open_groups: dict[object, tuple[int, float]] = {}
    number = 0
    for name, variable in reversed(list(graph.trainable.items())):
        choice = chosen[name]
        key = (choice.synchronizer, choice.average, variable.dtype)
        group, filled = open_groups.get(key, (0, limit))
        if filled + size(variable) > limit:
            number += 1
            group, filled = number, 0.0
        open_groups[key] = (group, filled + size(variable))
        grouped[name] = msgspec.structs.replace(choice, group=group)
    return grouped


def replicas(graph: GraphFacts, cluster: ClusterFacts) -> dict[str, VariableStrategy]:
    """Every variable whole on every worker: AllReduce, and AllGather of sparse gradients' rows."""
    return {
        name: allgather(variable, cluster) if variable.sparse else allreduce(variable, cluster)
        for name, variable in graph.trainable.items()
    }
