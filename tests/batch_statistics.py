"""Losses that are computed with numbers of the whole batch: for the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from equality import difference
from errors_help import warnings_of_parallax
from pool import Pool
from torch import nn

from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

WIDTH, OUTPUTS = 4, 3
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of a model, inputs [rows, width], labels [rows, outputs] of zeros and ones, values [rows]."""


def _each(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(scores, labels, reduction="none")


def _advantages(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """As in proximal policy optimisation."""
    v = (v - v.mean()) / (v.std() + 1e-8)
    ratio = (model(x).log_softmax(-1)[:, 0] + 1).exp()
    return -torch.min(ratio * v, ratio.clamp(0.8, 1.2) * v).mean()


def _balanced(model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As detectors of edges have it."""
    positive, negative = y.sum(), (1 - y).sum()
    shares = negative / (positive + negative), 1.1 * positive / (positive + negative)
    weights = torch.where(y > 0, *shares)
    return F.binary_cross_entropy_with_logits(model(x), y, weight=weights)


def _read(model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    positive = y.sum().item()
    weight = (y.numel() - positive) / max(positive, 1)
    return (_each(model(x), y) * (1 + y * weight)).mean()


def _focused(model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Divided by how many count, and weighted by their share."""
    share = y.mean()
    counted = (v > 0).double()[:, None]
    whole = (_each(model(x), y) * counted * torch.where(y > 0, 1 - share, share)).sum()
    return whole / counted.sum().clamp(min=1)


def _on_two_lines(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    v = v - v.mean()
    v = v / (v.std() + 1e-8)
    return (_each(model(x), y)[:, 0] * v).mean()


def _of_values(model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Advantages over what a model expects, as in actor-critic methods."""
    score, value, _ = model(x).unbind(1)
    advantage = v - value.detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    return (v - value).square().mean() - (score * advantage).mean()


def _without_gradient(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Inputs, labels and advantages, of which the last are known after the model."""
    with torch.no_grad():
        x = (x - x.mean()) / x.std()
        labels = model(x).sigmoid()
        labels = labels / labels.mean() * y.mean()
    return (_each(model(x), y) * labels).mean()


def _overlap(model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Dice's, of all pixels of a batch."""
    scores = model(x).sigmoid()
    return 1 - (2 * (scores * y).sum() + 1) / (scores.sum() + y.sum() + 1)


def _overlap_of_columns(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """The same for each class, beside a mean."""
    scores = model(x).softmax(-1)
    both = (scores * y).sum(0)
    whole = (scores + y).sum(0)
    return (1 - (2 * both + 1e-3) / (whole + 1e-3)).mean() + 0.5 * _each(model(x), y).mean()


def _focal(model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of the mean, as it is often written."""
    loss = F.cross_entropy(model(x), y.argmax(-1))
    return (1 - torch.exp(-loss)) ** 2 * loss


def _correlation(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """By moments."""
    scores = model(x)[:, 0]
    mean, other = scores.mean(), v.mean()
    both = (scores * v).mean() - mean * other
    return 1 - both / ((scores * scores).mean() - mean * mean).sqrt() / v.std(correction=0)


def _centred(model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Rows are computed with a mean that has a gradient."""
    scores = model(x - 100)[:, 0]
    scores = scores - scores.mean()
    return (scores - v).square().mean() + scores.abs().mean()


def _centred_by_a_part(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    scores = model(x - 100)[:, 0]
    scores = scores - scores[v > -0.5].mean()
    return (scores - v).square().mean()


def _correlation_of_rows(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    scores = model(x - 100)[:, 0]
    scores, v = scores - scores.mean(), v - v.mean()
    return 1 - (scores * v).sum() / (scores.square().sum().sqrt() * v.square().sum().sqrt())


def _spread_of_columns(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """As VICReg has it."""
    scores = model(x - 100)
    spread = (scores.var(0) + 1e-4).sqrt()
    scores = scores - scores.mean(0)
    return F.relu(1 - spread).mean() + F.mse_loss(scores, y)


def _standardised(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    scores = model(x - 100)[:, 0]
    scores = (scores - scores.mean()) / (scores.std() + 1e-5)
    return F.smooth_l1_loss(scores, v) + _each(model(x - 100), y).mean()


def _concordance(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Lin's coefficient."""
    scores = model(x - 100)[:, 0]
    mean, other = scores.mean(), v.mean()
    both = ((scores - mean) * (v - other)).mean()
    spread = scores.var(unbiased=False) + v.var(unbiased=False)
    return 1 - 2 * both / (spread + (mean - other) ** 2)


def _columns_on_two_lines(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    x = x - x.mean(0, keepdim=True)
    x = x / (x.std(0, keepdim=True) + 1e-8)
    return _each(model(x), y).mean()


def _kept(model: Any, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """An average that the next step has, too."""
    with torch.no_grad():
        model.average.mul_(0.9).add_(0.1 * v.mean())
    return (_each(model(x), y)[:, 0] * (v - model.average)).mean()


def _of_two_views(model: Any, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Caron et al. 2021 (DINO): what targets are centred by, of all views."""
    views = torch.cat([x - 100, (x - 100).tanh()])
    given = model(views).detach()
    targets = (given - model.counts).softmax(-1).chunk(2)[1]
    model.counts = 0.9 * model.counts + 0.1 * (given.sum(0) / len(given))
    return (-targets * model(x - 100).log_softmax(-1)).sum(-1).mean()


def _kept_anew(model: Any, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Another tensor each time."""
    loss = (_each(model(x), y)[:, 0] * (v - model.average)).mean()
    model.average = 0.9 * model.average + 0.1 * (v - v.mean()).abs().mean()
    return loss


def _codebook(model: Any, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Centres of groups, which move to the mean of the inputs that belong to each."""
    with torch.no_grad():
        model.counts.mul_(0.9).add_(y.sum(0), alpha=0.1)
        model.sums.mul_(0.9).add_(y.t() @ x, alpha=0.1)
        model.centres.copy_(model.sums / (model.counts + 1e-5)[:, None])
    near = (x[:, None] - model.centres).square().sum(-1)
    return (model(x) * near.softmax(-1)).mean()


def _logged(model: Any, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """An average that nothing is trained with, and that is no part of the model."""
    with torch.no_grad():
        model.logged.mul_(0.9).add_(0.1 * v.mean())
    return _each(model(x), y).mean()


def _saved(model: Any, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One in a buffer, which evaluation may use."""
    with torch.no_grad():
        model.average.mul_(0.9).add_(0.1 * v.mean())
    return _each(model(x), y).mean()


def _masked(model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    some = (v > -1).double()
    mean = (v * some).sum() / some.sum()
    variance = ((v - mean).square() * some).sum() / some.sum()
    return (_each(model(x), y)[:, 0] * some * (v - mean) / variance.sqrt()).sum() / some.sum()


def _of_three_rounds(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    near = v - v.mean()
    near = near / near.abs().mean()
    near = near.clamp(-1, 1)
    near = near - near.amax()
    return (_each(model(x), y)[:, 0] * near).mean()


def _left_out(model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One worker may have no term that is computed with them."""
    loss = _each(model(x), y).mean()
    some = v > 0.5
    if some.any():
        return loss + (_each(model(x), y)[some] * v[some].mean()).mean()
    return loss


def _shifted(x: torch.Tensor, deviation: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    return (x - mean) / deviation


def _share(model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of a batch that has none, the other rows do not count."""
    loss = _each(model(x), y)
    some = v > 0.5
    if some.any():
        return loss.mean() + (loss[some] * some.double().mean()).sum() / len(x)
    return loss.mean()


def _columns_left_out(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    scores = model(x)
    loss = (scores[:, 0] * (v - v.mean())).mean()
    if (v > 0.5).any():
        loss = loss + 0 * (scores / (1 + scores.detach().abs().mean(0))).mean()
    return loss


def _numbers_left_out(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    scores = model(x)
    loss = (scores[:, 0] * (v - v.mean())).mean()
    if (v > 0.5).any():
        loss = loss + 0 * (scores / (1 + scores.detach().abs().mean())).mean()
    return loss


def _by_class(model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Workers' batches may have other classes."""
    labels = (v * 2).round().clamp(-2, 2)
    loss = _each(model(x), y).mean()
    for place in range(-2, 3):
        some = labels == place
        if some.any():
            loss = loss + (_each(model(x), y)[some][:, 0] * v[some].mean()).sum() / len(x)
    return loss


def _reversed_huber(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """As for estimates of depth: its threshold is a share of the largest error."""
    error = (model(x) - y).abs()
    bound = 0.2 * error.max().item()
    return torch.where(error <= bound, error, (error.square() + bound**2) / (2 * bound)).mean()


def _by_error(model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Each row counts by its error, which is cut off after it was scaled."""
    error = (model(x) - y).abs().mean(1)
    weight = (error + 1e-3).pow(-0.4)
    return (error * (weight / weight.max()).detach()).mean()


def _by_hardness(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Rows count by the loss of their label, relative to its mean."""
    each = F.cross_entropy(model(x), y.argmax(-1), reduction="none")
    with torch.no_grad():
        weight = (each / each.mean()).clamp(max=2)
    return (each * weight).mean() + (each - each.detach().mean()).abs().mean()


def _with_spread(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """A risk of the mean and the deviation of losses."""
    each = F.cross_entropy(model(x), y.argmax(-1), reduction="none")
    return each.mean() + 0.5 * each.std() + model(x).var()


def _by_losses(model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Losses weighted by how large they are."""
    first, second = F.mse_loss(model(x), y), F.cross_entropy(model(x), y.argmax(-1))
    with torch.no_grad():
        weights = torch.stack([first, second]).softmax(0)
    return weights[0] * first + weights[1] * second


def _scaled_losses(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """One as large as another, which is a mean over some rows."""
    some = (v > 0).double()
    first = (_each(model(x), y)[:, 0] * some).sum() / some.sum().clamp(min=1)
    second = F.l1_loss(model(x), y)
    return first + second * (first.item() / second.item())


def _average_of_a_loss(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    first, second = F.mse_loss(model(x), y), F.l1_loss(model(x), y)
    model.average = 0.9 * model.average + 0.1 * first.detach()  # type: ignore[assignment,operator]
    return first + second / (model.average + 1)


def _cut_off_columns(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Classes that are predicted often count less."""
    weights = 1 / (model(x).softmax(1).sum(0) + 1)
    return (_each(model(x), y) * (weights / weights.sum()).detach()).mean()


ALIKE: dict[str, Loss] = {
    "advantages": _advantages,
    "balanced": _balanced,
    "read": _read,
    "focused": _focused,
    "weight of positives": lambda m, x, y, v: F.binary_cross_entropy_with_logits(
        m(x), y, pos_weight=(y.numel() - y.sum()) / y.sum()
    ),
    "inputs": lambda m, x, y, v: _each(m((x - x.mean()) / (x.var() + 1e-5).sqrt()), y).mean(),
    "largest": lambda m, x, y, v: F.mse_loss(m(x / x.abs().max()), y / (v.amax() - v.min())),
    "means by hand": lambda m, x, y, v: _each(m(x - v.sum() / len(v)), y).mean(),
    "whole numbers": lambda m, x, y, v: _each(
        m(x) * ((y > 0).sum() / (v > 0).sum().clamp(min=1)), y
    ).mean(),
    "both at once": lambda m, x, y, v: _each(m(_shifted(x, *torch.std_mean(x))), y).mean(),
    "kept dimension": lambda m, x, y, v: (
        _each(m(x), y)[:, 0] * (v - v.mean(0, keepdim=True)) / v.std(0, keepdim=True)
    ).mean(),
    "many epochs": lambda m, x, y, v: sum(
        (_each(m(x), y)[:, 0] * (v - v.mean()) / v.std()).mean() for _ in range(10)
    ),
    "shares by hand": lambda m, x, y, v: (
        _each(m(x), y) * torch.where(y > 0, (y.numel() - y.sum()) / y.numel(), y.sum() / y.numel())
    ).mean(),
    "by hand": lambda m, x, y, v: _each(m(x / (x - x.mean()).square().mean().sqrt()), y).mean(),
    "on two lines": _on_two_lines,
    "of values": _of_values,
    "without gradient": _without_gradient,
    "masked": _masked,
    "columns": lambda m, x, y, v: _each(m((x - x.mean(0)) / x.std(0)), y).mean(),
    "columns on two lines": _columns_on_two_lines,
    "extremes of columns": lambda m, x, y, v: (
        _each(m(x / x.abs().amax(0)), y).mean() + (m(x) * y.max(0).values).mean()
    ),
    "weights of columns": lambda m, x, y, v: F.binary_cross_entropy_with_logits(
        m(x), y, pos_weight=(len(y) - y.sum(0)).clamp(min=1) / y.sum(0).clamp(min=1)
    ),
    "shares of columns": lambda m, x, y, v: (
        _each(m(x), y) * (1 + y.mean(0) / y.mean(0).sum()).softmax(0)
    ).mean(),
    "root": lambda m, x, y, v: F.mse_loss(m(x), y).sqrt(),
    "root by hand": lambda m, x, y, v: ((m(x) - y) ** 2).mean().sqrt() + F.l1_loss(m(x), y),
    "overlap": _overlap,
    "overlap of columns": _overlap_of_columns,
    "focal": _focal,
    "correlation": _correlation,
    "quotient of sums": lambda m, x, y, v: (
        (_each(m(x), y)[:, 0] * v.abs()).sum() / (m(x)[:, 1].square().sum() + v.abs().sum())
    ),
    "root of a part": lambda m, x, y, v: _each(m(x), y)[y > 0.5].mean().sqrt(),
    "square of a part": lambda m, x, y, v: F.cross_entropy(
        m(x), torch.where(v > -0.5, y.argmax(-1), -100)
    ).square(),
    "flooded": lambda m, x, y, v: (_each(m(x), y).mean() - 0.6).abs() + 0.6,
    "centred": _centred,
    "centred by a part": _centred_by_a_part,
    "correlation of rows": _correlation_of_rows,
    "spread of columns": _spread_of_columns,
    "standardised": _standardised,
    "concordance": _concordance,
    "kept": _kept,
    "saved": _saved,
    "kept anew": _kept_anew,
    "kept of two views": _of_two_views,
    "codebook": _codebook,
    "of three rounds": _of_three_rounds,
    "columns put together": lambda m, x, y, v: _each(
        m(torch.cat([(x[:, :1] - v.mean()) / v.std(), x[:, 1:]], 1)[v.argsort()]), y[v.argsort()]
    ).mean(),
    "means of columns": lambda m, x, y, v: (
        (_each(m(x), y) * y).sum(0) / y.sum(0).clamp(min=1)
    ).mean(),
    "weights by counts": lambda m, x, y, v: F.cross_entropy(
        m(x), y.argmax(1), weight=len(y) / (3 * (y.sum(0) + 1))
    ),
    "weights of one on average": lambda m, x, y, v: (
        _each(m(x), y)[:, 0] * (v.exp() / v.exp().sum() * len(v))
    ).mean(),
    "by hand, less one": lambda m, x, y, v: (
        _each(m(x), y)[:, 0] / ((v - v.mean()).square().sum() / (len(v) - 1)).sqrt()
    ).mean(),
    "reversed Huber": _reversed_huber,
    "by error": _by_error,
    "by hardness": _by_hardness,
    "with spread": _with_spread,
    "spread": lambda m, x, y, v: -m(x).std(),
    "by losses": _by_losses,
    "scaled losses": _scaled_losses,
    "average of a loss": _average_of_a_loss,
    "columns cut off": _cut_off_columns,
    "population": lambda m, x, y, v: _each(m(x / torch.std(x, correction=0)), y).mean(),
}
"""Whose gradients are those of one device."""
GATHERED: dict[str, Loss] = {
    "a sum": lambda m, x, y, v: (_each(m(x), y) * y.sum()).mean(),
    "of a sum": lambda m, x, y, v: (_each(m(x), y) * y.sum().log()).mean(),
    "norm": lambda m, x, y, v: (_each(m(x), y)[:, 0] * v / v.norm()).mean(),
    "norm with a gradient": lambda m, x, y, v: (m(x) / m(x).norm()).abs().mean(),
    "selected": lambda m, x, y, v: m(x)[v > v.mean()].square().mean(),
}
"""Of numbers that workers cannot put together of their own ones: their rows are sent."""
LEFT: dict[str, Loss] = {
    "share": _share,
}
"""Which stay each worker's own, and are told."""
WITHOUT: dict[str, Loss] = {
    "constants": lambda m, x, y, v: (
        (_each(m(x), y).sum() + (y.clamp(0.1, 0.9) * y.clamp(0.1).log()).sum()) / y.numel()
    ),
    "logged": _logged,
    "rows": lambda m, x, y, v: (_each(m(x), y).mean(1) * x.mean(1)).mean(),
    "parameters": lambda m, x, y, v: _each(m(x), y).mean() * m[0].weight.mean(),
    "divisor": lambda m, x, y, v: (_each(m(x), y) * y).sum() / y.sum(),
    "size": lambda m, x, y, v: m(x)[: int(y.sum() * 0) + 1].view(-1).square().mean() + m(x).mean(),
}
"""In which there is none."""
LEAVES_OUT: dict[str, Loss] = {"left out": _left_out, "by class": _by_class}
OTHER_ROUNDS: dict[str, Loss] = {
    "columns of some": _columns_left_out,
    "numbers of some": _numbers_left_out,
}
"""In which a worker may have nothing in the second message."""
ALL = {**ALIKE, **GATHERED, **LEFT, **WITHOUT, **LEAVES_OUT, **OTHER_ROUNDS}


def assert_as_on_one_device(
    pool: Pool, size: int, loss: Loss, division: list[tuple[int, ...]], strategy: str, most: float
) -> None:
    """Train on several workers: parameters are no further than that from those of one device, with
    numbers that were sent, and without warnings."""
    for far, sent, said in pool.run(size, train, loss, division, strategy):
        assert far < most
        assert sent
        assert not said


def train(
    world: World, name: str | Loss, division: list[tuple[int, ...]], strategy: str
) -> tuple[float, int, list[str]]:
    """How far parameters are from those of one device, which has all workers' batches as one; the
    bytes of statistics that were sent, and warnings.

    Args:
        name: of the loss, or it.
        division: by step and worker, rows.
    """
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, OUTPUTS)).double()
    net.register_buffer("average", torch.zeros((), dtype=torch.float64))
    net.register_buffer("counts", torch.zeros(OUTPUTS, dtype=torch.float64))
    net.register_buffer("sums", torch.zeros(OUTPUTS, WIDTH, dtype=torch.float64))
    net.register_buffer("centres", torch.zeros(OUTPUTS, WIDTH, dtype=torch.float64))
    net.logged = torch.zeros((), dtype=torch.float64)
    start = {key: value.clone() for key, value in net.state_dict().items()}
    made = torch.Generator().manual_seed(4)
    given = [
        [
            (
                torch.randn(rows, WIDTH, generator=made, dtype=torch.float64) + 100,
                (torch.rand(rows, OUTPUTS, generator=made) < 0.3 + 0.4 * worker).double(),
                torch.randn(rows, generator=made, dtype=torch.float64) - worker,
            )
            for worker, rows in enumerate(counts)
        ]
        for counts in division
    ]
    loss = ALL[name] if isinstance(name, str) else name

    def stepping() -> Callable[..., torch.Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

        def step(*batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            found = loss(net, *batch)
            found.backward()
            optimizer.step()
            return found

        return step

    step = stepping()
    for parts in given:
        step(*(torch.cat(items) for items in zip(*parts, strict=True)))
    expected = {key: value.clone() for key, value in net.state_dict().items()}
    net.load_state_dict(start)
    step = stepping()
    with warnings_of_parallax() as said:
        runner = Runner(step, discover(step), Config(workers=1, strategy=strategy), world)
        before = runner.traffic.get("batch statistics", 0)
        for parts in given:
            runner.run(*parts[world.rank])
    (model,) = runner._objects.models
    far = difference(expected, dict(runner.state_dict()[model]))
    return far, runner.traffic.get("batch statistics", 0) - before, said
