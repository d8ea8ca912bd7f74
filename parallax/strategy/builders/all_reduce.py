"""AllReduce for dense variables, AllGather of rows for sparse ones: every worker holds all."""

from __future__ import annotations

from parallax.strategy.builders import common
from parallax.strategy.builders.base import ClusterFacts, GraphFacts, StrategyBuilder
from parallax.strategy.data import Strategy


class Replicated(StrategyBuilder):
    """Every variable whole on every worker (``run_option="AR"``)."""

    name = "AR"

    def build(self, graph: GraphFacts, cluster: ClusterFacts) -> Strategy:
        """AllReduce or AllGather for each variable."""
        chosen = {
            name: common.allgather(variable, cluster)
            if variable.sparse
            else common.allreduce(variable, cluster)
            for name, variable in graph.trainable.items()
        }
        return self.strategy(graph, cluster, chosen)
