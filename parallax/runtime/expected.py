"""What a worker expects of its steps before and while it runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parallax.cluster.network import Network
from parallax.graph.variables import Variable
from parallax.strategy.data import Strategy
from parallax.strategy.timeline import Computed, Item, Speed, StepTime, predict


@dataclass(frozen=True)
class ExpectedStep:
    """One worker's step by the order in which its graph computes and communicates.

    Args:
        items: the graph's timeline.
        alone: what one device computes in the step as it was captured.
        strategy: that the graph was rewritten for.
        network, speed: as they were measured before the first step.
    """

    items: tuple[Item, ...]
    alone: Computed
    strategy: Strategy
    network: Network
    speed: Speed

    def computing_for(self, seconds: float | None, variables: Mapping[str, Variable]) -> StepTime:
        """Its time if it computes for so long; None: as the device's speed says."""
        return self._play(variables, seconds)

    def where_one_device_takes(self, seconds: float, variables: Mapping[str, Variable]) -> StepTime:
        """Its time if the captured step, with nothing sent, takes one device so long."""
        return self._play(variables, seconds, self.alone)

    def _play(
        self,
        variables: Mapping[str, Variable],
        seconds: float | None,
        computed: Computed | None = None,
    ) -> StepTime:
        return predict(
            self.items, variables, self.strategy, self.network, self.speed, seconds, computed
        )
