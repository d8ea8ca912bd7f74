"""Losses that are means over some of a batch, run on several workers: for the tests."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from errors_help import warnings_of_parallax
from torch import nn

from parallax.config import Config
from parallax.graph.analysis.totals import Batches, means_left_alone, sums_by_inputs, totals
from parallax.graph.capture import capture
from parallax.graph.objects.discovery import discover
from parallax.graph.step_graph import StepGraph
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

LENGTH, CLASSES, WORDS, PAD = 6, 5, 30, 0
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of scores [rows, length, classes] and labels [rows, length]."""


def _words(scores: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), **options)


def _of_each(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return _words(scores, labels, reduction="none").view(labels.shape)


def _shifted(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As language models do: labels are changed in place, and moved by one."""
    labels = labels.clone()
    labels[labels == PAD] = -100
    return _words(scores[:, :-1], labels[:, 1:])


def _pieces(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    halves = zip(scores.split(3, 1), labels.split(3, 1), strict=True)
    return torch.stack([_words(a, b, ignore_index=PAD) for a, b in halves]).mean()


def _weights() -> torch.Tensor:
    return torch.arange(1, CLASSES + 1).double() / 3


ALIKE: dict[str, Loss] = {
    "labels left out": lambda s, y: _words(s, y, ignore_index=PAD),
    "labels moved": _shifted,
    "weights of classes": lambda s, y: _words(s, y, weight=_weights()),
    "weights and labels": lambda s, y: _words(s, y, weight=_weights(), ignore_index=PAD),
    "smoothed": lambda s, y: _words(s, y, ignore_index=PAD, label_smoothing=0.1),
    "images": lambda s, y: F.cross_entropy(s.transpose(1, 2), y, ignore_index=PAD),
    "mask": lambda s, y: (_of_each(s, y) * (y != PAD)).sum() / (y != PAD).sum(),
    "all but a mask": lambda s, y: (
        (_of_each(s, y) * (y != PAD)).sum() / (y.numel() - (y == PAD).long().sum())
    ),
    "twice all but a mask": lambda s, y: (
        (_of_each(s, y) * (y != PAD)).sum()
        / (2 * (len(y) * y.shape[1] - torch.count_nonzero(y == PAD)).clamp(min=1))
    ),
    "weighted together": lambda s, y: (
        torch.stack([_words(s, y, ignore_index=PAD), s.square().mean()])
        * torch.tensor([0.5, 2.0]).double()
    ).sum(),
    "mask and a little": lambda s, y: (
        (_of_each(s, y) * (y != PAD)).sum() / ((y != PAD).double().sum() + 1e-8)
    ),
    "mask and a bound": lambda s, y: (
        torch.where(y != PAD, _of_each(s, y), 0.0).sum() / (y != PAD).sum().clamp(min=1)
    ),
    "mask of elements": lambda s, y: (
        (s.square() * (y != PAD)[..., None]).sum(-1).sum()
        / (y != PAD)[..., None].expand_as(s).sum()
    ),
    "selected": lambda s, y: _of_each(s, y)[y != PAD].sum() / (y != PAD).sum(),
    "selected words": lambda s, y: F.cross_entropy(s[y != PAD], y[y != PAD]),
    "number of Python": lambda s, y: (
        _words(s, y, ignore_index=PAD, reduction="sum") / (y != PAD).sum().item()
    ),
    "one over": lambda s, y: (_of_each(s, y) * (y != PAD)).sum() * (1.0 / (y != PAD).sum()),
    "means": lambda s, y: (_of_each(s, y) * (y != PAD)).mean() / (y != PAD).double().mean(),
    "with a mean over rows": lambda s, y: (
        _words(s, y, ignore_index=PAD)
        + 0.1 * s.square().mean()
        - 0.2 * (s[..., 0] * (y == 1)).sum() / (y == 1).sum().clamp(min=1)
    ),
    "counted in parts": lambda s, y: (
        _words(s, y, ignore_index=PAD, reduction="sum")
        / sum((part != PAD).sum() for part in y.split(2, 1))
    ),
    "divided in place": lambda s, y: (
        _words(s, y, ignore_index=PAD, reduction="sum").div_((y != PAD).sum()).mul_(2)
    ),
    "pieces": _pieces,
    "all labels": _words,
}
"""Losses that are those of one device."""

SELECTED: dict[str, Loss] = {
    "mean of selected": lambda s, y: _of_each(s, y)[y != PAD].mean(),
    "halves": lambda s, y: _of_each(s, y)[y != PAD].to(torch.bfloat16).square().mean().double(),
    "masked_select": lambda s, y: torch.masked_select(_of_each(s, y), y != PAD).mean(),
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
    "several": lambda s, y: (
        0.3 * _of_each(s, y)[y != PAD].mean()
        - s[y == 1].square().mean() / 7
        + s.square().mean()
        + _words(s, y, ignore_index=PAD)
    ),
}
"""Means over selections; of a selection of nothing only the loss is no number."""

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
    "its own scores": lambda s, y: (s * (s > 0)).sum() / (s > 0).sum(),
    "selected by its own scores": lambda s, y: s[s > 0].mean(),
    "a part of a mean": lambda s, y: s[y != PAD].square().mean().sqrt(),
    "another division": lambda s, y: (
        s[y != PAD][:, 0].square().mean()
        + ((s[y != PAD] / s[y != PAD].shape[0]).sum(0).exp() * s[0, 0]).sum()
    ),
    "a part of another": lambda s, y: _words(s, y, ignore_index=PAD).square(),
    "all, and a number": lambda s, y: (_of_each(s, y) * (y != PAD)).sum() / ((y != PAD).sum() + 40),
}
"""Losses whose divisors are left as they are."""


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
    some = _words(scores, y, ignore_index=PAD)
    return some / (2 * deviation.square()) + torch.log(deviation) + scores.square().mean()


GIVEN: dict[str, Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]] = {
    "divided": lambda s, y, n: _summed(s, y) / n,
    "in place": lambda s, y, n: _summed(s, y).div_(n),
    "each": lambda s, y, n: (_of_each(s, y) * (y != PAD) / n).sum(),
    "one over": lambda s, y, n: _summed(s, y) * (1.0 / n),
    "bounded": lambda s, y, n: (
        _summed(s, y) / (n.clamp(min=1) if isinstance(n, torch.Tensor) else max(n, 1))
    ),
    "of two": lambda s, y, n: _summed(s, y) / (n + n),
    "among others": lambda s, y, n: (
        0.3 * _summed(s, y) / n + s.square().mean() + 0.1 * s.square().mean() / (0 * n + 2)
    ),
    "smoothed": lambda s, y, n: (
        (0.9 * _summed(s, y) - 0.1 * s.log_softmax(-1).sum(-1)[y != PAD].sum()) / n
    ),
}
"""Losses of scores, labels and how many of these count, which comes with the batch."""


def _summed(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return _words(scores, labels, ignore_index=PAD, reduction="sum")


WEIGHTED: dict[str, Callable[..., torch.Tensor]] = {
    **{name: functools.partial(_weighted, mean=mean) for name, mean in _WEIGHTED_MEANS.items()},
    "variance": _weighted_by_variance,
}
"""Losses of the net, words and labels: means over some of the batch that a learned number
multiplies, or divides."""


def of_tasks_at_once(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Two tasks whose learned weights are one vector."""
    scores, weights = net(x), net.out.bias[:2]
    tasks = torch.stack([_words(scores, y, ignore_index=PAD), scores.square().mean()])
    return (torch.exp(-weights) * tasks + weights).sum()


def line_left_alone(loss: Callable[..., torch.Tensor]) -> str:
    """Where a loss of the net, words and labels has a mean that stays each worker's own."""
    graph, names = _captured(loss, *data([(4,)], seed=5)[0][0])
    return str(means_left_alone(graph, names, Batches(leave_out=True)) or "")


def line_of_sums_by_inputs(counted: bool) -> str:
    """Where a loss divides more than a sum over the batch by how many labels there are.

    Args:
        counted: in the step, not before it.
    """

    def loss(net: Net, x: torch.Tensor, y: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        whole = _summed(net(x), y) + net.out.weight.square().sum()
        return whole / ((y != PAD).sum() if counted else count.clamp(min=1))

    x, y = data([(4,)], seed=5)[0][0]
    return str(sums_by_inputs(*_captured(loss, x, y, (y != PAD).sum())) or "")


def of_boxes(last: int) -> int:
    """How many divisors are found of a sum over the boxes of all images, where sizes are symbols.

    Args:
        last: how many boxes the last image has.
    """
    net = nn.Linear(3, 4).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    def step(images: torch.Tensor, boxes: list[torch.Tensor]) -> None:
        optimizer.zero_grad()
        places = torch.cat([torch.full((len(own),), place) for place, own in enumerate(boxes)])
        far = F.l1_loss(net(images)[places], torch.cat(boxes), reduction="none")
        (far.sum() / sum(len(own) for own in boxes)).backward()
        optimizer.step()

    boxes = [torch.rand(count, 4, dtype=torch.float64) for count in (3, 2, last)]
    batch = torch.rand(3, 3, dtype=torch.float64), boxes
    graph = capture(step, discover(step), batch, {}, varying={(1, 0): 0, (2, 0): 1})
    names = [name for name, _ in net.named_parameters()]
    return len(totals(graph, names, Batches(by_rows=False)))


def uses_of_micro_batches(rows: int) -> list[int]:
    """Of two sets of which three micro-batches have means, how many gradients each mean divides.

    Args:
        rows: of each micro-batch's sets.
    """
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    def step(some: torch.Tensor, others: torch.Tensor) -> None:
        optimizer.zero_grad()
        for one, other in zip(some.chunk(3), others.chunk(3), strict=True):
            far = net(other).sum(-1).square()
            ((net(one).logsumexp(-1).mean() + far.sum() / far.shape[0]) / 3).backward()
        optimizer.step()

    batch = [torch.randint(WORDS, (3 * rows,)) for _ in range(2)]
    graph = capture(step, discover(step), batch, {})
    names = [name for name, _ in net.named_parameters()]
    return [len(one.uses) for one in totals(graph, names, Batches(by_rows=False))]


def _captured(
    loss: Callable[..., torch.Tensor], *batch: torch.Tensor
) -> tuple[StepGraph, list[str]]:
    """A step of the net, and its variables."""
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(net, *batch)
        value.backward()
        optimizer.step()
        return value

    graph = capture(step, discover(step), batch, {})
    return graph, [name for name, _ in net.named_parameters()]


def data(division: Sequence[Sequence[int]], seed: int) -> list[list[tuple[torch.Tensor, ...]]]:
    """By step and worker, words and labels; 0 rows, or fewer for rows of labels left out alone."""
    made = torch.Generator().manual_seed(seed)
    found = []
    for counts in division:
        parts = []
        for count in counts:
            rows = abs(count)
            words = torch.randint(WORDS, (rows, LENGTH), generator=made)
            labels = torch.randint(1, CLASSES, (rows, LENGTH), generator=made)
            lengths = torch.randint(1, LENGTH + 1, (rows, 1), generator=made)
            left_out = torch.arange(LENGTH).expand(rows, LENGTH) >= (lengths if count > 0 else 0)
            parts.append((words, labels.masked_fill(left_out, PAD)))
        found.append(parts)
    return found


def packed_data(
    division: Sequence[Sequence[Sequence[int]]], seed: int
) -> list[list[tuple[torch.Tensor, ...]]]:
    """By step and worker, for sequences of these lengths: words, labels, and the lengths."""
    made = torch.Generator().manual_seed(seed)
    return [
        [
            (
                torch.randint(WORDS, (sum(lengths),), generator=made),
                torch.randint(CLASSES, (sum(lengths),), generator=made),
                torch.tensor(lengths, dtype=torch.int64),
            )
            for lengths in parts
        ]
        for parts in division
    ]


def train(
    world: World, name: str, division: Sequence[Sequence[int]], settings: dict[str, Any]
) -> tuple[float, int]:
    """How far parameters are from those of one device, and the bytes that this worker sent for
    totals.

    Args:
        name: of the loss.
        division: by step and worker, how many rows; fewer than none where no label counts.
        settings: beside the number of workers.
    """
    loss = {**ALIKE, **SELECTED, **OTHERS}[name]
    batches = data(division, seed=5)
    return _train(world, lambda net, x, y: loss(net(x), y), batches, settings)


def train_given(
    world: World, name: str, kind: type, division: Sequence[Sequence[int]], settings: dict[str, Any]
) -> tuple[float, int]:
    """As :func:`train`, with a number of labels that comes with the batch.

    Args:
        kind: of the number, ``torch.Tensor`` too.
    """
    loss = GIVEN[name]
    batches: Any = [
        [(x, y, _as(kind, (y != PAD).sum())) for x, y in parts] for parts in data(division, seed=5)
    ]
    return _train(world, lambda net, x, y, n: loss(net(x), y, n), batches, settings)


def _as(kind: type, count: torch.Tensor) -> Any:
    return count if kind is torch.Tensor else kind(count)


def train_weighted(world: World, name: str, division: Sequence[Sequence[int]]) -> tuple[float, int]:
    """As :func:`train`, with learned weights of two tasks."""
    return _train(world, WEIGHTED[name], data(division, seed=5), {})


def train_scaled(world: World, kind: str, division: Sequence[Sequence[int]]) -> tuple[float, int]:
    """As :func:`train`, of a mean over labels that is multiplied as a whole, by another number in
    each step.

    Args:
        kind: of the number: of the batch, as Python's or as a tensor; in an object of the user; or
            a tensor that is state.
    """
    kept = types.SimpleNamespace(value=torch.ones(()).double() if kind == "state" else 1.0)
    count = itertools.count()

    def number(step: int) -> float:
        return 1 / (1 + step % len(division))

    def prepare() -> None:
        value = number(next(count))
        if kind == "state":
            kept.value.fill_(value)
        else:
            kept.value = value

    def loss(net: Net, x: torch.Tensor, y: torch.Tensor, given: Any = None) -> torch.Tensor:
        mean = ALIKE["mask and a bound"](net(x), y)
        return mean * (kept.value if given is None else given)

    batches: list[list[tuple[Any, ...]]] = [[*parts] for parts in data(division, seed=5)]
    if kind in ("float", "tensor"):
        as_kind = torch.tensor if kind == "tensor" else float
        batches = [
            [(x, y, as_kind(number(step))) for x, y in parts] for step, parts in enumerate(batches)
        ]
    return _train(world, loss, batches, {}, prepare, lambda items: items[0])


def train_in_passes(world: World, division: Sequence[Sequence[int]]) -> tuple[float, int]:
    """As :func:`train`, with a backward pass for each half of the words' places."""

    def loss(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, last = (
            _words(net(a), b, ignore_index=PAD) / 2
            for a, b in zip(x.chunk(2, 1), y.chunk(2, 1), strict=True)
        )
        first.backward()
        return last

    return _train(world, loss, data(division, seed=5), {})


BEGUN: dict[str, Callable[[torch.Tensor], None]] = {
    "half": lambda loss: loss.sum().backward(torch.tensor(0.5).double()),
    "as many halves": lambda loss: loss.backward(torch.full_like(loss, 0.5)),
    "ones": lambda loss: torch.autograd.backward([loss], [torch.ones_like(loss)]),
}
"""Ways to begin a backward pass with other gradients than none, of a loss for each label."""


def train_begun(world: World, name: str, division: Sequence[Sequence[int]]) -> tuple[float, int]:
    """As :func:`train`, of a mean over labels, with such a backward pass."""

    def loss(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _of_each(net(x), y) * (y != PAD) / (y != PAD).sum().clamp(min=1)

    return _train(world, loss, data(division, seed=5), {}, backward=BEGUN[name])


def told_of_pieces(world: World, sizes: Sequence[int]) -> list[str]:
    """What is logged of means over as many sets of labels as the worker's batch has pieces.

    Args:
        sizes: by worker, in pieces of how many words its batch is split.
    """

    def loss(net: Net, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        size = sizes[world.rank]
        halves = zip(net(words).split(size, 1), labels.split(size, 1), strict=True)
        return torch.stack([_words(a, b, ignore_index=PAD) for a, b in halves]).sum()

    with warnings_of_parallax() as found:
        _train(world, loss, data([(2, 2)] * 4, seed=5), {})
    return [one for one in found if "differing terms" in one]


def train_packed(
    world: World,
    name: str,
    division: Sequence[Sequence[Sequence[int]]],
    settings: dict[str, Any],
) -> tuple[float, int]:
    """As :func:`train`, by the lengths of sequences."""
    loss = PACKED[name]

    def value(net: Net, words: torch.Tensor, labels: torch.Tensor, lengths: torch.Tensor) -> Any:
        scores = net(words)
        ends = lengths.cumsum(0)
        before = F.pad(scores.cumsum(0), (0, 0, 1, 0))
        return loss(scores, labels, before[ends] - before[ends - lengths])

    return _train(world, value, packed_data(division, seed=5), settings)


def _train(
    world: World,
    loss: Callable[..., torch.Tensor],
    batches: Sequence[Sequence[tuple[Any, ...]]],
    settings: dict[str, Any],
    prepare: Callable[[], None] = lambda: None,
    of_all: Callable[[Sequence[Any]], Any] = sum,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
) -> tuple[float, int]:
    """As :func:`train`.

    Args:
        backward: of the loss.
        prepare: is called before each step.
        of_all: what one device has for numbers of all workers' batches.
    """
    torch.manual_seed(3)
    net = Net().double()
    start = {key: value.clone() for key, value in net.state_dict().items()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(net, *batch)
        backward(value)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        return value.detach().sum()

    for parts in batches:
        prepare()
        step(*(_together(items, of_all) for items in zip(*parts, strict=True)))
    expected = {key: value.clone() for key, value in net.state_dict().items()}
    net.load_state_dict(start)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    runner = Runner(step, discover(step), Config(workers=1, **settings), world)
    before = world.traffic.sent["batch totals"]
    for parts in batches:
        prepare()
        runner.run(*parts[world.rank])
    (model,) = runner._objects.models
    found: dict[str, Any] = runner.state_dict()[model]
    far = max(float((expected[key] - found[key]).abs().max()) for key in expected)
    return far, world.traffic.sent["batch totals"] - before


def _together(items: Sequence[Any], of_all: Callable[[Sequence[Any]], Any]) -> Any:
    """Of all workers' batches, what one device has."""
    if isinstance(items[0], torch.Tensor) and items[0].dim():
        return torch.cat([*items])
    return of_all(items)
