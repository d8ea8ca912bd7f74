"""Every builder on the workers of a pool, compared with one device."""

from __future__ import annotations

from typing import Any

import equality

from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner
from parallax.strategy.builders import StrategyBuilder

Case = tuple[str, str, str]


def compare(world: World, choices: list[tuple[Any, Case]]) -> list[dict[str, Any]]:
    """Train each case by a builder: the difference from one device, and what was chosen."""
    found = []
    expected: dict[Case, Any] = {}
    data = equality.batches(world.size)
    for strategy, case in choices:
        if case not in expected:
            expected[case] = equality.single_device(equality.build(*case), data)
        mine = equality.build(*case)
        config = Config(strategy=strategy, workers=1, seed=equality.SEED)
        runner = Runner(mine.step, discover(mine.step), config, world)
        state = equality.distributed(mine, data, runner)
        assert runner.strategy is not None
        found.append(
            {
                "builder": strategy.title if isinstance(strategy, StrategyBuilder) else strategy,
                "case": case,
                "difference": equality.difference(expected[case], state),
                "chosen": {c.synchronizer for c in runner.strategy.variables.values()},
            }
        )
    return found
