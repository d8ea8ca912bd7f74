"""Control words: what every worker tells the others with each step, inside other messages.

They carry a hash of the plan and the step, the weight of the local batch, and a failure found
before anything was changed. A worker applies a step only when all agree on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from parallax.errors import BatchError, DisagreementError, RowIdError
from parallax.runtime.comm.id_messages import Room, exchange_ids
from parallax.runtime.comm.world import World

INTEGERS = 3
FLOATS = 19


class StepControl:
    """The control words of one worker's current step."""

    def __init__(self, world: World, usual_weight: int) -> None:
        """
        Args:
            world: this worker and the others.
            usual_weight: rows of the usual batch, equal on all workers.
        """
        self.world = world
        self.usual_weight = max(usual_weight, 1)
        self.weight = self.usual_weight
        self.total = self.weight * world.size
        self.digest = 0
        self.failure = ""
        """What this worker found wrong with its batch in this step, told to all workers."""
        self._rooms: dict[tuple[str, int], Room] = {}

    def begin(self, plan: int, step: int, weight: int) -> None:
        """Start a step.

        Args:
            plan: a hash of what this worker is about to run.
            step: number of the step.
            weight: rows of the local batch; 0 when it is empty.
        """
        self.digest = (plan ^ (step * 0x9E3779B97F4A7C15)) & 0x7FFFFFFFFFFFFFFF
        self.weight = weight
        self.total = weight * self.world.size
        self.failure = ""

    # -- With integers, before counts and ids ---------------------------------------------

    def integers(self, bad: str) -> list[int]:
        """The words as integers; ``bad`` says what is wrong with the exchange's ids."""
        self.failure = self.failure or bad
        return [self.digest, self.weight, 1 if self.failure else 0]

    def check_integers(self, words: list[list[int]]) -> None:
        """Compare what all workers sent, one list per worker.

        Raises:
            DisagreementError: a worker is about to run another step or another plan.
            RowIdError: a worker looks up a row that does not exist.
            BatchError: every worker's batch is empty.
        """
        self.check_same_step(words)
        if any(received[2] for received in words):
            raise self._failed()
        self._set_total(sum(received[1] for received in words))

    def check_same_step(self, words: list[list[int]]) -> None:
        """Whether what all workers sent can be read as this step's.

        Raises:
            DisagreementError: a worker is about to run another step or another plan.
        """
        for worker, received in enumerate(words):
            if received[0] != self.digest:
                raise self._differs(worker)

    def exchange_counts(self, counts: list[list[int]], bad: str, purpose: str) -> list[list[int]]:
        """Tell each worker its counts, with the words; what all workers tell this one.

        Raises:
            DisagreementError, RowIdError, BatchError: as :meth:`check_integers`.
        """
        words = self.integers(bad)
        told = self.world.exchange_numbers([[*words, *row] for row in counts], purpose)
        return self._checked(told)

    def exchange_ids(
        self,
        counts: list[list[int]],
        ids: torch.Tensor,
        lengths: Sequence[int],
        bad: str,
        purpose: str,
    ) -> tuple[list[list[int]], torch.Tensor]:
        """Send each worker its ids, and what they are as counts; see :func:`exchange_ids`.

        Raises:
            DisagreementError, RowIdError, BatchError: as :meth:`check_integers`.
        """
        words = self.integers(bad)
        heads = [[*words, *row] for row in counts]
        if self.world.size == 1:
            return self._checked(heads), ids
        room = self.room("rows", len(heads[0]))
        told, received = exchange_ids(self.world, room, heads, ids, lengths, purpose)
        return self._checked(told), received

    def _checked(self, told: list[list[int]]) -> list[list[int]]:
        self.check_integers([row[:INTEGERS] for row in told])
        return [row[INTEGERS:] for row in told]

    def room(self, group: str, width: int) -> Room:
        """Of messages of ids with a head of that width: all steps share it, so that workers which
        are about to run different ones can still say so to each other."""
        workers = len(self.world.group(group).ranks)
        return self._rooms.setdefault((group, width), Room(workers))

    # -- With floats, at the end of a bucket of dense gradients ------------------------------

    def floats(self, out: torch.Tensor) -> None:
        """Write the words to the end of a bucket that will be summed."""
        halves = [(self.digest >> (8 * i)) & 0xFF for i in range(8)]
        out.copy_(
            torch.tensor(
                [*halves, *(h * h for h in halves), self.weight, 1.0, bool(self.failure)],
                dtype=out.dtype,
                device=out.device,
            )
        )

    def check_floats(self, words: torch.Tensor) -> None:
        """Compare sums: for equal bytes h on all N workers, (sum h)^2 = N sum h^2.

        Raises:
            DisagreementError: some worker ran another step or another plan.
            RowIdError: a worker looks up a row that does not exist.
            BatchError: every worker's batch is empty.
        """
        values = [round(v) for v in words.tolist()]
        size = self.world.size
        if values[17] != size or any(
            values[i] * values[i] != size * values[8 + i] for i in range(8)
        ):
            raise self._differs(None)
        if values[18]:
            raise self._failed()
        self._set_total(values[16])

    @property
    def scale(self) -> float:
        """What a local gradient is multiplied by before the sum when the mean is wanted."""
        return self.weight / (self.usual_weight * self.world.size)

    @property
    def correction(self) -> float:
        """What the sum is multiplied by afterwards; 1 when all batches had the usual size."""
        return self.usual_weight * self.world.size / self.total

    @property
    def is_empty(self) -> bool:
        return self.weight == 0

    def put(self, gradient: torch.Tensor, out: torch.Tensor, average: bool) -> None:
        """Write a local gradient as it enters the sum: weighted for a mean, zero for no rows."""
        if self.is_empty:
            out.zero_()
        elif average:
            torch.mul(gradient, self.scale, out=out)
        else:
            out.copy_(gradient)

    def _set_total(self, total: int) -> None:
        if total == 0:
            raise BatchError(
                "Every worker's batch is empty in this step.",
                hint="check that the data is not exhausted and that its sharding leaves batches.",
            )
        self.total = total

    def _failed(self) -> RowIdError:
        """All workers know that some failed; each says what it found."""
        found = self.world.texts("failure", self.failure)
        self.world.settle()
        return row_id_error(next(text for text in found if text))

    def _differs(self, worker: int | None) -> DisagreementError:
        who = f"worker {worker}" if worker is not None else "another worker"
        return DisagreementError(
            f"Worker {self.world.rank} and {who} are not running the same step: batches of "
            "different structure, another number of steps, or another model. Nothing was updated.",
            hint="give every worker batches of the same nesting, dtypes and ranks, the same number "
            "of them, and keep modules in the same train/eval mode on all workers.",
        )


def batch_weight(flat: list[Any]) -> int:
    """Rows of a batch: the leading size that its tensors share, 1 if they share none."""
    sizes = {item.shape[0] for item in flat if isinstance(item, torch.Tensor) and item.dim() > 0}
    return sizes.pop() if len(sizes) == 1 else 1


def row_id_error(problem: str) -> RowIdError:
    """A lookup of a row that a table does not have."""
    return RowIdError(
        problem,
        hint="check the vocabulary the data was encoded with, its padding id, and offsets of bags.",
    )
