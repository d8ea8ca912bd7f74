"""The strategy of a run: made in the first step, and what every later graph has to fit."""

from __future__ import annotations

import logging
from collections.abc import Callable

from parallax.cluster.network import Network
from parallax.config import Config
from parallax.errors import StrategyError
from parallax.graph.analysis.variables import Analysis, Variable
from parallax.graph.objects.checks import check_unchanged
from parallax.graph.objects.discovery import StepObjects
from parallax.graph.objects.state import Leaf, aliases
from parallax.runtime.chief import strategy_of_chief
from parallax.runtime.comm.world import World
from parallax.runtime.predictions.forecast import Forecast
from parallax.runtime.state.resharding import Partitions
from parallax.runtime.state.state_table import StateTable
from parallax.strategy.builders import ClusterFacts
from parallax.strategy.choose import choose_strategy, is_finished, with_later
from parallax.strategy.data import Strategy
from parallax.strategy.timeline import Speed
from parallax.strategy.verify import check_still_fits, verify

logger = logging.getLogger("parallax")


class StrategyChoice:
    """Chooses once, for all workers; ``network`` and ``speed`` are measured before, or unknown."""

    def __init__(
        self,
        config: Config,
        world: World,
        objects: StepObjects,
        state: StateTable,
        tell: Callable[[Strategy], None],
    ) -> None:
        """
        Args:
            tell: called with the strategy that was made, on worker 0.
        """
        self._config = config
        self._world = world
        self._objects = objects
        self._state = state
        self._tell = tell
        self._known: dict[str, Leaf] = {}
        self._partitions: Partitions | None = None
        self.network: Network | None = None
        self.speed: Speed | None = None
        self.strategy: Strategy | None = None
        self.variables: dict[str, Variable] = {}
        """Of the last graph, by name."""

    def decide(self, analysis: Analysis) -> Strategy:
        """The strategy: made once, by the chief, for all; checked against every new graph.

        Raises:
            StrategyError: it does not fit the model or the workers.
        """
        if self.strategy is None:
            self.strategy = self._make(analysis)
            self._known = dict(self._state.leaves)
            self.variables = analysis.variables
            if self._world.rank == 0:
                self._tell(self.strategy)
        elif self._world.size > 1:
            config, variables = self._config, analysis.variables
            check_still_fits(self.strategy, variables)
            self.strategy = with_later(
                self.strategy, variables, config.average_dense, config.average_sparse
            )
            self.variables = variables
        return self.strategy

    def check_state(self) -> None:
        """Check that the state is of the kind that the strategy was made for.

        Raises:
            ModelError: variables came, went, or are others.
        """
        if self.strategy is not None:
            check_unchanged(self._known, self._state.leaves)

    @property
    def partitions(self) -> Partitions | None:
        """The numbers of shards of tables, where partitioners ask for them."""
        return self._partitions

    @property
    def is_searching(self) -> bool:
        """Whether steps are timed to find the number of shards of tables."""
        return self._partitions is not None and self._partitions.searching

    def search(self, seconds: float) -> bool:
        """Note how long a step took, and go on with another number of shards if it is time.

        Returns:
            Whether the strategy is another one now.
        """
        partitions = self._partitions
        assert partitions is not None
        changed = partitions.step(seconds)
        if changed:
            partitions.deal(self.variables)
            self.strategy = partitions.strategy()
        if not partitions.searching and self._world.rank == 0:
            logger.info("%s", partitions.summary())
        return changed

    def _make(self, analysis: Analysis) -> Strategy:
        strategy = self._partitioned(strategy_of_chief(self._world, lambda: self._choose(analysis)))
        two_levels = self.network is not None and self.network.host is not None
        try:
            device = self._world.device.type
            known = list(analysis.variables.values())
            verify(strategy, known, self._world.size, two_levels, device)
        except StrategyError:
            self._world.settle()
            raise
        return strategy

    def _partitioned(self, strategy: Strategy) -> Strategy:
        """With the numbers of shards that partitioners ask for, unless it is finished as it is."""
        if self._world.size == 1 or is_finished(self._config.source):
            return strategy
        self._partitions = Partitions(
            strategy, self._state, self._world, self._config.search_partitions
        )
        return self._partitions.strategy()

    def _choose(self, analysis: Analysis) -> Strategy:
        config, world = self._config, self._world
        cluster = ClusterFacts(
            world.size,
            self.network,
            world.hosts,
            self.speed,
            config.average_dense,
            config.average_sparse,
            world.device.type,
        )
        if self.network is None or self.speed is None:
            return choose_strategy(config.source, analysis, cluster)
        forecast = Forecast(
            analysis, self._state.leaves, aliases(self._objects), self.network, self.speed
        )
        return choose_strategy(config.source, analysis, cluster, forecast.step)
