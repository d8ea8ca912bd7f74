"""Let dense gradients, and rows, go through each host first, where that takes less time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from parallax.cluster.network import Network
from parallax.graph.analysis.variables import Variable
from parallax.strategy.cost import messages_of_step
from parallax.strategy.data import HierarchyName, Strategy, VariableStrategy, everyone
from parallax.strategy.encoders import encodes_by_host
from parallax.strategy.registry import names_where


def by_host(strategy: Strategy, variables: Sequence[Variable], network: Network) -> Strategy:
    """A strategy with two levels wherever the network makes that faster.

    Gradients travel in buckets, and rows of all tables together, so that there is one decision for
    all dense gradients and one for all rows: by the time that their messages are predicted to take,
    and the time that processors work for them, which computation would have.
    """
    if network.host is None:
        return strategy
    for synchronizer in names_where(lambda one: one.by_host):
        chosen = [v for v in variables if strategy.variables[v.name].synchronizer == synchronizer]
        flat, hosts = (
            _seconds([(v, leveled.variables[v.name]) for v in chosen], network)
            for leveled in (
                with_hierarchy(strategy, synchronizer, "flat"),
                with_hierarchy(strategy, synchronizer, "hosts"),
            )
        )
        if hosts < flat:
            strategy = with_hierarchy(strategy, synchronizer, "hosts")
    return strategy


def _seconds(decided: list[tuple[Variable, VariableStrategy]], network: Network) -> float:
    messages = messages_of_step(decided, network)
    return sum(message.whole + message.working(network) for message in messages)


def with_hierarchy(strategy: Strategy, synchronizer: str, hierarchy: HierarchyName) -> Strategy:
    """The strategy with this hierarchy for the variables of a synchroniser that can have it: by
    their encoder, and not those whose rows are dealt to some workers only."""
    all_workers = everyone(strategy.replicas)

    def fits(choice: VariableStrategy) -> bool:
        dealt = choice.partition != "cyclic" or choice.owners == all_workers
        return choice.synchronizer == synchronizer and encodes_by_host(choice) and dealt

    variables = {
        name: msgspec.structs.replace(choice, hierarchy=hierarchy) if fits(choice) else choice
        for name, choice in strategy.variables.items()
    }
    return msgspec.structs.replace(strategy, variables=variables)
