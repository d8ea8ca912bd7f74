"""Steps as people write them, on several workers and on one device.

Each takes a seed's whole batch of ``rows`` rows and gives its models, its step and its batches. The
first dimension of every tensor of a batch is the rows; numbers are the same for all.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import torch
import user_counters  # noqa: F401 - makes cases
import user_gradients
import user_guesses  # noqa: F401 - makes cases
import user_indexing  # noqa: F401 - makes cases
import user_labels  # noqa: F401 - makes cases
import user_means  # noqa: F401 - makes cases
import user_memories  # noqa: F401 - makes cases
import user_models  # noqa: F401 - makes cases
import user_packed  # noqa: F401 - makes cases
import user_state  # noqa: F401 - makes cases
import user_tables  # noqa: F401 - makes cases
from equality import difference
from torch import nn
from user_cases import CASES, LOCAL, SEED, Built

from parallax.config import Config
from parallax.errors import StrategyError
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

ADVERSARIES = user_gradients.ADVERSARIES

# -- Containers of batches ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    labels: torch.Tensor


class Named(collections.UserDict):  # type: ignore[type-arg]
    """As tokenizers give it."""


class Settings:
    """No part of a batch: a value like any other, although it knows itself."""

    share = 1.0

    def __init__(self) -> None:
        self.whole = self


SETTINGS = Settings()


class Masked:
    """As the code beside papers makes batches, with what is computed from them."""

    def __init__(self, x: torch.Tensor, labels: torch.Tensor) -> None:
        self.x, self.labels = x, labels
        self.parts = {"mask": labels >= 0}
        self.settings = SETTINGS


class Slotted:
    __slots__ = ("labels", "x")

    def __init__(self, x: torch.Tensor, labels: torch.Tensor) -> None:
        self.x, self.labels = x, labels


# -- Running them ---------------------------------------------------------------------------


def build(name: str, rows: int) -> Built:
    torch.manual_seed(SEED)
    return CASES[name](rows)


def _between(name: str, models: list[nn.Module]) -> None:
    """What the script does between two steps."""
    if name == "thawing":
        models[0].requires_grad_(True)


def compare(
    world: World, name: str, builder: Any, late: bool = False, **settings: Any
) -> dict[str, float]:
    """How far parameters, and what the first step returns, are from one device's.

    Args:
        late: dense updates are finished in the steps that follow.
    """
    models, step, batches = build(name, LOCAL * world.size)
    returned = []
    for batch in batches:
        returned.append(step(*batch))
        _between(name, models)
    expected = [dict(model.state_dict()) for model in models]

    models, step, batches = build(name, LOCAL * world.size)
    config = Config(strategy=builder, workers=1, **settings)
    runner = Runner(step, discover(step), config, world)
    part = slice(world.rank * LOCAL, (world.rank + 1) * LOCAL)
    own = [
        tuple(item if isinstance(item, int | float) else item[part] for item in batch)
        for batch in batches
    ]
    for number, batch in enumerate(runner.ahead(own, late_updates=True) if late else own):
        result = runner.run(*batch)
        if number == 0:
            start = result
        _between(name, models)
    state = runner.state_dict()
    names = {id(model): name for name, model in runner._objects.models.items()}
    found = [dict(state[names[id(model)]]) for model in models]
    shared = {} if "norms" not in name else {"norms": difference(returned[0][-1], start[-1])}
    return {"parameters": difference(expected, found), **shared}


def refused(world: World, name: str, builder: Any) -> str:
    """Why a step is not run; empty if it is."""
    try:
        compare(world, name, builder)
    except StrategyError as error:
        return str(error)
    return ""
