"""Losses with sums of the batch's rows for each label: for the tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from batch_statistics import OUTPUTS, Loss
from torch import nn

T = torch.Tensor


def _balanced(model: nn.Module, x: T, y: T, v: T) -> T:
    labels = y.argmax(1)
    counts = torch.bincount(labels, minlength=OUTPUTS)
    weights = counts.sum() / (OUTPUTS * counts.clamp(min=1))
    return F.cross_entropy(model(x - 100), labels, weight=weights.double())


def _normalised(model: nn.Module, x: T, y: T, v: T) -> T:
    labels = y.argmax(1)
    weights = 1 / labels.bincount(v.abs(), minlength=OUTPUTS).clamp(min=0.1)
    weights = weights / weights.sum()
    return (F.cross_entropy(model(x - 100), labels, reduction="none") * weights[labels]).mean()


def _scattered(model: nn.Module, x: T, y: T, v: T) -> T:
    labels = y.argmax(1)
    counts = torch.zeros(OUTPUTS, dtype=x.dtype)
    counts.scatter_add_(0, labels, torch.ones(len(labels), dtype=x.dtype))
    weights = len(labels) / (OUTPUTS * counts.clamp(min=1))
    return (F.cross_entropy(model(x - 100), labels, reduction="none") * weights[labels]).mean()


def _prototypes(model: nn.Module, x: T, y: T, v: T) -> T:
    """Means of each class, through which gradients flow."""
    labels, z = y.argmax(1), model(x - 100)
    counts = torch.bincount(labels, minlength=OUTPUTS).clamp(min=1)
    means = torch.zeros(OUTPUTS, OUTPUTS, dtype=x.dtype).index_add(0, labels, z)
    means = means / counts[:, None]
    return z.mean() - (means[:, None] - means).square().mean()


def _centres(model: nn.Module, x: T, y: T, v: T) -> T:
    labels, z = y.argmax(1), model(x - 100)
    with torch.no_grad():
        counts = torch.bincount(labels, minlength=OUTPUTS).clamp(min=1)
        centres = torch.zeros(OUTPUTS, OUTPUTS, dtype=x.dtype)
        centres.index_add_(0, labels, z)
        centres /= counts[:, None]
    return (z - centres[labels]).square().mean()


LOSSES: dict[str, Loss] = {
    "balanced": _balanced,
    "normalised": _normalised,
    "scattered": _scattered,
    "prototypes": _prototypes,
    "centres": _centres,
}


def more_labels(model: nn.Module, x: T, y: T, v: T) -> T:
    """Of which there are more than is said."""
    labels = (y.sum(1) * 2).long()
    counts = torch.bincount(labels, minlength=2).double()
    return (model(x - 100).mean(1) * counts[labels]).mean() / counts.sum()


def of_neighbours(model: nn.Module, x: T, y: T, v: T) -> T:
    """A sum for each row of the batch, as graphs have for each node."""
    z = model(x - 100)
    places = (torch.arange(len(x)) + 1) % len(x)
    found = torch.zeros(len(x), OUTPUTS, dtype=x.dtype).index_add(0, places, z)
    return F.mse_loss(found, y) + found.square().mean()
