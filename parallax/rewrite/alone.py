"""One worker has nobody to synchronise with, but need not work on rows that it did not touch."""

from __future__ import annotations

import math

from torch.fx import Node

from parallax.graph.common.sizes import sizes_of
from parallax.rewrite.context import Rewriting
from parallax.rewrite.touched_rows import can_touch_only_rows
from parallax.strategy.data import Strategy, VariableStrategy

LEAST_BYTES_ON_CUDA = 1 << 29
"""Of a table on a CUDA device, for its touched rows to be worth finding: that waits for the device,
which goes through less in shorter time, and is told what to do in one call if it is told no sizes.
"""
ROWS_PER_ID = 4
"""How many times as many rows as ids a table that is not read in bags needs for its touched rows
to be worth finding."""


def for_one_worker(work: Rewriting) -> Strategy:
    """What the passes do for a single worker: touched rows alone are updated, where that is the
    same as updating all of a table and less work. Nothing else is changed.

    Tables that are read in bags are read, and their rows found, all at once: their exchange does
    with ids and rows of all tables in one operation what would be one for each.
    """
    return Strategy(
        work.strategy.fingerprint,
        work.strategy.replicas,
        {name: _alone(work, name) for name in work.analysis.variables},
    )


def _alone(work: Rewriting, name: str) -> VariableStrategy:
    variable = work.analysis.variables[name]
    usual = VariableStrategy("none", average=False)
    if not variable.sparse or not variable.trainable or variable.lazy:
        return usual
    if not can_touch_only_rows(work, name, work.analysis.gradients[name]):
        return usual
    table = work.step.placeholder(name)
    value = None if table is None else table.meta["val"]
    if value is not None and value.device.type == "cuda" and value.nbytes < LEAST_BYTES_ON_CUDA:
        return usual
    if variable.bags:
        return VariableStrategy("bags", "whole", (0,), average=False)
    ids: list[Node] = [lookup.ids for lookup in work.analysis.lookups[name]]
    count = sum(math.prod(sizes_of(node.meta["val"])) for node in dict.fromkeys(ids))
    if not count or count * ROWS_PER_ID > variable.rows:
        return usual
    return VariableStrategy("allgather", average=False)
