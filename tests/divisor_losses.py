"""Losses that divide by numbers of the batch, for the tests."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

LENGTH, CLASSES, WORDS, PAD = 6, 5, 30, 0
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of scores [rows, length, classes] and labels [rows, length]."""


def of_words(scores: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), **options)


def of_each(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    found = F.cross_entropy(scores.flatten(0, -2), labels.flatten(), reduction="none")
    return found.view(labels.shape)


def _shifted(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As language models do: labels are changed in place, and moved by one."""
    labels = labels.clone()
    labels[labels == PAD] = -100
    return of_words(scores[:, :-1], labels[:, 1:])


def _pieces(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    halves = zip(scores.split(3, 1), labels.split(3, 1), strict=True)
    return torch.stack([of_words(a, b, ignore_index=PAD) for a, b in halves]).mean()


def _row_by_row(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As detectors do: by how many places count in all rows."""
    whole, count = 0 * scores.sum(), torch.tensor(0)
    for one, own in zip(scores, labels, strict=True):
        chosen = own != PAD
        whole = whole + of_each(one, own)[chosen].sum()
        count = count + chosen.sum()
    return whole / count.clamp(min=1)


def _assigned(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Ge et al. 2021 (SimOTA): in each row as many as its labels say, of those that cost least."""
    whole, count = 0 * scores.sum(), torch.tensor(0)
    for one, own in zip(scores, labels, strict=True):
        each = of_each(one, own)
        most = own.topk(2)[0].sum() % 4 + 1
        chosen = each.detach().argsort().argsort() < most
        whole = whole + (each * chosen).sum()
        count = count + chosen.sum()
    return whole / count.clamp(min=1)


def _confident(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As with labels that the model has made."""
    sure = scores.softmax(-1).max(-1)[0] > 0.4
    return (of_each(scores, labels) * sure).sum() / sure.sum().clamp(min=1)


def _positive(values: torch.Tensor) -> torch.Tensor:
    return (values * (values > 0)).sum() / (values > 0).sum()


def _weights() -> torch.Tensor:
    return torch.arange(1, CLASSES + 1).double() / 3


ALIKE: dict[str, Loss] = {
    "its own scores": lambda s, y: _positive(s),
    "confident words": _confident,
    "all but what is no number": lambda s, y: torch.nanmean(
        torch.where(y[..., None] != PAD, s, math.nan).square()
    ),
    "sum of all but what is no number": lambda s, y: (
        s.square().masked_fill((y == PAD)[..., None], math.nan).nansum() / (y != PAD).sum()
    ),
    "labels left out": lambda s, y: of_words(s, y, ignore_index=PAD),
    "labels moved": _shifted,
    "weights of classes": lambda s, y: of_words(s, y, weight=_weights()),
    "weights and labels": lambda s, y: of_words(s, y, weight=_weights(), ignore_index=PAD),
    "smoothed": lambda s, y: of_words(s, y, ignore_index=PAD, label_smoothing=0.1),
    "images": lambda s, y: F.cross_entropy(s.transpose(1, 2), y, ignore_index=PAD),
    "mask": lambda s, y: (of_each(s, y) * (y != PAD)).sum() / (y != PAD).sum(),
    "all but a mask": lambda s, y: (
        (of_each(s, y) * (y != PAD)).sum() / (y.numel() - (y == PAD).long().sum())
    ),
    "twice all but a mask": lambda s, y: (
        (of_each(s, y) * (y != PAD)).sum()
        / (2 * (len(y) * y.shape[1] - torch.count_nonzero(y == PAD)).clamp(min=1))
    ),
    "weighted together": lambda s, y: (
        torch.stack([of_words(s, y, ignore_index=PAD), s.square().mean()])
        * torch.tensor([0.5, 2.0]).double()
    ).sum(),
    "mask and a little": lambda s, y: (
        (of_each(s, y) * (y != PAD)).sum() / ((y != PAD).double().sum() + 1e-8)
    ),
    "mask and a bound": lambda s, y: (
        torch.where(y != PAD, of_each(s, y), 0.0).sum() / (y != PAD).sum().clamp(min=1)
    ),
    "mask of elements": lambda s, y: (
        (s.square() * (y != PAD)[..., None]).sum(-1).sum()
        / (y != PAD)[..., None].expand_as(s).sum()
    ),
    "selected": lambda s, y: of_each(s, y)[y != PAD].sum() / (y != PAD).sum(),
    "selected words": lambda s, y: F.cross_entropy(s[y != PAD], y[y != PAD]),
    "number of Python": lambda s, y: (
        of_words(s, y, ignore_index=PAD, reduction="sum") / (y != PAD).sum().item()
    ),
    "one over": lambda s, y: (of_each(s, y) * (y != PAD)).sum() * (1.0 / (y != PAD).sum()),
    "means": lambda s, y: (of_each(s, y) * (y != PAD)).mean() / (y != PAD).double().mean(),
    "with a mean over rows": lambda s, y: (
        of_words(s, y, ignore_index=PAD)
        + 0.1 * s.square().mean()
        - 0.2 * (s[..., 0] * (y == 1)).sum() / (y == 1).sum().clamp(min=1)
    ),
    "counted in parts": lambda s, y: (
        of_words(s, y, ignore_index=PAD, reduction="sum")
        / sum((part != PAD).sum() for part in y.split(2, 1))
    ),
    "divided in place": lambda s, y: (
        of_words(s, y, ignore_index=PAD, reduction="sum").div_((y != PAD).sum()).mul_(2)
    ),
    "pieces": _pieces,
    "all labels": of_words,
}
"""Losses that are those of one device."""

SELECTED: dict[str, Loss] = {
    "selected by its own scores": lambda s, y: s[s > 0].mean(),
    "mean of selected": lambda s, y: of_each(s, y)[y != PAD].mean(),
    "halves": lambda s, y: of_each(s, y)[y != PAD].to(torch.bfloat16).square().mean().double(),
    "masked_select": lambda s, y: torch.masked_select(of_each(s, y), y != PAD).mean(),
    "indices": lambda s, y: s.square().flatten(0, 1)[(y != PAD).flatten().nonzero()[:, 0]].mean(),
    "squares": lambda s, y: F.mse_loss(s[y != PAD], s.detach()[y != PAD] + 1),
    "both sides": lambda s, y: F.mse_loss(s[y != PAD], s[y != PAD].flip(1).tanh()),
    "labels by their number": lambda s, y: F.cross_entropy(
        s[y != PAD], torch.zeros(s[y != PAD].shape[0], dtype=torch.long)
    ),
    "labels by their number, summed": lambda s, y: (
        F.cross_entropy(
            s[y != PAD], torch.ones(len(s[y != PAD]), dtype=torch.long), reduction="sum"
        )
        / (y != PAD).sum()
    ),
    "differences": lambda s, y: F.l1_loss(s[y != PAD], s.detach()[y != PAD] + 1),
    "smooth differences": lambda s, y: F.smooth_l1_loss(s[y != PAD], s.detach()[y != PAD] + 0.5),
    "logits": lambda s, y: F.binary_cross_entropy_with_logits(
        s[y != PAD], F.one_hot(y, CLASSES)[y != PAD].double()
    ),
    "probabilities": lambda s, y: F.binary_cross_entropy(
        s[y != PAD].sigmoid(), F.one_hot(y, CLASSES)[y != PAD].double()
    ),
    "dims": lambda s, y: s[y != PAD].square().mean((0, 1)) + s[y != PAD][:, 0].mean(0),
    "divergence": lambda s, y: F.kl_div(
        s[y != PAD].log_softmax(1), F.one_hot(y, CLASSES)[y != PAD].double(), reduction="batchmean"
    ),
    "soft labels": lambda s, y: F.cross_entropy(
        s[y != PAD], F.one_hot(y, CLASSES)[y != PAD].double()
    ),
    "rows with any": lambda s, y: (
        s[(y == 1).any(1)].square().mean() + s[y.amax(dim=-1) > 3].tanh().mean()
    ),
    "rows by all of them": lambda s, y: (
        (s.square().mean((1, 2)) * (y.argmax(1) > 1)).sum() / (y.argmax(1) > 1).sum().clamp(min=1)
    ),
    "row by row": _row_by_row,
    "assigned row by row": _assigned,
    "several": lambda s, y: (
        0.3 * of_each(s, y)[y != PAD].mean()
        - s[y == 1].square().mean() / 7
        + s.square().mean()
        + of_words(s, y, ignore_index=PAD)
    ),
}
"""Means over selections; of a selection of nothing only the loss is no number."""


def _with_some(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = scores.square().mean()
    chosen = labels == 1
    if chosen.any():
        loss = loss + scores[chosen].tanh().mean()
    others = scores[labels == 2]
    if len(others):
        loss = loss - F.l1_loss(others, others.detach() + 1) / 3
    return loss


def _in_a_line(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    first, second = labels == 1, labels == 2
    return (
        scores.square().mean()
        + (scores[first].tanh().mean() if first.any() else 0.0)
        + (scores[second].square().mean() if second.any() else scores.sum() * 0)
    )


def _by_class(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = 0 * scores.sum()
    each = of_each(scores, labels)
    for label in range(1, CLASSES):
        chosen = labels == label
        if chosen.any():
            loss = loss + each[chosen].mean() / label
            loss = loss + (scores[..., 0] * chosen).sum() / chosen.sum()
    return loss


def _by_one_number(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As detectors do: scores are divided by how many places count, which there may be none of."""
    chosen = labels != PAD
    count = chosen.sum().clamp(min=1)
    loss = scores.square().sum() / count
    if chosen.any():
        loss = loss + (of_each(scores, labels) * chosen).sum() / count
    return loss


def _by_helper(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    def mean(of: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (of * mask).sum() / mask.sum() if mask.any() else 0 * of.sum()

    each = of_each(scores, labels)
    return mean(each, labels != PAD) + mean(each.square(), labels == 1) - mean(each, labels == 3)


LEFT_OUT: dict[str, Loss] = {
    "terms of their own lines": _with_some,
    "terms of one line": _in_a_line,
    "classes": _by_class,
    "one number": _by_one_number,
    "a helper": _by_helper,
}
"""Losses that leave out a term where a batch has nothing for it."""

Packed = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of scores [words, classes], labels [words], and scores [sequences, classes]."""
PACKED: dict[str, Packed] = {
    "words": lambda s, y, _: F.cross_entropy(s, y),
    "squares": lambda s, y, _: F.mse_loss(s, F.one_hot(y, CLASSES).double()),
    "all": lambda s, y, _: s.square().mean() + s.abs().mean((0, 1)),
    "sequences": lambda _, y, q: F.smooth_l1_loss(q, q.detach() + 0.5),
    "both": lambda s, y, q: (
        F.cross_entropy(s, y, ignore_index=1)
        + 0.3 * q.tanh().square().mean()
        - F.l1_loss(s.sigmoid(), F.one_hot(y, CLASSES).double()) / 2
        + F.binary_cross_entropy_with_logits(s[y > 2], F.one_hot(y, CLASSES)[y > 2].double())
    ),
    "words by sequences": lambda s, y, q: F.cross_entropy(s, y, reduction="sum") / len(q),
    "a number of each": lambda s, y, q: (
        s.logsumexp(-1).square().mean() + 2 * q.sum(1).tanh().square().mean()
    ),
    "sums of these": lambda s, y, q: (
        F.cross_entropy(s, y, reduction="sum") / len(y) - q.sum(1).tanh().sum() / q.shape[0] / 3
    ),
    "by their elements": lambda s, y, q: (
        s.logsumexp(-1).sum() / y.numel() + q.tanh().sum() / q.numel()
    ),
    "along the first dimension": lambda s, y, q: (
        s.square().mean(0).sum() + q.mean(0).mean() / 2 + s.tanh().mean((0, 1))
    ),
    "weighted together": lambda s, y, q: (
        (
            torch.stack([F.cross_entropy(s, y), q.tanh().square().mean()])
            * torch.tensor([1.0, 0.5]).double()
        ).sum()
        + torch.tensor([2.0, -1.0]).double()
        @ torch.stack([s.square().mean(), q.sum(1).tanh().square().mean()])
    ),
    "one behind the other": lambda s, y, q: torch.cat([s.logsumexp(-1), q.sum(1).tanh()]).mean(),
    "all together": lambda s, y, q: (
        (s.logsumexp(-1).sum() + q.sum(1).tanh().sum()) / (len(s) + len(q))
    ),
    "bounded": lambda s, y, q: F.cross_entropy(s, y, reduction="sum") / max(len(y), 1),
    "in pieces": lambda s, y, q: sum(
        F.mse_loss(a, F.one_hot(b, CLASSES).double(), reduction="sum") / y.shape[0]
        for a, b in zip(s.split(2), y.split(2), strict=True)
    ),
}
"""Losses of batches that have no number of rows: words of sequences, one after the other."""


def _weighted(net: Net, x: torch.Tensor, y: torch.Tensor, mean: Loss) -> torch.Tensor:
    """Two tasks with weights that are learned, of which one is a mean over some of the batch."""
    scores = net(x)
    first, second = net.out.bias[:2].unbind()
    return (
        torch.exp(-first) * mean(scores, y)
        + first
        + 0.5 * torch.exp(-second) * scores.square().mean()
        + second
    )


_WEIGHTED_MEANS: dict[str, Loss] = {
    "labels left out": ALIKE["labels left out"],
    "mask": ALIKE["mask"],
    "one over": ALIKE["one over"],
    "means": ALIKE["means"],
    "half of a mask and a bound": lambda s, y: 0.5 * ALIKE["mask and a bound"](s, y),
    "mean of selected": SELECTED["mean of selected"],
    "squares": SELECTED["squares"],
    "logits": SELECTED["logits"],
}

OTHERS: dict[str, Loss] = {
    "no sum above": lambda s, y: s.square().mean() / (y != PAD).sum(),
    "a mean of other things": lambda s, y: s.square().sum() / (y.unique() != PAD).sum(),
    "classes that are there": lambda s, y: (
        (s.square() * (y != PAD)[..., None]).sum()
        / (torch.bincount(y.flatten(), minlength=CLASSES) > 0).sum()
    ),
    "pairs of rows": lambda s, y: _positive(s.flatten(1) @ s.flatten(1).T),
    "a part of a mean": lambda s, y: s[y != PAD].square().mean().sqrt(),
    "another division": lambda s, y: (
        s[y != PAD][:, 0].square().mean()
        + ((s[y != PAD] / s[y != PAD].shape[0]).sum(0).exp() * s[0, 0]).sum()
    ),
    "a part of another": lambda s, y: of_words(s, y, ignore_index=PAD).square(),
    "all, and a number": lambda s, y: (of_each(s, y) * (y != PAD)).sum() / ((y != PAD).sum() + 40),
}
"""Losses whose divisors are no totals: what they are made of is of all rows, which are sent."""


class Net(nn.Module):
    """Looks up words, and scores each."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 8)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.table(words))
        return found


def _weighted_by_variance(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same as the paper has it: divided by twice a variance."""
    scores = net(x)
    deviation = net.out.bias[0].exp()
    some = of_words(scores, y, ignore_index=PAD)
    return some / (2 * deviation.square()) + torch.log(deviation) + scores.square().mean()


GIVEN: dict[str, Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]] = {
    "divided": lambda s, y, n: summed(s, y) / n,
    "in place": lambda s, y, n: summed(s, y).div_(n),
    "each": lambda s, y, n: (of_each(s, y) * (y != PAD) / n).sum(),
    "one over": lambda s, y, n: summed(s, y) * (1.0 / n),
    "bounded": lambda s, y, n: (
        summed(s, y) / (n.clamp(min=1) if isinstance(n, torch.Tensor) else max(n, 1))
    ),
    "of two": lambda s, y, n: summed(s, y) / (n + n),
    "among others": lambda s, y, n: (
        0.3 * summed(s, y) / n + s.square().mean() + 0.1 * s.square().mean() / (0 * n + 2)
    ),
    "smoothed": lambda s, y, n: (
        (0.9 * summed(s, y) - 0.1 * s.log_softmax(-1).sum(-1)[y != PAD].sum()) / n
    ),
}
"""Losses of scores, labels and how many of these count, which comes with the batch."""


def summed(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return of_words(scores, labels, ignore_index=PAD, reduction="sum")


WEIGHTED: dict[str, Callable[..., torch.Tensor]] = {
    **{name: functools.partial(_weighted, mean=mean) for name, mean in _WEIGHTED_MEANS.items()},
    "variance": _weighted_by_variance,
}
"""Losses of the net, words and labels: means over some of the batch that a learned number
multiplies, or divides."""
