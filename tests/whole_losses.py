"""Losses of covariances, norms and logarithms of sums over the batch: for the tests."""

from __future__ import annotations

from typing import Any

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


def _solved(model: nn.Module, x: T, y: T, v: T) -> T:
    """Ermolov et al. 2021 (W-MSE): rows are columns of a system that a covariance is a part of."""
    z = model(x - 100)
    z = z - z.mean(0)
    lower = torch.linalg.cholesky(z.T @ z / len(z) + 0.5 * EYE)
    w = torch.linalg.solve_triangular(lower, z.T, upper=False)
    return (w.T - y).square().mean() + (torch.linalg.solve(lower, z.T) * y.T).mean()


def _of_frames(model: nn.Module, x: T, y: T, v: T) -> T:
    """Yamamoto et al. 2020 (Parallel WaveGAN): distances of spectra of short frames."""
    window = torch.hann_window(6, dtype=x.dtype)

    def spectrum(signal: T) -> T:
        found = torch.stft(signal.repeat(1, 5), 6, 2, window=window, return_complex=True)
        return found.abs().clamp(min=1e-2)

    one, other = spectrum(y), spectrum(model(x - 100))
    return torch.norm(one - other, p="fro") / torch.norm(one, p="fro") + (one - other).abs().mean()


def _relative(model: nn.Module, x: T, y: T, v: T) -> T:
    return (model(x - 100) - y).norm() / torch.linalg.vector_norm(y)


def _by_columns(model: nn.Module, x: T, y: T, v: T) -> T:
    z = model(x - 100)
    return (z - y).norm(dim=0).sum() + torch.logsumexp(z, 0) @ torch.arange(3.0).double()


def _hard(model: nn.Module, x: T, y: T, v: T) -> T:
    """As losses have it that are robust to how rows are distributed."""
    each = F.mse_loss(model(x - 100), y, reduction="none").mean(1)
    return torch.logsumexp(each / 0.3, 0) * 0.3


def _joined(model: nn.Module, x: T, y: T, v: T) -> T:
    """The covariance of columns of which no parameter has as many."""
    z = model(x - 100)
    z = torch.cat([z, z.square(), v[:, None]], 1)
    return (z.T @ z / len(x)).square().mean()


LOSSES: dict[str, Loss] = {
    "redundancy": _redundancy,
    "invariance": _invariance,
    "by einsum": _by_einsum,
    "coding rate": _coding_rate,
    "covariance": _covariance,
    "correlation": _correlation,
    "whitening": _whitening,
    "solved": _solved,
    "of frames": _of_frames,
    "relative": _relative,
    "by columns": _by_columns,
    "hard": _hard,
    "joined": _joined,
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
    z = model(x - 100).repeat(1, 86)[:, :257] * torch.linspace(1, 2, 257).double()
    return (z.T @ z / len(x)).square().mean()


def _equal_shares(model: nn.Module, x: T, y: T, v: T) -> T:
    """Caron et al. 2020 (SwAV), as published: assignments of which all clusters get as many."""
    scores = model(x - 100)
    with torch.no_grad():
        shares = torch.exp(scores.detach() / 0.3).t()
        clusters, rows = shares.shape
        shares /= torch.sum(shares)
        for _ in range(3):
            shares /= torch.sum(shares, dim=1, keepdim=True)
            shares /= clusters
            shares /= torch.sum(shares, dim=0, keepdim=True)
            shares /= rows
        shares *= rows
    return -(shares.t() * F.log_softmax(scores + y, 1)).sum(1).mean()


def _sharpened(model: nn.Module, x: T, y: T, v: T) -> T:
    """Xie et al. 2016 (DEC): targets by how many rows a cluster has."""
    found = model(x - 100).softmax(1)
    weight = found**2 / found.sum(0)
    target = (weight.t() / weight.sum(1)).t().detach()
    return F.kl_div(found.log(), target, reduction="batchmean")


def _decorrelated(model: nn.Module, x: T, y: T, v: T) -> T:
    """Huang et al. 2018 and Siarohin et al. 2018: rows are whitened, with gradients."""
    z = model(x - 100)
    z = z - z.mean(0, keepdim=True)
    covariance = z.T @ z / (z.shape[0] - 1) + 0.1 * torch.eye(z.shape[1]).double()
    return (z @ torch.inverse(torch.linalg.cholesky(covariance)).T - y).square().mean()


def _said_often(model: Any, x: T, y: T, v: T) -> T:
    """Wang et al. 2023 (FreeMatch): shares of classes that a model says, followed slowly."""
    scores = model(x - 100)
    with torch.no_grad():
        counts = torch.bincount(scores.argmax(1), minlength=y.shape[1]).double()
        model.counts.copy_(0.9 * model.counts + 0.1 * counts / counts.sum())
    weights = (1 + model.counts).reciprocal()
    return (scores.log_softmax(1).mean(0) * weights / weights.sum()).sum().neg()


GATHERED: dict[str, Loss] = {
    "many columns": _many_columns,
    "root": _root,
    "unit columns": _unit_columns,
    "in a view": _in_a_view,
    "equal shares": _equal_shares,
    "sharpened": _sharpened,
    "decorrelated": _decorrelated,
    "said often": _said_often,
}
"""Of numbers that workers cannot put together of their own ones: their rows are sent."""


def ordered(model: nn.Module, x: T, y: T, v: T) -> T:
    """Rows in an order are the same rows."""
    places = v.argsort(descending=True)
    return F.mse_loss(model((x - 100)[places]), y[places])
