"""AllGather of sparse gradients: every worker holds the table, and gets the rows of all."""

from __future__ import annotations

from parallax.graph.analysis.variables import Variable
from parallax.rewrite.synchronizers.row_exchange import synchronize_rows
from parallax.rewrite.timeline import ASKING, RECEIVING, SENDING
from parallax.strategy.cost import sent_row_bytes, touched_rows
from parallax.strategy.data import VariableStrategy
from parallax.strategy.registry import Synchronizer


def _gathered(variable: Variable, choice: VariableStrategy, workers: int, hosts: int) -> float:
    """Gradients of rows with ids of 8 bytes, to each other worker."""
    sent = sent_row_bytes(variable, choice, "push")
    return (workers - 1) * touched_rows(variable) * (sent + 8)


SYNCHRONIZER = Synchronizer(
    "allgather",
    _gathered,
    synchronize_rows,
    calls=ASKING + SENDING + RECEIVING,
    messages=("words", "gathered"),
    sparse=True,
    casts=True,
)
