"""Gradients within a model that are bounded or normalised are noted: workers' are larger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallax.graph.analysis.bent_gradients import note_bent_gradients
from parallax.graph.capture import capture
from parallax.graph.objects.discovery import discover
from parallax.graph.passes.inner_gradients import note_inner_gradients

Hook = Callable[[torch.Tensor], torch.Tensor]

BENT: dict[str, Hook] = {
    "bounds": lambda g: g.clamp(-0.02, 0.02),
    "upper bound": lambda g: g.clamp(max=0.1),
    "signs": lambda g: g.sign(),
    "norm of a row": lambda g: g / g.norm(dim=1, keepdim=True),
    "norm": lambda g: g * torch.clamp(1.0 / (g.norm() + 1e-6), max=1.0),
    "squares": lambda g: g * g.abs(),
    "large ones": lambda g: torch.where(g > 0.1, 0.0, g),
}
STRAIGHT: dict[str, Hook] = {
    "half": lambda g: g * 0.5,
    "positive": lambda g: g.clamp(min=0),
    "mask": lambda g: torch.where(g < 0, 0.0, g),
    "reversed": lambda g: -g,
    "mean of the columns": lambda g: g - g.mean(1, keepdim=True),
}


def notes(hook: Hook, loss: Callable[..., torch.Tensor] = F.mse_loss) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        found = model[0](x)
        found.register_hook(hook)  # here
        value = loss(model[1:](found), y)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return value

    graph = capture(step, discover(step), (torch.randn(6, 3), torch.randn(6, 2)), {})
    note_bent_gradients(graph)
    return graph.notes


@pytest.mark.parametrize("name", BENT)
def test_what_follows_from_the_size_of_gradients_is_noted(name: str) -> None:
    (note,) = notes(BENT[name])
    assert "bounded or normalised" in note
    assert "test_bent_gradients.py" in note


@pytest.mark.parametrize("name", STRAIGHT)
def test_what_is_as_large_as_the_gradients_is_not(name: str) -> None:
    assert not notes(STRAIGHT[name])


def test_a_function_with_its_own_backward() -> None:
    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.round()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient.tanh()

    (note,) = notes(lambda g: g, lambda x, y: F.mse_loss(Rounded.apply(x), y))
    assert "bounded or normalised" in note


def test_slopes_that_a_loss_is_made_of_are_none_of_these() -> None:
    def penalty(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
        return F.mse_loss(x, y) + (slope.norm(dim=1) - 1).square().mean() + slope.sigmoid().mean()

    assert not notes(lambda g: g, penalty)


def test_numbers_that_have_the_shape_of_gradients_are_none_of_these() -> None:
    def mean_of_neighbours(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        place = torch.tensor([[0], [0], [1], [2], [2], [5]]).expand_as(x)
        found = torch.zeros_like(x).scatter_reduce(0, place, x, "mean", include_self=False)
        return F.mse_loss(found, y)

    assert not notes(lambda g: g, mean_of_neighbours)


@pytest.mark.parametrize(("of_items", "said"), [(False, 1), (True, 0)])
def test_losses_of_gradients_of_parameters_are_noted(of_items: bool, said: int) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        parts = zip(x, y, strict=True) if of_items else [(x, y)]
        losses = []
        for one, other in parts:
            loss = F.mse_loss(model(one), other)
            found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)  # here
            losses.append(loss + 0.1 * sum(g.square().sum() for g in found))
        torch.stack(losses).mean().backward()
        optimizer.step()

    graph = capture(step, discover(step), (torch.randn(3, 6, 3), torch.randn(3, 6, 2)), {})
    note_inner_gradients(graph)
    assert len(graph.notes) == said
    for note in graph.notes:
        assert "create_graph=True" in note
        assert "test_bent_gradients.py" in note
