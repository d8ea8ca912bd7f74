"""Losses that add up rows which are divided by a sum over the batch: for the tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from batch_statistics import OUTPUTS, Loss
from torch import nn

T = torch.Tensor


def _each(model: nn.Module, x: T, y: T) -> T:
    return F.mse_loss(model(x), y, reduction="none").mean(1)


def _weights(model: nn.Module, x: T, y: T, v: T) -> T:
    w = v.abs()
    w = w / w.sum()
    return (_each(model, x, y) * w).sum()


def _with_a_mean(model: nn.Module, x: T, y: T, v: T) -> T:
    w = v.abs() / (v.abs().sum() + 1e-8)
    each = F.mse_loss(model(x), y, reduction="none")
    return 0.3 * (w[:, None] * each).sum() + each.square().mean()


def _product(model: nn.Module, x: T, y: T, v: T) -> T:
    w = v.abs()
    return torch.dot(_each(model, x, y), w / w.sum())


def _of_scores(model: nn.Module, x: T, y: T, v: T) -> T:
    """As weights of hard rows are, which are detached."""
    scores = model(x)
    w = scores.detach().square().mean(1).exp()
    return (F.cross_entropy(scores, y.argmax(1), reduction="none") * (w / w.sum())).sum()


def _of_advantages(model: nn.Module, x: T, y: T, v: T) -> T:
    """As in regression weighted by advantages: a round for the mean, and one for the sum."""
    w = (v - v.mean()).exp()
    w = w / w.sum()
    taken = F.log_softmax(model(x), 1).gather(1, y.argmax(1)[:, None])
    return -(taken[:, 0] * w).sum()


def _of_labels(model: nn.Module, x: T, y: T, v: T) -> T:
    """One over how often each label comes, all together one."""
    labels = y.argmax(1)
    counts = F.one_hot(labels, OUTPUTS).sum(0)
    w = (1 / counts.clamp(min=1))[labels]
    w = w / w.sum()
    return (F.cross_entropy(model(x), labels, reduction="none") * w).sum()


LOSSES: dict[str, Loss] = {
    "weights": _weights,
    "with a mean": _with_a_mean,
    "product": _product,
    "of scores": _of_scores,
    "of advantages": _of_advantages,
    "of labels": _of_labels,
}


def twice(model: nn.Module, x: T, y: T, v: T) -> T:
    """What is summed is squared as well."""
    w = v.abs()
    each = _each(model, x, y) * (w / w.sum())
    return each.sum() + each.square().mean()
