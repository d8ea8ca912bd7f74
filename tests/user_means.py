"""Means over some of the batch, or of each of its rows: see user_steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from user_cases import STEPS, Built, case, mlp, numbers


def _of_items(rows: int, mean: Callable[..., torch.Tensor]) -> Built:
    """Each row has five places with a label; some of these count, of every row another number."""
    model = nn.Linear(4, 15).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def step(x: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        several = zip(model(x).view(-1, 5, 3), labels, kept, strict=True)
        losses = [mean(*item) for item in several]
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
        return loss

    def batch() -> tuple[torch.Tensor, ...]:
        kept = torch.rand(rows, 5) > 0.5
        kept[:, 0] = True
        return numbers(rows, 4), torch.randint(3, (rows, 5)), kept

    return [model], step, [batch() for _ in range(STEPS)]


@case
def masked_means_of_items(rows: int) -> Built:
    return _of_items(
        rows,
        lambda scores, labels, kept: (
            (F.cross_entropy(scores, labels, reduction="none") * kept).sum() / kept.sum()
        ),
    )


@case
def labels_left_out_of_items(rows: int) -> Built:
    return _of_items(
        rows,
        lambda scores, labels, kept: F.cross_entropy(scores, labels.masked_fill(~kept, -100)),
    )


@case
def selections_of_items(rows: int) -> Built:
    return _of_items(rows, lambda scores, labels, kept: F.cross_entropy(scores[kept], labels[kept]))


@case
def boxes_of_images(rows: int) -> Built:
    """A list has the boxes of each image, more or less of them."""
    model = mlp(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def step(images: torch.Tensor, boxes: list[torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        found = model(images)
        losses = [(found[place] - own).abs().mean() for place, own in enumerate(boxes)]
        loss = sum(losses) / len(losses)
        loss.backward()
        optimizer.step()
        return loss

    counts = torch.randint(1, 4, (STEPS, rows)).tolist()
    return [model], step, [(numbers(rows, 6), [numbers(n, 4) for n in own]) for own in counts]


def _of_some(rows: int, mean: Callable[..., torch.Tensor]) -> Built:
    """Of every three rows the first counts, and maybe others."""
    model = mlp(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = mean(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss

    def batch() -> tuple[torch.Tensor, ...]:
        return numbers(rows, 4), torch.randint(3, (rows,)) * (torch.arange(rows) % 3 > 0)

    return [model], step, [batch() for _ in range(STEPS)]


@case
def groups_of_rows(rows: int) -> Built:
    """Means over some of the answers to one question, of which each has three."""

    def mean(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        several = zip(scores.view(-1, 3, 3), labels.view(-1, 3), strict=True)
        return torch.stack([F.cross_entropy(*group, ignore_index=2) for group in several]).mean()

    return _of_some(rows, mean)


@case
def checked_means_of_some(rows: int) -> Built:
    """Workers tell each other what their means are over, and whether a check failed."""

    def mean(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(scores, labels, ignore_index=2)
        assert loss.isfinite()
        return loss

    return _of_some(rows, mean)


@case
def first_order_tasks(rows: int) -> Built:
    """Each row is a task, whose own gradient makes the model that its loss is of."""
    model = nn.Linear(2, 1).double()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        losses = []
        for task, wanted in zip(x, y, strict=True):
            own = dict(model.named_parameters())
            first = F.mse_loss(torch.func.functional_call(model, own, (task[:2],)), wanted[:2])
            gradients = torch.autograd.grad(first, list(own.values()))
            fast = {
                name: value - 0.3 * gradient
                for (name, value), gradient in zip(own.items(), gradients, strict=True)
            }
            found = torch.func.functional_call(model, fast, (task[2:],))
            losses.append(F.mse_loss(found, wanted[2:]))
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return [model], step, [(numbers(rows, 4, 2), numbers(rows, 4, 1)) for _ in range(STEPS)]


def _of_all_boxes(rows: int, number: Callable[[int], float]) -> Built:
    """DETR's: a sum over the boxes of all images, by how many these are."""
    model = mlp(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def step(images: torch.Tensor, boxes: list[torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        places = torch.cat([torch.full((len(own),), place) for place, own in enumerate(boxes)])
        far = F.l1_loss(model(images)[places], torch.cat(boxes), reduction="none")
        loss = 2 * far.sum() / number(sum(len(own) for own in boxes))
        loss.backward()
        optimizer.step()
        return loss

    counts = torch.randint(1, 4, (STEPS, rows)).tolist()
    return [model], step, [(numbers(rows, 6), [numbers(n, 4) for n in own]) for own in counts]


@case
def boxes_by_their_number(rows: int) -> Built:
    return _of_all_boxes(rows, lambda number: number)


@case
def boxes_by_their_number_as_a_tensor(rows: int) -> Built:
    return _of_all_boxes(
        rows, lambda number: torch.as_tensor([number], dtype=torch.float64).clamp(min=1).item()
    )


@case
def two_selections_in_one_mean(rows: int) -> Built:
    """As losses of preferences are written: those of good answers, and of bad ones."""
    model = mlp(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def step(x: torch.Tensor, good: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        scores = model(x).squeeze(-1)
        loss = torch.cat([scores[good].square(), 1.3 * torch.sigmoid(-scores[~good])]).mean()
        loss.backward()
        optimizer.step()
        return loss

    return [model], step, [(numbers(rows, 4), torch.rand(rows) > 0.4) for _ in range(STEPS)]


@case
def transcripts_by_their_letters(rows: int) -> Built:
    """Each worker's have another number of letters."""

    def mean(scores: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        letters, frames, lengths = others
        return F.ctc_loss(scores, letters, frames, lengths, reduction="none").sum() / lengths.sum()

    return _transcripts(rows, mean)


@case
def transcripts_in_one_line(rows: int) -> Built:
    """Their letters without the padding behind them."""

    def mean(scores: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        letters, frames, lengths = others
        found = letters[torch.arange(4) < lengths[:, None]]
        return F.ctc_loss(scores, found, frames, lengths)

    return _transcripts(rows, mean)


def _transcripts(rows: int, mean: Callable[..., torch.Tensor]) -> Built:
    model = mlp(5, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def step(
        x: torch.Tensor, frames: torch.Tensor, letters: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        optimizer.zero_grad()
        scores = model(x).transpose(0, 1).log_softmax(-1)
        loss = mean(scores, letters, frames, lengths)
        loss.backward()
        optimizer.step()
        return loss

    batches = []
    for _ in range(STEPS):
        sizes = torch.randint(8, 13, (rows,)), torch.randint(1, 5, (rows,))
        batches.append((numbers(rows, 12, 5), sizes[0], torch.randint(1, 6, (rows, 4)), sizes[1]))
    return [model], step, batches


@case
def over_the_places_of_boxes(rows: int) -> Built:
    """As detectors have it: a sum over all places by the number of those with a box."""
    model = nn.Linear(4, 15).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor, labels: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        scores = model(x).view(-1, 3)
        boxes = torch.nonzero(kept.flatten()).squeeze(1)
        wanted = F.one_hot(labels.flatten(), 3).double()
        every = F.binary_cross_entropy_with_logits(scores, wanted, reduction="sum")
        loss = every / max(1, boxes.numel())
        loss = loss + F.cross_entropy(
            scores[boxes], labels.flatten()[boxes], reduction="sum"
        ) / max(len(boxes), 1)
        loss.backward()
        optimizer.step()
        return loss

    def batch() -> tuple[torch.Tensor, ...]:
        kept = torch.rand(rows, 5) > 0.6
        kept[: rows // 2, 1:] = False
        return numbers(rows, 4), torch.randint(3, (rows, 5)), kept

    return [model], step, [batch() for _ in range(STEPS)]


@case
def mean_of_a_mean(rows: int) -> Built:
    """As trainers have it that may be given losses of several devices: ``loss.mean()``."""
    return _of_some(
        rows,
        lambda scores, labels: (
            (F.cross_entropy(scores, labels, ignore_index=0) + scores[labels == 0].square().mean())
            .mean()
            .sum()
        ),
    )
