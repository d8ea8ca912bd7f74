"""Captures of a runner's step: once for a batch, or again as another graph of it is wanted."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from parallax.config import Config
from parallax.errors import ModelError
from parallax.graph.analysis.compared_rows import Refused
from parallax.graph.analysis.divisors import divides_by_constants
from parallax.graph.analysis.mixed_rows import confuses_rows, may_compare_rows
from parallax.graph.capture import capture
from parallax.graph.common.sizes import Place, shapes_of, with_rows
from parallax.graph.inputs import parts_of
from parallax.graph.objects.discovery import StepObjects
from parallax.graph.objects.draws import Streams
from parallax.graph.objects.outside import NO_NUMBERS, Numbers
from parallax.graph.passes.lent import NOTHING_LENT, Lent
from parallax.graph.passes.whole_batch import (
    ROWS_ARE_A_NUMBER,
    has_free_rows,
    noted,
    of_whole_batch,
)
from parallax.graph.step_graph import StepGraph
from parallax.graph.surroundings import any_number_of_rows
from parallax.runtime.comm.weighing import Weighing
from parallax.runtime.comm.world import World
from parallax.runtime.first_batches import (
    all_compare_rows,
    any_may_compare_rows,
    means_are_of_all,
    one_batch_norm,
)
from parallax.runtime.state.state_table import StateTable

logger = logging.getLogger("parallax")


@dataclass(frozen=True)
class Call:
    """What a step is captured for.

    Args:
        batch, named: what it takes.
        varying: sizes that are to be symbols.
        numbers: that the step reads, and are to be inputs.
        lent: variables that are to have gradients of zero where they have none.
    """

    batch: tuple[Any, ...]
    named: Mapping[str, Any]
    varying: Mapping[Place, int] | None = None
    numbers: Numbers = NO_NUMBERS
    lent: Lent = NOTHING_LENT

    @property
    def flat(self) -> list[Any]:
        """The flat batch."""
        return pytree.tree_leaves((self.batch, dict(self.named)))


class Captures:
    """Captures a step as it is to run on this worker."""

    def __init__(
        self,
        step: Callable[..., Any],
        objects: StepObjects,
        config: Config,
        world: World,
        state: StateTable,
        weighing: Weighing,
        devices: Mapping[str, torch.device],
    ) -> None:
        """
        Args:
            step: the user's function.
            objects: what it uses.
            config: the user's settings.
            world: this worker and the others.
            state: what steps read and write.
            weighing: how batches count.
            devices: where tensors will lie that have no storage yet.
        """
        self._step = step
        self._objects = objects
        self._config = config
        self._world = world
        self._state = state
        self._weighing = weighing
        self.devices = devices
        self.streams = Streams()
        """Random numbers that the step draws."""
        self.compare_rows = False
        """The steps of all workers compare rows of the batch with each other."""
        self._is_apart = False
        """The last step was captured with a symbol for its rows, to tell them from other sizes."""
        self.count = 0

    def alone(self, call: Call) -> StepGraph:
        """The step as one device runs it.

        Raises:
            ModelError: it cannot be captured.
        """
        together = self._world.size > 1 and one_batch_norm(self._objects, self._config)
        # Where tensors lie that the user's objects hold without storage, or will lie.
        dealt = {name: rows.device for name, rows in self._state.shards.items()}
        with any_number_of_rows() if together else contextlib.nullcontext():
            step = capture(
                *(self._step, self._objects, call.batch, call.named),
                *({**self.devices, **dealt}, call.varying, call.numbers),
                streams=self.streams,
                lent=call.lent,
                common=self._weighing.common,
            )
        self.count += 1
        return step

    def first(self, call: Call) -> StepGraph:
        """The first step of all workers, with what compares rows of the batch, or keeps them,
        computed of all their batches, if all do.

        Raises:
            ModelError: it cannot be captured.
        """
        if not self._counts_rows:
            return self._with_numbers(call)
        made, failed, refused = None, None, None
        try:
            step = self._with_numbers(call)
        except ModelError as error:  # this batch may have too few rows, where all have enough
            failed = error
        # By chance, sizes may say so of some workers' batches alone.
        if any_may_compare_rows(self._world, failed is not None or may_compare_rows(step)):
            made, refused = self._of_whole_batch(call)
            if failed is not None and made is None:
                raise failed
        self.compare_rows = all_compare_rows(self._world, made)
        if made is not None and self.compare_rows:
            return noted(made, refused)
        if failed is not None:
            raise failed
        return noted(self._told_apart(step, call), refused)

    def later(self, call: Call) -> StepGraph:
        """The same of a later step.

        Raises:
            ModelError: it cannot be captured.
        """
        if self.compare_rows:
            # This batch may have no row, and others many.
            made, refused = self._of_whole_batch(call)
            return noted(made or self._with_numbers(call), refused)
        if self._is_apart and (free := self._apart(call)) is not None:
            return free
        step = self._with_numbers(call)
        return self._told_apart(step, call) if self._counts_rows else step

    @property
    def _counts_rows(self) -> bool:
        """Whether batches of several workers count by their rows in a mean."""
        by_rows = self._weighing.by_rows and means_are_of_all(self._config)
        return by_rows and self._world.size > 1

    def _told_apart(self, step: StepGraph, call: Call) -> StepGraph:
        """A step, captured with a symbol for how many rows the batch has where it takes that to
        tell them from other sizes."""
        if not confuses_rows(step):
            return step
        free = self._apart(call)
        self._is_apart = free is not None
        return step if free is None else free

    def _apart(self, call: Call) -> StepGraph | None:
        """The step, captured with such a symbol for batches of any size; None if it cannot be."""
        free = self._with_free_rows(call)
        if free is not None:
            assert free.sizes is not None
            free.sizes.hold_for_any()
        return free

    def _of_whole_batch(self, call: Call) -> tuple[StepGraph | None, Refused | None]:
        """See :func:`of_whole_batch`."""
        step = self._with_free_rows(call)
        return (None, Refused(ROWS_ARE_A_NUMBER)) if step is None else of_whole_batch(step)

    def _with_free_rows(self, call: Call) -> StepGraph | None:
        """The step, with a symbol for how many rows the batch has; None if they are a number."""
        flat = call.flat
        parts = parts_of(call.batch, call.named, len(flat))
        common = [place for place, (part, _) in enumerate(parts) if part in self._weighing.common]
        # What Python and PyTorch decide by the size of the batch, they do by that of all.
        free = with_rows(call.varying or {}, shapes_of(flat), common, self._weighing.rows)
        try:
            step = self._with_numbers(replace(call, varying=free))
        except ModelError:
            logger.debug("how many rows a batch has is no symbol", exc_info=True)
            return None
        return step if has_free_rows(step) else None

    def _with_numbers(self, call: Call) -> StepGraph:
        """The step, with whole numbers of the batch as inputs, if its losses may be divided by one,
        and it can be captured so."""
        step = self.alone(call)
        if self._world.size == 1 or call.numbers.batch or not means_are_of_all(self._config):
            return step
        whole = frozenset(index for index, item in enumerate(call.flat) if type(item) is int)
        if not whole or not divides_by_constants(step):
            return step
        try:
            return self.alone(replace(call, numbers=replace(call.numbers, batch=whole)))
        except ModelError:
            logger.debug("whole numbers of the batch stay constants", exc_info=True)
            return step
