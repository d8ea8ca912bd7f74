"""Owners for all variables: rows of sparse ones, whole or split dense ones."""

from __future__ import annotations

from parallax.strategy.builders import common
from parallax.strategy.builders.base import ClusterFacts, GraphFacts, StrategyBuilder
from parallax.strategy.data import Strategy, VariableStrategy


class ParameterServer(StrategyBuilder):
    """Owners for all (``run_option="PS"``).

    Dense variables of a megabyte or more are split into blocks of rows over all workers; smaller
    ones go whole to the worker that owns the fewest bytes, largest first (AutoDist's hand-made
    server, Zhang's thesis, section 7.6.2).
    """

    name = "PS"

    def build(self, graph: GraphFacts, cluster: ClusterFacts) -> Strategy:
        """Rows, blocks or a whole owner for each variable."""
        chosen: dict[str, VariableStrategy] = {}
        queue = common.OwnerQueue(cluster.workers)
        for variable in queue.largest_first(graph.trainable.values()):
            if variable.sparse:
                choice = common.sparse(variable, cluster)
            elif variable.shard_obstacle:
                choice = common.replicated(variable, cluster)
            elif variable.bytes >= common.WHOLE_BYTES and variable.rows >= cluster.workers:
                why = "dense, split over all owners"
                choice = common.owned(variable, cluster, cluster.everyone, why)
            else:
                choice = common.owned(variable, cluster, [queue.next(variable.bytes)])
            chosen[variable.name] = choice
        return self.strategy(graph, cluster, chosen)
