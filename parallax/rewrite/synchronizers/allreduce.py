"""AllReduce: all workers sum a dense gradient, by ring, tree, halving and doubling, or the backend.

In two levels the workers of each host sum first, and then those with the same place on each host.
"""

from __future__ import annotations

from parallax.graph.analysis.variables import Variable
from parallax.ops.reductions import remote_share
from parallax.rewrite.synchronizers.dense import synchronize_dense
from parallax.strategy.cost import gradient_bytes, summed_bytes
from parallax.strategy.data import VariableStrategy, everyone
from parallax.strategy.encoders import BlockEncoder, encoder_of
from parallax.strategy.registry import Synchronizer


def _reduced(variable: Variable, choice: VariableStrategy, workers: int, hosts: int) -> float:
    """Of a ring: gradients once around, and their sums; by host they are not encoded inside."""
    size = gradient_bytes(variable, choice)
    if choice.hierarchy == "hosts" and choice.encoder != "none":
        inside = 2 * (1 - hosts / workers) * summed_bytes(variable)
        return inside + _reduced_across(variable, choice, workers, hosts)
    return 2 * (workers - 1) / workers * size


def _reduced_across(
    variable: Variable, choice: VariableStrategy, workers: int, hosts: int
) -> float:
    """One link of the ring leaves each host; by host, a ring for each place in a host.

    Encoded blocks go to the worker that sums them, and their sums to all.
    """
    size = gradient_bytes(variable, choice)
    if choice.hierarchy == "hosts":
        return 2 * (hosts - 1) / hosts * size * hosts / workers
    if isinstance(encoder_of(choice), BlockEncoder):
        return 2 * (hosts - 1) / hosts * size
    if choice.reduction != "auto":
        order = choice.order or everyone(workers)
        return size * remote_share(choice.reduction, order, hosts)
    return 2 * (workers - 1) / workers * size * hosts / workers


SYNCHRONIZER = Synchronizer(
    "allreduce",
    _reduced,
    synchronize_dense,
    across=_reduced_across,
    messages=("summed",),
    dense=True,
    by_host=True,
    pieces=True,
    axes=True,
    reductions=("ring", "tree", "halving"),
    encodes=True,
    merges=True,
    in_turn=True,
)
