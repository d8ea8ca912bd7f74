"""Bytes that each synchroniser sends per step, as formulas (Parallax paper, table 3).

For N workers, a variable of b bytes and V rows, of which a share α is touched by one worker, each
worker sends on average:

===============  ==============================================================================
allreduce        2 (N-1)/N b                         ring AllReduce
owner            2 (N-1)/N b                         gradient to its owners, new values back
rows             2 (N-1)/N αb  +  4 (N-1)/N αV       rows and row gradients; ids of 4 bytes
allgather        (N-1) αb  +  8 (N-1) αV             row gradients to all; ids of 8 bytes
bags, one owner  2 (N-1)/N Br  +  4 (N-1)/N (n + B)  bags and their gradients; ids, bag sizes
bags, dealt out  2 (N-1) Br  +  4 (N-1) (n/N + B)    parts of each bag from every owner
bags, either     2 (N-1)/N αb  +  4 (N-1)/N αV       distinct rows, where they are fewer
===============  ==============================================================================

with n ids in B bags a worker and step, and r bytes in a row. The paper counts a server's own part
as transferred as well (2b, 2αb); here it stays local.
"""

from __future__ import annotations

from parallax.graph.variables import Variable
from parallax.strategy.data import VariableStrategy


def bytes_per_step(variable: Variable, choice: VariableStrategy, workers: int) -> float:
    """Bytes one worker sends per step for one variable, on average over workers."""
    others = workers - 1
    share = others / workers
    alpha = variable.sparsity if variable.sparsity is not None else 1.0
    touched = alpha * variable.rows
    if choice.synchronizer in ("allreduce", "owner"):
        size = variable.bytes
        if choice.synchronizer == "allreduce" and variable.dtype.itemsize < 4:
            size = variable.elements * 4  # half types are summed in float32
        return 2 * share * size
    if choice.synchronizer == "rows":
        return share * (2 * alpha * variable.bytes + 4 * touched)
    if choice.synchronizer == "allgather":
        return others * (alpha * variable.bytes + 8 * touched)
    if choice.synchronizer == "bags":
        row = variable.bytes / max(variable.rows, 1)
        values, numbers = variable.travelled or _bags(variable, choice, touched, workers)
        return share * (2 * values * row + 4 * numbers)
    return 0.0


def _bags(
    variable: Variable, choice: VariableStrategy, touched: float, workers: int
) -> tuple[float, float]:
    """Values, and ids with bag sizes, that one worker's lookups need."""
    bags = variable.bags_per_step * (1 if choice.partition == "whole" else workers)
    if touched <= bags:
        return touched, touched
    return bags, variable.ids_per_step + bags
