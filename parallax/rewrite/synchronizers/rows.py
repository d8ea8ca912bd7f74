"""Row servers: touched rows are pulled from their owners, and their gradients pushed there.

With several workers on each host, rows and gradients may be merged inside a host before they cross
(Parallax paper, section 5.3).
"""

from __future__ import annotations

from parallax.graph.analysis.variables import Variable
from parallax.rewrite.synchronizers.row_exchange import synchronize_rows
from parallax.rewrite.timeline import ASKING, RECEIVING, SENDING, SERVING
from parallax.strategy.cost import (
    bytes_across,
    part_of_exchange,
    rows_both_ways,
    sent_row_bytes,
    touched_rows,
)
from parallax.strategy.data import VariableStrategy
from parallax.strategy.registry import MessageKind, Synchronizer


def _exchanged(variable: Variable, choice: VariableStrategy, workers: int, hosts: int) -> float:
    """Ids, rows and their gradients; by host, inside the host and what leaves it."""
    if choice.hierarchy == "flat":
        return (workers - 1) / workers * rows_both_ways(variable, choice, touched_rows(variable))
    width = workers / hosts
    inside = (width - 1) / width * rows_both_ways(variable, choice, touched_rows(variable))
    return inside + bytes_across(variable, choice, workers, hosts)


def _exchanged_across(
    variable: Variable, choice: VariableStrategy, workers: int, hosts: int
) -> float:
    """By host, what its workers ask for travels once; what that is was measured, or is at most
    all that each of them asks for."""
    share, width = (hosts - 1) / hosts, workers / hosts
    if choice.hierarchy == "flat":
        return share * rows_both_ways(variable, choice, touched_rows(variable))
    most = min(width * touched_rows(variable), variable.rows)
    merged = most if variable.host_rows is None else variable.host_rows
    return share * rows_both_ways(variable, choice, merged) / width


def _part_of_rows(
    kind: MessageKind, variable: Variable, choice: VariableStrategy, workers: int
) -> float:
    rows = touched_rows(variable)
    both = sent_row_bytes(variable, choice, "pull") + sent_row_bytes(variable, choice, "push")
    return part_of_exchange(kind, rows, rows, both / 2)


SYNCHRONIZER = Synchronizer(
    "rows",
    _exchanged,
    synchronize_rows,
    across=_exchanged_across,
    part=_part_of_rows,
    calls=ASKING + SERVING + SENDING + RECEIVING,
    messages=("ids", "rows", "rows"),
    sparse=True,
    sharded=True,
    partitions=("cyclic",),
    some=True,
    by_host=True,
    casts=True,
)
