"""Losses and models within checkpoints and functions that have a backward pass of their own: for
the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import batch_statistics
import torch
import torch.nn.functional as F
from batch_statistics import Loss
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallax.runtime.comm.world import World


class _Squashed(torch.autograd.Function):
    """A hyperbolic tangent."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scores)
        return scores.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (scores,) = ctx.saved_tensors
        return gradient * (1 - scores.tanh().square())


class _Around(nn.Module):
    """A model that is called in another way; all else of it is as before."""

    def __init__(self, model: nn.Module, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.model, name)

    def __getitem__(self, place: int) -> nn.Module:
        return self.model[place]  # type: ignore[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.model, x)


def _reentrant(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()  # as it wants
    return checkpoint(model, x, use_reentrant=True)  # type: ignore[no-any-return]


def _model(call: Callable[..., torch.Tensor]) -> Callable[[Loss], Loss]:
    return lambda loss: lambda model, *batch: loss(_Around(model, call), *batch)


def _whole(reentrant: bool) -> Callable[[Loss], Loss]:
    def around(loss: Loss) -> Loss:
        def run(model: nn.Module, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_(reentrant)
            given = (lambda x: loss(model, x, *others)), x
            return checkpoint(*given, use_reentrant=reentrant)  # type: ignore[no-any-return]

        return run

    return around


AROUND: dict[str, Callable[[Loss], Loss]] = {
    "a model": _model(lambda model, x: checkpoint(model, x, use_reentrant=False)),
    "a reentrant model": _model(_reentrant),
    "a model's end": _model(lambda model, x: _Squashed.apply(model(x))),
    "a loss": _whole(False),
    "a reentrant loss": _whole(True),
}
"""What is run in which way."""
MEANS: dict[str, Loss] = {
    "labels left out": lambda m, x, y, v: F.cross_entropy(
        m(x), torch.where(v > -0.5, y.argmax(-1), -100)
    ),
    "weights of classes": lambda m, x, y, v: F.cross_entropy(
        m(x), y.argmax(-1), weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    ),
    "mask": lambda m, x, y, v: (
        ((m(x) - y).square().mean(1) * (v > 0)).sum() / (v > 0).sum().clamp(min=1)
    ),
    "rows": lambda m, x, y, v: (m(x)[v > -1] - y[v > -1]).square().mean(),
}
"""Over some of the batch."""
TWICE = ("kept", "kept anew", "codebook")
"""These change a state, which a checkpoint does twice."""
STATISTICS = [name for name in batch_statistics.ALIKE if name not in TWICE]


def train(
    world: World, name: str, around: str, division: list[tuple[int, ...]]
) -> tuple[float, list[str]]:
    """How far parameters are from those of one device, and warnings.

    Args:
        name: of the loss.
        around: in which way what is run.
        division: by step and worker, rows.
    """
    loss = AROUND[around]({**MEANS, **batch_statistics.ALIKE}[name])
    far, _, said = batch_statistics.train(world, loss, division, "HYBRID")
    return far, said
