"""What the tests of error messages share."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from parallax.config import Config
from parallax.errors import ParallaxError
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World, single
from parallax.runtime.runner import Runner

MARK = "# here"


def alone(step: Any, **given: Any) -> Runner:
    """A runner of one worker."""
    return Runner(step, discover(step, **given), Config(workers=1), single(torch.device("cpu")))


def among(world: World, step: Any, run_option: Any = "HYBRID", **settings: Any) -> Runner:
    """A runner of one of several workers."""
    config = Config(run_option=run_option, workers=1, seed=7, **settings)
    return Runner(step, discover(step), config, world)


def linear(seed: int = 0) -> tuple[nn.Linear, torch.optim.SGD]:
    """A model and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def rows(count: int = 4) -> torch.Tensor:
    """A batch for it."""
    return torch.arange(3.0 * count).reshape(count, 3) / 10


def marked_line(function: Callable[..., Any]) -> str:
    """File and line of the line marked in a function's source, as messages give them."""
    source, first = inspect.getsourcelines(function)
    numbers = [first + i for i, line in enumerate(source) if line.rstrip().endswith(MARK)]
    assert len(numbers) == 1, f"{function.__name__} marks {len(numbers)} lines"
    return f"{inspect.getsourcefile(function)}:{numbers[0]}"


def raised(case: Callable[[], Any], kind: type[ParallaxError], *fragments: str) -> ParallaxError:
    """The error of ``case``: of exactly this class, with all fragments in its message."""
    with pytest.raises(ParallaxError) as caught:
        case()
    error = caught.value
    assert type(error) is kind, f"{type(error).__name__}: {error}"
    for fragment in fragments:
        assert fragment in str(error), f"{fragment!r} not in:\n{error}"
    return error


@contextmanager
def warnings_of_parallax(least: int = logging.WARNING) -> Iterator[list[str]]:
    """What the package's logger says meanwhile, at this level or above."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = logging.getLogger("parallax"), Keep(least)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
