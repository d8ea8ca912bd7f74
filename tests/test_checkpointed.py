"""What follows from the whole batch does so in checkpoints, and beside functions that have a
backward pass of their own."""

from __future__ import annotations

import itertools

import checkpointed
import pytest
import torch
from cells import sampled
from pool import Pool
from torch.utils.checkpoint import checkpoint

from parallax.graph.capture import capture
from parallax.graph.objects.discovery import discover

DIVISION = [(4, 4), (6, 2), (3, 5), (5, 3)]


@pytest.mark.parametrize(
    ("name", "around"),
    [
        *sampled(itertools.product(checkpointed.MEANS, checkpointed.AROUND), 4),
        *sampled(itertools.product(checkpointed.STATISTICS, checkpointed.AROUND), 19, 3),
    ],
)
def test_the_numbers_of_one_device(pool: Pool, name: str, around: str) -> None:
    for far, said in pool.run(2, checkpointed.train, name, around, DIVISION):
        assert far < 1e-12
        assert not said


def test_numbers_are_not_computed_again() -> None:
    """But what has a row for each of the batch is."""
    layer = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def loss(x: torch.Tensor) -> torch.Tensor:
        scores = layer((x - x.mean()) / torch.tensor([2.0, 1.0, 0.5, 1.0])).tanh()
        return (scores / scores.detach().square().sum(0).sqrt()).square().mean().sqrt()

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        checkpoint(loss, x, use_reentrant=False).backward()
        optimizer.step()

    graph = capture(step, discover(step), (torch.randn(2000, 4),), {}).graph
    targets = [str(node.target) for node in graph.nodes]
    assert targets.count("aten.tanh.default") == 2
    assert targets.count("aten.mean.default") == 2
    assert targets.count("aten.sum.dim_IntList") == 2  # with that of the bias
    assert targets.count("aten.sqrt.default") == 2


def test_what_was_changed_in_between_is_computed_again() -> None:
    layer = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    scale = torch.ones(1)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return layer(x).square().sum(1).mean() * (scale * 2)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        found = checkpoint(loss, x, use_reentrant=False)
        scale.add_(1)
        found.backward()
        optimizer.step()

    rows = torch.randn(8, 4)
    graph = capture(step, discover(step), (rows,), {}).graph
    twice = [n for n in graph.nodes if n.target is torch.ops.aten.mul.Tensor and 2 in n.args]
    assert len(twice) == 2
