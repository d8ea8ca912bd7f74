"""Batches with parts that all workers have alike: for the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from equality import difference
from errors_help import warnings_of_parallax
from torch import nn

from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.weighing import Weighing
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

CLASSES, LENGTH, WIDTH = 7, 5, 4
Loss = Callable[..., torch.Tensor]
"""Of a model, inputs [rows, length, width], labels [rows], and what is given beside them."""


def _weights_of_classes(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, given: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Normalised in the step, by their sum and their largest."""
    shares = given["weights"] / given["weights"].sum()
    scores = model(x).mean(1) * (given["weights"] / given["weights"].max())
    return F.cross_entropy(scores, y, weight=CLASSES * shares)


def _prior(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, given: dict[str, torch.Tensor]
) -> torch.Tensor:
    prior = (given["weights"] - given["weights"].mean()) / given["weights"].std()
    return F.cross_entropy(model(x).mean(1) + prior, y)


def _masked(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, given: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Each time sees those before it; a number of the batch itself is there as well."""
    x = x - x.mean()
    scores = x @ x.transpose(1, 2)
    seen = scores.masked_fill(given["mask"], -torch.inf).softmax(-1) @ x
    return F.cross_entropy(model(seen).mean(1), y)


def _several(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, given: list[torch.Tensor]
) -> torch.Tensor:
    for one in given:
        x = one @ x / one.norm()
    return F.cross_entropy(model(x).mean(1), y)


def _of_rows(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, given: dict[str, torch.Tensor]
) -> torch.Tensor:
    """What is each row's own, although all have the same at first."""
    each = F.cross_entropy(model(x).mean(1), y, reduction="none")
    weights = given["weights"] / given["weights"].mean()
    return (each * weights).mean()


def _weights(_: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, CLASSES + 1, dtype=torch.float64)


def _mask(_: torch.Tensor) -> torch.Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


COMMON: dict[str, tuple[Loss, Any]] = {
    "weights of classes": (_weights_of_classes, lambda y: {"weights": _weights(y)}),
    "prior": (_prior, lambda y: {"weights": _weights(y)}),
    "not used": (lambda m, x, y, given: F.cross_entropy(m(x).mean(1), y), _weights),
    "mask": (_masked, lambda y: {"mask": _mask(y)}),
    "several": (
        _several,
        lambda _: [torch.eye(LENGTH, dtype=torch.float64) + place for place in range(2)],
    ),
}
OWN: dict[str, tuple[Loss, Any]] = {
    "weights of rows": (_of_rows, lambda y: {"weights": (y % 3 + 1).double()}),
}
"""Of each row."""


def _values(*shape: int, of: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(of))


FIRST: dict[str, tuple[list[list[torch.Tensor]], int | None, set[str]]] = {
    "rows": ([[_values(3, 2, of=w), _values(3, of=w)] for w in (1, 2)], 3, set()),
    "weights": ([[_values(3, 2, of=w), _values(5)] for w in (1, 2)], 3, {"1"}),
    "as many rows on one": ([[_values(n, 2, of=n), _values(5)] for n in (5, 3)], 5, {"1"}),
    "as many rows on both": ([[_values(5, 2, of=w), _values(5)] for w in (1, 2)], 5, set()),
    "lengths": ([[_values(6, 2, of=w), torch.tensor([1, 2, 3])] for w in (1, 2)], None, set()),
    "ones": ([[_values(6, 2, of=w), torch.ones(3)] for w in (1, 2)], None, set()),
    "all alike": ([[_values(3, 2), _values(5)] for _ in (1, 2)], None, set()),
    "other shapes": ([[_values(3, of=w), _values(2 * w, 12 // w)] for w in (1, 2)], None, set()),
    "pairs": ([[_values(3, 2, of=w), torch.tensor([[0, 1], [1, 2]])] for w in (1, 2)], 3, {"1"}),
    "large": ([[_values(3, of=w), _values(1 << 10, 1 << 11)] for w in (1, 2)], 3, {"1"}),
    "half": ([[_values(3, of=w), _values(5).bfloat16()] for w in (1, 2)], 3, {"1"}),
    "turned": ([[_values(3, of=w), _values(5, 4).t()[:, ::2]] for w in (1, 2)], 3, {"1"}),
    "scattered": ([[_values(3, of=w), torch.eye(5).to_sparse()] for w in (1, 2)], None, set()),
    "empty": ([[_values(3, of=w), torch.empty(0, 2)] for w in (1, 2)], None, set()),
}
"""Of two workers the first batches; by how many rows the first one's counts, and what is common."""


def agreed(world: World, name: str) -> tuple[int, bool, set[str]]:
    """What a usual batch counts, whether by rows, and which of its places are common."""
    flat = FIRST[name][0][world.rank]
    weighing = Weighing()
    count = weighing.agree(world, flat, [str(place) for place, _ in enumerate(flat)])
    return count, weighing.by_rows, set(weighing.common)


def train(
    world: World, name: str, division: list[tuple[int, ...]]
) -> tuple[float, bool, list[str], list[str]]:
    """How far parameters are from those of one device, which has all workers' rows as one batch;
    whether batches count by rows, which parts are common, and warnings.

    Args:
        name: of the case.
        division: by step and worker, rows.
    """
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
    start = {key: value.clone() for key, value in net.state_dict().items()}
    made = torch.Generator().manual_seed(4)
    given = [
        [
            (
                torch.randn(rows, LENGTH, WIDTH, generator=made, dtype=torch.float64),
                torch.randint(CLASSES, (rows,), generator=made) * (number > 0),
            )
            for rows in counts
        ]
        for number, counts in enumerate(division)
    ]
    loss, beside = {**COMMON, **OWN}[name]

    def stepping() -> Callable[..., torch.Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

        def step(x: torch.Tensor, y: torch.Tensor, given: Any) -> torch.Tensor:
            optimizer.zero_grad()
            found = loss(net, x, y, given)
            found.backward()
            optimizer.step()
            return found

        return step

    step = stepping()
    for parts in given:
        x, y = (torch.cat(items) for items in zip(*parts, strict=True))
        step(x, y, beside(y))
    expected = {key: value.clone() for key, value in net.state_dict().items()}
    net.load_state_dict(start)
    step = stepping()
    with warnings_of_parallax() as said:
        runner = Runner(step, discover(step), Config(workers=1), world)
        for parts in given:
            x, y = parts[world.rank]
            runner.run(x, y, given=beside(y))
    (model,) = runner._objects.models
    far = difference(expected, dict(runner.state_dict()[model]))
    weighing = runner._preparation.weighing
    return far, weighing.by_rows, sorted(weighing.common), said
