"""The cheapest way for each variable by the cost model, compared with other builders as a whole."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
import torch

from parallax.cluster.network import Network
from parallax.graph.analysis.variables import Variable
from parallax.strategy.builders import common
from parallax.strategy.builders.all_reduce import Replicated
from parallax.strategy.builders.base import ClusterFacts, GraphFacts, StrategyBuilder
from parallax.strategy.builders.hybrid import MARGIN, MOST_COMPARED, Hybrid, placed_bags
from parallax.strategy.builders.parameter_server import ParameterServer
from parallax.strategy.cost import messages_of_step
from parallax.strategy.data import PartitionName, Strategy, VariableStrategy
from parallax.strategy.registry import Synchronizer, facts, synchronizers
from parallax.strategy.timeline import Speed
from parallax.strategy.verify import problems_of

logger = logging.getLogger("parallax")

# What computation hides costs nothing; of steps that take as long, the one that sends less wins.
HIDDEN = 0.01
# Relative difference below which two times are the same.
TIE = 1e-6


@dataclass(frozen=True)
class Priced:
    """One way to synchronise a variable.

    Args:
        choice: the way.
        seconds: that its bytes take on the links in a step, and what it lets workers compute.
        latency: seconds that its kind of message takes besides, once for all variables of it.
    """

    choice: VariableStrategy
    seconds: float
    latency: float


class Auto(StrategyBuilder):
    """The cheapest predicted way for each variable, unless another builder's step is much faster.

    Each variable gets the synchroniser whose bytes take least time on the measured links, among all
    that verification allows; kinds of messages whose latency costs more than their bytes save are
    given up. Then the time of whole steps is predicted, with what computation hides, for this
    strategy and for those of other builders, of which one is taken if its step is faster by a
    twentieth; of very large models the steps are not compared. ``why`` has the predicted
    time of each variable's choice and of the next best; what was predicted of whole steps is
    printed. (AutoDist's idea, Zhang's thesis, chapters 7 and 8, with a model instead of trials.)
    """

    name = "auto"

    def build(self, graph: GraphFacts, cluster: ClusterFacts) -> Strategy:
        """The strategy with the least predicted time of a step."""
        network = cluster.network
        if network is None or cluster.workers == 1:
            return Hybrid().build(graph, cluster)
        placed = placed_bags(graph, cluster)
        priced = {
            name: price(variable, ways(variable, index, cluster, placed), network, cluster.speed)
            for index, (name, variable) in enumerate(graph.trainable.items())
        }
        own = self.strategy(graph, cluster, {n: one.choice for n, one in cheapest(priced).items()})
        best = self._fastest(graph, cluster, own)
        explained = {
            name: _explained(best.variables[name], priced[name], variable, network, cluster.speed)
            for name, variable in graph.trainable.items()
        }
        return self.strategy(graph, cluster, explained)

    def _fastest(self, graph: GraphFacts, cluster: ClusterFacts, own: Strategy) -> Strategy:
        """Of this strategy and those of other builders, the one with the fastest step."""
        if graph.predict is None:
            return own
        if len(graph.trainable) > MOST_COMPARED:
            logger.info(
                "auto: chosen per variable; with %d, no whole steps were compared",
                len(graph.trainable),
            )
            return own
        candidates = {self.title: own}
        for builder in (Hybrid(), ParameterServer(), Replicated()):
            candidates[builder.title] = builder.build(graph, cluster)
        times = {name: graph.predict(strategy) for name, strategy in candidates.items()}
        costs = {name: time.step + HIDDEN * time.messages for name, time in times.items()}
        best = min(costs, key=costs.__getitem__)
        if costs[best] > (1 - MARGIN) * costs[self.title]:
            best = self.title
        shown = ", ".join(
            f"{'per variable' if name == self.title else name} {time.step * 1e3:.1f} ms"
            for name, time in sorted(times.items(), key=lambda item: item[1].step)
        )
        logger.info("auto: predicted times of a step: %s", shown)
        return candidates[best]


def ways(
    variable: Variable,
    index: int,
    cluster: ClusterFacts,
    placed: Mapping[str, VariableStrategy],
) -> list[VariableStrategy]:
    """Every way to synchronise a variable that verification allows and that spreads its bytes.

    Args:
        variable: it receives a gradient.
        index: among those that do.
        cluster: the workers.
        placed: where tables that are read in bags would live.
    """
    found = []
    for one in synchronizers().values():
        if one.bags:
            found += [placed[variable.name]] if variable.name in placed else []
        elif one.name != "none":
            found += [_way(one, part, variable, index, cluster) for part in one.partitions]
    fitting = [choice for choice in found if _fits(choice, variable, cluster)]
    if cluster.speed is not None and cluster.speed.alike:
        return fitting
    # Workers that multiply factors themselves would drift apart, or take who knows how long.
    return [choice for choice in fitting if not (facts(choice).factors and not choice.owners)]


def _way(
    one: Synchronizer,
    partition: PartitionName,
    variable: Variable,
    index: int,
    cluster: ClusterFacts,
) -> VariableStrategy:
    owners = cluster.everyone if partition != "whole" else (index % cluster.workers,)
    return VariableStrategy(
        one.name,
        partition=partition,
        owners=owners if one.sharded else (),
        average=common.averages(variable, cluster),
    )


def _fits(choice: VariableStrategy, variable: Variable, cluster: ClusterFacts) -> bool:
    on_one = choice.partition == "whole" and choice.owners and not facts(choice).bags
    little = variable.rows < cluster.workers and variable.bytes < common.WHOLE_BYTES
    if on_one and not little:
        return False  # its link would carry what all send for it
    return not problems_of(choice, variable, cluster.workers)


def price(
    variable: Variable,
    choices: Iterable[VariableStrategy],
    network: Network,
    speed: Speed | None = None,
) -> list[Priced]:
    """The choices with what they cost, cheapest first."""
    found = [_priced(variable, choice, network, speed) for choice in choices]
    return sorted(found, key=lambda one: one.seconds)


def _priced(
    variable: Variable, choice: VariableStrategy, network: Network, speed: Speed | None
) -> Priced:
    """A choice with its cost, in two levels where that is faster."""
    levels = [choice]
    if network.host is not None and facts(choice).by_host:
        levels.append(msgspec.structs.replace(choice, hierarchy="hosts"))
    costs = []
    for one in levels:
        messages = messages_of_step([(variable, one)], network)
        latency = sum(message.latency for message in messages)
        seconds = sum(message.whole for message in messages) - latency
        seconds += 0.0 if speed is None else speed.added(variable, one, network.whole.workers)
        processing = sum(message.working(network) for message in messages)
        costs.append((latency + seconds + processing, seconds, latency))
    _, seconds, latency = min(costs)
    return Priced(choice, seconds, latency)


def cheapest(priced: Mapping[str, list[Priced]]) -> dict[str, Priced]:
    """For each variable its cheapest way; without the kinds of messages that are not worth it.

    Every set of synchronisers is tried: with a few, each variable may cost more, but fewer kinds of
    messages wait for each other. Of equal ones, sums by AllReduce are preferred: they need nothing
    of the next step.

    Args:
        priced: by variable, its ways.
    """
    if not priced:
        return {}
    by_kind = [
        {one.choice.synchronizer: one for one in reversed(found)} for found in priced.values()
    ]
    kinds = sorted({kind for ways in by_kind for kind in ways}, key=_preference)
    seconds = torch.tensor(
        [[ways[k].seconds if k in ways else math.inf for k in kinds] for ways in by_kind],
        dtype=torch.float64,
    )
    latency = {k: max(ways[k].latency for ways in by_kind if k in ways) for k in kinds}
    best, least = tuple(range(len(kinds))), math.inf
    for count in range(1, len(kinds) + 1):
        for picked in itertools.combinations(range(len(kinds)), count):
            total = float(seconds[:, list(picked)].amin(1).sum())
            total += sum(latency[kinds[k]] for k in picked)
            if total < least * (1 - TIE):
                best, least = picked, total
    places = (seconds[:, list(best)] * (1 + TIE * torch.arange(len(best)))).argmin(1)
    return {
        name: ways[kinds[best[int(place)]]]
        for name, ways, place in zip(priced, by_kind, places, strict=True)
    }


def _preference(kind: str) -> tuple[bool, int]:
    found = synchronizers()
    return "summed" not in found[kind].messages, list(found).index(kind)


def _explained(
    choice: VariableStrategy,
    priced: list[Priced],
    variable: Variable,
    network: Network,
    speed: Speed | None,
) -> VariableStrategy:
    """A choice whose reason is its price and that of the next best."""
    seconds = _priced(variable, choice, network, speed).seconds
    others = [one for one in priced if one.choice.synchronizer != choice.synchronizer]
    why = _milliseconds(seconds)
    if others:
        why += f"; {others[0].choice.synchronizer} {_milliseconds(others[0].seconds)}"
    return msgspec.structs.replace(choice, why=why)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
