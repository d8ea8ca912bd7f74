"""Losses in which rows of the batch are reduced to numbers in ways of their own: for the tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from compared_rows import KINDS, Loss, Towers

LOSSES: dict[str, Loss] = {}


def _loss(name: str) -> Callable[[Loss], Loss]:
    def note(loss: Loss) -> Loss:
        LOSSES[name] = loss
        return loss

    return note


def _each(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(i, j)[0][:, :KINDS], y, reduction="none")


@_loss("by group")
def _by_group(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Sagawa et al. 2020 (group DRO), as published."""
    groups = (y == torch.arange(KINDS).unsqueeze(1)).to(torch.float64)
    count = groups.sum(1)
    count = count + (count == 0).to(torch.float64)
    each = (groups @ _each(model, i, j, y).view(-1)) / count
    return each @ torch.softmax(each.detach(), 0)


@_loss("products of columns")
def _columns(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Ji et al. 2019 (invariant information), as published."""
    a, b = (z.softmax(1) for z in model(i, j))
    joint = (a.unsqueeze(2) * b.unsqueeze(1)).sum(0)
    joint = (joint + joint.t()) / 2
    joint = joint / joint.sum()
    first, second = (joint.sum(dim, keepdim=True).expand_as(joint) for dim in (1, 0))
    return (-joint * (joint.log() - second.log() - first.log())).sum()


def _correlation(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = (z - z.mean(1).unsqueeze(1) for z in (a, b))
    return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1) + 1e-8)


@_loss("correlations of columns")
def _distilled(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Huang et al. 2022 (DIST), as published: of each row, and of each class over the batch."""
    a, b = (z.softmax(1) for z in model(i, j))
    b = b.detach()
    return 2 - _correlation(a, b).mean() - _correlation(a.t(), b.t()).mean()


@_loss("in order, slice by slice")
def _sliced(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Deshpande et al. 2018 (sliced Wasserstein)."""
    a, b = model(i, j)
    slices = torch.linspace(-1, 1, 3 * a.shape[1], dtype=a.dtype).view(a.shape[1], 3)
    first, second = (torch.sort((z @ slices).t(), dim=1)[0] for z in (a, b))
    return (first - second).square().mean()


@_loss("a share of the hardest")
def _share(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Online hard example mining, as published: the worst seven tenths, by a sort."""
    each = _each(model, i, j, y)
    order = torch.sort(each, descending=True)[1]
    keep = min(each.size(0), int(each.size(0) * 0.7))
    return each[order[:keep]].sum() / keep


@_loss("of each other's easiest")
def _taught(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Han et al. 2018 (co-teaching): each tower learns of what is easy for the other one."""
    a, b = (z[:, :KINDS] for z in model(i, j))
    orders = [F.cross_entropy(z, y, reduction="none").detach().argsort() for z in (a, b)]
    keep = int(0.7 * len(y))
    first, second = (order[:keep] for order in orders)
    return F.cross_entropy(a[second], y[second]) + F.cross_entropy(b[first], y[first])


@_loss("relative to the mean")
def _relative(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Jolicoeur-Martineau 2019 (relativistic averages), as published."""
    real, fake = (z.sum(1) for z in model(i, j))
    return (F.softplus(fake.mean() - real) + F.softplus(fake - real.mean())).mean()


@_loss("entropy of the mean")
def _entropy(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Van Gansbeke et al. 2020 (SCAN), as published."""
    a, b = (z.softmax(1) for z in model(i, j))
    rows, classes = a.shape
    alike = torch.bmm(a.view(rows, 1, classes), b.view(rows, classes, 1)).squeeze()
    mean = a.mean(0).clamp(min=1e-8)
    return F.binary_cross_entropy(alike, torch.ones_like(alike)) + 5 * (mean * mean.log()).sum()


@_loss("spread of the batch")
def _spread(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Karras et al. 2018 (a deviation over the batch as one more feature)."""
    a, b = model(i, j)
    spread = ((a - a.mean(0, keepdim=True)).square().mean(0) + 1e-8).sqrt().mean()
    return F.softplus(-torch.cat([b, spread.expand(len(b), 1)], 1).sum(1)).mean()


@_loss("weights of tasks")
def _weighted(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """By their losses, stacked and detached."""
    a, b = model(i, j)
    each = torch.stack(
        [F.cross_entropy(a[:, :KINDS], y), F.mse_loss(a, b), (a * b).mean().square()]
    )
    return (each * torch.softmax(each.detach().sqrt(), 0)).sum()


@_loss("losses without a gradient")
def _without_gradient(
    model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Liu et al. 2023 (FAMO) trains by logarithms of such."""
    a, b = model(i, j)
    with torch.no_grad():
        first = torch.stack([F.cross_entropy(a[:, :KINDS], y), F.mse_loss(a, b)])
    return F.smooth_l1_loss(a, b) * first.log().exp().prod().sqrt()


@_loss("confusion of classes")
def _confusion(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Jin et al. 2020 (minimum class confusion), as published: by how many rows there are."""
    shares = (model(i, j)[0] / 0.5).softmax(1)
    weight = 1 + torch.exp((shares * (shares + 1e-5).log()).sum(1).detach())
    weight = (len(shares) * weight / weight.sum()).view(-1, 1)
    both = (shares * weight).t() @ shares
    both = both / both.sum(1)
    return both.sum() - both.trace()


@_loss("calibration")
def _calibrated(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Karandikar et al. 2021 (soft calibration): sums by bin, divided by each other and by rows."""
    sure, found = model(i, j)[0][:, :KINDS].softmax(1).max(1)
    right = (found == y).to(sure.dtype)
    bins = torch.linspace(0, 1, 4, dtype=sure.dtype)
    share = torch.softmax(-((sure[:, None] - bins[None]) ** 2) / 0.1, 1)
    count = share.sum(0)
    off = (share * right[:, None]).sum(0) / count - (share * sure[:, None]).sum(0) / count
    return torch.sqrt((count / len(y) * off**2).sum())


@_loss("singular values")
def _nuclear(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cui et al. 2020 (batch nuclear norm maximization)."""
    scores = model(i, j)[0][:, :KINDS]
    return F.cross_entropy(scores, y) - torch.linalg.svdvals(scores.softmax(1)).mean()


@_loss("proxies")
def _proxies(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Kim et al. 2020 (proxy anchors), as published: by the classes that the batch has."""
    near = F.normalize(model(i, j)[0][:, :KINDS])
    of_class = F.one_hot(y, KINDS).double()
    there = torch.nonzero(of_class.sum(dim=0) != 0).squeeze(dim=1)
    pull = (torch.exp(-4 * (near - 0.1)) * of_class).sum(dim=0)
    push = (torch.exp(4 * (near + 0.1)) * (1 - of_class)).sum(dim=0)
    return torch.log(1 + pull).sum() / len(there) + torch.log(1 + push).sum() / KINDS


@_loss("whitened in rounds")
def _in_rounds(model: Towers, i: torch.Tensor, j: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Huang et al. 2019 (iterative normalization), as published."""
    x = model(i, j)[0].transpose(0, 1).contiguous()
    x = x - x.mean(-1, keepdim=True)
    eye = torch.eye(len(x), dtype=x.dtype)
    spread = torch.addmm(eye, x, x.transpose(0, 1), beta=0.1, alpha=1.0 / x.size(1))
    scale = (spread * eye).sum((0, 1), keepdim=True).reciprocal()
    root = eye
    for _ in range(2):
        root = torch.addmm(root, torch.matrix_power(root, 3), spread * scale, beta=1.5, alpha=-0.5)
    return F.cross_entropy((root * scale.sqrt()).mm(x).transpose(0, 1), y)
