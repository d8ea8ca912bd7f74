"""From the settings of a run to its strategy: whose it is, and what parallax adds to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from parallax.config import Config
from parallax.graph.variables import Analysis
from parallax.strategy.builders import (
    ClusterFacts,
    GraphFacts,
    StrategyBuilder,
    find_builder,
)
from parallax.strategy.data import Strategy
from parallax.strategy.hierarchy import by_host
from parallax.strategy.message_sizes import MessageSizes
from parallax.strategy.messages import dense_bytes, merge_messages
from parallax.strategy.timeline import StepTime


def source_of(config: Config) -> StrategyBuilder | Strategy:
    """The builder or the finished strategy that the settings ask for.

    Raises:
        ConfigError: there is no such builder.
        StrategyError: the file cannot be read, or holds no strategy.
    """
    chosen = config.run_option if config.strategy is None else config.strategy
    if isinstance(chosen, Path):
        return Strategy.load(chosen)
    if isinstance(chosen, str):
        return find_builder(chosen)
    assert chosen is not None
    return chosen


def is_finished(config: Config) -> bool:
    """Whether the settings have a strategy that is run as it is, not one to be built."""
    return isinstance(config.strategy, Path | Strategy)


def title_of(config: Config) -> str:
    """What the settings ask for, in a few words that are the same on all workers."""
    chosen = config.run_option if config.strategy is None else config.strategy
    if isinstance(chosen, Strategy):
        return f"strategy for {chosen.fingerprint}"
    return chosen.title if isinstance(chosen, StrategyBuilder) else str(chosen)


def choose_strategy(
    analysis: Analysis,
    cluster: ClusterFacts,
    predict: Callable[[Strategy], StepTime] | None = None,
) -> Strategy:
    """The strategy of a run: a builder's with its messages arranged, or a finished one as it is.

    Args:
        analysis: of the first graph.
        cluster: the workers; its settings say who decides.
        predict: the time of a step by a strategy as it is.

    Raises:
        ConfigError, StrategyError: as :func:`source_of`.
    """
    source = source_of(cluster.config)
    if isinstance(source, Strategy):
        return source

    def arranged(strategy: Strategy) -> Strategy:
        variables, network = analysis.variables, cluster.network
        if network is None:
            return merge_messages(strategy, analysis)
        strategy = by_host(strategy, list(variables.values()), network)
        if cluster.speed is None:
            return merge_messages(strategy, analysis)
        sizes = MessageSizes.measured(network, cluster.speed, dense_bytes(strategy, variables))
        return merge_messages(strategy, analysis, sizes)

    def predicted(strategy: Strategy) -> StepTime:
        assert predict is not None
        return predict(arranged(strategy))

    variables = analysis.variables.values()
    facts = GraphFacts.of(variables, None if predict is None else predicted)
    built = source.build(facts, cluster)
    return built if source.arranges_messages else arranged(built)
