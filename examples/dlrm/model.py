"""DLRM, a recommendation model (Naumov et al. 2019), written for one device.

Numbers go through a small network, ids through one embedding bag for each table. What these give,
vectors of the same length, meet in all pairwise dot products, and a second network makes a click
probability of them. Nearly all parameters are in the tables, of which a step reads few rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from examples.optimizers import make_optimizer as make_optimizer

Ids = Sequence[torch.Tensor]


class DLRM(nn.Module):
    """Predicts clicks.

    Args:
        numbers: dense features of a sample.
        rows: rows of each table.
        features: of each row, and so of every vector that is compared.
        bottom: hidden sizes of the network for the dense features.
        top: hidden sizes of the network for the dot products.
        sparse: let the tables' gradients be torch's sparse tensors.
    """

    def __init__(
        self,
        numbers: int,
        rows: Sequence[int],
        features: int = 32,
        bottom: Sequence[int] = (256, 64),
        top: Sequence[int] = (256, 64),
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.bottom = _network([numbers, *bottom, features])
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(count, features, mode="sum", sparse=sparse) for count in rows
        )
        for count, table in zip(rows, self.tables, strict=True):
            nn.init.uniform_(table.weight, -(count**-0.5), count**-0.5)
        vectors = len(rows) + 1
        first, second = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("pairs", first * vectors + second, persistent=False)
        self.top = _network([features + len(first), *top, 1])

    def forward(self, numbers: torch.Tensor, ids: Ids, offsets: Ids | None = None) -> torch.Tensor:
        """Log odds of a click, [batch].

        Args:
            numbers: [batch, numbers] dense features.
            ids: for each table, [batch, lookups] rows that are summed, or with ``offsets`` all
                rows of the batch one after the other.
            offsets: for each table, [batch] positions where the samples' ids begin.
        """
        dense = F.relu(self.bottom(numbers))
        begins = [None] * len(ids) if offsets is None else offsets
        bags = [
            table(wanted, begin)
            for table, wanted, begin in zip(self.tables, ids, begins, strict=True)
        ]
        vectors = torch.stack([dense, *bags], 1)
        # Each pair once, without a vector's product with itself.
        products = (vectors @ vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return self.top(torch.cat([dense, products], 1)).squeeze(1)


def _network(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers of these sizes with ReLUs between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_step(
    model: DLRM, optimizer: torch.optim.Optimizer
) -> Callable[[torch.Tensor, Ids, torch.Tensor], torch.Tensor]:
    """The training step for one device, of dense features, ids [batch, lookups] and clicks."""

    def train_step(numbers: torch.Tensor, ids: Ids, clicks: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(numbers, ids), clicks)
        loss.backward()
        optimizer.step()
        return loss

    return train_step


@torch.no_grad()
def predict(model: DLRM, numbers: torch.Tensor, ids: Ids, batch: int = 1000) -> torch.Tensor:
    """Log odds of clicks of all samples, computed ``batch`` samples at a time: [samples]."""
    model.eval()
    parts = [
        model(numbers[begin : begin + batch], [wanted[begin : begin + batch] for wanted in ids])
        for begin in range(0, len(numbers), batch)
    ]
    return torch.cat(parts)
