"""Sufficient-factor broadcasting (Poseidon, thesis section 3.3).

Every worker sends both factors of a gradient to all, and each multiplies the stacked ones.
"""

from __future__ import annotations

from parallax.graph.analysis.variables import Variable
from parallax.rewrite.synchronizers.factor_exchange import all_products, synchronize_factors
from parallax.strategy.cost import factor_bytes
from parallax.strategy.data import VariableStrategy
from parallax.strategy.registry import Synchronizer


def _to_all(variable: Variable, choice: VariableStrategy, workers: int, hosts: int) -> float:
    """Both factors, to each other worker."""
    return (workers - 1) * factor_bytes(variable)


SYNCHRONIZER = Synchronizer(
    "factors",
    _to_all,
    synchronize_factors,
    computes=all_products,
    messages=("factors",),
    dense=True,
    factors=True,
    merges=True,
    in_turn=True,
)
