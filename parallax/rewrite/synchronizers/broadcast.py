"""Peer-to-peer broadcast: every worker sends its whole dense gradient to each other."""

from __future__ import annotations

from parallax.graph.analysis.variables import Variable
from parallax.rewrite.synchronizers.dense import synchronize_dense
from parallax.strategy.cost import summed_bytes
from parallax.strategy.data import VariableStrategy
from parallax.strategy.registry import Synchronizer


def _broadcast(variable: Variable, choice: VariableStrategy, workers: int, hosts: int) -> float:
    """The whole gradient to each other worker."""
    return (workers - 1) * summed_bytes(variable)


SYNCHRONIZER = Synchronizer(
    "broadcast", _broadcast, synchronize_dense, dense=True, merges=True, in_turn=True
)
