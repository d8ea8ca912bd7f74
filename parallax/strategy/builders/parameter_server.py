"""Owners for all variables: rows of sparse ones, whole or split dense ones."""

from __future__ import annotations

from collections.abc import Sequence

from parallax.config import Config
from parallax.graph.variables import Variable
from parallax.strategy.builders import common
from parallax.strategy.data import Strategy, VariableStrategy, fingerprint


def build(variables: Sequence[Variable], workers: int, config: Config) -> Strategy:
    """The strategy of ``run_option="PS"``.

    Dense variables of a megabyte or more are split into blocks of rows over all workers; smaller
    ones go whole to the worker that owns the fewest bytes, largest first.
    """
    chosen: dict[str, VariableStrategy] = {}
    queue = common.OwnerQueue(workers)
    for variable in queue.largest_first(variables):
        if not variable.trainable:
            chosen[variable.name] = common.untouched(variable)
        elif variable.sparse:
            chosen[variable.name] = common.sparse(variable, workers, config)
        elif variable.shard_obstacle:
            why = f"dense, but replicated: {variable.shard_obstacle}"
            chosen[variable.name] = VariableStrategy(
                "allreduce", average=config.average_dense, why=why
            )
        elif variable.bytes >= common.WHOLE_BYTES and variable.rows >= workers:
            chosen[variable.name] = VariableStrategy(
                "owner",
                partition="block",
                owners=tuple(range(workers)),
                average=config.average_dense,
                why="dense, split over all owners",
            )
        else:
            chosen[variable.name] = VariableStrategy(
                "owner",
                owners=(queue.next(variable.bytes),),
                average=config.average_dense,
                why="dense",
            )
    ordered = {variable.name: chosen[variable.name] for variable in variables}
    return Strategy(fingerprint(variables), workers, ordered)
