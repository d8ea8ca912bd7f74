"""Tables whose number of shards is chosen, on the workers of a pool."""

from __future__ import annotations

import logging
from typing import Any

import equality
import torch
from errors_help import warnings_of_parallax

import parallax
from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner
from parallax.runtime.state.resharding import deal_anew
from parallax.runtime.state.state_table import StateTable
from parallax.strategy.layout import RowLayout

CASE = ("sparse", "adam", "clip_norm")


def train(world: World, least: int, search: bool, steps: int) -> dict[str, Any]:
    """Train with a marked table: its owners after each step, and the difference from one device."""
    data = [
        batch for _ in range(-(-steps // equality.STEPS)) for batch in equality.batches(world.size)
    ]
    data = data[:steps]
    expected = equality.single_device(equality.build(*CASE), data)
    mine = equality.build(*CASE)
    parallax.get_partitioner(least)(mine.models[0].table)
    config = Config(workers=1, seed=equality.SEED, search_partitions=search)
    runner = Runner(mine.step, discover(mine.step), config, world)
    owners = []
    with warnings_of_parallax(logging.INFO) as said:
        for batch in data:
            first = world.rank * equality.LOCAL_BATCH
            runner.run(*(item[first : first + equality.LOCAL_BATCH] for item in batch))
            assert runner.strategy is not None
            table = next(n for n in runner.strategy.variables if n.endswith("table.weight"))
            owners.append(runner.strategy.variables[table].owners)
    found = equality.distributed(mine, [], runner)
    plan = str(runner.plan)
    return {
        "owners": owners,
        "difference": equality.difference(expected, found),
        "said": said,
        "plan": plan,
    }


def dealt(world: World, rows: int, old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    """Whether rows that are dealt anew are those of the new layout, on this worker."""
    before = RowLayout("cyclic", rows, world.size, old)
    after = RowLayout("cyclic", rows, world.size, new)
    whole = torch.arange(rows * 6, dtype=torch.float64).view(rows, 2, 3)
    state = StateTable.__new__(StateTable)
    state.shards = {"a": before.take(whole, world.rank)}
    state.layouts = {"a": before, "b": before}
    deal_anew(state, ["a", "b"], after, world)
    assert state.layouts == {"a": after, "b": after}
    return torch.equal(state.shards["a"], after.take(whole, world.rank))
