"""What a worker expects of its steps before and while it runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parallax.cluster.network import Network
from parallax.graph.analysis.variables import Variable
from parallax.strategy.data import Strategy
from parallax.strategy.timeline import (
    Computed,
    Item,
    Speed,
    StepTime,
    predict,
    with_ids_ahead,
)


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

    def time(
        self,
        variables: Mapping[str, Variable],
        computing: float | None = None,
        one_device: float | None = None,
        ids_ahead: bool = False,
    ) -> StepTime:
        """What it should take.

        Args:
            variables: as they were measured.
            computing: seconds that it computes; None: as the device's speed says.
            one_device: instead, seconds of the captured step on one device with nothing to send.
            ids_ahead: ids are sent a step ahead.
        """
        known = computing if one_device is None else one_device
        alone = None if one_device is None else self.alone
        items = with_ids_ahead(self.items) if ids_ahead else self.items
        return predict(items, variables, self.strategy, self.network, self.speed, known, alone)
