"""Random strategies for the property tests: any way that fits, for every variable."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equality
import msgspec

from parallax.config import Config
from parallax.graph.discovery import discover
from parallax.graph.variables import Variable
from parallax.runtime.comm import World
from parallax.runtime.runner import Runner
from parallax.strategy.builders import (
    ClusterFacts,
    GraphFacts,
    StrategyBuilder,
    find_builder,
)
from parallax.strategy.data import Strategy, VariableStrategy, fingerprint


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
    cluster = ClusterFacts(workers, config or Config())
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


def random_strategy(variables: Sequence[Variable], workers: int, seed: int) -> Strategy:
    """A strategy that fits, drawn at random."""
    draw = random.Random(seed)
    everyone = tuple(range(workers))
    chosen = {}
    kinds: dict[object, int] = {}
    for variable in variables:
        options = [VariableStrategy("allreduce")] if not variable.lazy else []
        if not variable.trainable:
            options = [VariableStrategy("none")]
        elif variable.sparse:
            options.append(VariableStrategy("allgather"))
            if not variable.shard_obstacle:
                options.append(VariableStrategy("rows", "cyclic", everyone))
        elif not variable.shard_obstacle:
            options.append(VariableStrategy("owner", "whole", (draw.randrange(workers),)))
            options.append(VariableStrategy("owner", "block", everyone))
        choice = draw.choice(options)
        whole = choice.synchronizer == "allreduce"
        kind = (choice.synchronizer, variable.dtype, draw.randrange(2))
        chosen[variable.name] = msgspec.structs.replace(
            choice,
            group=draw.randrange(3) and 1 + kinds.setdefault(kind, len(kinds)),
            pieces=draw.randint(1, min(max(variable.rows, 1), 3)) if whole else 1,
            pull_group=draw.randrange(2),
        )
    return Strategy(fingerprint(variables), workers, chosen)


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
