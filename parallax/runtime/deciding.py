"""Workers whose Python decides by values of their batches run graphs with the same gradients.

``if len(boxes): loss = loss + ...`` leaves out a part of the model where a batch has nothing for
it. Where another worker's batch has something, this worker's graph gets gradients of zero for that
part, and its updates: as on one device with all batches.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from parallax.errors import DisagreementError, StrategyError
from parallax.graph.passes.lent import Lent, missing
from parallax.graph.step_graph import GradientPlace, Gradients, StepGraph
from parallax.runtime.comm.world import World
from parallax.runtime.program import Program
from parallax.runtime.programs import Programs

_PURPOSE = "decisions"

logger = logging.getLogger("parallax")


def with_gradients_of_all(
    world: World, step: StepGraph, capture: Callable[[Lent], StepGraph]
) -> StepGraph:
    """The first step, with gradients of zero for what those of other workers have gradients of.

    Args:
        world: this worker and the others, which must all call this.
        step: as it was captured.
        capture: captures it with such gradients.

    Raises:
        DisagreementError: their Python decides by their batches on other gradients or updates.
    """
    if str(True) not in world.texts("branches", str(step.decides_by_batch)):
        return step
    told = _gradients_of_all(world, step)
    lent = missing(told[world.rank], told)
    if lent.passes:
        # The chief decides by its graph's products, which are of rows.
        step = capture(replace(lent, as_products=world.rank > 0))
    if (differing := _differing(world, step)) is not None:
        world.settle()
        raise differing
    return step


def _gradients_of_all(world: World, step: StepGraph) -> list[Gradients]:
    told = world.texts("gradients", json.dumps(step.gradients))
    return [[GradientPlace(*one) for one in json.loads(text)] for text in told]


def _differing(world: World, step: StepGraph | None) -> DisagreementError | None:
    """What is said of gradients or updates that not all workers have; all of them must call this.

    Args:
        step: as it was captured; None if it could not be.
    """
    own = "" if step is None else _told_of(step)
    told = world.texts("updates", own)
    worker = next((place for place, other in enumerate(told) if other != own), None)
    return None if worker is None else _otherwise(world, worker, own, told[worker])


def _told_of(step: StepGraph) -> str:
    return json.dumps([{one.name: 0 for one in step.gradients}, step.updates])


def _otherwise(world: World, worker: int, own: str = "", other: str = "") -> DisagreementError:
    what = "has other gradients, or other updates"
    if own and other:
        (has, makes), (others, others_make) = json.loads(own), json.loads(other)
        if names := _unlike(has, others):
            what = f"has gradients of {names}, or has none"
        elif names := _unlike(makes, others_make):
            what = f"updates {names} otherwise, or not at all"
    return DisagreementError(
        f"Worker {world.rank} and worker {worker} are not running the same step: its Python "
        f"decides by values of the batch, and what it decides on them {what}. Nothing was updated.",
        hint="let the loss follow from the same tables either way: choose with torch.where, or "
        "multiply what is left out by zero; and clip, set and step the same, whatever the batch.",
    )


def _unlike(own: Mapping[str, int], other: Mapping[str, int]) -> str:
    """Names that two workers have other values for, or one of them has none."""
    found = sorted(n for n in own.keys() | other.keys() if own.get(n) != other.get(n))
    return ", ".join(found[:5]) + (" and others" if len(found) > 5 else "")


class Decisions:
    """Finds what a worker runs when some workers' Python has decided otherwise."""

    def __init__(self, world: World, programs: Programs) -> None:
        self._world = world
        self._programs = programs
        self._told: set[tuple[int, ...]] = set()
        """By worker, hashes of what steps leave for the next ones, which was told."""

    def program(
        self, own: Program, flat: Sequence[object], capture: Callable[[Lent], Program]
    ) -> Program:
        """What this worker runs in a step; all workers must call this.

        Args:
            own: what holds for its batch.
            flat: the batch.
            capture: gives another program for it, with gradients of zero.

        Raises:
            DisagreementError: workers' graphs exchange other gradients.
        """
        digests, kept = self._compare(own)
        if len({*kept}) > 1 and kept not in self._told:
            self._told.add(kept)
            self._tell_of_kept(own.step)
        if len({*digests}) == 1:
            return own
        settled = self._programs.settled(digests, flat)
        if len(found := {*self._of_all(settled)}) == 1 and settled is not None and all(found):
            return settled
        told = _gradients_of_all(self._world, own.step)
        lent = missing(told[self._world.rank], told)
        program: Program | None = own
        if lent.passes:
            try:
                program = capture(lent)
            except StrategyError:  # what it does not fit; the others have to hear of it
                program = None
        digests_now = self._of_all(program)
        if program is None or len({*digests_now}) > 1:
            raise self._differing(program, digests_now)
        self._programs.settle(digests, program)
        return program

    def _differing(self, program: Program | None, digests: tuple[int, ...]) -> DisagreementError:
        """What is said of programs of these digests."""
        step = None if program is None else program.step
        own = digests[self._world.rank]
        worker = next((place for place, other in enumerate(digests) if other != own), 0)
        return _differing(self._world, step) or _otherwise(self._world, worker)

    def _compare(self, program: Program) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of all workers, digests of programs, and of what they leave for the next steps."""
        words = [[_digest(program), program.kept]] * self._world.size
        digests, kept = zip(*self._world.exchange_numbers(words, _PURPOSE), strict=True)
        return digests, kept

    def _tell_of_kept(self, step: StepGraph) -> None:
        """Say what only some workers' steps leave for the next ones."""
        told = [{*json.loads(text)} for text in self._world.texts("kept", json.dumps(step.kept))]
        some = sorted(set.union(*told) - set.intersection(*told))
        if self._world.rank == 0:
            logger.warning(
                "the step's Python decides by values of the batch whether it sets %s: each worker "
                "has its own, which need not be that of one device; set it either way",
                ", ".join(some[:5]),
            )

    def _of_all(self, program: Program | None) -> tuple[int, ...]:
        """Digests of what the workers have."""
        words = [[0 if program is None else _digest(program)]] * self._world.size
        return tuple(digest for (digest,) in self._world.exchange_numbers(words, _PURPOSE))


def _digest(program: Program) -> int:
    return program.digest ^ program.order
