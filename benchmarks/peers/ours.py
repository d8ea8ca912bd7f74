"""parallax, on the plain model with ``nn.Embedding`` as it is."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

import parallax
from benchmarks.peers.unplaced import unplaced_pulls, unplaced_updates
from benchmarks.workloads import Batch, Step, Training, make_step
from parallax.cluster.network import Network
from parallax.graph.analysis.variables import Variable
from parallax.runtime import compiled
from parallax.runtime.comm import world
from parallax.runtime.predictions import probe
from parallax.strategy import choose
from parallax.strategy.data import Strategy
from parallax.strategy.hierarchy import with_hierarchy

LEVELS: dict[str, tuple[str, ...]] = {
    "flat": (),
    "rows": ("rows",),
    "hosts": ("rows", "allreduce"),
}
"""By name, what is exchanged in two levels."""

SETTLED_AFTER = 2
"""Steps after which regions are compiled: the first, and one with the optimizer's slots."""

UNPLACED = {"unplaced": True, "pulled": False}
"""By name, whether besides operations on pulled rows those on aggregated gradients are left to
workers."""


def build(training: Training, option: str) -> Step:
    """A step of parallax.

    Args:
        training: what to train.
        option: a builder; after a slash, one of ``LEVELS`` instead of what parallax would choose
            for the network, ``compiled`` (every region), ``settled`` (as the default is after some
            minutes: each region where it was measured to be faster), ``ahead`` (batches are read
            ahead), ``late`` (and updates are left to the next step), ``whole`` (no exchange travels
            in parts), or ``partitions=`` and into how many shards tables are dealt: a number, or
            ``search``; after another, one of ``UNPLACED``.
    """
    builder, how, place = (*option.split("/"), "", "")[:3]
    _, _, partitions = how.partition("partitions=")
    torch.manual_seed(0)
    model = training.model(False)
    if partitions:
        least = 1 if partitions == "search" else int(partitions)
        parallax.get_partitioner(least)(model)
    step = make_step(training, model, model, training.optimizer(model.parameters()))
    search = partitions == "search"
    config = parallax.Config(
        strategy=builder,
        seed=0,
        search_partitions=search,
        compile="inductor" if how == "compiled" else "auto",
    )
    runner = parallax.get_runner(step, config=config)
    if search:
        return Searched(runner)
    if how in ("ahead", "late"):
        return ReadAhead(runner, how == "late")
    if how == "settled":
        return settled(runner.run)
    if how == "whole":
        return at_once(runner.run)
    run = with_levels(runner.run, LEVELS[how]) if how in LEVELS else runner.run
    return without_placement(runner, run, UNPLACED[place]) if place else run


class ReadAhead:
    """A step whose ids travel while the step before computes, if its batches come of ``over``."""

    def __init__(self, runner: parallax.Runner, late: bool) -> None:
        self.__self__ = runner
        self._late = late

    def __call__(self, *batch: Any) -> torch.Tensor:
        result: torch.Tensor = self.__self__.run(*batch)
        return result

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Batches, read ahead."""
        return self.__self__.ahead(batches, late_updates=self._late)

    def finish(self) -> None:
        """Wait for what the last step has left to the next."""
        self.__self__.settle()


class Searched:
    """A step of which the first call goes on until the number of shards is found."""

    def __init__(self, runner: parallax.Runner) -> None:
        self._runner = runner
        self.told = ""
        """What was found, for people."""

    def __call__(self, *batch: Any) -> torch.Tensor:
        result: torch.Tensor = self._runner.run(*batch)
        partitions = self._runner._choice.partitions
        if partitions is None:
            return result
        while partitions.searching:
            result = self._runner.run(*batch)
        self.told = partitions.summary()
        return result


def settled(run: Step) -> Step:
    """The same step, whose first call goes on until it was decided which regions are compiled."""
    # Its first run, the one after which regions are compiled, and those that time both forms.
    steps = SETTLED_AFTER + 1 + 2 * compiled.TRIALS + 1
    pending = True

    def step(*batch: Any) -> torch.Tensor:
        nonlocal pending
        if pending:
            pending = False
            with (
                mock.patch.object(compiled, "WORTH_SECONDS", 0.0),
                mock.patch.object(compiled, "FIRST_LOOK", SETTLED_AFTER),
            ):
                for _ in range(steps):
                    run(*batch)
        return run(*batch)

    return step


def at_once(run: Step) -> Step:
    """The same step, no exchange of which travels in parts."""

    def step(*batch: Any) -> torch.Tensor:
        with (
            mock.patch.object(probe, "AS_FAST", math.inf),
            mock.patch.object(world, "number_of_parts", return_value=1),
        ):
            return run(*batch)

    return step


def with_levels(run: Step, by_host: Sequence[str]) -> Step:
    """The same step, for which the strategy of its first call takes two levels where we say."""

    def decide(strategy: Strategy, variables: Sequence[Variable], network: Network) -> Strategy:
        if network.host is not None:
            for synchronizer in by_host:
                strategy = with_hierarchy(strategy, synchronizer, "hosts")
        return strategy

    decided = False

    def step(*batch: Any) -> torch.Tensor:
        nonlocal decided
        if decided:
            return run(*batch)
        with mock.patch.object(choose, "by_host", decide):
            decided = True
            return run(*batch)

    return step


def without_placement(runner: parallax.Runner, run: Step, updates: bool) -> Step:
    """The same step, with operations on pulled rows left to workers, and those of ``updates``."""

    def step(*batch: Any) -> torch.Tensor:
        left = unplaced_updates(runner._world) if updates else contextlib.nullcontext()
        with unplaced_pulls(), left:
            return run(*batch)

    return step
