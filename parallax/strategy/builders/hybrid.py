"""AllReduce for dense variables, row servers for sparse ones (Parallax paper, section 5.3).

Tables that are read in bags exchange sums of bags or distinct rows, whichever are fewer. Their
owners are balanced by what they send, and none owns much more than its share of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from parallax.config import Config
from parallax.graph.variables import Variable
from parallax.strategy.builders import common
from parallax.strategy.cost import bytes_per_step
from parallax.strategy.data import Strategy, VariableStrategy, fingerprint

# How much more than an even share of all tables one worker may own.
MOST_OF_SHARE = 1.25


def build(variables: Sequence[Variable], workers: int, config: Config) -> Strategy:
    """The strategy of ``run_option="HYBRID"``."""
    placed = _placed_bags(variables, workers, config)
    chosen = {}
    for variable in variables:
        if not variable.trainable:
            chosen[variable.name] = common.untouched(variable)
        elif variable.sparse:
            exchanged = placed.get(variable.name) or common.sparse(variable, workers, config)
            chosen[variable.name] = _unless_dense(variable, exchanged, workers, config)
        else:
            chosen[variable.name] = common.allreduce(variable, config)
    return Strategy(fingerprint(variables), workers, chosen)


def _unless_dense(
    variable: Variable, exchanged: VariableStrategy, workers: int, config: Config
) -> VariableStrategy:
    """AllReduce for a table of which nearly all rows are touched, if that sends less."""
    if variable.lazy or variable.sparsity is None or workers == 1:
        return exchanged
    summed = VariableStrategy(
        "allreduce",
        average=config.average_sparse,
        why=f"sparse, but nearly all rows are touched: {variable.sparsity:.0%}",
    )
    if bytes_per_step(variable, summed, workers) < bytes_per_step(variable, exchanged, workers):
        return summed
    return exchanged


def _placed_bags(
    variables: Sequence[Variable], workers: int, config: Config
) -> dict[str, VariableStrategy]:
    """Tables that are read in bags: whole on a worker where that sends less, or dealt out."""
    tables = [v for v in variables if v.sparse and v.trainable and not v.shard_obstacle]
    most = MOST_OF_SHARE * sum(v.bytes for v in tables) / workers
    owned, sent = [0.0] * workers, [0.0] * workers
    chosen: dict[str, VariableStrategy] = {}

    def cost(variable: Variable, choice: VariableStrategy) -> float:
        return bytes_per_step(variable, choice, workers)

    candidates = [v for v in tables if v.bags and v.bags_per_step]
    for variable in sorted(candidates, key=lambda v: (-v.bytes, v.name)):
        best = common.bags(variable, None, workers, config)
        free = [w for w in range(workers) if owned[w] + variable.bytes <= most]
        if free:
            worker = min(free, key=lambda w: (sent[w], owned[w], w))
            whole = common.bags(variable, worker, workers, config)
            if cost(variable, whole) <= cost(variable, best):
                best = whole
                owned[worker] += variable.bytes
                sent[worker] += cost(variable, whole)
        chosen[variable.name] = best
        if best.partition != "whole":
            owned = [size + variable.bytes / workers for size in owned]
    return chosen
