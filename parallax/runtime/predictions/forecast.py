"""What a step would take by some strategy: its graph is rewritten for it, and thrown away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parallax.cluster.network import Network
from parallax.graph.analysis.variables import Analysis, analyze
from parallax.graph.objects.state import Leaf
from parallax.rewrite.pipeline import rewrite
from parallax.rewrite.timeline import timeline
from parallax.strategy.data import Strategy
from parallax.strategy.timeline import Speed, StepTime, predict

__all__ = ["Forecast"]


@dataclass(frozen=True)
class Forecast:
    """Predictions for one captured step.

    Args:
        analysis: of the step, which stays as it is.
        leaves: the state by name.
        aliases: further names of tied parameters.
        network: the links.
        speed: of the device.
    """

    analysis: Analysis
    leaves: Mapping[str, Leaf]
    aliases: Mapping[str, list[str]]
    network: Network
    speed: Speed

    def step(self, strategy: Strategy) -> StepTime:
        """The time of a step by a strategy, as it is. Takes as long as to rewrite the graph."""
        variables = self.analysis.variables
        own = analyze(self.analysis.step.copy(runs=False), self.leaves, self.aliases)
        own.variables.update(variables)  # with what was measured of them
        graph = rewrite(own, strategy, 0, strategy.replicas)
        items = timeline(graph, variables, strategy)
        return predict(items, variables, strategy, self.network, self.speed)
