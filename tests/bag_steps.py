"""Tables that are read in bags, with every way to synchronise them, on the workers of the pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from equality import moved
from torch import nn

from parallax.config import Config
from parallax.errors import ParallaxError
from parallax.graph.analysis.variables import Variable
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner
from parallax.strategy.builders import ClusterFacts, GraphFacts, StrategyBuilder, common
from parallax.strategy.data import Strategy, VariableStrategy

LOCAL_BATCH, WIDTH, STEPS = 3, 4, 6
ROWS = {"a": 13, "b": 7, "c": 2}
Batch = dict[str, Any]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "adam": lambda p: torch.optim.Adam(p, 0.05, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
}


class Net(nn.Module):
    """Bags of two dimensions, bags by offsets, means, and a table that is read twice."""

    def __init__(self, lazy: bool) -> None:
        super().__init__()
        self.a = nn.EmbeddingBag(ROWS["a"], WIDTH, mode="sum", sparse=lazy)
        self.b = nn.EmbeddingBag(
            ROWS["b"], WIDTH, mode="mean", sparse=lazy, include_last_offset=True
        )
        self.c = nn.EmbeddingBag(ROWS["c"], WIDTH, mode="sum", sparse=lazy)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        x = self.a(batch["a"]) * self.b(batch["b"], batch["b_offsets"])
        x = x + self.a(batch["again"], batch["again_offsets"]).sin() + self.c(batch["c"])
        result: torch.Tensor = self.out(torch.tanh(x)).square().mean()
        return result


def build(optimizer: str, clip: bool) -> tuple[Net, Callable[[Batch], torch.Tensor]]:
    torch.manual_seed(11)
    lazy = optimizer == "lazy"
    net = Net(lazy).double()
    tables = [p for n, p in net.named_parameters() if not n.startswith("out")]
    optimizers = [
        OPTIMIZERS["sgd" if lazy else optimizer](tables),
        torch.optim.Adam(net.out.parameters(), 0.05),
    ]

    def step(batch: Batch) -> torch.Tensor:
        for one in optimizers:
            one.zero_grad()
        loss = net(batch)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        for one in optimizers:
            one.step()
        return loss

    return net, step


def batches(workers: int) -> list[list[Batch]]:
    """For each step every worker's batch; bags by offsets have zero to three rows."""
    generator = torch.Generator().manual_seed(3)

    def draw(table: str, *shape: int) -> torch.Tensor:
        return torch.randint(ROWS[table], shape, generator=generator)

    def offsets(last: bool) -> tuple[torch.Tensor, int]:
        sizes = torch.randint(4, (LOCAL_BATCH,), generator=generator)
        ends = sizes.cumsum(0)
        starts = ends - sizes
        total = int(ends[-1])
        return (torch.cat([starts, ends[-1:]]) if last else starts), total

    def one() -> Batch:
        again, count = offsets(False)
        b, b_count = offsets(True)
        return {
            "a": draw("a", LOCAL_BATCH, 2),
            "again": draw("a", count),
            "again_offsets": again,
            "b": draw("b", b_count),
            "b_offsets": b,
            "c": draw("c", LOCAL_BATCH, 5),
        }

    return [[one() for _ in range(workers)] for _ in range(STEPS)]


def whole(parts: list[Batch]) -> Batch:
    """The batch of one device: all workers' bags one after the other."""
    result: Batch = {name: torch.cat([part[name] for part in parts]) for name in ("a", "c")}
    for name, last in (("again", False), ("b", True)):
        result[name] = torch.cat([part[name] for part in parts])
        pieces, start = [], 0
        for part in parts:
            own = part[f"{name}_offsets"] + start
            pieces.append(own[:-1] if last else own)
            start += len(part[name])
        if last:
            pieces.append(torch.tensor([start]))
        result[f"{name}_offsets"] = torch.cat(pieces)
    return result


