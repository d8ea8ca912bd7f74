"""Two levels for dense gradients and for rows, forced, on the workers of a pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import equality
import torch
import traffic

from benchmarks.peers.ours import LEVELS, UNPLACED, with_levels, without_placement
from benchmarks.workloads import QUICK, Training, lm, make_step
from parallax.cluster.network import Network
from parallax.config import Config
from parallax.graph.analysis.variables import Variable
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.predictions.probe import measure_network
from parallax.runtime.runner import Runner
from parallax.strategy import choose
from parallax.strategy.data import Strategy
from parallax.strategy.hierarchy import with_hierarchy

FLAT, HOSTS, MIXED = "flat", "hosts", "mixed"


def forced(levels: str) -> AbstractContextManager[Any]:
    """Let strategies have these levels whatever the network is; ``mixed`` alternates tables."""

    def decide(strategy: Strategy, variables: Sequence[Variable], network: Network) -> Strategy:
        if levels == FLAT:
            return strategy
        for synchronizer in ("allreduce", "rows"):
            strategy = with_hierarchy(strategy, synchronizer, "hosts")
        if levels == MIXED:
            names = [n for n, one in strategy.variables.items() if one.synchronizer == "rows"]
            flat = with_hierarchy(strategy, "rows", "flat").variables
            chosen = {**strategy.variables, **{name: flat[name] for name in names[::2]}}
            strategy = Strategy(strategy.fingerprint, strategy.replicas, chosen)
        return strategy

    return mock.patch.object(choose, "by_host", decide)


def compare(
    world: World, option: str, cases: list[tuple[str, str, str]], levels: str
) -> dict[str, float]:
    """As ``equality.compare``."""
    with forced(levels):
        return equality.compare(world, option, cases)


def across(world: World, levels: str) -> dict[str, Any]:
    """Bytes of dense gradients that this worker sent to other hosts per step, and the plan."""
    with forced(levels):
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


def rows_across(world: World, levels: str) -> dict[str, Any]:
    """As ``traffic.across_hosts``."""
    with forced(levels):
        return traffic.across_hosts(world)


def formulas(world: World, option: str, levels: str) -> dict[str, float]:
    """What this worker sent per step, in all and to other hosts, by count and by formula."""
    with forced(levels):
        runner, batch = traffic.runner_for(world, option, False)
        return _counted(world, runner, lambda: runner.run(batch()))


def language_model(world: World, levels: str) -> dict[str, float]:
    """The same for the rows of the language model that is compared, and what it looks up."""
    with forced(levels):
        runner, step = _language_model(world, lm(50_000))
        found = _counted(world, runner, step, "rows: ")
    tables = [row for row in runner.plan.rows if row.choice.synchronizer == "rows"]
    each = [(row.variable, row.variable.bytes / row.variable.rows) for row in tables]
    found["tables"] = len(tables)
    found["lookups"] = sum(v.ids_per_step * (2 * width + 4) for v, width in each)
    found["formula"] = sum(row.bytes_across for row in tables)
    return found


def losses(world: World, levels: str) -> dict[str, Any]:
    """Losses of a small language model, and the hierarchy of its tables."""
    with forced(levels):
        runner, step = _language_model(world, QUICK["lm-50k"]())
        found = [float(step()) for _ in range(8)]
    choices = [row.choice for row in runner.plan.rows]
    return {
        "losses": found,
        "levels": [one.hierarchy for one in choices if one.synchronizer == "rows"],
    }


def levels_of_case(world: World, levels: str) -> dict[str, str]:
    """By synchroniser, the hierarchy that a benchmark's system with these levels gets."""
    runner, _ = _language_model(world, QUICK["lm-50k"]())
    batch = QUICK["lm-50k"]().batch()
    with_levels(runner.run, LEVELS[levels])(*batch)
    return {row.choice.synchronizer: row.choice.hierarchy for row in runner.plan.rows}


def placement_of_case(
    world: World, builder: str, place: str
) -> tuple[list[float], dict[str, float]]:
    """Losses, and bytes of two more steps by purpose, with operations placed so."""
    training = QUICK["paper-lm-bf16"]()
    runner, _ = _language_model(world, training, builder)
    step = without_placement(runner, runner.run, UNPLACED[place]) if place else runner.run
    torch.manual_seed(5)
    batch = training.batch()
    losses = [float(step(*batch)) for _ in range(2)]
    before = dict(world.traffic.sent)
    losses += [float(step(*batch)) for _ in range(2)]
    sent = {name: n - before.get(name, 0) for name, n in world.traffic.sent.items()}
    return losses, {name: n for name, n in sent.items() if n}


def _language_model(
    world: World, training: Training, builder: str = "HYBRID"
) -> tuple[Runner, Callable[[], Any]]:
    torch.manual_seed(0)
    model = training.model(False)
    step = make_step(training, model, model, training.optimizer(model.parameters()))
    config = Config(workers=1, seed=3, strategy=builder)
    runner = Runner(step, discover(step), config, world)
    return runner, lambda: runner.run(*training.batch())


def _counted(
    world: World, runner: Runner, step: Callable[[], Any], purpose: str = ""
) -> dict[str, float]:
    def sent() -> tuple[int, int]:
        kinds = [world.traffic.sent, world.traffic.across]
        whole, across = (
            sum(count for name, count in kind.items() if name.startswith(purpose)) for kind in kinds
        )
        return whole, across

    for _ in range(2):  # the first also sends what workers agree on before
        step()
    before = sent()
    for _ in range(traffic.STEPS):
        step()
    whole, across = ((now - then) / traffic.STEPS for now, then in zip(sent(), before, strict=True))
    plan = runner.plan
    return {
        "sent": whole,
        "across": across,
        "sent by formula": plan.bytes_per_step,
        "across by formula": plan.bytes_across,
    }


def measured(world: World) -> Network:
    """What the probe finds."""
    return measure_network(world)
