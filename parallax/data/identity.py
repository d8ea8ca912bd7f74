"""Which part of the data is this worker's, and the seed that all workers have in common.

Nothing here is remembered. ``shard()`` may be called in the process that starts the workers, before
there are any, so each epoch asks anew.
"""

from __future__ import annotations

from typing import Any

from parallax.cluster.environment import launch_seed, worker_environment

__all__ = [
    "DEFAULT_SEED",
    "common_seed",
    "known_sizes",
    "note_size",
    "num_shards",
    "shard_id",
    "worker_identity",
]

# What the orders of a run are drawn from when neither the launcher nor the loader gives a seed. Any
# number does, as long as it is the same in each process; torch's own seed is not.
DEFAULT_SEED = 0


def worker_identity() -> tuple[int, int]:
    """This worker's part of the data as ``(shard_id, num_shards)``; ``(0, 1)`` outside a run.

    Raises:
        LaunchError: the environment contradicts itself about which worker this is.
    """
    worker = worker_environment()
    return worker.rank, worker.world_size


def num_shards() -> int:
    """How many parts the data is split into: the number of workers.

    For input code that ``shard()`` cannot split, such as a reader that opens every
    ``num_shards()``-th file. Ask when reading starts, not at import: in the process that starts the
    workers the answer is 1.

    Raises:
        LaunchError: the environment contradicts itself about which worker this is.
    """
    return worker_identity()[1]


def shard_id() -> int:
    """Which of the ``num_shards()`` parts this worker reads, from 0.

    Raises:
        LaunchError: the environment contradicts itself about which worker this is.
    """
    return worker_identity()[0]


def common_seed(loader_seed: int | None) -> int:
    """The number from which all workers draw the same order.

    Args:
        loader_seed: the initial seed of the DataLoader's own generator, if it has one.

    Returns:
        The launcher's seed (``PARALLAX_SEED``), else ``loader_seed``, else ``DEFAULT_SEED``.

    Raises:
        LaunchError: ``PARALLAX_SEED`` is no integer from 0.
    """
    seed = launch_seed()
    if seed is not None:
        return seed
    return DEFAULT_SEED if loader_seed is None else loader_seed


_sizes: list[str] = []


def note_size(data: object) -> None:
    """Remember the size of data that was split, for workers to compare before the first step."""
    source: Any = getattr(data, "dataset", data)
    try:
        size = len(source)
    except TypeError:  # a stream has none
        return
    _sizes.append(f"a {type(source).__name__} of {size} items")


def known_sizes() -> list[str]:
    """What this process split so far, in order."""
    return list(_sizes)