def _some(index: int, workers: int) -> list[int]:
    count = min(1 + index % 3, workers)
    return [(index - place) % workers for place in range(count)]


class OneWay(StrategyBuilder):
    """Synchronises all tables in one way; "mixed" takes turns."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def build(self, graph: GraphFacts, cluster: ClusterFacts) -> Strategy:
        chosen = {
            variable.name: self._choose(variable, index, cluster)
            for index, variable in enumerate(graph.variables.values())
        }
        return self.strategy(graph, cluster, chosen)

    def _choose(self, variable: Variable, index: int, cluster: ClusterFacts) -> VariableStrategy:
        assert variable.bags == (not variable.name.startswith("out"))
        if not variable.bags:
            return common.allreduce(variable, cluster)
        ways = {
            "whole": common.bags(variable, [(index + 1) % cluster.workers], cluster),
            "dealt": common.bags(variable, cluster.everyone, cluster),
            # Tables with one owner more than others have, in another order than workers.
            "some": common.bags(variable, _some(index, cluster.workers), cluster),
            "rows": common.rows(variable, cluster),
        }
        return ways.get(self._kind) or list(ways.values())[index % len(ways)]


def train(world: World, kind: str, optimizer: str, clip: bool) -> dict[str, float]:
    """The largest difference from one device, and bytes sent against the formulas."""
    data = batches(world.size)
    with world.device:
        (alone, one_device), (_, step) = build(optimizer, clip), build(optimizer, clip)
    for parts in data:
        one_device(moved(whole(parts), world.device))
    data = moved(data, world.device)
    decides = kind if kind == "hybrid" else OneWay(kind)
    config = Config(strategy=decides, workers=1, seed=1)
    runner = Runner(step, discover(step), config, world)
    runner.run(data[0][world.rank])
    before = {k: v for k, v in runner.traffic.items() if k.startswith("bags")}
    for parts in data[1:]:
        runner.run(parts[world.rank])
    state = runner.state_dict()["net"]
    expected = alone.state_dict()
    sent = sum(
        v - before[k] for k, v in runner.traffic.items() if k in before and "counts" not in k
    )
    rows = [row for row in runner.plan.rows if row.choice.synchronizer == "bags"]
    return {
        "difference": max(float((state[n] - p).abs().max()) for n, p in expected.items()),
        "sent": sent / (STEPS - 1),
        "formula": sum(row.bytes_per_step for row in rows),
        "tables": len(rows),
    }


class Several(nn.Module):
    """Bags of two widths and of two dtypes, sums and means of each width."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            [
                nn.EmbeddingBag(11, 3, mode="sum"),
                nn.EmbeddingBag(9, 5, mode="mean"),
                nn.EmbeddingBag(40, 3, mode="mean", include_last_offset=True),
                nn.EmbeddingBag(8, 5, mode="sum"),
                nn.EmbeddingBag(6, 3, mode="sum"),
            ]
        ).double()
        self.tables[4].float()

    def forward(self, ids: torch.Tensor, ragged: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        own = [ids % table.num_embeddings for table in self.tables]
        bags = [self.tables[n](own[n]).double() for n in (0, 1, 3, 4)]
        bags.append(self.tables[2](ragged, ends))
        return torch.cat(bags, 1).tanh()


def several(world: World, kind: str) -> float:
    """The largest difference from one device, of a step that goes back twice through its bags."""

    def build() -> tuple[Several, Callable[..., torch.Tensor]]:
        torch.manual_seed(2)
        net = Several()
        optimizer = torch.optim.Adagrad(net.parameters(), 0.1)

        def step(*batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            values = net(*batch)
            loss = values.square().mean()
            loss.backward(retain_graph=True)
            values.sin().mean().backward()
            optimizer.step()
            return loss

        return net, step

    alone, one_device = build()
    _, step = build()
    config = Config(strategy=OneWay(kind), workers=1, seed=1)
    runner = Runner(step, discover(step), config, world)
    generator = torch.Generator().manual_seed(5)
    count = 2 * world.size
    for _ in range(3):
        ids = torch.randint(99, (count, 4), generator=generator)
        ragged = torch.randint(40, (count, 3), generator=generator)
        # Three ids for the first of a worker's two bags, two for the second, and one for nobody.
        ends = torch.tensor([0, 3, 5])
        mine = slice(2 * world.rank, 2 * world.rank + 2)
        runner.run(ids[mine], ragged[mine].flatten(), ends)
        used = ragged.view(-1, 6)[:, :5].flatten()
        every = torch.tensor([n for w in range(world.size) for n in (5 * w, 5 * w + 3)])
        one_device(ids, used, torch.cat([every, torch.tensor([len(used)])]))
    state = runner.state_dict()["net"]
    expected = alone.state_dict()
    return max(
        float((state[n] - p).abs().max()) * (1.0 if p.dtype is torch.float64 else 1e-5)
        for n, p in expected.items()
    )


def bad_offsets(world: World) -> str:
    """What offsets of worker 1 that begin late make every worker say."""
    _, step = build("sgd", False)
    config = Config(strategy=OneWay("whole"), workers=1, seed=1)
    runner = Runner(step, discover(step), config, world)
    data = batches(world.size)
    runner.run(data[0][world.rank])
    wrong = data[0][world.rank]
    if world.rank == 1:
        wrong["again_offsets"] = wrong["again_offsets"] + 1
    try:
        runner.run(wrong)
    except ParallaxError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def bad_id(world: World) -> str:
    """What worker 1's id out of range makes every worker say."""
    _, step = build("sgd", False)
    config = Config(strategy=OneWay("whole"), workers=1, seed=1)
    runner = Runner(step, discover(step), config, world)
    data = batches(world.size)
    runner.run(data[0][world.rank])
    wrong = data[1][world.rank]
    if world.rank == 1:
        wrong["a"][0, 1] = ROWS["a"]
    try:
        runner.run(wrong)
    except ParallaxError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def placement(world: World) -> dict[str, tuple[str, tuple[int, ...]]]:
    """How HYBRID places a large table and several small ones, some of large bags."""
    torch.manual_seed(0)
    sizes = {"huge": 4000, "one": 300, "two": 280, "three": 260, "flat": 500}
    tables = nn.ModuleDict({n: nn.EmbeddingBag(r, 16, mode="sum") for n, r in sizes.items()})
    optimizer = torch.optim.SGD(tables.parameters(), 0.1)

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for name, table in tables.items():
            own = ids[:, :1] if name == "flat" else ids
            loss = loss + table(own % sizes[name]).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    runner = Runner(step, discover(step), Config(workers=1, seed=1), world)
    generator = torch.Generator().manual_seed(world.rank)
    runner.run(torch.randint(4000, (32, 20), generator=generator))
    return {
        row.variable.name.split(".")[0]: (row.choice.synchronizer, row.choice.owners)
        for row in runner.plan.rows
    }


def hot_table(world: World) -> tuple[dict[str, str], float]:
    """A table that every batch reads all of, beside one that is read in part."""

    def build() -> tuple[nn.ModuleDict, Callable[[torch.Tensor], torch.Tensor]]:
        torch.manual_seed(0)
        tables = nn.ModuleDict({"hot": nn.Embedding(4, 3), "cold": nn.Embedding(90, 3)}).double()
        optimizer = torch.optim.Adam(tables.parameters(), 0.1)

        def step(ids: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (tables["hot"](ids % 4) * tables["cold"](ids)).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return tables, step

    alone, one_device = build()
    _, step = build()
    runner = Runner(step, discover(step), Config(workers=1, seed=1), world)
    ids = torch.arange(16 * world.size) * 5 % 90
    for _ in range(4):
        one_device(ids)
        runner.run(ids.view(world.size, -1)[world.rank])
    found = runner.state_dict()["tables"]
    worst = max(float((found[n] - p).abs().max()) for n, p in alone.state_dict().items())
    return {row.variable.name: row.choice.synchronizer for row in runner.plan.rows}, worst


def no_bags(world: World, kind: str, last: bool) -> float:
    """The largest difference from one device if a worker, or each, has no bags by offsets."""
    sizes = [[[2, 1], [3, 0]], [[2, 0], []], [[], [1]], [[0], [0, 0]], [[1, 3], [2]]]
    generator = torch.Generator().manual_seed(4)
    data = [[_bags(own, last, generator) for own in parts] for parts in sizes]

    def made() -> tuple[nn.Module, Callable[..., torch.Tensor]]:
        torch.manual_seed(12)
        table = nn.EmbeddingBag(9, 3, mode="mean", include_last_offset=last)
        net = nn.ModuleDict({"table": table, "out": nn.Linear(3, 1)}).double()
        optimizer = torch.optim.Adam(net.parameters(), 0.05)

        def step(ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net["out"](net["table"](ids, offsets)).square().sum()
            loss.backward()
            optimizer.step()
            return loss

        return net, step

    with world.device:
        (alone, one_device), (_, step) = made(), made()
    for parts in data:
        ids = torch.cat([own for own, _, _ in parts])
        counts = [count for *_, own in parts for count in own]
        one_device(*moved((ids, _offsets(counts, last)), world.device))
    decides = kind if kind == "hybrid" else OneWay(kind)
    sums = {"average_dense": False, "average_sparse": False, "weigh_batches": False}
    runner = Runner(step, discover(step), Config(strategy=decides, workers=1, **sums), world)
    for parts in data:
        runner.run(*moved(parts[world.rank][:2], world.device))
    state = runner.state_dict()["net"]
    return max(float((state[n] - p).abs().max()) for n, p in alone.state_dict().items())


def _bags(
    sizes: list[int], last: bool, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    ids = torch.randint(9, (sum(sizes),), generator=generator)
    return ids, _offsets(sizes, last), sizes


def _offsets(sizes: list[int], last: bool) -> torch.Tensor:
    ends = torch.tensor([0, *sizes]).cumsum(0)
    return ends if last else ends[:-1]


def weighted(world: World, sparse: bool, dtype: torch.dtype) -> tuple[dict[str, str], float]:
    """Bags whose ids have weights that are learned, and some that the batch has: how tables are
    synchronised, and the largest difference from one device."""

    def build() -> tuple[nn.ModuleDict, Callable[..., torch.Tensor]]:
        torch.manual_seed(6)
        tables = nn.ModuleDict(
            {
                "own": nn.EmbeddingBag(90, WIDTH, mode="sum", sparse=sparse),
                "given": nn.EmbeddingBag(90, WIDTH, mode="sum", sparse=sparse),
                "weights": nn.Embedding(90, 1, sparse=sparse),
            }
        ).to(dtype)
        optimizer = torch.optim.Adagrad(tables.parameters(), 0.1)

        def step(ids: torch.Tensor, starts: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            learned = tables["weights"](ids).flatten().exp()
            sums = tables["own"](ids, starts, learned) + tables["given"](ids, starts, given)
            loss = sums.square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return tables, step

    alone, one_device = build()
    _, step = build()
    runner = Runner(step, discover(step), Config(workers=1, seed=1), world)
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        ids = torch.randint(90, (world.size, 7), generator=generator)
        given = torch.rand(world.size, 7, generator=generator).to(dtype)
        starts = torch.tensor([0, 3, 3])
        runner.run(ids[world.rank], starts, given[world.rank])
        one_device(
            ids.flatten(), torch.cat([7 * n + starts for n in range(world.size)]), given.flatten()
        )
    found = runner.state_dict()["tables"]
    worst = max(float((found[n] - p).abs().max()) for n, p in alone.state_dict().items())
    return {row.variable.name: row.choice.synchronizer for row in runner.plan.rows}, worst
