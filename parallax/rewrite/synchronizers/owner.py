"""Parameter servers for dense variables: gradients go to the owners, which update and send values.

A variable has one owner, or several, each of a block of its rows (Parallax paper, section 5.1).
"""

from __future__ import annotations

from parallax.rewrite.synchronizers.dense import (
    RING,
    half_each_way,
    scatter_and_gather,
    scatter_and_gather_across,
    synchronize_dense,
)
from parallax.strategy.registry import Synchronizer

SYNCHRONIZER = Synchronizer(
    "owner",
    scatter_and_gather,
    synchronize_dense,
    across=scatter_and_gather_across,
    part=half_each_way,
    messages=("owned", "owned"),
    dense=True,
    sharded=True,
    whole=True,
    partitions=("whole", "block"),
    axes=True,
    reductions=RING,
    merges=True,
    in_turn=True,
)
