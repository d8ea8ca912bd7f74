"""Factors of a gradient to the variable's owner alone (Project Adam; figure 3.10 of the thesis).

The owner multiplies them, updates, and sends the new values back to all.
"""

from __future__ import annotations

from parallax.graph.analysis.variables import Variable
from parallax.rewrite.synchronizers.factor_exchange import all_products, synchronize_factors
from parallax.strategy.cost import factor_bytes
from parallax.strategy.data import VariableStrategy
from parallax.strategy.registry import MessageKind, Synchronizer


def _to_owner(variable: Variable, choice: VariableStrategy, workers: int, hosts: int) -> float:
    """Both factors to the owner, and the whole matrix back, which the owner sends alone."""
    return (workers - 1) / workers * (factor_bytes(variable) + variable.bytes)


def _part_of_push(
    kind: MessageKind, variable: Variable, choice: VariableStrategy, workers: int
) -> float:
    own = factor_bytes(variable) if kind == "factors" else variable.bytes
    return own / (factor_bytes(variable) + variable.bytes)


SYNCHRONIZER = Synchronizer(
    "factor_push",
    _to_owner,
    synchronize_factors,
    computes=all_products,
    part=_part_of_push,
    messages=("factors", "owned"),
    dense=True,
    factors=True,
    sharded=True,
    whole=True,
    merges=True,
    in_turn=True,
)
