"""What comes before a step can run: captured, agreed on, analysed, decided, rewritten and bound."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils import _pytree as pytree

from parallax.config import Config
from parallax.errors import StrategyError
from parallax.graph.analysis.bent_gradients import note_bent_gradients
from parallax.graph.analysis.sums import note_sums
from parallax.graph.analysis.totals import Batches
from parallax.graph.analysis.variables import Analysis, analyze
from parallax.graph.common.sizes import Place
from parallax.graph.inputs import parts_of
from parallax.graph.objects.checks import check_batch, check_not_dealt
from parallax.graph.objects.discovery import StepObjects
from parallax.graph.objects.outside import NO_NUMBERS, Numbers
from parallax.graph.objects.state import aliases
from parallax.graph.passes.inner_gradients import note_inner_gradients
from parallax.graph.passes.lent import NOTHING_LENT, Lent
from parallax.graph.refusals import no_backward
from parallax.rewrite.agreement import check_agreement
from parallax.rewrite.context import WorkerGraph
from parallax.rewrite.late import defer_updates
from parallax.rewrite.pipeline import rewrite
from parallax.rewrite.timeline import computation_alone, timeline
from parallax.runtime.binding import bind
from parallax.runtime.captures import Call, Captures
from parallax.runtime.choosing import StrategyChoice
from parallax.runtime.comm.control import StepControl
from parallax.runtime.comm.weighing import Weighing, without
from parallax.runtime.comm.world import World
from parallax.runtime.deciding import with_gradients_of_all
from parallax.runtime.exchange.resources import ResourcePool
from parallax.runtime.first_batches import (
    agree_on_batches,
    as_one_batch,
    measure_access,
    one_batch_norm,
    open_groups,
    tell_of_means,
    warn_of_batch_norms,
)
from parallax.runtime.garbage import collected_seldom
from parallax.runtime.predictions.expected import ExpectedStep
from parallax.runtime.predictions.probe import measure_network
from parallax.runtime.predictions.speed import measure_speed
from parallax.runtime.program import Program
from parallax.runtime.signature import structure
from parallax.runtime.start import agree_on_everything, agree_on_tensors, draw_alike
from parallax.runtime.state.deferral import deferred_device
from parallax.runtime.state.state_table import StateTable
from parallax.strategy.choose import title_of
from parallax.strategy.compare import summary
from parallax.strategy.data import Strategy
from parallax.strategy.encoders import encoder_of

__all__ = ["Preparation"]

logger = logging.getLogger("parallax")


def _refuse_residuals(strategy: Strategy) -> None:
    """Where a step may be run again from its start, nothing may be left of what was sent."""
    for name, choice in strategy.variables.items():
        encoder = encoder_of(choice)
        if encoder is not None and encoder.feedback:
            raise StrategyError(
                f"Variable {name!r} is encoded by {encoder.name}, which keeps residuals, and the "
                "step's Python branches on gradients, so that a step may be begun twice.",
                hint="choose with torch.where instead of `if`, or leave encoder out of the "
                "variable's strategy.",
            )


class Preparation:
    """Prepares a runner's step for a batch that no program holds for.

    Before the first one, workers compare what they have and how fast they are; that one's graph
    decides the strategy, which later ones have to fit.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        objects: StepObjects,
        config: Config,
        world: World,
        state: StateTable,
        resources: ResourcePool,
        control: StepControl,
        data_sizes: Callable[[], list[str]],
    ) -> None:
        """
        Args:
            step: the user's function.
            objects: what it uses.
            config: the user's settings.
            world: this worker and the others.
            state: what steps read and write.
            resources, control: of the runtime, for programs.
            data_sizes: says how much data this worker has.
        """
        self._objects = objects
        self._config = config
        self._world = world
        self._state = state
        self._resources = resources
        self._control = control
        self._data_sizes = data_sizes
        self._noted: set[str] = set()
        devices = {
            leaf.name: device
            for leaf in state.leaves.values()
            if isinstance(leaf.value, torch.Tensor)
            and (device := deferred_device(leaf.value)) is not None
        }
        self.choice = StrategyChoice(config, world, objects, state, self._tell)
        self.weighing = Weighing(config.weigh_batches)
        self.captures = Captures(step, objects, config, world, state, self.weighing, devices)
        self.batches = Batches()
        """What is known of the batches of all workers."""
        self.expected: ExpectedStep | None = None
        """Of the last graph; None with one worker, and before the first."""

    def program(
        self,
        batch: tuple[Any, ...],
        named: Mapping[str, Any],
        varying: Mapping[Place, int],
        numbers: Numbers,
        late: bool,
        lent: Lent = NOTHING_LENT,
    ) -> Program:
        """What runs a step for a batch, on this worker.

        Args:
            batch, named: what the step takes.
            varying: sizes that should be symbols; if that cannot be, the program holds for this
                shape alone.
            numbers: that the step reads, and are to be inputs.
            late: updates may be left to the next step.
            lent: variables that are to have gradients of zero where they have none.

        Raises:
            ModelError: the step cannot be captured or distributed.
            DataError: the batch cannot be given to it.
            StrategyError: the strategy does not fit.
        """
        try:
            description, analysis = self.analyzed(batch, named, varying, numbers, lent)
            rewritten = self.rewritten(analysis, late)
        except Exception:
            if not varying:
                raise
            # What sizes mean to the step may be more than symbols can say.
            logger.debug("the step is captured for this shape alone", exc_info=True)
            description, analysis = self.analyzed(batch, named, None, numbers, lent)
            rewritten = self.rewritten(analysis, late)
        self._state.shard(rewritten.sharded, rewritten.views)
        self._state.materialize(self.captures.devices)
        return self._bound(rewritten, description, analysis)

    @collected_seldom()
    def analyzed(
        self,
        batch: tuple[Any, ...],
        named: Mapping[str, Any],
        varying: Mapping[Place, int] | None = None,
        numbers: Numbers = NO_NUMBERS,
        lent: Lent = NOTHING_LENT,
    ) -> tuple[str, Analysis]:
        """The batch's structure, and the step that it was captured with; changes nothing."""
        check_batch(batch, named)
        self._state.refresh()
        check_not_dealt(self._state.leaves, self._state.layouts)
        self.choice.check_state()
        description = structure(batch, named)
        flat = pytree.tree_leaves((batch, dict(named)))
        first = self.choice.strategy is None and self._world.size > 1
        if first:
            parts = [part for part, _ in parts_of(batch, named, len(flat))]
            self._compare(description, flat, parts)
        call = Call(batch, named, varying, numbers, lent)
        if first:
            step = self.captures.first(call)
            step = with_gradients_of_all(
                self._world, step, lambda lent: self.captures.later(replace(call, lent=lent))
            )
        else:
            step = self.captures.later(call)
        if self.choice.strategy is None and not step.gradients:
            raise no_backward(self._objects)
        if first and self._config.average_dense and self._config.average_sparse:
            note_sums(step, without(flat, step.common))
            note_bent_gradients(step)
            note_inner_gradients(step)
        for note in step.notes:
            if note not in self._noted:
                self._noted.add(note)
                logger.warning(note)
        self._state.refresh()  # which numbers are state is known by the capture
        used = self._state.use(step)
        if self._world.size > 1:
            check_agreement(step, self._state.leaves)
            if first:
                agree_on_tensors(self._world, used)
        analysis = analyze(step, self._state.leaves, aliases(self._objects))
        if first:
            measure_access(self._world, analysis, flat, self._state.leaves)
            by_rows = self.weighing.by_rows
            compared = self.captures.compare_rows
            self.batches = agree_on_batches(self._world, analysis, flat, by_rows, compared)
            open_groups(self._world, self.batches)
            tell_of_means(analysis, self._config, self.batches)
        self._dump("captured", lambda: step.graph_module.print_readable(print_output=False))
        return description, analysis

    @collected_seldom()
    def rewritten(self, analysis: Analysis, late: bool = False) -> WorkerGraph:
        """This worker's graph by the strategy, which the first graph decides."""
        strategy = self.choice.decide(analysis)
        if analysis.step.decisions and self._world.size > 1:
            _refuse_residuals(strategy)
        network, speed, variables = self.choice.network, self.choice.speed, analysis.variables
        first = as_one_batch(self._objects, self._config, self.batches)
        # Of the captured step, which rewriting uses up.
        alone = computation_alone(analysis.step, variables) if network and speed else None
        world = self._world
        # What decides about a step's updates has to be known in this step.
        late = late and world.size > 1 and not analysis.step.decisions
        rewritten = rewrite(analysis, strategy, world.rank, world.size, first, late)
        if late:
            defer_updates(rewritten, lambda entry: not entry.by_host or bool(world.host_sums))
        if network and speed and alone:
            items = timeline(rewritten, variables, strategy)
            self.expected = ExpectedStep(items, alone, strategy, network, speed)
        self._dump("rewritten", lambda: rewritten.step.graph_module.print_readable(False))
        return rewritten

    def _bound(self, rewritten: WorkerGraph, description: str, analysis: Analysis) -> Program:
        for optimizer in self._objects.optimizers.values():
            # Schedulers look here to see that optimizer.step() comes before theirs: in the graph.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        assert self.choice.strategy is not None
        # Of its variables: what comes later on some workers may not be known on others yet.
        chosen = self.choice.strategy.variables
        trained = {name for name, one in analysis.variables.items() if one.trainable}
        own = {name: choice for name, choice in chosen.items() if name in trained}
        alike = f"{description}\n{msgspec.json.encode(own)!r}"
        return bind(rewritten, self._state, self._resources, alike)

    # -- Before the first step --------------------------------------------------------------

    def _compare(self, description: str, flat: list[Any], parts: Sequence[str]) -> None:
        world = self._world
        leaves = {n: leaf for n, leaf in self._state.leaves.items() if leaf.kind != "tensor"}
        agree_on_everything(world, leaves, self._config, self._data_sizes(), description)
        draw_alike(world, self.captures.streams, self._objects)
        self._warn_of_batch_norms()
        self.choice.network = measure_network(world)
        self.choice.speed = measure_speed(world)
        self._control.usual_weight = self.weighing.agree(world, flat, parts)

    def _warn_of_batch_norms(self) -> None:
        if not one_batch_norm(self._objects, self._config):
            warn_of_batch_norms(self._objects)

    def _tell(self, strategy: Strategy) -> None:
        """Print in a line what was decided, and write it where that is asked for."""
        logger.info("strategy %s: %s", title_of(self._config.source), summary(strategy))
        self._write("strategy.json", lambda: f"{strategy.to_json().decode()}\n")

    def _dump(self, stage: str, text: Callable[[], str]) -> None:
        """A stage's result of this worker, if it is asked for."""
        self._write(f"{self.captures.count:02d}_{stage}_worker{self._world.rank}.txt", text)

    def _write(self, name: str, text: Callable[[], str]) -> None:
        if self._config.dump_dir is None:
            return
        directory = Path(self._config.dump_dir)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text(), encoding="utf-8")
