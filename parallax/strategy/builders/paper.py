"""The rule of the Parallax paper, without what parallax adds to it."""

from __future__ import annotations

from parallax.strategy.builders import common
from parallax.strategy.builders.base import ClusterFacts, GraphFacts, StrategyBuilder
from parallax.strategy.data import Strategy


class ParallaxPaper(StrategyBuilder):
    """AllReduce for dense variables, servers for sparse ones (Parallax paper, section 5.3.1).

    ``HYBRID`` also sends sums of bags where these are fewer, and sums tables by AllReduce of which
    nearly all rows are touched.
    """

    name = "Parallax"

    def build(self, graph: GraphFacts, cluster: ClusterFacts) -> Strategy:
        """AllReduce, or rows, for each variable."""
        chosen = {
            name: common.sparse(variable, cluster)
            if variable.sparse
            else common.allreduce(variable, cluster)
            for name, variable in graph.trainable.items()
        }
        return self.strategy(graph, cluster, chosen)
