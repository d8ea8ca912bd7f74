"""For workers of the tests on another device: what they make without saying where is there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")
DRAWN_FROM = ("rand", "randint", "randn", "randperm")
"""Functions that take a generator, which must be of the device that they draw on."""


def live_on(device: torch.device) -> None:
    """Make this process one of a script that calls ``torch.set_default_device`` at its top.

    Numbers of generators are those that the CPU would give.
    """
    torch.set_default_device(device)
    for name in DRAWN_FROM:
        setattr(torch, name, _drawn_on_the_processor(getattr(torch, name), device))


def _drawn_on_the_processor(
    draw: Callable[..., torch.Tensor], device: torch.device
) -> Callable[..., torch.Tensor]:
    @functools.wraps(draw)
    def drawn(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = kwargs.get("generator")
        if made is None or made.device != CPU or "device" in kwargs:
            return draw(*args, **kwargs)
        return draw(*args, device=CPU, **kwargs).to(device)

    return drawn
