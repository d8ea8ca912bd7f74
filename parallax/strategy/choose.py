"""From the settings of a run to its strategy: whose it is, and what parallax adds to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from parallax.graph.analysis.variables import Analysis, Variable
from parallax.strategy.builders import (
    ClusterFacts,
    GraphFacts,
    StrategyBuilder,
    find_builder,
)
from parallax.strategy.data import Strategy, VariableStrategy
from parallax.strategy.hierarchy import by_host
from parallax.strategy.late_order import with_late_turns
from parallax.strategy.message_sizes import MessageSizes
from parallax.strategy.messages import dense_bytes, merge_messages
from parallax.strategy.rings import in_rings
from parallax.strategy.timeline import StepTime

Source = str | Path | StrategyBuilder | Strategy
"""What the settings of a run have: a builder's name, a strategy's file, or one of both itself."""


def source_of(source: Source) -> StrategyBuilder | Strategy:
    """The builder or the finished strategy that the settings ask for.

    Raises:
        ConfigError: there is no such builder.
        StrategyError: the file cannot be read, or holds no strategy.
    """
    if isinstance(source, Path):
        return Strategy.load(source)
    return find_builder(source) if isinstance(source, str) else source


def is_finished(source: Source) -> bool:
    """Whether it is a strategy that is run as it is, not one to be built."""
    return isinstance(source, Path | Strategy)


def title_of(source: Source) -> str:
    """What the settings ask for, in a few words that are the same on all workers."""
    if isinstance(source, Strategy):
        return f"strategy for {source.fingerprint}"
    return source.title if isinstance(source, StrategyBuilder) else str(source)


_LATER = "trained only later"


def with_later(
    strategy: Strategy, variables: Mapping[str, Variable], average_dense: bool, average_sparse: bool
) -> Strategy:
    """The strategy with decisions for variables that are trained only now (gradual unfreezing).

    Every worker holds them until then, and goes on to: their gradients are summed, or their rows
    gathered. All workers decide the same for themselves.

    Args:
        strategy: made for an earlier graph.
        variables: of the present one.
        average_dense, average_sparse: as :class:`parallax.config.Config` has them.
    """
    chosen = dict(strategy.variables)
    # The same whichever came first: workers whose Python decides otherwise meet them in any order.
    made = [one.group for one in chosen.values() if not one.why.endswith(_LATER)]
    group = max(made, default=0)
    for name, variable in variables.items():
        known = chosen.get(name)
        if not variable.trainable or (known is not None and known.synchronizer != "none"):
            continue
        why = f"{'sparse' if variable.sparse else 'dense'}, {_LATER}"
        chosen[name] = VariableStrategy(
            "allgather" if variable.sparse else "allreduce",
            average=average_sparse if variable.sparse else average_dense,
            group=group + 1 + variable.sparse,
            why=why,
        )
    return msgspec.structs.replace(strategy, variables=chosen)


def choose_strategy(
    source: Source,
    analysis: Analysis,
    cluster: ClusterFacts,
    predict: Callable[[Strategy], StepTime] | None = None,
) -> Strategy:
    """The strategy of a run: a builder's with its messages arranged, or a finished one as it is.

    Args:
        source: says who decides.
        analysis: of the first graph.
        cluster: the workers.
        predict: the time of a step by a strategy as it is.

    Raises:
        ConfigError, StrategyError: as :func:`source_of`.
    """
    decider = source_of(source)
    if isinstance(decider, Strategy):
        return decider

    def arranged(strategy: Strategy) -> Strategy:
        variables, network = analysis.variables, cluster.network
        if network is None:
            return merge_messages(strategy, analysis)
        strategy = by_host(strategy, list(variables.values()), network)
        if cluster.speed is None:
            return merge_messages(strategy, analysis)
        sizes = MessageSizes.measured(network, cluster.speed, dense_bytes(strategy, variables))
        if cluster.device == "cpu":
            strategy = in_rings(strategy, list(variables.values()), network, sizes)
        merged = merge_messages(strategy, analysis, sizes)
        return with_late_turns(merged, analysis, network, cluster.speed)

    def predicted(strategy: Strategy) -> StepTime:
        assert predict is not None
        return predict(arranged(strategy))

    variables = analysis.variables.values()
    facts = GraphFacts.of(variables, None if predict is None else predicted)
    built = decider.build(facts, cluster)
    return built if decider.arranges_messages else arranged(built)
