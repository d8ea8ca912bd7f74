"""What workers of :mod:`pool` do for the tests of process groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from parallax.runtime.comm.world import World


def opened(world: World) -> dict[str, Any]:
    """The groups of a world, how many threads serve their sockets, and what all can do at once."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    groups = sorted(world._groups)
    sums = [torch.full((3,), float(world.rank + 1)) for _ in groups]
    received = torch.empty(world.size)
    given = torch.arange(float(world.size)) + 10 * world.rank
    pending = [
        world.all_reduce(one, "test", group) for one, group in zip(sums, groups, strict=True)
    ]
    even = [1] * world.size
    pending.append(world.all_to_all(received, given, even, even, "access"))
    for one in pending:
        one.wait()
    return {
        "threads": names.count("gloo_tcp_loop"),
        "groups": groups,
        "members": {name: [w + 1 for w in world.group(name).ranks] for name in groups},
        "sums": {name: one.tolist() for name, one in zip(groups, sums, strict=True)},
        "received": received.tolist(),
    }
