"""ZeRO: state and update of every variable divided over all workers."""

from __future__ import annotations

from parallax.graph.analysis.variables import Variable
from parallax.strategy.builders import common
from parallax.strategy.builders.base import ClusterFacts
from parallax.strategy.builders.parameter_server import OwnerBuilder
from parallax.strategy.data import VariableStrategy


class ZeRO(OwnerBuilder):
    """Each dense variable in even shards on all workers; values are gathered when they are read.

    Stage 3 of ZeRO (Rajbhandari et al., 2020) in words of collectives: gradients are summed at the
    owners of their rows (ReduceScatter), a worker keeps and updates its shard and its slots only,
    and values are gathered for a step (AllGather). It sends what AllReduce does and keeps a part of
    the state. A variable with fewer rows than workers is whole on an owner; one of which rows are
    looked up as well stays on every worker, and its slots are divided.
    """

    name = "ZeRO"

    def owned(
        self, variable: Variable, cluster: ClusterFacts, queue: common.OwnerQueue
    ) -> VariableStrategy:
        """Even shards, or a whole owner."""
        if variable.rows < cluster.workers:
            return common.owned(variable, cluster, [queue.next(variable.bytes)])
        if variable.lookups:
            why = "dense, split over all owners; rows of it are looked up"
            return common.owned(variable, cluster, cluster.everyone, why)
        return VariableStrategy(
            "scatter",
            partition="block",
            owners=cluster.everyone,
            average=common.averages(variable, cluster),
            why="dense, a shard on every worker",
        )
