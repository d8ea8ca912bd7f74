"""A model of several layers under optimizers whose updates fused kernels can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parallax import Config
from parallax.graph.objects.discovery import discover
from parallax.ops.updates import ADAM, SGD
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

Optimizers = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[Optimizers, Any]] = {
    "sgd": (lambda p: torch.optim.SGD(p, 0.1), SGD),
    "sgd decay": (lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.02), SGD),
    "momentum": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.02), SGD),
    "dampening": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, dampening=0.3), SGD),
    "nesterov": (
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        SGD,
    ),
    "maximize": (lambda p: torch.optim.SGD(p, 0.001, momentum=0.5, maximize=True), SGD),
    "adam": (lambda p: torch.optim.Adam(p, 0.02), ADAM),
    "adam decay": (lambda p: torch.optim.Adam(p, 0.02, weight_decay=0.1), ADAM),
    "adamw": (lambda p: torch.optim.AdamW(p, 0.02, (0.8, 0.95), weight_decay=0.1), ADAM),
    "amsgrad": (lambda p: torch.optim.Adam(p, 0.02, amsgrad=True), None),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, 0.01), None),
}


class Layers(nn.Module):
    """Several layers, with a weight that lies column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.first.weight.data = self.first.weight.data.to(memory_format=torch.channels_last)
        self.hidden = nn.Linear(4, 6)
        self.hidden.weight.data = self.hidden.weight.data.t().contiguous().t()
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x)).mean((2, 3))
        return self.last(torch.tanh(self.hidden(x)))


def training(
    model: nn.Module, optimizer: torch.optim.Optimizer, clip: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach()

    return step


def kernels(runner: Any) -> list[Any]:
    nodes = runner._last.step.graph.nodes
    return [node.target for node in nodes if node.target in (SGD, ADAM)]


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(5, 2, 4, 4, generator=generator, dtype=torch.float64) for _ in range(count)]


def train(world: World, name: str, strategy: str, steps: int) -> tuple[list[float], list[str]]:
    """Losses of a worker, and the kernels of its graph."""
    torch.manual_seed(0)
    model = Layers().double()
    optimizer = OPTIMIZERS[name][0](model.parameters())
    step = training(model, optimizer, clip=True)
    objects = discover(step, model=model, optimizer=optimizer)
    runner = Runner(step, objects, Config(workers=1, seed=0, strategy=strategy), world)
    losses = [float(runner.run(x)) for x in batches(steps)]
    return losses, [str(kernel) for kernel in kernels(runner)]
