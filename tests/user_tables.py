"""Steps that change tables, or their gradients, themselves: see user_steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from user_cases import STEPS, Built, case, mlp


def _attacked(rows: int, table: nn.Module) -> Built:
    """Words are moved along their gradients, trained once more, and moved back (FGM)."""
    model = nn.ModuleList([table, nn.Linear(4, 3)]).double()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    words: Any = table.weight

    def loss_of(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        # Cut anew for each lookup, whose ids are a tensor of their own then.
        found = table(ids[:, :-1])
        features = found if found.dim() == 2 else found.mean(1)
        return F.cross_entropy(model[1](features.tanh()), labels)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(ids, labels)
        loss.backward()
        before = words.data.clone()
        words.data.add_(words.grad / words.grad.norm())
        loss_of(ids, labels).backward()
        words.data.copy_(before)
        optimizer.step()
        return loss

    data = [(torch.randint(90, (rows, 4)), torch.randint(3, (rows,))) for _ in range(STEPS)]
    return [model], step, data


@case
def attacked_table(rows: int) -> Built:
    return _attacked(rows, nn.Embedding(90, 4))


@case
def attacked_bags(rows: int) -> Built:
    return _attacked(rows, nn.EmbeddingBag(90, 4, mode="sum"))


@case
def some_rows_of_a_table(rows: int) -> Built:
    """Only some words are trained: a tensor with one number for each masks their gradient."""
    model = nn.Sequential(nn.Embedding(40, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    mask = (torch.arange(40) > 20).double()[:, None]
    optimizer = torch.optim.Adam(model.parameters(), 0.05)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids), labels)
        loss.backward()
        gradient: Any = model[0].weight.grad
        gradient *= mask
        optimizer.step()
        return loss

    data = [(torch.randint(40, (rows,)), torch.randint(3, (rows,))) for _ in range(STEPS)]
    return [model], step, data


@case
def bags_with_padding(rows: int) -> Built:
    """Sums and means that leave out a row, by offsets and with weights, of tables that stay
    sparse."""
    summed = nn.EmbeddingBag(40, 4, mode="sum", padding_idx=3).double()
    averaged = nn.EmbeddingBag(40, 4, mode="mean", sparse=True, padding_idx=0).double()
    weights = nn.Embedding(40, 1).double()
    out = mlp(8, 3)
    models: list[nn.Module] = [summed, averaged, weights, out]
    of_rows = torch.optim.SparseAdam(averaged.parameters(), 1e-2)
    dense = [p for model in (summed, weights, out) for p in model.parameters()]
    optimizer = torch.optim.Adam(dense, 1e-2)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        of_rows.zero_grad()
        offsets = torch.arange(len(ids)) * ids.shape[1]
        one = summed(ids, per_sample_weights=weights(ids)[..., 0])
        other = averaged(ids.flatten(), offsets)
        loss = F.cross_entropy(out(torch.cat([one, other], 1)), labels)
        loss.backward()
        optimizer.step()
        of_rows.step()
        return loss

    data = [(torch.randint(6, (rows, 5)), torch.randint(3, (rows,))) for _ in range(STEPS)]
    return models, step, data


@case
def table_that_is_read_again(rows: int) -> Built:
    """By words that a mask chooses; its gradients stay sparse."""
    table = nn.Embedding(40, 4, sparse=True).double()
    head = nn.Linear(4, 3).double()
    optimizers = (
        torch.optim.SparseAdam(table.parameters(), 0.05),
        torch.optim.SGD(head.parameters()),
    )

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = F.cross_entropy(head(table(ids)), labels)
        loss = loss + table(ids[labels > 0]).square().sum() / len(labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    data = [(torch.randint(40, (rows,)), torch.randint(3, (rows,))) for _ in range(STEPS)]
    return [table, head], step, data
