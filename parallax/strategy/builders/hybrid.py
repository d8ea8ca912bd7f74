"""AllReduce for dense variables, row servers for sparse ones (Parallax paper, section 5.3).

Tables that are read in bags exchange sums of bags or distinct rows, whichever are fewer. They have
one owner, or as few as can hold them: each sends sums of its own. Owners are balanced by what they
send, and none owns much more than its share of all rows.

A dense gradient that is a product goes by its factors where that is predicted to be faster
(Poseidon's hybrid communication, Zhang's thesis, section 3.4, with the time that all workers'
products take, and with convolutions): layers of many parameters and few samples.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

import msgspec

from parallax.graph.analysis.variables import Variable
from parallax.strategy.builders import common
from parallax.strategy.builders.base import ClusterFacts, GraphFacts, StrategyBuilder
from parallax.strategy.cost import bytes_per_step
from parallax.strategy.data import Strategy, VariableStrategy

# How much more than an even share of all tables one worker may own.
MOST_OF_SHARE = 1.25


# What another strategy's step must be faster by: predictions are not better than that.
MARGIN = 0.05
# Seconds that factors must spare in a step: of less, measurements of a moment would decide.
LEAST_SPARED = 2e-3
# Of so many variables whole steps are compared: each takes a millisecond for every variable.
MOST_COMPARED = 1000


class Hybrid(StrategyBuilder):
    """Each kind of variable the way that is usually cheapest for it (``run_option="HYBRID"``).

    Factors of dense gradients are taken together, if the whole step is predicted to be faster by a
    twentieth with them, and by two milliseconds; not while links and devices are not measured, nor
    where devices differ, since every worker multiplies them itself and all must get the same to the
    last bit.
    """

    name = "HYBRID"

    def build(self, graph: GraphFacts, cluster: ClusterFacts) -> Strategy:
        """AllReduce, factors, rows or bags for each variable."""
        placed = placed_bags(graph, cluster)
        chosen = {}
        for name, variable in graph.trainable.items():
            if variable.sparse:
                exchanged = placed.get(name) or common.sparse(variable, cluster)
                chosen[name] = _unless_dense(variable, exchanged, cluster)
            else:
                chosen[name] = common.allreduce(variable, cluster)
        built = self.strategy(graph, cluster, chosen)
        by_factors = _factors(graph, cluster, chosen)
        if not by_factors or graph.predict is None or len(graph.trainable) > MOST_COMPARED:
            return built
        other = self.strategy(graph, cluster, chosen | by_factors)
        usual, faster = (graph.predict(strategy).step for strategy in (built, other))
        return other if usual - faster > max(MARGIN * usual, LEAST_SPARED) else built


def _factors(
    graph: GraphFacts, cluster: ClusterFacts, chosen: Mapping[str, VariableStrategy]
) -> dict[str, VariableStrategy]:
    """Of the variables that AllReduce was chosen for, those that may be faster by factors."""
    network, speed = cluster.network, cluster.speed
    if network is None or speed is None or not speed.alike:
        return {}
    workers, found = cluster.workers, {}
    for name, choice in chosen.items():
        variable = graph.variables[name]
        if choice.synchronizer != "allreduce" or not variable.factors:
            continue
        summed = bytes_per_step(variable, choice, workers)
        way = common.factors(variable, cluster)
        sent = bytes_per_step(variable, way, workers)
        why = f"dense: factors are {sent / 1e6:.3g} MB, by AllReduce it would be {summed / 1e6:.3g}"
        spared = summed / network.whole.sums - sent / network.whole.rate(sent)
        if spared > speed.added(variable, way, workers):
            found[name] = msgspec.structs.replace(way, why=why)
    return found


def _unless_dense(
    variable: Variable, exchanged: VariableStrategy, cluster: ClusterFacts
) -> VariableStrategy:
    """AllReduce for a table of which nearly all rows are touched, if that sends less."""
    workers = cluster.workers
    if variable.lazy or variable.sparsity is None or workers == 1:
        return exchanged
    why = f"sparse, but nearly all rows are touched: {variable.sparsity:.0%}"
    summed = common.allreduce(variable, cluster, why)
    if bytes_per_step(variable, summed, workers) < bytes_per_step(variable, exchanged, workers):
        return summed
    return exchanged


def placed_bags(graph: GraphFacts, cluster: ClusterFacts) -> dict[str, VariableStrategy]:
    """Tables that are read in bags: on as few workers as can hold them, where that sends less."""
    workers = cluster.workers
    tables = [v for v in graph.trainable.values() if v.sparse and not v.shard_obstacle]
    most = MOST_OF_SHARE * sum(v.bytes for v in tables) / workers
    owned, sent = [0.0] * workers, [0.0] * workers
    chosen: dict[str, VariableStrategy] = {}

    def cost(variable: Variable, choice: VariableStrategy) -> float:
        return bytes_per_step(variable, choice, workers)

    candidates = [v for v in tables if v.bags and v.bags_per_step]
    for variable in common.OwnerQueue.largest_first(candidates):
        best = common.bags(variable, cluster.everyone, cluster)
        for count in range(1, workers):
            some = common.bags(variable, range(count), cluster)
            if cost(variable, some) > cost(variable, best):
                break  # more of them would send more
            share = variable.bytes / count
            free = [w for w in range(workers) if owned[w] + share <= most]
            if len(free) >= count:
                owners = heapq.nsmallest(count, free, key=lambda w: (sent[w], owned[w], w))
                best = common.bags(variable, sorted(owners), cluster)
                break
        chosen[variable.name] = best
        each = cost(variable, best) / len(best.owners)
        for owner in best.owners:
            owned[owner] += variable.bytes / len(best.owners)
            sent[owner] += each
    return chosen
