"""Python's garbage collection while a step is prepared."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collected_seldom"]

ALLOCATIONS = 100_000
YOUNGER = 20


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Collect less often.

    A captured step of thousands of variables is millions of objects that stay. Python looks at all
    of them again and again while more are made: most of the time that analysing such a step takes.
    """
    before = gc.get_threshold()
    if before[0] == 0 or before[0] >= ALLOCATIONS:
        yield  # as the user has it
        return
    gc.set_threshold(ALLOCATIONS, YOUNGER, YOUNGER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
