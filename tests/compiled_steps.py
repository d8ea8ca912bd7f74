"""Steps for the tests of compiled regions, and the comparison with one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from equality import moved
from torch import nn
from torch.utils._pytree import tree_flatten

from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.rewrite.region_graphs import Region
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

STEPS, ROWS, WIDTH, CLASSES, LOCAL = 5, 40, 8, 5, 3

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.05),
    "adamw": lambda p: torch.optim.AdamW(p, 0.05, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, 0.05),
}


class Net(nn.Module):
    """Looked-up rows, layers, changes in place; and what draws, averages and recurs."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        self.table = nn.Embedding(ROWS, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(inplace=True), nn.LayerNorm(16))
        self.out = nn.Linear(16, CLASSES)
        if whole:
            self.norm = nn.BatchNorm1d(16)
            self.dropout = nn.Dropout(0.3)
            self.lstm = nn.LSTM(16, 16, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.body(self.table(ids))
        if self.whole:
            x = self.norm(self.dropout(x).transpose(1, 2)).transpose(1, 2)
            x = self.lstm(x)[0]
        return self.out(x[:, -1])


def training(optimizer: str, whole: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model, its optimizer with a schedule, and a step with clipping."""
    torch.manual_seed(3)
    model = Net(whole).double()
    chosen = OPTIMIZERS[optimizer](model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(chosen, 0.9)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        chosen.zero_grad()
        loss = F.cross_entropy(model(ids), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        chosen.step()
        schedule.step()
        return loss

    return model, chosen, step


def batches(workers: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Whole batches, of which each worker takes its part."""
    torch.manual_seed(4)
    rows = workers * LOCAL
    return [(torch.randint(ROWS, (rows, 4)), torch.randint(CLASSES, (rows,))) for _ in range(STEPS)]


def difference(one: tuple[Any, ...], other: tuple[Any, ...]) -> float:
    """The largest between parameters and slots of two trainings."""
    worst = 0.0
    for mine, theirs in zip(one[0].parameters(), other[0].parameters(), strict=True):
        worst = max(worst, float((mine - theirs).detach().abs().max()))
    for mine, theirs in zip(one[1].state.values(), other[1].state.values(), strict=True):
        for name, value in mine.items():
            worst = max(worst, float((value - theirs[name]).abs().max()))
    return worst


def cut_and_compare(world: World, option: str, optimizer: str) -> dict[str, Any]:
    """How far workers whose steps run in regions, not compiled, are from workers without."""
    state = []
    regions: list[int] = []
    for cut in (False, True):
        torch.manual_seed(11)
        own = training(optimizer, whole=True)
        runner = Runner(own[2], discover(own[2]), Config(strategy=option, seed=1), world)
        for ids, labels in batches(world.size):
            part = slice(world.rank * LOCAL, (world.rank + 1) * LOCAL)
            runner.run(ids[part], labels[part])
            program = runner._last
            assert program is not None
            if cut and program.digest not in regions:
                regions.append(program.digest)
                operations = [r.operations for r in program.cut(_Counted)]
        state.append(runner.state_dict())
    return {"difference": _largest(state[0], state[1]), "operations": operations}


class _Counted(torch.nn.Module):
    def __init__(self, region: Region) -> None:
        super().__init__()
        self.operations = region.operations
        self.forward = region.module.forward


def _largest(one: Any, other: Any) -> float:
    mine, _ = tree_flatten(one)
    theirs, _ = tree_flatten(other)
    assert len(mine) == len(theirs)
    return max(
        float((a.double() - b.double()).abs().max()) if isinstance(a, torch.Tensor) else 0.0
        for a, b in zip(mine, theirs, strict=True)
        if not isinstance(a, torch.Tensor) or a.numel()
    )


def compare(world: World, option: str, optimizer: str) -> tuple[float, str]:
    """How far compiled workers are from one device; and what the plan says of it."""
    with world.device:
        expected, found, whole = (training(optimizer) for _ in range(3))
    config = Config(strategy=option, compile="inductor", seed=1)
    runner = Runner(found[2], discover(found[2]), config, world)
    for ids, labels in moved(batches(world.size), world.device):
        expected[2](ids, labels)
        own = slice(world.rank * LOCAL, (world.rank + 1) * LOCAL)
        runner.run(ids[own], labels[own])
    state = runner.state_dict()
    whole[0].load_state_dict(state["model"])
    whole[1].load_state_dict(state["chosen"])
    return difference(expected, whole), runner._compiler.describe(runner._last)
