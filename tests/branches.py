"""Steps whose Python decides by the values of a batch, run alone or on workers: for the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from equality import difference
from errors_help import warnings_of_parallax
from torch import nn

from parallax.config import Config
from parallax.errors import ParallaxError
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

ROWS, WIDTH, LABELS = 6, 4, 5
Loss = Callable[["Net", torch.Tensor, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Two ways to score rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, LABELS)
        self.second = nn.Linear(WIDTH, LABELS)
        self.out = nn.Linear(WIDTH, LABELS)
        self.table = nn.Embedding(LABELS, WIDTH, sparse=True)
        self.always = nn.Embedding(LABELS, WIDTH, sparse=True)
        self.other = nn.Embedding(LABELS, WIDTH)
        self.bag = nn.EmbeddingBag(LABELS, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x)


def _either(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scores = net(x)
    return F.cross_entropy(scores, y) if (y > 2).any() else scores.square().mean()


def _checked(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if not (y >= 0).all() or y.max() >= LABELS:
        raise ValueError("no such label")
    return F.cross_entropy(net(x), y)


def _changed(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    kept = y.clone()
    kept[:2] = 0
    kept.view(-1)[2] = 1
    return net(x)[kept > 0].sum() if (kept > 2).any() else net(x).square().mean()


def _selected(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(net(x)[y > 0], x[y > 0].repeat(1, 2)[:, :LABELS])


def _pairs(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As SimCLR has it: all pairs but those with oneself."""
    scores = net(x)
    others = ~torch.eye(len(x), dtype=torch.bool)
    alike = (scores @ scores.t())[others].view(len(x), -1)
    return alike.logsumexp(1).mean()


def _in_shapes(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scores = net(x)
    both = torch.cat([scores, scores[y >= 0]])
    return F.cross_entropy(both, torch.cat([y, y[y >= 0]]))


def _one_way(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net.first(x) if y[0] > 2 else net(x), y)


def _heads(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As detectors have it: each head has a part of the loss if there is something for it."""
    loss = F.cross_entropy(net.out(x), y)
    if (y > 2).any():
        loss = loss + net.first(x).square().mean()
    if (y == 0).any():
        loss = loss + net.second(x).tanh().mean()
    return loss


def _passes(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same with several backward passes."""
    if (y > 2).any():
        net.first(x).square().mean().backward()
    else:
        (0 * net.out(x).sum()).backward()
    loss = F.cross_entropy(net.out(x), y)
    return loss + net.second(x).tanh().mean() if (y == 0).any() else loss


def _tables(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One table is read in any case, between two others."""
    loss = 0 * net.out(x).sum()
    if (y > 2).any():
        loss = loss + net.table(y).square().mean()
    loss = loss + F.cross_entropy(net.out(net.always(y)), y)
    if (y == 0).any():
        loss = loss + net.other(y).tanh().mean()
    return loss


def _bags(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(net.out(x), y)
    return loss + net.bag(y[None]).square().mean() if (y > 2).any() else loss


def _by_levels(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As trees are computed, level by level."""
    found = net(x)
    for level in range(int(y.max()) + 1):
        found = torch.where((y >= level)[:, None], found.tanh() + found.mean(), found)
    return found.square().mean()


LOSSES: dict[str, Loss] = {
    "either": _either,
    "by levels": _by_levels,
    "checked": _checked,
    "changed": _changed,
    "selected": _selected,
    "pairs": _pairs,
    "in shapes": _in_shapes,
    "one way": _one_way,
    "heads": _heads,
    "passes": _passes,
    "tables": _tables,
    "bags": _bags,
}


def labels(*ranges: tuple[int, int]) -> list[torch.Tensor]:
    """By batch, labels between two numbers."""
    made = torch.Generator().manual_seed(2)
    return [torch.randint(low, high, (ROWS,), generator=made) for low, high in ranges]


def train(
    world: World,
    name: str,
    given: list[list[torch.Tensor]],
    strategy: str = "HYBRID",
    kind: Callable[..., Any] = torch.optim.SGD,
    bound: float = 0.0,
) -> tuple[float, int] | str:
    """How far parameters are from those of one device that averages over workers' batches, and how
    often the step was captured; or what was refused.

    Args:
        given: by step and worker, the labels.
        strategy: a builder's name.
        kind: of the optimizer.
        bound: of gradients' norm.
    """
    torch.manual_seed(1)
    data = [[(torch.randn(ROWS, WIDTH).double(), y) for y in each] for each in given]
    loss = LOSSES[name]
    net = Net().double()
    start = {key: value.clone() for key, value in net.state_dict().items()}
    optimizer = kind(net.parameters(), 0.1)
    for parts in data:
        optimizer.zero_grad()
        for x, y in parts:
            loss(net, x, y).backward()
        for one in net.parameters():
            if one.grad is not None:
                one.grad /= len(parts)
        if bound:
            nn.utils.clip_grad_norm_(net.parameters(), bound)
        optimizer.step()
    expected = {key: value.clone() for key, value in net.state_dict().items()}
    net.load_state_dict(start)
    optimizer = kind(net.parameters(), 0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(net, x, y)
        value.backward()
        if bound:
            nn.utils.clip_grad_norm_(net.parameters(), bound)
        optimizer.step()
        return value

    config = Config(workers=1, strategy=strategy, weigh_batches=False)
    runner = Runner(step, discover(step), config, world)
    try:
        for parts in data:
            runner.run(*parts[world.rank])
    except ParallaxError as error:
        return f"{type(error).__name__}: {error}"
    (model,) = runner._objects.models
    found: dict[str, Any] = runner.state_dict()[model]
    return difference(expected, dict(found)), runner._preparation.captures.count


def told_of_counters(world: World, given: list[list[torch.Tensor]]) -> list[str]:
    """What is told of a step that counts only where there is something to count."""
    net = Net().double()
    net.register_buffer("uses", torch.zeros(()))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        if (y > 2).any():
            net.uses += 1
        F.cross_entropy(net.out(x), y).backward()
        optimizer.step()

    runner = Runner(step, discover(step), Config(workers=1), world)
    with warnings_of_parallax() as found:
        for labels in given:
            runner.run(torch.randn(ROWS, WIDTH).double(), labels[world.rank])
    return [one for one in found if "whether it sets" in one]
