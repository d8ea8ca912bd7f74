"""Into how many shards tables are partitioned: asked for, or searched while training begins.

More shards serve requests in parallel; each shard is one more worker to talk to. The time of a step
for P shards is taken to be a/P + b (P-1) + c (Parallax user guide, on partitioners; its cost model
has these three terms). A shard is what one worker owns, so P is at most the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from parallax.errors import ConfigError
from parallax.graph.objects.state import Leaf
from parallax.strategy.data import Strategy, VariableStrategy

__all__ = ["PartitionSearch", "Partitioner", "fit", "get_partitioner", "partitioned", "wanted"]

Tables = TypeVar("Tables", torch.nn.Module, torch.nn.Parameter)

_least: Any = WeakIdKeyDictionary()
"""By parameter, the least number of shards that was asked for."""


class Partitioner:
    """Marks tables whose number of shards is chosen; made by :func:`get_partitioner`."""

    def __init__(self, min_partitions: int) -> None:
        self.min_partitions = min_partitions

    def __call__(self, tables: Tables) -> Tables:
        """Mark a module's parameters, or one parameter.

        Returns:
            What it was given: ``table = partitioner(nn.Embedding(rows, width))``.
        """
        if isinstance(tables, torch.nn.Module):
            marked = list(tables.parameters())
        elif isinstance(tables, torch.nn.Parameter):
            marked = [tables]
        else:
            raise ConfigError(
                f"A partitioner takes a module or a parameter, found {type(tables).__name__}.",
                hint="for example table = partitioner(nn.Embedding(rows, width)).",
            )
        for parameter in marked:
            _least[parameter] = self.min_partitions
        return tables


def get_partitioner(min_partitions: int = 1) -> Partitioner:
    """A partitioner for tables (Parallax user guide).

    Rows of the tables that it is called with are dealt to ``min_partitions`` workers, or, with
    ``Config(search_partitions=True)``, to as many as turn out fastest in the first steps, that
    number at least.

    Args:
        min_partitions: the fewest shards that fit into the workers' memory; all workers where there
            are not as many.

    Raises:
        ConfigError: it is not a positive integer.
    """
    good = isinstance(min_partitions, int) and not isinstance(min_partitions, bool)
    if not good or min_partitions < 1:
        raise ConfigError(f"min_partitions must be a positive integer, found {min_partitions!r}.")
    return Partitioner(min_partitions)


def wanted(leaves: Mapping[str, Leaf], workers: int) -> dict[str, int]:
    """By marked parameter, the least number of its shards."""
    return {
        name: min(_least[leaf.value], workers)
        for name, leaf in leaves.items()
        if leaf.kind == "parameter" and leaf.value in _least
    }


def partitioned(strategy: Strategy, counts: Mapping[str, int]) -> Strategy:
    """A strategy in which the rows of tables are dealt to so many workers, spread over hosts.

    Args:
        strategy: tables that it does not give to row servers stay as they are.
        counts: by table.
    """
    variables = dict(strategy.variables)
    for name, count in counts.items():
        choice = variables.get(name)
        if choice is not None and choice.synchronizer == "rows":
            variables[name] = _dealt(choice, count, strategy.replicas)
    return msgspec.structs.replace(strategy, variables=variables)


def _dealt(choice: VariableStrategy, count: int, workers: int) -> VariableStrategy:
    owners = tuple(place * workers // count for place in range(count))
    hierarchy = choice.hierarchy if count == workers else "flat"
    why = choice.why.split(", in ")[0]
    return msgspec.structs.replace(
        choice, owners=owners, hierarchy=hierarchy, why=f"{why}, in {count} partitions"
    )


class PartitionSearch:
    """Which numbers of shards to try, and which to take.

    From the geometric middle between the least and the most it doubles while steps get faster, then
    halves from there; to what was measured the three terms are fitted, and of all numbers the one
    is taken that is fastest by measurement, or by the fit where it was not measured.
    """

    def __init__(self, least: int, most: int) -> None:
        """
        Args:
            least, most: numbers of shards between which to search.
        """
        self.least, self.most = least, most
        self.current = min(max(round(math.sqrt(least * most)), least), most)
        """The number that is to be measured, or at the end the one that is taken."""
        self.done = least == most
        self.measured: dict[int, float] = {}
        self._first = self.current
        self._doubling = True

    def tell(self, seconds: float) -> None:
        """Steps with the current number of shards take so long; moves on to the next."""
        faster = not self.measured or seconds < min(self.measured.values())
        self.measured[self.current] = seconds
        if self._doubling and (not faster or self.current == self.most):
            self._doubling, faster = False, True
            self.current = self._first
        if self._doubling:
            self.current = min(2 * self.current, self.most)
        elif faster and self.current > self.least:
            self.current = max(self.current // 2, self.least)
        else:
            self._finish()
        if self.current in self.measured and not self.done:
            self._finish()

    def _finish(self) -> None:
        self.done = True
        times = dict(self.measured)
        if (predicted := fit(self.measured)) is not None:
            a, b, c = predicted
            for count in range(self.least, self.most + 1):
                times.setdefault(count, a / count + b * (count - 1) + c)
        self.current = min(times, key=lambda count: (times[count], count))


def fit(measured: Mapping[int, float]) -> tuple[float, float, float] | None:
    """a, b and c of a/P + b (P-1) + c by least squares, neither a nor b negative.

    Args:
        measured: seconds by number of shards.

    Returns:
        None for fewer than three measurements, which say nothing of other numbers.
    """
    if len(measured) < 3:
        return None
    counts = np.array(list(measured), dtype=np.float64)
    seconds = np.array(list(measured.values()))
    columns = {"a": 1 / counts, "b": counts - 1, "c": np.ones_like(counts)}
    kept: Collection[str] = "abc"
    while True:
        found = np.linalg.lstsq(np.stack([columns[k] for k in kept], 1), seconds, rcond=None)[0]
        values = dict(zip(kept, found.tolist(), strict=True))
        negative = [k for k in "ab" if values.get(k, 0.0) < 0]
        if not negative:
            return values.get("a", 0.0), values.get("b", 0.0), values["c"]
        kept = [k for k in kept if k != min(negative, key=values.__getitem__)]
