"""Convolutions whose weights' gradients travel as factors, on the workers of a pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from synchronizers import runner_for, sent_per_step
from torch import nn

from parallax.runtime.comm.world import World

CLASSES = 3
Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """Convolutions of every kind, one of them used twice, for images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.again = nn.Conv2d(4, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=1)
        self.grouped = nn.Conv2d(6, 6, (1, 3), padding=(0, 1), groups=3)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.line = nn.Conv1d(4, 4, 3, padding=2, dilation=2)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        x = torch.tanh(self.again(torch.tanh(self.again(x))))
        x = torch.tanh(self.up(torch.tanh(self.grouped(self.down(x)))))
        return self.head(torch.tanh(self.line(x.flatten(2))).mean(2))


def penalty(model: Any) -> torch.Tensor:
    """A term that is no product, for a convolution and for a matrix."""
    total: torch.Tensor = model.stem.weight.square().sum() + model.head.weight.square().sum()
    return 0.01 * total


def build(seed: int = 7) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    torch.manual_seed(seed)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(images: torch.Tensor, classes: torch.Tensor, decay: bool = False) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), classes)
        if decay:  # gradients that are no products any more
            loss = loss + penalty(model)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return model, step


def batches(workers: int, kind: str, seed: int = 3) -> list[list[Batch]]:
    """By step, the batch of every worker.

    Args:
        workers: how many.
        kind: ``even``; of other ``sizes`` from step to step; ``uneven`` numbers of images, some
            of none; or, for a mean, images whose size differs between workers (``mixed``).
    """
    generator = torch.Generator().manual_seed(seed)

    def one(count: int, side: int) -> Batch:
        images = torch.randn(count, 2, side, side, generator=generator, dtype=torch.float64)
        return images, torch.randint(CLASSES, (count,), generator=generator)

    found = []
    for step in range(6):
        counts, sides = [2] * workers, [6] * workers
        if kind == "sizes":
            sides = [(6, 8, 4, 10, 6, 12)[step]] * workers
        elif kind == "uneven" and step:
            counts = [(step + worker) % 3 for worker in range(workers)]
        elif kind == "mixed":
            sides = [6 + 2 * ((step + worker) % 2) for worker in range(workers)]
        found.append([one(*pair) for pair in zip(counts, sides, strict=True)])
    return found


def _alone(data: list[list[Batch]], decays: list[bool]) -> Mapping[str, torch.Tensor]:
    """One device's training on the batches of all workers; images of one size run together."""
    model, _ = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for parts, decay in zip(data, decays, strict=True):
        optimizer.zero_grad()
        total = sum(len(classes) for _, classes in parts)
        loss = sum(
            F.cross_entropy(model(images), classes, reduction="sum") / total
            for images, classes in parts
            if len(classes)
        )
        if decay:
            loss = loss + penalty(model)
        loss.backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.state_dict()


def compare(
    world: World, wanted: Mapping[str, Any], kind: str, decays: bool = False
) -> dict[str, Any]:
    """The difference from one device, the replicas' state, and what was sent as factors."""
    data = batches(world.size, kind)
    decayed = [decays and number > 2 for number in range(len(data))]
    expected = _alone(data, decayed)
    _, step = build()
    runner = runner_for(world, step, wanted)
    for parts, decay in zip(data, decayed, strict=True):
        runner.run(*parts[world.rank], **({"decay": True} if decay else {}))
    found = runner.state_dict()["model"]
    return {
        "difference": max(float((expected[k] - found[k]).abs().max()) for k in expected),
        "bits": {name: value.numpy().tobytes() for name, value in found.items()},
        "chosen": sorted(
            row.variable.name
            for row in runner.plan.rows
            if row.choice.synchronizer == wanted["synchronizer"]
        ),
    }


def counted(world: World, wanted: Mapping[str, Any], steps: int = 3) -> dict[str, Any]:
    """Bytes per step of one convolution: what this worker sent, and what the plan says."""
    torch.manual_seed(0)
    model = nn.Conv2d(32, 48, 3, padding=1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(images: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(images).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    runner = runner_for(world, step, wanted)
    batch = torch.randn(5, 32, 4, 4)
    runner.run(batch)
    return {
        "sent": sent_per_step(runner, batch, steps),
        "formula": runner.plan.bytes_per_step,
    }
