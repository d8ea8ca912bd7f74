"""Training by strategies of tests' own, on the workers of a pool."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equality
from random_strategies import random_strategy

from parallax.config import Config
from parallax.graph.analysis.variables import Variable
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner
from parallax.strategy.builders import (
    ClusterFacts,
    GraphFacts,
    StrategyBuilder,
    find_builder,
)
from parallax.strategy.data import Strategy


class Made(StrategyBuilder):
    """A builder of a function that makes strategies with their messages arranged."""

    arranges_messages = True

    def __init__(self, make: Callable[[Sequence[Variable], int], Strategy]) -> None:
        self._make = make

    def build(self, graph: GraphFacts, cluster: ClusterFacts) -> Strategy:
        return self._make(list(graph.variables.values()), cluster.workers)


def built(
    name: str, variables: Iterable[Variable], workers: int, config: Config | None = None
) -> Strategy:
    """What the builder of a name makes."""
    config = config or Config()
    cluster = ClusterFacts(
        workers, average_dense=config.average_dense, average_sparse=config.average_sparse
    )
    return find_builder(name).build(GraphFacts.of(variables), cluster)


class Failing(StrategyBuilder):
    """Fails."""

    def build(self, graph: GraphFacts, cluster: ClusterFacts) -> Strategy:
        raise ZeroDivisionError("no bandwidth")


def trained(world: World, settings: dict[str, Any], case: tuple[str, str, str]) -> dict[str, Any]:
    """Train one case with these settings: the strategy, and the difference from one device."""
    data = equality.batches(world.size)
    expected = equality.single_device(equality.build(*case), data)
    mine = equality.build(*case)
    runner = Runner(
        mine.step, discover(mine.step), Config(workers=1, seed=equality.SEED, **settings), world
    )
    assert runner.strategy is None
    found = equality.distributed(mine, data, runner)
    assert runner.strategy is not None
    return {
        "strategy": runner.strategy.to_json(),
        "difference": equality.difference(expected, found),
        "title": str(runner.plan).splitlines()[0],
    }


def failed(world: World, settings: dict[str, Any], case: tuple[str, str, str]) -> tuple[str, str]:
    """What the first step raises with these settings: class and text."""
    try:
        trained(world, settings, case)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def compare_random(world: World, seed: int) -> dict[str, Any]:
    """Train a few cases with random strategies; the worst difference and what was chosen."""
    draw = random.Random(seed)
    cases = draw.sample(equality.all_cases(), 4)
    worst, chosen = 0.0, []
    for case in cases:
        data = equality.batches(world.size)
        expected = equality.single_device(equality.build(*case), data)
        mine = equality.build(*case)
        builder = Made(lambda variables, workers: random_strategy(variables, workers, seed))
        config = Config(strategy=builder, workers=1, seed=equality.SEED)
        runner = Runner(mine.step, discover(mine.step), config, world)
        found = equality.distributed(mine, data, runner)
        worst = max(worst, equality.difference(expected, found))
        chosen += [row.choice.synchronizer for row in runner.plan.rows]
    return {"difference": worst, "chosen": chosen, "cases": cases}
