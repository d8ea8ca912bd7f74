"""``torch.set_default_device`` and ``with torch.device(...)`` in a script: for its own code alone.

What the runtime makes without saying where belongs to the processor, whatever the script has set;
the step itself, when it is captured, makes its tensors where the script says.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch
from torch.utils import _device

P = ParamSpec("P")
R = TypeVar("R")

_PROCESSOR = torch.device("cpu")
_set_by_script: torch.device | None = None
"""The script's default device while the runtime runs; None if it has none."""


def on_processor(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function of the runtime make on the processor what it makes without saying where."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        global _set_by_script
        current: torch.device | None = _device.CURRENT_DEVICE
        if current is None or current == _PROCESSOR:
            return function(*args, **kwargs)
        before, _set_by_script = _set_by_script, current
        try:
            with _PROCESSOR:
                return function(*args, **kwargs)
        finally:
            _set_by_script = before

    return run


@contextlib.contextmanager
def as_script_has_it() -> Iterator[None]:
    """Within such a function: the script's own code, with its own default device."""
    if _set_by_script is None:
        yield
        return
    with _set_by_script:
        yield
