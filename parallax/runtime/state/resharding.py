"""Rows that are dealt out move to other workers, while training goes on."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping

import torch

from parallax.graph.analysis.variables import Variable
from parallax.runtime.comm.world import World
from parallax.runtime.state.state_table import StateTable
from parallax.strategy.data import Strategy
from parallax.strategy.layout import RowLayout
from parallax.strategy.partitions import PartitionSearch, partitioned, wanted

__all__ = ["Partitions", "deal_anew"]

# Steps with a number of shards before they are measured: the first is captured anew.
WARM, MEASURED = 2, 4


def deal_anew(state: StateTable, names: Iterable[str], layout: RowLayout, world: World) -> None:
    """Send rows of leaves to the workers that own them by another layout; nothing is made whole.

    Args:
        state: of this worker.
        names: sharded leaves of one variable, all with its layout.
        layout: the new one; rows are dealt out by both.
        world: the workers, all of which must call it.
    """
    for name in names:
        if name in state.shards:
            state.shards[name] = _moved(state.shards[name], state.layouts[name], layout, world)
        state.layouts[name] = layout


def _moved(shard: torch.Tensor, old: RowLayout, new: RowLayout, world: World) -> torch.Tensor:
    rank, size, width = world.rank, world.size, math.prod(shard.shape[1:])
    owners = torch.tensor(new.owners, device=shard.device)

    def rows_of(worker: int) -> torch.Tensor:
        """The rows that a worker has now."""
        return torch.arange(old.rows, device=shard.device)[old.dealt(worker)]

    own = rows_of(rank)
    to = owners[own % len(new.owners)]
    order = torch.argsort(to, stable=True)
    sent = shard.detach()[order].reshape(len(own), width)
    sent_counts = torch.bincount(to, minlength=size).tolist()
    coming = [rows_of(worker) for worker in range(size)]
    coming = [rows[owners[rows % len(new.owners)] == rank] for rows in coming]
    received_counts = [len(rows) for rows in coming]
    received = sent.new_empty((sum(received_counts), width))
    world.all_to_all(received, sent, received_counts, sent_counts, "partitions").wait()
    result = sent.new_empty((new.local_rows(rank), width))
    places = torch.cat(coming) // len(new.owners)
    result[places] = received
    return result.view(len(result), *shard.shape[1:])


class Partitions:
    """The number of shards of the tables that a partitioner marked, in the course of a run.

    All workers do the same in the same steps: times are compared after a fixed number of them.
    """

    def __init__(self, base: Strategy, state: StateTable, world: World, search: bool) -> None:
        """
        Args:
            base: the strategy with all tables on all workers.
            state: of this worker.
            world: the workers.
            search: for the fastest number, else the least is taken.
        """
        self._base, self._state, self._world = base, state, world
        self._least = {
            name: least
            for name, least in wanted(state.leaves, world.size).items()
            if name in base.variables and base.variables[name].synchronizer == "rows"
        }
        self.search: PartitionSearch | None = None
        """That is under way or was done."""
        if search and self._least:
            self.search = PartitionSearch(max(self._least.values()), world.size)
        self.steps = 0
        """That the search took so far."""
        self._times: list[float] = []

    def strategy(self) -> Strategy:
        """The strategy with the present numbers of shards."""
        if self.search is None:
            return partitioned(self._base, self._least)
        return partitioned(self._base, dict.fromkeys(self._least, self.search.current))

    @property
    def searching(self) -> bool:
        """Whether numbers are still tried."""
        return self.search is not None and not self.search.done

    def step(self, seconds: float) -> bool:
        """A step took so long on this worker; whether the number of shards changes after it."""
        assert self.search is not None
        self.steps += 1
        self._times.append(seconds)
        if len(self._times) < WARM + MEASURED:
            return False
        own = statistics.median(self._times[WARM:])
        slowest = max(float(text) for text in self._world.texts("partitions", repr(own)))
        self._times.clear()
        before = self.search.current
        self.search.tell(slowest)
        return self.search.current != before

    def deal(self, variables: Mapping[str, Variable]) -> None:
        """Move the tables' rows, with their slots and shadows, to where they live from now on.

        Args:
            variables: as of the last graph.
        """
        strategy = self.strategy()
        for name in self._least:
            variable = variables[name]
            layout = RowLayout.of(strategy.variables[name], variable.rows, self._world.size)
            followers = (name, *variable.slots, *variable.shadows)
            sharded = [follower for follower in followers if follower in self._state.layouts]
            deal_anew(self._state, sharded, layout, self._world)

    def summary(self) -> str:
        """What was found, for people."""
        assert self.search is not None
        times = ", ".join(
            f"{count}: {seconds * 1e3:.1f} ms"
            for count, seconds in sorted(self.search.measured.items())
        )
        return f"{self.search.current} partitions after {self.steps} steps ({times})"
