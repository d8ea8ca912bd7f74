"""AllReduce in two levels, forced, on the workers of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import equality
import traffic

from parallax.cluster.network import Level, Network
from parallax.graph.variables import Variable
from parallax.runtime import runner as runner_module
from parallax.runtime.comm import World
from parallax.runtime.probe import measure_network
from parallax.strategy import hierarchy
from parallax.strategy.data import Strategy

SLOW_RAIL = Network(Level(4, 1e6, 1e-3), Level(2, 1e9, 1e-5), Level(2, 1e6, 1e-3))


def forced(strategy: Strategy, variables: Sequence[Variable], network: Network) -> Strategy:
    """As on hosts with slow links between them."""
    return hierarchy.by_host(strategy, variables, SLOW_RAIL)


def compare(world: World, option: str, cases: list[tuple[str, str, str]]) -> dict[str, float]:
    """As ``equality.compare``, summing inside hosts first."""
    with mock.patch.object(runner_module, "by_host", forced):
        return equality.compare(world, option, cases)


def across(world: World, two_levels: bool) -> dict[str, Any]:
    """Bytes of dense gradients that this worker sent to other hosts per step, and the plan."""
    choose = forced if two_levels else lambda strategy, *_: strategy
    with mock.patch.object(runner_module, "by_host", choose):
        runner, batch = traffic.runner_for(world, "HYBRID", False)
        runner.run(batch())
        before = world.traffic.across["dense: sum"]
        for _ in range(traffic.STEPS):
            runner.run(batch())
        sent = (world.traffic.across["dense: sum"] - before) / traffic.STEPS
        rows = [r for r in runner.plan.rows if r.choice.synchronizer == "allreduce"]
        return {
            "sent": sent,
            "bytes": sum(row.variable.bytes for row in rows),
            "hierarchy": {row.choice.hierarchy for row in rows},
            "plan": str(runner.plan),
        }


def measured(world: World) -> Network:
    """What the probe finds."""
    return measure_network(world)
