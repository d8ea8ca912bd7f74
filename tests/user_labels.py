"""Means over labels of sentences, and of several tasks, as people write them: see user_steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from user_cases import Built, case, numbers

WORDS = 7
Mean = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _of_sentences(rows: int, mean: Mean) -> Built:
    """Of sentences of a length that changes; labels are those of the next word."""
    model = nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, WORDS)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def step(words: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        labels = words.masked_fill(torch.arange(words.shape[1]) >= lengths[:, None], -100)
        loss = mean(model(words), labels, lengths)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def batch(length: int) -> tuple[torch.Tensor, ...]:
        lengths = torch.randint(2, length + 1, (rows,))
        lengths[::3] = length
        return torch.randint(WORDS, (rows, length)), lengths

    return [model], step, [batch(length) for length in (6, 6, 5)]


def _sentences(mean: Mean) -> None:
    def build(rows: int) -> Built:
        return _of_sentences(rows, mean)

    build.__name__ = mean.__name__
    case(build)


@_sentences
def counted_labels_of_next_words(
    scores: torch.Tensor, labels: torch.Tensor, _: torch.Tensor
) -> torch.Tensor:
    labels = labels[:, 1:].reshape(-1)
    scores = scores[:, :-1].reshape(-1, WORDS)
    return F.cross_entropy(scores, labels, reduction="sum") / (labels != -100).sum()


@_sentences
def kept_losses_of_next_words(
    scores: torch.Tensor, labels: torch.Tensor, _: torch.Tensor
) -> torch.Tensor:
    kept = (labels[:, 1:] != -100).flatten()
    losses = F.cross_entropy(
        scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
    )
    return losses[kept].sum() / max(1, int(kept.sum()))


@_sentences
def smoothed_labels_of_next_words(
    scores: torch.Tensor, labels: torch.Tensor, _: torch.Tensor
) -> torch.Tensor:
    own = scores[:, :-1].reshape(-1, WORDS)
    return F.cross_entropy(own, labels[:, 1:].reshape(-1), label_smoothing=0.1)


@_sentences
def places_of_next_words(
    scores: torch.Tensor, labels: torch.Tensor, _: torch.Tensor
) -> torch.Tensor:
    return F.cross_entropy(scores[:, :-1].transpose(1, 2), labels[:, 1:])


@_sentences
def times_the_width(
    scores: torch.Tensor, labels: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    kept = torch.arange(scores.shape[1])[None] < lengths[:, None]
    sizes = (scores.abs() * kept.unsqueeze(-1)).sum()
    return sizes / (kept.sum() * scores.size(-1))


@_sentences
def selected_by_length(
    scores: torch.Tensor, labels: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    kept = torch.arange(scores.shape[1])[None] < lengths[:, None]
    return scores.square().mean(-1).masked_select(kept).mean()


@_sentences
def two_means_of_a_selection(
    scores: torch.Tensor, labels: torch.Tensor, _: torch.Tensor
) -> torch.Tensor:
    kept = labels >= 2
    first, second = scores[..., 0], scores[..., 1]
    return F.smooth_l1_loss(first[kept], labels[kept] / 7) + second[kept].abs().mean()


@_sentences
def divided_in_place(scores: torch.Tensor, labels: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    losses = {
        "of words": 0.5 * F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum"),
        "of sizes": (scores**2 * (labels >= 2)[..., None]).sum(),
    }
    losses["of words"] += F.l1_loss(scores[..., 0], (labels == 0).double(), reduction="sum")
    losses["of words"] /= (labels >= 0).sum()
    for name in ("of sizes",):
        losses[name] /= torch.max((labels >= 2).sum(), torch.tensor([1.0]))[0]
    return losses["of words"] + losses["of sizes"].mul_(0.3)


@_sentences
def a_sum_of_quotients(scores: torch.Tensor, labels: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    kept = labels >= 2
    sizes = scores.abs().sum(-1) * kept
    sizes /= kept.sum()
    return (scores[..., 0] ** 2 * kept / kept.sum()).sum() + sizes.sum()


@_sentences
def at_least_one(scores: torch.Tensor, labels: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    kept = (labels == 3).double()
    sizes = (scores.square().sum(-1) * kept).sum()
    return (sizes / torch.max(kept.sum(), torch.tensor([1.0]).double())).sum()


def _of_tasks(rows: int, weigh: Callable[..., torch.Tensor]) -> Built:
    """Two tasks, of which some rows have labels, and learned weights."""

    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.heads = nn.Linear(4, 5), nn.Linear(5, 4)
            self.weights = nn.ParameterList([torch.full((), 0.3), torch.full((), -0.2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.heads(self.trunk(x).tanh())
            return scores

    model = Tasks().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def step(x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        scores, kept = model(x), y > 0
        first = ((scores[:, 0] - y).square() * kept).sum() / kept.sum()
        loss = weigh(*model.weights, first, scores[:, 1:], labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def batch() -> tuple[torch.Tensor, ...]:
        y = numbers(rows)
        y[::3] = y[::3].abs() + 0.1
        return numbers(rows, 4), y, torch.randint(3, (rows,)) - (torch.arange(rows) % 3 == 1) * 100

    def labelled() -> tuple[torch.Tensor, ...]:
        x, y, labels = batch()
        return x, y, labels.masked_fill(labels < 0, -100)

    return [model], step, [labelled() for _ in range(3)]


@case
def one_weight_of_two_tasks(rows: int) -> Built:
    return _of_tasks(
        rows,
        lambda weight, _, first, scores, labels: (
            (-weight).exp() * (first + 0.5 * F.cross_entropy(scores, labels)) + weight
        ),
    )


@case
def tasks_by_their_variances(rows: int) -> Built:
    return _of_tasks(
        rows,
        lambda one, other, first, scores, labels: (
            first / (2 * one.exp() ** 2)
            + one
            + F.cross_entropy(scores, labels) / (2 * other.exp() ** 2)
            + other
        ),
    )


@case
def weighted_smoothed_labels(rows: int) -> Built:
    return _of_tasks(
        rows,
        lambda one, other, first, scores, labels: (
            (-one).exp() * F.cross_entropy(scores, labels, label_smoothing=0.1)
            + one
            + other * first
        ),
    )
