"""Losses of tensors that a step makes and writes to in place: for the tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from batch_statistics import OUTPUTS, Loss
from torch import nn

T = torch.Tensor


def _columns(model: nn.Module, x: T, y: T, v: T) -> T:
    scores, out = model(x), torch.zeros(len(x), 2, dtype=x.dtype)
    out[:, 0] = scores[:, 0] * v
    out[:, 1] = scores[:, 1].square()
    return out.square().mean().sqrt()


def _tasks(model: nn.Module, x: T, y: T, v: T) -> T:
    losses = torch.empty(OUTPUTS, dtype=x.dtype)
    for task in range(OUTPUTS):
        losses[task] = F.mse_loss(model(x)[:, task], y[:, task])
    return losses.sqrt().sum()


def _advantages(model: nn.Module, x: T, y: T, v: T) -> T:
    """As in proximal policy optimisation, with rewards [rows, time]."""
    values = model(x)
    with torch.no_grad():
        found, last = torch.zeros(y.shape, dtype=y.dtype), torch.zeros(len(x), dtype=y.dtype)
        for time in reversed(range(OUTPUTS)):
            later = values[:, time + 1] if time + 1 < OUTPUTS else 0.0
            last = y[:, time] + 0.9 * later - values[:, time] + 0.8 * last
            found[:, time] = last
        returns = found + values
        found = (found - found.mean()) / (found.std() + 1e-8)
    return (values - returns).square().mean() + (found * values.tanh()).mean()


def _from_later(model: nn.Module, x: T, y: T, v: T) -> T:
    """What is written is read again before the whole is."""
    values, found = model(x), torch.zeros_like(y)
    for time in reversed(range(OUTPUTS)):
        later = found[:, time + 1] if time + 1 < OUTPUTS else 0.0
        found[:, time] = y[:, time] - values[:, time].detach() + 0.8 * later
    return ((found - found.mean()) / found.std() * values.tanh()).mean()


def _from_all_before(model: nn.Module, x: T, y: T, v: T) -> T:
    scores, out = model(x), torch.zeros(len(x), 4, dtype=x.dtype)
    for time in range(4):
        out[:, time] = out[:, :time].sum(1) + scores[:, time % OUTPUTS]
    return out.square().mean().sqrt()


def _centred_column(model: nn.Module, x: T, y: T, v: T) -> T:
    scores = model(x) * 1
    scores[:, 0] -= scores[:, 0].mean()
    return (scores.square() * (1 + y)).mean()


def _centred_rows(model: nn.Module, x: T, y: T, v: T) -> T:
    out, chosen = model(x).clone(), v > 0
    out[chosen] = out[chosen] - out.mean()
    return out.square().mean() + out.mean()


def _standardised(model: nn.Module, x: T, y: T, v: T) -> T:
    v = v.clone()
    v -= v.mean()
    v /= v.std()
    return (model(x).mean(1) * v).exp().mean()


def _of_each_column(model: nn.Module, x: T, y: T, v: T) -> T:
    y = y.clone()
    y.sub_(y.mean(0)).div_(y.std(0, keepdim=True) + 1)
    return (model(x) * y).exp().mean()


def _halves(model: nn.Module, x: T, y: T, v: T) -> T:
    scores, out = model(x), torch.empty(len(x), 2 * OUTPUTS + 1, dtype=x.dtype)
    out[:, :OUTPUTS] = scores * v[:, None]
    out[:, OUTPUTS:] = 0.5
    out[:, OUTPUTS:-1] = scores.square()
    return out.square().mean().sqrt()


def _differences(model: nn.Module, x: T, y: T, v: T) -> T:
    scores, out = model(x), torch.zeros(len(x), OUTPUTS, dtype=x.dtype)
    out[:, 1:] = scores[:, 1:] - scores[:, :-1]
    out[:, :-1] += scores[:, 1:]
    return (out - out.mean()).abs().mean()


def _within_parts(model: nn.Module, x: T, y: T, v: T) -> T:
    scores, out = model(x), torch.zeros(len(x), 2, OUTPUTS, dtype=x.dtype)
    out[:, 0, 1] = scores[:, 0]
    out.transpose(1, 2)[:, 2, 1:] = scores[:, 1:2]
    out[:, 1].mul_(2)
    return out.square().mean().sqrt()


def _masked_weights(model: nn.Module, x: T, y: T, v: T) -> T:
    weights = torch.ones(len(x), dtype=x.dtype)
    weights[v > 0] = 2.0
    weights /= weights.sum()
    return (F.mse_loss(model(x), y, reduction="none").mean(1) * weights).sum()


def _by_labels(model: nn.Module, x: T, y: T, v: T) -> T:
    out = model(x) * 1
    out[torch.arange(len(x)), y.argmax(1)] = 0.0
    out[:, 1:][y[:, 1:] > 0] = 0.5
    return (out - out.mean()).square().mean().sqrt()


LOSSES: dict[str, Loss] = {
    name[1:]: loss
    for name, loss in list(globals().items())
    if name.startswith("_") and getattr(loss, "__module__", "") == __name__
}
