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

from collections.abc import Iterable

from parallax.cluster.network import Network
from parallax.graph.variables import Variable
from parallax.strategy.data import VariableStrategy

# Messages of a step that wait for one another: counts, ids, rows, gradients.
EXCHANGE_MESSAGES = 4


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


def communication_seconds(
    decided: Iterable[tuple[Variable, VariableStrategy]], network: Network
) -> float:
    """Seconds that a step's messages take, one after the other, by the latency-bandwidth model.

    What overlaps with computation is not subtracted.
    """
    workers = network.whole.workers
    summed = {"flat": 0.0, "hosts": 0.0}
    exchanged: dict[str, float] = {}
    for variable, choice in decided:
        if choice.synchronizer == "allreduce":
            summed[choice.hierarchy] += variable.elements * max(variable.dtype.itemsize, 4)
        elif choice.synchronizer != "none":
            own = bytes_per_step(variable, choice, workers)
            exchanged[choice.synchronizer] = exchanged.get(choice.synchronizer, 0.0) + own
    seconds = 0.0
    if summed["flat"]:
        seconds += network.whole.all_reduce(summed["flat"])
    if summed["hosts"]:
        seconds += network.all_reduce_by_host(summed["hosts"])
    for synchronizer, sent in exchanged.items():
        messages = 2 if synchronizer == "owner" else EXCHANGE_MESSAGES
        seconds += messages * network.whole.latency + sent / network.whole.bandwidth
    return seconds


def _bags(
    variable: Variable, choice: VariableStrategy, touched: float, workers: int
) -> tuple[float, float]:
    """Values, and ids with bag sizes, that one worker's lookups need."""
    bags = variable.bags_per_step * (1 if choice.partition == "whole" else workers)
    if touched <= bags:
        return touched, touched
    return bags, variable.ids_per_step + bags
