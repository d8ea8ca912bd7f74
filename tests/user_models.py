"""Steps of tables, selections and layouts, as people write them: see user_steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from user_cases import STEPS, Built, case, numbers

# -- Tables and selections ------------------------------------------------------------------


def _looked_up(
    optimizer: Callable[..., torch.optim.Optimizer], table: nn.Module, rows: int, **options: Any
) -> Built:
    """A table, or bags of one, whose update is the point."""
    table.double()
    update = optimizer(table.parameters(), **options)

    def step(ids: torch.Tensor) -> torch.Tensor:
        update.zero_grad()
        loss = table(ids).square().mean()
        loss.backward()
        update.step()
        return loss

    ids = torch.int32 if isinstance(table, nn.EmbeddingBag) else torch.int64
    known = len(table.weight)
    return [table], step, [(torch.randint(known, (rows, 3), dtype=ids),) for _ in range(STEPS)]


def _two_tasks(rows: int, table: nn.Module) -> Built:
    """Each task's own gradient of one table, mixed by how they agree (MGDA)."""
    table.double()
    optimizer = torch.optim.SGD(table.parameters(), 0.1, momentum=0.9)

    def step(ids: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        found = table(ids).reshape(len(ids), -1)
        losses = [(found[:, :1] - first).square().mean(), (found[:, 1:2] - second).square().mean()]
        one, two = [
            torch.autograd.grad(loss, [table.weight], retain_graph=True)[0] for loss in losses
        ]
        share = two.square().sum() / (one.square().sum() + two.square().sum())
        table.weight.grad = share * one + (1 - share) * two
        optimizer.step()
        return share

    def batch() -> tuple[torch.Tensor, ...]:
        return torch.randint(41, (rows, 3)), numbers(rows, 1), numbers(rows, 1)

    return [table], step, [batch() for _ in range(STEPS)]


@case
def two_tasks_of_a_table(rows: int) -> Built:
    return _two_tasks(rows, nn.Embedding(41, 4))


@case
def two_tasks_of_bags(rows: int) -> Built:
    return _two_tasks(rows, nn.EmbeddingBag(41, 4, mode="sum"))


@case
def steps_by_signs(rows: int) -> Built:
    """Rprop, which writes where a condition holds."""
    return _looked_up(torch.optim.Rprop, nn.Embedding(41, 4), rows)


@case
def sparse_momentum(rows: int) -> Built:
    """A slot that is a sparse tensor."""
    table = nn.Embedding(41, 4, sparse=True)
    return _looked_up(torch.optim.SGD, table, rows, lr=0.1, momentum=0.9)


@case
def table_of_one_row(rows: int) -> Built:
    """As many rows as a step touches; all workers but one own none."""
    table = nn.Embedding(1, 4, sparse=True)
    return _looked_up(torch.optim.SparseAdam, table, rows, lr=0.05)


@case
def bags_of_short_ids(rows: int) -> Built:
    """Bags by int32, which say in the same type where they begin."""
    return _looked_up(torch.optim.SGD, nn.EmbeddingBag(41, 4, mode="sum"), rows, lr=0.1)


@case
def masked_words(rows: int) -> Built:
    """A layer for those positions alone that a mask selects: values say how many there are."""
    table, layer = nn.Embedding(23, 4).double(), nn.Linear(4, 23).double()
    optimizer = torch.optim.Adam([*table.parameters(), *layer.parameters()], 1e-2)

    def step(words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(layer(table(words)[mask]), words[mask])
        loss.backward()
        optimizer.step()
        return loss

    def batch() -> tuple[torch.Tensor, ...]:
        hidden = torch.rand(rows, 6).argsort(1) < 2  # as many of each sentence
        return torch.randint(23, (rows, 6)), hidden

    return [table, layer], step, [batch() for _ in range(STEPS)]


@case
def sparse_neighbours(rows: int) -> Built:
    """A graph as a sparse matrix that the step closes over (LightGCN)."""
    near = (torch.rand(30, 30) < 0.1).double().to_sparse_coo()
    nodes = nn.Embedding(30, 4).double()
    optimizer = torch.optim.Adam(nodes.parameters(), 1e-2)

    def step(users: torch.Tensor, liked: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        found = nodes.weight + torch.sparse.mm(near, nodes.weight)
        better = (found[users] * (found[liked] - found[others])).sum(1)
        loss = -F.logsigmoid(better).mean()
        loss.backward()
        optimizer.step()
        return loss

    sizes = (3, rows)
    return [nodes], step, [tuple(torch.randint(30, sizes).unbind()) for _ in range(STEPS)]


@case
def averaged_table(rows: int) -> Built:
    """A moving average of all tensors at once, which copies them when it begins."""
    table = nn.Embedding(41, 4).double()
    average = torch.optim.swa_utils.AveragedModel(
        table, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.SGD(table.parameters(), 0.1)

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = table(ids).square().mean()
        loss.backward()
        optimizer.step()
        average.update_parameters(table)
        return loss

    return [table, average], step, [(torch.randint(41, (rows, 3)),) for _ in range(STEPS)]


# -- How tensors lie ------------------------------------------------------------------------


@case
def volume_of_columns(rows: int) -> Built:
    """A matrix that lies by columns, as those of orthogonal decompositions do."""
    model = nn.Module()
    model.matrix = nn.Parameter(torch.linalg.qr(numbers(6, 6))[0])
    assert not model.matrix.is_contiguous()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (x @ model.matrix).square().mean() - torch.linalg.slogdet(model.matrix)[1]
        loss.backward()
        optimizer.step()
        return loss

    return [model], step, [(numbers(rows, 6),) for _ in range(STEPS)]


def _transposed(rows: int, criterion: Callable[..., torch.Tensor]) -> Built:
    """A result that does not lie in order, of which kernels make gradients that do."""
    model = nn.Linear(6, 5).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = criterion(model(x).transpose(1, 2), wanted)
        loss.backward()
        optimizer.step()
        return loss

    return [model], step, [(numbers(rows, 4, 6), numbers(rows, 5, 4)) for _ in range(STEPS)]


@case
def transposed_squares(rows: int) -> Built:
    return _transposed(rows, F.mse_loss)


@case
def transposed_activations(rows: int) -> Built:
    return _transposed(rows, lambda x, y: (F.softplus(F.hardtanh(x)) * F.relu6(y)).mean())
