"""Being one worker of several in a test: the environment that a launcher would give it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PARALLAX_SEED",
    "PARALLAX_LAUNCHED",
)


def worker_variables(rank: int, workers: int) -> dict[str, str]:
    """What torchrun sets for one of ``workers`` workers on this machine."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


@contextmanager
def as_worker(rank: int, workers: int, seed: int | None = None) -> Iterator[None]:
    """Makes this process worker ``rank`` of ``workers``, with the launcher's seed if given."""
    before = {name: os.environ.pop(name) for name in NAMES if name in os.environ}
    os.environ.update(worker_variables(rank, workers))
    if seed is not None:
        os.environ["PARALLAX_SEED"] = str(seed)
    try:
        yield
    finally:
        for name in NAMES:
            os.environ.pop(name, None)
        os.environ.update(before)


def on_each(
    workers: int,
    make: Callable[[], Any],
    read: Callable[[Any], Any] = list,
    seed: int | None = None,
) -> list[Any]:
    """What each worker reads from what it makes for itself, as separate processes would."""
    found = []
    for rank in range(workers):
        with as_worker(rank, workers, seed):
            found.append(read(make()))
    return found
