"""Horovod: ring AllReduce through a fusion buffer, AllGather for sparse gradients."""

from __future__ import annotations

from parallax.errors import ConfigError
from parallax.strategy.builders import common
from parallax.strategy.builders.base import ClusterFacts, GraphFacts, StrategyBuilder
from parallax.strategy.data import Strategy


class Horovod(StrategyBuilder):
    """Ring AllReduce of gradients merged in a fusion buffer; AllGather for sparse ones.

    As Horovod does it (Sergeev and Del Balso, 2018; Zhang's thesis, table 7.1): gradients that are
    ready are copied into one buffer of a fixed size, and that is reduced over a ring.

    Args:
        fusion_bytes: of the buffer; Horovod's own default is 64 MiB.

    Raises:
        ConfigError: that is negative.
    """

    name = "Horovod"
    arranges_messages = True

    def __init__(self, fusion_bytes: int = 64 << 20) -> None:
        if fusion_bytes < 0:
            raise ConfigError(f"fusion_bytes must not be negative, found {fusion_bytes}.")
        self.fusion_bytes = fusion_bytes

    def build(self, graph: GraphFacts, cluster: ClusterFacts) -> Strategy:
        """AllReduce or AllGather, in groups by size."""
        chosen = common.replicas(graph, cluster)
        grouped = common.merged(graph, chosen, lambda variable: variable.bytes, self.fusion_bytes)
        return self.strategy(graph, cluster, grouped)
