"""The Runner: captures the step when a batch first needs it, decides once, and runs it."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from parallax.config import Config
from parallax.errors import BatchError, CheckError, ConfigError, ParallaxError, StepError
from parallax.graph.analysis.variables import Variable
from parallax.graph.objects.checks import check_state
from parallax.graph.objects.discovery import StepObjects
from parallax.graph.passes.lent import NOTHING_LENT, Lent
from parallax.graph.stand_ins.default_device import on_processor
from parallax.graph.stand_ins.unread import unread_in
from parallax.graph.symbols.guesses import WrongGuessError
from parallax.runtime.ahead import Course
from parallax.runtime.captures import Call
from parallax.runtime.comm.control import StepControl
from parallax.runtime.comm.world import World
from parallax.runtime.compiled import Compiler
from parallax.runtime.compute.kept_memory import keep_freed_memory
from parallax.runtime.deciding import Decisions
from parallax.runtime.exchange.resources import ResourcePool
from parallax.runtime.one_device import Comparison, Join, compared, joined, stepped, values_of
from parallax.runtime.pace import Pace
from parallax.runtime.plan import GraphView, Plan, measured
from parallax.runtime.preparation import Preparation
from parallax.runtime.program import Program
from parallax.runtime.programs import Programs
from parallax.runtime.signature import Signature, SignatureReader
from parallax.runtime.start import seed_worker
from parallax.runtime.state.checkpoint import load_state, read_state
from parallax.runtime.state.state_table import StateTable
from parallax.runtime.trace import Profile, Profiler
from parallax.strategy.choose import title_of
from parallax.strategy.data import Strategy
from parallax.strategy.timeline import StepTime

logger = logging.getLogger("parallax")

_MOST_TRIES = 100
"""Programs that a step is begun with before one runs to its end."""


def _is_of_this_worker(error: BaseException) -> bool:
    """Whether an error within a step is one that the other workers do not raise, too."""
    if isinstance(error, BatchError):
        return error.where is not None
    return isinstance(error, StepError) or not isinstance(error, ParallaxError)


class Runner:
    """Runs a training step on this worker, together with all others.

    Made by :func:`parallax.get_runner`. The first call of :meth:`run` captures the step, agrees
    with the other workers, decides how each variable is synchronised and rewrites the graph;
    later calls replay it. When a batch of another shape comes, the step is captured once more, for
    all sizes; another train/eval mode is captured when it comes (the 32 used last are kept).
    """

    @on_processor
    def __init__(
        self,
        step: Callable[..., Any],
        objects: StepObjects,
        config: Config,
        world: World,
        data_sizes: Callable[[], list[str]] = list,
        preparation: Callable[..., Preparation] = Preparation,
    ) -> None:
        self._objects = objects
        self._config = config
        self._world = world
        check_state(objects)
        keep_freed_memory()
        self._state = StateTable(objects, world.rank, world.size)
        self._signatures = SignatureReader(objects)
        self._programs = Programs(objects.guesses)
        self._control = StepControl(world, 1)
        self._resources = ResourcePool(world, self._control)
        self._preparation = preparation(
            *(step, objects, config, world, self._state, self._resources, self._control, data_sizes)
        )
        self._choice = self._preparation.choice
        self._pace = Pace(world.device)
        self._profiler: Profiler | None = None
        self._compiler = Compiler(config.compile, world)
        weighing = self._preparation.weighing
        self._decisions = Decisions(world, self._programs)
        self._course = Course(world, self._programs, self._signatures, weighing)
        self._steps = 0
        self._failure: BaseException | None = None
        """What ended a step of this worker's within, where the others may wait for it."""
        self._last: Program | None = None
        seed_worker(world, config.seed)

    # -- Who we are -----------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self._world.size

    @property
    def worker_id(self) -> int:
        """This worker's number, from 0; worker 0 is the chief."""
        return self._world.rank

    @property
    def num_replicas_per_worker(self) -> int:
        """Model replicas that one worker drives: one, each worker has one device."""
        return 1

    # -- Running --------------------------------------------------------------------------

    @on_processor
    def run(self, *batch: Any, **named: Any) -> Any:
        """Run one step on this worker's batch.

        Args:
            batch, named: what the step takes; each worker passes its own part of the data.

        Returns:
            What the step returns, computed from this worker's batch; tensors carry no gradient.

        Raises:
            ModelError: the step cannot be captured or distributed; found at its first call.
            DataError: the batch does not fit, or looks up a row that does not exist. Nothing was
                updated in this step, on any worker.
            CheckError: what the step checks did not hold, on this worker or another one.
            StepError: an operation of the step failed on this worker, in this step or before.
            PeerError: another worker failed.
        """
        self._refuse_to_go_on()
        if self._state.refresh_if_replaced():
            self._course.settle()
            self._programs.rebind()
        captures = self._preparation.captures.count
        began = time.perf_counter()
        self._pace.start(self._world.traffic.waited)
        moving = self._choice.is_searching
        program, result = self._run(batch, named, moving)
        if self._profiler is not None and self._profiler.after():
            logger.info(self._profiler.profile)
            self._profiler = None
        self._compiler.after(program, self._pace.computed)
        self._steps += 1
        if self._preparation.captures.count == captures:
            self._pace.stop(self._world.traffic.waited)
        if moving and self._choice.search(time.perf_counter() - began):
            self._programs.clear()
        return result

    def _run(
        self, batch: tuple[Any, ...], named: Mapping[str, Any], moving: bool
    ) -> tuple[Program, Any]:
        """Run a step by the program that fits, which is known when one has run to its end."""
        for tries in range(_MOST_TRIES):
            program, signature, flat = self._program(batch, named)
            if self.num_workers > 1 and self._decides(program):
                capture = functools.partial(self._captured, batch, named, signature)
                program = self._last = self._decisions.program(program, flat, capture)
            self._course.settle(program)
            step = self._course.begin(program, signature, flat, self._steps, moving)
            try:
                self._control.begin(step)
                if self._profiler is not None and not tries:
                    self._profiler.before()
                result = program.run(flat, again=tries > 0)
                self._course.end(program)
            except (CheckError, WrongGuessError) as error:
                self._steps += 1  # on all workers at one place: steps that are announced stay so
                if isinstance(error, CheckError):
                    raise
                self._objects.guesses.decisions.update(error.decisions)
            except BaseException as error:
                self._course.forget()
                if _is_of_this_worker(error):
                    self._failure = error
                raise
            else:
                self._objects.guesses.decisions.update(program.step.decisions)
                return program, result
        raise StepError(
            f"The step was begun {_MOST_TRIES} times, and each time a branch on what it computes "
            "went another way.",
            hint="choose with torch.where or multiply by a mask instead of `if`.",
        )

    def _refuse_to_go_on(self) -> None:
        """After a step that failed within, on this worker alone: the others are still in it."""
        if self._failure is not None and self.num_workers > 1:
            raise StepError(
                f"Worker {self.worker_id} cannot go on: a step failed on it within "
                f"({type(self._failure).__name__}), and the other workers wait for its part.",
                hint="let the error end the program and go on from a checkpoint; look for what "
                "is wrong with a batch, such as labels, before runner.run().",
            ) from self._failure

    def ahead(self, batches: Iterable[Any], late_updates: bool = False) -> Iterator[Any]:
        """The same batches, read before they are needed, so that ids travel a step ahead.

        While a step computes, the ids that the next one looks up are sent to the owners of their
        rows: one wait less for every step. For loops that pass on what they are given::

            for words, labels in runner.ahead(loader):
                loss = runner.run(words, labels)

        Two batches are read ahead of the present one, so random numbers that reading them draws
        come before those of the step, and an error in reading is raised when its batch is due. Ids
        go ahead where they follow from the batch alone, in exchanges of one level; a batch that the
        loop has changed or moved is run as without. All workers must use it alike: if one runs
        another batch in between, so must all.

        With ``late_updates``, sums of dense gradients may still be under way when a step returns;
        the next step finishes them, and updates by them, where it first uses the variable. No
        number changes by that. But between two steps of the loop the model and its optimizer then
        have dense values that are one update old: read :meth:`state_dict`, which finishes all, as
        does the step of the last batch, or call :meth:`settle` first.

        Args:
            batches: one pass over this worker's data, such as a loader.
            late_updates: see above.

        Returns:
            An iterator over them. The last one made is the one that counts.

        Raises:
            ConfigError: ``batches`` cannot be gone through.
        """
        if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
            raise ConfigError(
                f"runner.ahead() goes through batches, found {type(batches).__name__}.",
                hint="give it what the loop goes through: for batch in runner.ahead(loader).",
            )
        self._course.settle()
        if late_updates != self._course.late_updates:
            self._course.late_updates = late_updates
            self._programs.clear()
        return self._course.over(batches)

    @on_processor
    def settle(self) -> None:
        """Finish all updates of the steps that ran: what ``ahead(late_updates=True)`` leaves.

        Each worker may call it when it needs to.
        """
        self._course.settle()

    def _program(
        self, batch: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[Program, Signature, list[Any]]:
        """What runs for a call, with the call's signature and its flat batch."""
        signature, flat = self._signatures.read(batch, named)
        program = self._programs.find(signature, flat)
        if program is None:
            self._course.settle()
            self._state.refresh()
            program = self._programs.find(signature, flat)
        if program is None:
            varying = self._programs.varying(signature)
            texts = self._signatures.texts
            try:
                program = self._captured(batch, named, signature)
            except Exception:
                if unread_in(texts.hidden(batch, named)):
                    texts.show()
                    return self._program(batch, named)
                if not self._signatures.keep_constant(signature):
                    raise
                logger.debug("the step is captured for these numbers alone", exc_info=True)
                return self._program(batch, named)
            if self._signatures.follow(program.step, signature):
                signature, flat = self._signatures.read(batch, named)
            if not program.step.is_lent:  # as in the first step, for batches of all workers
                self._programs.add(signature, program, varying)
        self._last = program
        return program, signature, flat

    def _captured(
        self,
        batch: tuple[Any, ...],
        named: Mapping[str, Any],
        signature: Signature,
        lent: Lent = NOTHING_LENT,
    ) -> Program:
        """What runs for a call, captured."""
        given = self._signatures.texts.hidden(batch, named)
        varying, numbers = self._programs.varying(signature), self._signatures.numbers(signature)
        return self._preparation.program(*given, varying, numbers, self._course.late_updates, lent)

    def _decides(self, program: Program) -> bool:
        """Whether the step's Python decides by values of the batch."""
        return self._preparation.batches.decide or program.step.decides_by_batch

    # -- Looking at it ------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """How each variable is synchronised and why, as a table: ``print(runner.plan)``.

        Available after the first :meth:`run`; bytes and sparsity are measured, so they settle with
        the first steps.
        """
        return Plan(
            self._measured(),
            self._choice.strategy,
            self.num_workers,
            title_of(self._config.source),
            self._choice.network,
            self._pace,
            self.expected_time(),
            self._compiler.describe(self._last),
            self._course.ids_came_ahead,
            self._last.late_variables if self._last is not None else 0,
        )

    @property
    def strategy(self) -> Strategy | None:
        """The strategy as data, None before the first :meth:`run`.

        ``runner.strategy.save("strategy.json")`` writes a file that can be read, edited, and run
        by ``Config(strategy="strategy.json")``.
        """
        return self._choice.strategy

    def _measured(self) -> dict[str, Variable]:
        return measured(self._choice.variables, self._resources.exchanges())

    def expected_time(self, one_device: float | None = None) -> StepTime | None:
        """What a step should take, by the order in which it computes and communicates.

        Args:
            one_device: seconds that the captured step takes one device with nothing to send, where
                that is known; else the time that the last steps computed is taken.

        Returns:
            None with one worker, and before the first step.
        """
        expected = self._preparation.expected
        if expected is None:
            return None
        measured, computed = self._measured(), self._pace.computation
        return expected.time(measured, computed, one_device, self._course.ids_came_ahead)

    @property
    def graph(self) -> GraphView:
        """The rewritten graph of the last step: ``runner.graph.print()``."""
        return GraphView(None if self._last is None else self._last.step)

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes that this worker sent so far, or that others of its host read, by purpose."""
        return dict(self._world.traffic.sent)

    def profile(self, steps: int = 10, path: str | Path = "trace.json") -> Profile:
        """Record the next steps: what each worker computes, sends and waits for, and when.

        All workers must call it together, some steps after the first. When the last of the steps
        has run, the chief writes all workers' trace to ``path``, for Perfetto or Chrome's
        ``about:tracing``, and logs the share of each.

        Args:
            steps: how many to record.
            path: of the file.

        Returns:
            What will have the shares, by worker.

        Raises:
            ConfigError: ``steps`` is no positive number, ``path`` no path, or steps are being
                recorded already.
        """
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ConfigError(f"steps must be a positive integer, found {steps!r}.")
        if not isinstance(path, str | os.PathLike) or Path(path).is_dir():
            raise ConfigError(f"path must be that of a file, found {path!r}.")
        if self._profiler is not None:
            raise ConfigError(
                f"{self._profiler.profile.steps} steps are being recorded already.",
                hint="call profile() again when they have run.",
            )
        self._profiler = Profiler(Profile(steps, path), self._world)
        return self._profiler.profile

    @on_processor
    def compare_with_one_device(
        self, *batch: Any, join: Join | None = None, **named: Any
    ) -> Comparison:
        """Run one step, and see how far it is from one device that has all workers' batches.

        All workers must call it together, each with its batch, as :meth:`run`; each also takes the
        step alone, on copies of all state and on all batches as one. So it takes the memory of
        one device, and is for a look at small batches: whether a loss couples rows in a way that
        workers cannot tell, for one.

        Args:
            batch, named: what the step takes.
            join: makes one batch, ``(args, kwargs)``, of those of all workers; by default tensors
                are put one behind the other along their first dimension, and numbers that differ
                are added up.

        Returns:
            The differences, to be printed, and ``worst``, the largest of them.

        Raises:
            BatchError: the batches cannot be put together.
            ConfigError: no step was run before, or a branch goes another way on one device.
            ParallaxError: as :meth:`run`.
        """
        if not self._steps:
            raise ConfigError(
                "Before their first step, workers need not have the same values yet.",
                hint="call runner.run() once before.",
            )
        self._course.settle()
        before = values_of(self._state, self._world)
        whole = joined(self._world, (batch, named), join)
        step = self._preparation.captures.alone(Call(*whole))
        one = stepped(step, before, whole)
        result = self.run(*batch, **named)
        self._course.settle()
        many = values_of(self._state, self._world)
        return compared(self._state, step, before, one, many, result)

    # -- State --------------------------------------------------------------------------------

    @on_processor
    def state_dict(self) -> dict[str, Any]:
        """The full single-device state of everything the step trains.

        All workers must call it together; each receives the whole.

        Returns:
            For each model and optimizer, by the name that the step uses for it, what its own
            ``state_dict()`` would be after training on one device; moving averages and other
            tensors of the step by their names as well. With lossy encoders, what they keep is under
            ``parallax.encoders``, by variable.
        """
        self._refuse_to_go_on()
        self._course.settle()
        return read_state(self._objects, self._state, self._world, self._resources.encoded)

    @on_processor
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state that :meth:`state_dict` gave, from a run with any number of workers.

        Raises:
            CheckpointError: names, shapes or dtypes do not fit; all problems are listed, and
                nothing was changed.
        """
        self._course.settle()
        load_state(self._objects, self._state, state, self._resources.encoded)
        self._programs.rebind()
        if self._steps:  # before, worker 0's values are given to all
            self._course.loads += 1
