"""Losses of covariances, norms and logarithms of sums over the batch: for the tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from batch_statistics import OUTPUTS, Loss
from torch import nn

T = torch.Tensor
EYE = torch.eye(OUTPUTS, dtype=torch.float64)


def _twice(model: nn.Module, x: T, y: T) -> tuple[T, T]:
    """Of two views of each row."""
    return model(x - 100), model((x - 100) * (1 + 0.1 * y[:, :1]))


def _standard(z: T) -> T:
    return (z - z.mean(0)) / (z.std(0) + 1e-3)


def _redundancy(model: nn.Module, x: T, y: T, v: T) -> T:
    """As Barlow twins have it."""
    first, second = _twice(model, x, y)
    c = _standard(first).T @ _standard(second)
    c.div_(len(x))
    on = torch.diagonal(c).add_(-1).pow_(2).sum()
    off = c.flatten()[:-1].view(OUTPUTS - 1, OUTPUTS + 1)[:, 1:].flatten().pow_(2).sum()
    return on + 0.005 * off


def _invariance(model: nn.Module, x: T, y: T, v: T) -> T:
    """As VICReg has it: of two views, with the variance and the covariance of each."""
    loss = F.mse_loss(*_twice(model, x, y))
    for z in _twice(model, x, y):
        loss = loss + F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()
        z = z - z.mean(0)
        c = (z.T @ z) / (len(x) - 1)
        loss = loss + (c.square().sum() - c.diagonal().square().sum()) / 7
    return loss


def _by_einsum(model: nn.Module, x: T, y: T, v: T) -> T:
    z = model(x - 100)
    return (torch.einsum("bi,bj->ij", z, y) / len(x)).square().sum()


def _coding_rate(model: nn.Module, x: T, y: T, v: T) -> T:
    z = model(x - 100)
    return -torch.logdet(EYE + 2 * (z.T / len(x)) @ z)


def _covariance(model: nn.Module, x: T, y: T, v: T) -> T:
    z = model(x - 100)
    return (torch.cov(z.T) - EYE).square().mean() + z.T.cov(correction=0).square().mean()


def _correlation(model: nn.Module, x: T, y: T, v: T) -> T:
    z = model(x - 100)
    return torch.corrcoef(torch.stack([z[:, 0], v]))[0, 1] + z.T.corrcoef().square().mean()


def _whitening(model: nn.Module, x: T, y: T, v: T) -> T:
    """Rows with numbers that are one covariance's."""
    with torch.no_grad():
        inverse = torch.linalg.inv(torch.cov((x - 100).T) + torch.eye(x.shape[1]).double())
    return (model((x - 100) @ inverse) - y).square().mean()


def _relative(model: nn.Module, x: T, y: T, v: T) -> T:
    return (model(x - 100) - y).norm() / torch.linalg.vector_norm(y)


def _by_columns(model: nn.Module, x: T, y: T, v: T) -> T:
    z = model(x - 100)
    return (z - y).norm(dim=0).sum() + torch.logsumexp(z, 0) @ torch.arange(3.0).double()


def _hard(model: nn.Module, x: T, y: T, v: T) -> T:
    """As losses have it that are robust to how rows are distributed."""
    each = F.mse_loss(model(x - 100), y, reduction="none").mean(1)
    return torch.logsumexp(each / 0.3, 0) * 0.3


LOSSES: dict[str, Loss] = {
    "redundancy": _redundancy,
    "invariance": _invariance,
    "by einsum": _by_einsum,
    "coding rate": _coding_rate,
    "covariance": _covariance,
    "correlation": _correlation,
    "whitening": _whitening,
    "relative": _relative,
    "by columns": _by_columns,
    "hard": _hard,
}


def _root(model: nn.Module, x: T, y: T, v: T) -> T:
    return (model(x - 100) - y).norm() / len(x) ** 0.5


def _unit_columns(model: nn.Module, x: T, y: T, v: T) -> T:
    return (F.normalize(model(x - 100), dim=0) * y).sum() / len(x)


def _in_a_view(model: nn.Module, x: T, y: T, v: T) -> T:
    """Divided in place by a view, whose backward pass has operations of its own."""
    z = model(x - 100)
    c = torch.bmm(z.T[None], z[None])[0]
    c.div_(len(x))
    return c.square().sum()


def _many_columns(model: nn.Module, x: T, y: T, v: T) -> T:
    """A covariance of more than 65,536 numbers."""
    z = model(x - 100)
    z = torch.stack([z[:, place % OUTPUTS] * (1 + place / 257) for place in range(257)], 1)
    return (z.T @ z / len(x)).square().mean()


OWN: dict[str, Loss] = {
    "many columns": _many_columns,
    "root": _root,
    "unit columns": _unit_columns,
    "in a view": _in_a_view,
}
"""Those that stay each worker's own, which is told."""


def ordered(model: nn.Module, x: T, y: T, v: T) -> T:
    """Rows in an order are the same rows."""
    places = v.argsort(descending=True)
    return F.mse_loss(model((x - 100)[places]), y[places])
