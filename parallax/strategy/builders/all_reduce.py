"""Every variable whole on every worker: AllReduce for dense ones, AllGather of rows for sparse."""

from __future__ import annotations

from parallax.errors import ConfigError
from parallax.strategy.builders import common
from parallax.strategy.builders.base import ClusterFacts, GraphFacts, StrategyBuilder
from parallax.strategy.data import Strategy


class Replicated(StrategyBuilder):
    """Every variable whole on every worker, in messages that parallax arranges (``AR``)."""

    name = "AR"

    def build(self, graph: GraphFacts, cluster: ClusterFacts) -> Strategy:
        """AllReduce or AllGather for each variable."""
        return self.strategy(graph, cluster, common.replicas(graph, cluster))


class AllReduce(StrategyBuilder):
    """Every variable whole on every worker, in messages of so many gradients each.

    The AllReduce builder of AutoDist (Zhang's thesis, section 7.6.2): gradients are merged by their
    number, whatever their size.

    Args:
        chunk: how many.

    Raises:
        ConfigError: that is not positive.
    """

    name = "AllReduce"
    arranges_messages = True

    def __init__(self, chunk: int = 128) -> None:
        if chunk < 1:
            raise ConfigError(f"chunk must be at least 1, found {chunk}.")
        self.chunk = chunk

    def build(self, graph: GraphFacts, cluster: ClusterFacts) -> Strategy:
        """AllReduce or AllGather, in groups by number."""
        chosen = common.replicas(graph, cluster)
        grouped = common.merged(graph, chosen, lambda variable: 1.0, self.chunk)
        return self.strategy(graph, cluster, grouped)
