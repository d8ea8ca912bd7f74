"""Every variable synchronised in one way, wherever that fits, on the workers of a pool."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import equality
import msgspec
import torch
import torch.nn.functional as F
from torch import nn

from parallax.config import Config
from parallax.graph.analysis.variables import Variable
from parallax.graph.objects.discovery import discover
from parallax.ops import factors as ops_factors
from parallax.rewrite import blocks
from parallax.rewrite.synchronizers import factor_exchange
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner
from parallax.strategy.builders import ClusterFacts, GraphFacts, StrategyBuilder, find_builder
from parallax.strategy.data import Strategy, VariableStrategy
from parallax.strategy.verify import findings

COMPARED = ("synchronizer", "axis", "pieces", "reduction", "order")
"""Fields by which a choice is recognised as the one that was wanted."""


class Wherever(StrategyBuilder):
    """What is wanted, for all variables for which verification finds nothing wrong with it."""

    def __init__(self, wanted: Mapping[str, Any]) -> None:
        self.wanted = wanted

    def build(self, graph: GraphFacts, cluster: ClusterFacts) -> Strategy:
        built = find_builder("HYBRID").build(graph, cluster)
        variables = list(graph.variables.values())
        for number, (name, usual) in enumerate(built.variables.items()):
            choice = self.choice(number, graph.variables[name], cluster.workers, usual.average)
            tried = msgspec.structs.replace(built, variables={**built.variables, name: choice})
            if not findings(tried, variables, cluster.workers):
                built = tried
        return built

    def choice(
        self, number: int, variable: Variable, workers: int, average: bool
    ) -> VariableStrategy:
        wanted = dict(self.wanted)
        if wanted.get("owners") == "one":
            wanted["owners"] = (number % workers,)
        elif wanted.get("owners") == "all":
            wanted["owners"] = tuple(range(workers))
        if wanted.get("shards") == "uneven":
            parts = wanted.get("pieces", workers)
            size = (
                variable.shape[wanted.get("axis", 0)]
                if variable.shape[wanted.get("axis", 0) :]
                else 0
            )
            wanted["shards"] = (size - parts + 1, *[1] * (parts - 1))
        return VariableStrategy(average=average, why="as the test wants", **wanted)


def runner_for(world: World, step: Callable[..., Any], wanted: Mapping[str, Any]) -> Runner:
    config = Config(strategy=Wherever(wanted), workers=1, seed=equality.SEED)
    return Runner(step, discover(step), config, world)


def compare(
    world: World, wanted: Mapping[str, Any], cases: list[tuple[str, str, str]]
) -> dict[str, Any]:
    """Train cases and compare each with one device: differences, and what was synchronised so."""
    result: dict[str, Any] = {}
    for case in cases:
        data = equality.moved(equality.batches(world.size), world.device)
        expected = equality.single_device(equality.built(world.device, case), data)
        mine = equality.built(world.device, case)
        runner = runner_for(world, mine.step, wanted)
        found = equality.distributed(mine, data, runner)
        same = {name: value for name, value in wanted.items() if name in COMPARED}
        chosen = [
            row.variable.name
            for row in runner.plan.rows
            if same == {name: getattr(row.choice, name) for name in same}
        ]
        result["-".join(case)] = (equality.difference(expected, found), chosen)
    return result


def layers(seed: int = 5) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Layers without biases, one of which is used twice."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Linear(n, m, bias=False) for n, m in ((6, 5), (5, 5), (5, 4)))
    ).double()
    return model, torch.optim.Adam(model.parameters(), 0.02)


def make_step(
    model: Any, optimizer: torch.optim.Optimizer, mean: bool
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def step(values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        hidden = torch.tanh(model[1](torch.tanh(model[1](torch.tanh(model[0](values))))))
        reduction = "mean" if mean else "sum"
        loss = F.cross_entropy(model[2](hidden), targets, reduction=reduction)
        loss.backward()
        optimizer.step()
        return loss

    return step


def uneven(world: World, wanted: Mapping[str, Any], mean: bool) -> dict[str, Any]:
    """Batches of different sizes on the workers, some empty: the difference from one device."""
    generator = torch.Generator().manual_seed(8)
    sizes = [[3] * world.size, [1 + w for w in range(world.size)], [0, *[2] * (world.size - 1)]]
    sizes += [[4 - (w == 1) for w in range(world.size)]] * 2
    data = [
        [(torch.randn(n, 6, generator=generator).double(), torch.arange(n) % 4) for n in each]
        for each in sizes
    ]
    model, optimizer = layers()
    step = make_step(model, optimizer, mean)
    for parts in data:
        step(*(torch.cat(items) for items in zip(*parts, strict=True)))
    expected = model.state_dict()
    mine, optimizer = layers()
    config = Config(strategy=Wherever(wanted), workers=1, average_dense=mean, average_sparse=mean)
    own_step = make_step(mine, optimizer, mean)
    runner = Runner(own_step, discover(own_step), config, world)
    for parts in data:
        runner.run(*parts[world.rank])
    found = runner.state_dict()["model"]
    return {
        "difference": max(float((expected[k] - found[k]).abs().max()) for k in expected),
        "chosen": [row.choice.synchronizer for row in runner.plan.rows],
    }


class Everywhere(Wherever):
    """What is wanted, for all variables at once."""

    def build(self, graph: GraphFacts, cluster: ClusterFacts) -> Strategy:
        built = find_builder("HYBRID").build(graph, cluster)
        chosen = {
            name: self.choice(number, graph.variables[name], cluster.workers, usual.average)
            for number, (name, usual) in enumerate(built.variables.items())
        }
        return msgspec.structs.replace(built, variables=chosen)


def joined(world: World, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Two variables, one of whose gradients is added to the other's: both sharded, and one."""

    def build() -> tuple[nn.Module, Callable[[torch.Tensor], None]]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def step(values: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(values).square().mean().backward()
            first, second = model.parameters()
            assert first.grad is not None
            first.grad.add_(second.grad)
            optimizer.step()

        return model, step

    data = [torch.full((world.size * 2, 4), 0.1 * n).double() for n in range(1, 5)]
    model, step = build()
    for batch in data:
        step(batch)
    _, mine = build()
    config = Config(strategy=Everywhere(wanted), workers=1, seed=1)
    runner = Runner(mine, discover(mine), config, world)
    for batch in data:
        runner.run(batch[2 * world.rank : 2 * world.rank + 2])
    found, expected = runner.state_dict()["model"], model.state_dict()
    _, again = build()
    alone = runner_for(world, again, wanted)  # for one after the other
    alone.run(data[0][:2])
    return {
        "difference": max(float((expected[k] - found[k]).abs().max()) for k in expected),
        "chosen": [row.choice.synchronizer for row in runner.plan.rows],
        "alone": [row.choice.synchronizer for row in alone.plan.rows],
    }


def sent_per_step(runner: Runner, batch: torch.Tensor, steps: int) -> float:
    """Bytes that this worker sends in a step."""
    before = sum(runner.traffic.values())
    for _ in range(steps):
        runner.run(batch)
    return (sum(runner.traffic.values()) - before) / steps


def counted(world: World, wanted: Mapping[str, Any], steps: int = 3) -> dict[str, Any]:
    """Bytes per step: what this worker sent and what the plan's formulas say."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 200))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step(values: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(values).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    runner = runner_for(world, step, wanted)
    batch = torch.randn(16, 300)
    runner.run(batch)
    runner.run(batch)
    sent = sent_per_step(runner, batch, steps)
    rows = runner.plan.rows
    return {
        "sent": sent,
        "formula": runner.plan.bytes_per_step,
        "chosen": [row.choice.synchronizer for row in rows],
        "held": sum(shard.numel() for shard in runner._state.shards.values()),
    }


def multiplied_in_blocks(
    world: World, wanted: Mapping[str, Any], cases: list[tuple[str, str, str]]
) -> dict[str, Any]:
    """As :func:`compare`, with updates that multiply factors of any size, one row at a time."""
    calls = 0

    @functools.wraps(ops_factors.update_by_product)
    def counting(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return ops_factors.update_by_product(*args)

    with (
        mock.patch.object(factor_exchange, "LEAST_BYTES", 1),
        mock.patch.object(ops_factors, "BLOCK_BYTES", 1),
        mock.patch.object(blocks, "update_by_product", counting),
    ):
        found = compare(world, wanted, cases)
    return {"found": found, "calls": calls}
