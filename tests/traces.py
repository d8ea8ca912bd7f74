"""Workers that record their steps, for the tests of traces."""

from __future__ import annotations

from typing import Any

import compiled_steps
import msgspec

from parallax.config import Config
from parallax.errors import ConfigError
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner
from parallax.strategy.builders import ClusterFacts, GraphFacts, StrategyBuilder
from parallax.strategy.builders.zero import ZeRO
from parallax.strategy.data import Strategy

RECORDED = 3


class Rings(ZeRO):
    """Gradients go to their owners round a ring."""

    def build(self, graph: GraphFacts, cluster: ClusterFacts) -> Strategy:
        built = super().build(graph, cluster)
        chosen = {
            name: msgspec.structs.replace(one, reduction="ring")
            if one.synchronizer == "scatter"
            else one
            for name, one in built.variables.items()
        }
        assert any(one.reduction == "ring" for one in chosen.values()) == (cluster.workers > 1)
        return msgspec.structs.replace(built, variables=chosen)


STRATEGIES: dict[str, str | StrategyBuilder] = {"HYBRID": "HYBRID", "rings": Rings()}


def record(world: World, path: str, strategy: str) -> dict[str, Any]:
    """Record some steps; what the profile says then, and what else was sent meanwhile."""
    _, _, step = compiled_steps.training("adam")
    config = Config(strategy=STRATEGIES[strategy], seed=1, compile="none")
    runner = Runner(step, discover(step), config, world)
    batch = compiled_steps.batches(world.size)[0]
    own = slice(world.rank * compiled_steps.LOCAL, (world.rank + 1) * compiled_steps.LOCAL)
    part = [one[own] for one in batch]
    for _ in range(3):
        runner.run(*part)
    profile = runner.profile(RECORDED, path)
    refused = []
    for arguments in ((0, path), (2, 3), (2, path)):
        try:
            runner.profile(*arguments)  # type: ignore[arg-type]
        except ConfigError as error:
            refused.append(str(error))
    before = _useful(runner)
    shown = [str(profile)]
    for _ in range(RECORDED):
        runner.run(*part)
    sent = _useful(runner) - before
    shown.append(str(profile))
    messages = world.traffic.messages
    runner.run(*part)  # is not recorded any more
    return {
        "shown": shown,
        "refused": refused,
        "shares": [
            (one.step, one.computing, one.waiting, one.communicating) for one in profile.shares
        ],
        "sent": sent,
        "messages": world.traffic.messages - messages,
        "recorder": world.traffic.recorder,
    }


def _useful(runner: Runner) -> int:
    return sum(count for purpose, count in runner.traffic.items() if purpose != "room")
