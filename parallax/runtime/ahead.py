"""The batches that come next, and the steps that they will be.

:meth:`parallax.Runner.ahead` reads batches before they are needed, so that exchanges can send ids
of the next step while the present one computes. Two batches are read: with the ids of the next step
travels whether there is one after it, so that all workers go on, or none does.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from parallax.errors import BatchError
from parallax.graph.objects.containers import flatten
from parallax.runtime.comm.control import Step
from parallax.runtime.comm.weighing import Weighing
from parallax.runtime.comm.world import World
from parallax.runtime.late import LateUpdates
from parallax.runtime.program import Program
from parallax.runtime.programs import Programs
from parallax.runtime.signature import STRUCTURE, Signature, SignatureReader

logger = logging.getLogger("parallax")

DEPTH = 2
"""Batches that are read before they are needed."""


class Batches(Iterator[Any]):
    """Passes batches on, and knows those that come next."""

    def __init__(self, batches: Iterable[Any], depth: int) -> None:
        """
        Args:
            batches: one pass over the data.
            depth: how many are read before they are needed.
        """
        self._source: Iterator[Any] | None = iter(batches)
        self._depth = depth
        self._coming: deque[tuple[Any, list[Any], tuple[int, ...]]] = deque()
        """Batches with what is in them, and how often that had been changed."""
        self._failure: Exception | None = None
        """What reading ended with; it is raised when what was read before is used up."""
        self._given: list[Any] = []
        """The flat batch that was passed on last."""

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        self._read()
        if not self._coming:
            self._given = []
            if self._failure is not None:
                raise self._failure
            raise StopIteration
        batch, self._given, versions = self._coming.popleft()
        if versions != versions_of(self._given):
            raise BatchError(
                "runner.ahead() was given a batch that changed when a later one was read.",
                hint="give each batch tensors of its own, or do without runner.ahead().",
            )
        return batch

    def _read(self) -> None:
        while self._source is not None and len(self._coming) <= self._depth:
            try:
                batch = next(self._source)
            except StopIteration:
                self._source = None
            except Exception as error:
                self._source, self._failure = None, error
            else:
                flat, _ = flatten(batch)
                self._coming.append((batch, flat, versions_of(flat)))

    def after(self, flat: Sequence[Any]) -> list[list[Any]]:
        """The flat batches that come after one; none if it is not the one that was passed on."""
        if not self._given or not same_objects(self._given, flat):
            return []
        return [coming for _, coming, _ in self._coming]


def versions_of(flat: Sequence[Any]) -> tuple[int, ...]:
    """How often each tensor of a flat batch was changed in place, as far as that is counted."""
    return tuple(
        item._version for item in flat if isinstance(item, torch.Tensor) and not item.is_inference()
    )


def same_objects(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two flat batches are the same objects, not only equal ones."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


@dataclass(frozen=True)
class Announced:
    """A step that is to come: what it will run, on which flat batch."""

    step: Step
    program: Program
    flat: Sequence[Any]
    versions: tuple[int, ...]
    """Of the batch, when it was announced."""

    def is_for(self, program: Program, flat: Sequence[Any]) -> bool:
        """Whether this is what now runs."""
        same = program is self.program and same_objects(self.flat, flat)
        return same and self.versions == versions_of(flat)

    def is_changed(self, flat: Sequence[Any]) -> bool:
        """Whether ``flat`` is the same batch, but changed since."""
        return same_objects(self.flat, flat) and self.versions != versions_of(flat)


_LOADED = 0x5851F42D4C957F2D
"""Mixed into the hash of a step for each state that was loaded."""


class Course:
    """The present step of a worker and those that it announced."""

    def __init__(
        self, world: World, programs: Programs, signatures: SignatureReader, weighing: Weighing
    ) -> None:
        self._world = world
        self._programs = programs
        self._signatures = signatures
        self._weighing = weighing
        self._batches: Batches | None = None
        self._coming: deque[Announced] = deque()
        self.ids_came_ahead = False
        """Whether ids of the present step came with the step before."""
        self.goes_on = False
        """Whether the batch that comes after the present one is at hand."""
        self.late_updates = False
        """Whether a step may leave updates to the one that follows."""
        self.loads = 0
        """How many states were loaded between steps, which all workers do together."""
        self._unsettled: LateUpdates | None = None
        self._rates: deque[tuple[int, int]] = deque(maxlen=DEPTH + 1)
        """Of the last steps, their numbers and hashes of the optimizers' rates."""

    def over(self, batches: Iterable[Any]) -> Batches:
        """Batches that are read ahead, of which the next steps will be."""
        self._batches = Batches(batches, DEPTH if self._world.size > 1 else 0)
        return self._batches

    def begin(
        self,
        program: Program,
        signature: Signature,
        flat: Sequence[Any],
        number: int,
        moving: bool,
    ) -> Step:
        """The present step, and with it those that follow.

        Args:
            program: what it runs.
            signature: of the call.
            flat: its batch.
            number: of the step.
            moving: rows may have other owners in the next one.

        Raises:
            PeerError: ids of another batch were sent ahead, and not all workers do without it.
        """
        if self._world.size > 1:
            self._rates.append((number, self._signatures.rates()))
        announced = self._coming.popleft() if self._coming else None
        if announced is not None and not announced.is_for(program, flat):
            self._break_off(announced, flat)
            announced = None
        if announced is not None:
            present = announced.step
        else:
            present = self._weighing.step(
                self._plan(program, number), number, flat, program.step.common
            )
        self.ids_came_ahead = present.told
        coming = [] if moving or self._batches is None else self._batches.after(flat)
        self.goes_on = bool(coming)
        last = self._coming[-1].step if self._coming else present
        for distance in range(len(self._coming) + 1, len(coming) + 1):
            batch = coming[distance - 1]
            # What was told of the step before cannot be changed any more.
            found = None if last.told else self._program(batch, signature)
            if found is None:
                break
            following = self._announced(found, number + distance, batch)
            self._coming.append(following)
            last.following = following.step
            last = following.step
        return present

    def _plan(self, program: Program, number: int) -> int:
        """What workers must have alike in a step: what it runs, rates, and how many states were
        loaded. Rates are of ``DEPTH`` steps before, as one that is announced cannot know its own
        yet."""
        known = dict(self._rates)
        return program.digest ^ known.get(number - DEPTH, 0) ^ self.loads * _LOADED

    def _announced(self, program: Program, number: int, flat: Sequence[Any]) -> Announced:
        ids = functools.cache(lambda: program.ids(flat))
        step = self._weighing.step(
            self._plan(program, number), number, flat, program.step.common, ids
        )
        return Announced(step, program, flat, versions_of(flat))

    def _program(self, batch: Sequence[Any], signature: Signature) -> Program | None:
        """What a batch that comes will run, if that is known and tells its ids.

        Args:
            batch: flat.
            signature: of a call with a batch of the same structure.
        """
        spec: Any = signature[STRUCTURE]
        if len(batch) != spec.num_leaves:
            return None
        args, named = pytree.tree_unflatten(list(batch), spec)
        program = self._programs.coming(*self._signatures.read(args, named))
        if program is None or program.step.decides_by_batch:  # others may decide otherwise
            return None
        return program if program.knows_ids else None

    def _break_off(self, announced: Announced, flat: Sequence[Any]) -> None:
        """Another batch is run than the one that was announced: all workers must do the same."""
        self._coming.clear()
        if announced.is_changed(flat):
            self._batches = None  # It would be so in every step.
            logger.warning(
                "runner.ahead(): the loop changes batches in place, so ids do not travel ahead; "
                "change a copy, or change them before runner.ahead() reads them"
            )
        if announced.step.told:
            self._world.texts("running another batch than the one that runner.ahead() gave", "")

    def forget(self) -> None:
        """Nothing is announced any more: the step failed, on all workers."""
        self._coming.clear()

    def end(self, program: Program) -> None:
        """A program's step has run: finish its updates, if there is no step to leave them to."""
        self._unsettled = program.late
        if not (self.late_updates and self.goes_on):
            self.settle()

    def settle(self, program: Program | None = None) -> None:
        """Finish the updates that a step has left, unless it is this program that runs next."""
        if self._unsettled is not None and (program is None or self._unsettled is not program.late):
            late, self._unsettled = self._unsettled, None
            late.finish()
