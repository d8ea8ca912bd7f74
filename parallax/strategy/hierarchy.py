"""Sum dense gradients inside hosts first, where that takes less time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from parallax.cluster.network import Network
from parallax.graph.variables import Variable
from parallax.strategy.data import Strategy


def by_host(strategy: Strategy, variables: Sequence[Variable], network: Network) -> Strategy:
    """A strategy whose AllReduce has two levels if the network makes that faster.

    Gradients travel in buckets, so that one decision for all of a model is enough: it is made for
    all dense gradients together.
    """
    summed = [v for v in variables if strategy.variables[v.name].synchronizer == "allreduce"]
    size = sum(variable.bytes for variable in summed)
    if not size or network.all_reduce_by_host(size) >= network.whole.all_reduce(size):
        return strategy
    chosen = dict(strategy.variables)
    for variable in summed:
        chosen[variable.name] = msgspec.structs.replace(
            chosen[variable.name], hierarchy="hosts", why=f"{chosen[variable.name].why}, by host"
        )
    return msgspec.structs.replace(strategy, variables=chosen)
