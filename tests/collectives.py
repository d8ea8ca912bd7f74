"""What the collectives of ``benchmarks.exchanges`` move, on real workers."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks import exchanges
from benchmarks.exchanges import COLLECTIVES, Shards
from parallax.runtime.comm.world import World


def moved(world: World) -> dict[str, bool]:
    """By collective, whether this worker has afterwards what it should."""
    rank, size = dist.get_rank(), dist.get_world_size()
    every = torch.arange(size).float().repeat_interleave(3)
    total = float(sum(range(1, size + 1)))
    expected: dict[str, Callable[[Shards], bool]] = {
        # Worker w sends w + 1 everywhere.
        **dict.fromkeys(
            ("all_to_all", "in_parts", "at_once", "in_rounds"),
            lambda one: all(
                torch.equal(part, full)
                for w, (part, full) in enumerate(
                    zip(one.received.split(3), (every + 1).split(3), strict=True)
                )
                if w != rank
            ),
        ),
        "all_gather": lambda one: torch.equal(one.received, every + 1),
        "scatter_in_ring": lambda one: bool((one.sent[3 * rank : 3 * rank + 3] == total).all()),
        "all_reduce": lambda one: bool((one.sent == total).all()),
    }
    assert expected.keys() == COLLECTIVES.keys()
    found = {}
    for name, is_right in expected.items():
        one = Shards(3)
        one.sent.fill_(rank + 1.0)
        with mock.patch.object(exchanges, "PIECE", 16):
            getattr(one, name)()
        found[name] = is_right(one)
    return found


def speeds(world: World) -> dict[str, list[float]]:
    """What it measures, of small messages."""
    with mock.patch.object(exchanges, "MEGABYTES", (0.01, 0.02)):
        return exchanges.measure()
