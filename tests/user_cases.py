"""What the steps that people write share: see user_steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

LOCAL, STEPS, SEED = 3, 3, 11

Built = tuple[list[nn.Module], Callable[..., Any], list[tuple[Any, ...]]]
CASES: dict[str, Callable[[int], Built]] = {}


def case(build: Callable[[int], Built]) -> Callable[[int], Built]:
    CASES[build.__name__] = build
    return build


def numbers(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def classes(rows: int) -> list[tuple[torch.Tensor, ...]]:
    return [(numbers(rows, 4), torch.randint(3, (rows,))) for _ in range(STEPS)]


def stepping(
    rows: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[tuple[Any, ...]] | None = None,
) -> Built:
    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss

    return [model], step, classes(rows) if data is None else data


def squares(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step that makes what a model gives small, by plain SGD."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step
