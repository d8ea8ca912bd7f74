"""Losses that add up the batch are noted, since workers' gradients are averaged; means are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallax.graph.analysis.sums import note_sums
from parallax.graph.analysis.totals import Batches, means_of_items, totals
from parallax.graph.capture import capture
from parallax.graph.objects.discovery import discover

ROWS, LENGTH, CLASSES = 6, 3, 4
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def _flat(scores: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
    return F.cross_entropy(scores.reshape(-1, CLASSES), labels.reshape(-1), reduction=reduction)


def _decay(model: nn.Module) -> torch.Tensor:
    return 0.01 * torch.stack([p.square().sum() for p in model.parameters()]).sum()


def _slope(model: nn.Module, x: torch.Tensor, whole: bool) -> torch.Tensor:
    """A penalty for the slope of scores by their inputs, as GANs have it."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    squares = slope.square().sum((1, 2))
    return squares.sum() if whole else squares.mean()


SUMS: dict[str, Loss] = {
    "sum": lambda m, x, y: m(x).square().sum(),
    "of classes": lambda m, x, y: _flat(m(x), y, "sum"),
    "of squares": lambda m, x, y: F.mse_loss(m(x), x[..., :CLASSES], reduction="sum"),
    "of bits": lambda m, x, y: F.binary_cross_entropy(
        torch.sigmoid(m(x)), torch.ones(ROWS, LENGTH, CLASSES), reduction="sum"
    ),
    "of logits": lambda m, x, y: F.binary_cross_entropy_with_logits(
        m(x), torch.ones(ROWS, LENGTH, CLASSES), reduction="sum"
    ),
    "beside others": lambda m, x, y: -0.5 * m(x).sum() + m(x).mean() + _decay(m),
    "of slopes": lambda m, x, y: _slope(m, x, whole=True),
    "of what deviations divide": lambda m, x, y: (
        m(x) * ((y - y.float().mean()) / (y.float().std() + 1e-6))[..., None]
    ).sum(),
    "of one element": lambda m, x, y: m(x).square().sum().reshape(1) + _decay(m),
}
MEANS: dict[str, Loss] = {
    "mean": lambda m, x, y: m(x).square().mean(),
    "of classes": lambda m, x, y: _flat(m(x), y, "mean"),
    "over the rows": lambda m, x, y: m(x).square().sum() / len(x),
    "of words": lambda m, x, y: _flat(m(x), y, "sum") / (ROWS * LENGTH),
    "of sums of rows": lambda m, x, y: m(x).square().sum((1, 2)).mean(),
    "with decay": lambda m, x, y: m(x).mean() + _decay(m),
    "over the batch first": lambda m, x, y: m(x).mean(0).sum(),
    "of slopes of a sum": lambda m, x, y: m(x).mean() + 5 * _slope(m, x, whole=False),
    "times a constant": lambda m, x, y: 8 * m(x).mean(),
    "by a share": lambda m, x, y: (m(x).mean((1, 2)) * (y[:, 0] / y[:, 0].sum())).sum(),
    "by a count": lambda m, x, y: _flat(m(x), y, "sum") / (y > 0).sum(),
    "of as many tasks as rows": lambda m, x, y: (
        torch.stack([(m(x) - task).square().mean() for task in range(ROWS)]) * m.bias[0].exp()
    ).sum(),
}


def notes(loss: Loss) -> list[str]:
    torch.manual_seed(0)
    model = nn.Linear(5, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, x, y)  # here
        value.backward()
        optimizer.step()
        return value

    batch = torch.randn(ROWS, LENGTH, 5), torch.randint(CLASSES, (ROWS, LENGTH))
    graph = capture(step, discover(step), batch, {})
    note_sums(graph, batch)
    return graph.notes


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_noted_with_their_line(name: str) -> None:
    (note,) = notes(SUMS[name])
    assert "the loss is a sum over the batch" in note
    assert "Config(average_dense=False, average_sparse=False)" in note
    assert "test_sums.py" in note


@pytest.mark.parametrize("name", MEANS)
def test_means_are_not(name: str) -> None:
    assert not notes(MEANS[name])


@pytest.mark.parametrize("by_rows", [True, False])
def test_means_of_items_have_a_line(by_rows: bool) -> None:
    """They stay their items' own, and would be sums over workers if another dimension were the
    batch's rows."""
    model = nn.Linear(5, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        scores, labels = (x, y) if by_rows else (x.transpose(0, 1), y.t())
        several = zip(model(scores), labels, strict=True)
        loss = torch.stack([F.cross_entropy(*one, ignore_index=0) for one in several]).mean()
        loss.backward()
        optimizer.step()
        return loss

    batch = torch.randn(ROWS, LENGTH, 5), torch.randint(CLASSES, (ROWS, LENGTH))
    graph = capture(step, discover(step), batch, {})
    where = means_of_items(graph, ["weight", "bias"])
    assert ("test_sums.py" in str(where)) is by_rows
    assert bool(totals(graph, ["weight", "bias"], Batches(leave_out=True))) is not by_rows


@pytest.mark.parametrize(("reduction", "notes"), [("sum", 1), ("mean", 0)])
def test_sums_are_noted_where_a_batch_has_no_number_of_rows(reduction: str, notes: int) -> None:
    bags = nn.EmbeddingBag(20, CLASSES)
    optimizer = torch.optim.SGD(bags.parameters(), 0.1)

    def step(ids: torch.Tensor, offsets: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(bags(ids, offsets), labels, reduction=reduction).backward()
        optimizer.step()

    batch = torch.randint(20, (11,)), torch.arange(4) * 2, torch.randint(CLASSES, (4,))
    graph = capture(step, discover(step), batch, {})
    note_sums(graph, batch)
    assert len(graph.notes) == notes


TIMES = {
    "rows": (lambda m, x: m(x).mean() * x.shape[0], 1),
    "rows in the middle": (lambda m, x: (0.05 * m(x).mean() + m(x).square().mean()) * len(x), 1),
    "a share of rows": (lambda m, x: m(x).mean() * len(x) / (len(x) + 8), 0),
    "few": (lambda m, x: m(x).mean() * 5, 0),
}


@pytest.mark.parametrize("name", TIMES)
def test_means_times_rows_are_noted(name: str) -> None:
    loss, count = TIMES[name]
    model = nn.Linear(5, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, x)
        value.backward()
        optimizer.step()
        return value

    batch = (torch.randn(8, LENGTH, 5),)
    graph = capture(step, discover(step), batch, {})
    note_sums(graph, batch)
    assert ["multiplied by as many as the batch has rows" in one for one in graph.notes] == (
        [True] * count
    )
