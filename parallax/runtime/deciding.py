"""Workers whose Python decides by values of their batches run graphs with the same gradients.

``if len(boxes): loss = loss + ...`` leaves out a part of the model where a batch has nothing for
it. Where another worker's batch has something, this worker's graph gets gradients of zero for that
part, and its updates: as on one device with all batches.
"""

from __future__ import annotations

import collections
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from parallax.errors import DisagreementError, ParallaxError
from parallax.graph.common.recording import Act
from parallax.graph.passes.lent import Done, Lent, missing
from parallax.graph.step_graph import GradientPlace, StepGraph
from parallax.runtime.comm.world import World
from parallax.runtime.program import Program
from parallax.runtime.programs import Programs

_PURPOSE = "decisions"

_T = TypeVar("_T")

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
    lent = _missing(world, step)
    found: StepGraph | None = step
    if lent is not None and lent.is_any:
        # The chief decides by its graph's products, which are of rows.
        found = _tried(lambda: capture(replace(lent, as_products=world.rank > 0)))
    if (differing := _differing(world, found)) is not None:
        world.settle()
        raise differing
    assert found is not None
    return found


def _tried(capture: Callable[[], _T]) -> _T | None:
    """What a capture gives, or nothing: the other workers have to hear of it."""
    try:
        return capture()
    except ParallaxError:
        logger.debug("what others do cannot be done", exc_info=True)
        return None


def _missing(world: World, step: StepGraph) -> Lent | None:
    """What a worker lacks; all of them must call this."""
    of_all = []
    for text in world.texts("acts and gradients", json.dumps([step.acts, step.gradients])):
        acts, gradients = json.loads(text)
        of_all.append(
            Done([_act(*one) for one in acts], [GradientPlace(*one) for one in gradients])
        )
    return missing(of_all[world.rank], of_all)


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
    gradients = sorted({one.name for one in step.gradients})
    acts = collections.Counter(f"{act.kind} {act.name}" for act in step.acts if act.updates)
    return json.dumps([dict.fromkeys(gradients, 0), step.updates, acts])


def _otherwise(world: World, worker: int, own: str = "", other: str = "") -> DisagreementError:
    what = "has other gradients, or other updates"
    if own and other:
        (has, makes, does), (others, others_make, others_do) = json.loads(own), json.loads(other)
        if names := _unlike(has, others):
            what = f"has gradients of {names}, or has none"
        elif names := _unlike(makes, others_make):
            what = f"updates {names} otherwise, or not at all"
        elif kinds := _unlike(does, others_do):
            what = f"has other steps of optimizers or schedulers ({kinds})"
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


def _act(kind: str, name: str, place: int, lines: Sequence[int]) -> Act:
    return Act(kind, name, place, tuple(lines))


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
        lent = _missing(self._world, own.step)
        program: Program | None = own
        if lent is not None and lent.is_any:
            program = _tried(lambda: capture(lent))
        digests_now = self._of_all(program)
        if program is None or len({*digests_now}) > 1:
            raise self._differing(program, digests_now)
        self._programs.settle(digests, program, flat)
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
