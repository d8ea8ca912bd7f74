"""Control words: what every worker tells the others with each step, inside other messages.

They carry a hash of the plan and the step, the weight of the local batch, and a failure found
before anything was changed. A worker applies a step only when all agree on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallax.errors import BatchError, DisagreementError, RowIdError
from parallax.ops.turns import Turns
from parallax.runtime.comm.id_messages import IdsUnderWay, Room
from parallax.runtime.comm.pending import Pending
from parallax.runtime.comm.world import World

INTEGERS = 3
FLOATS = 19
LAST = 8
"""Of how many messages of rows the largest says into how many parts the next ones are cut."""


@dataclass(eq=False)
class Step:
    """One step of this worker, as it tells the others of it.

    Args:
        digest: a hash of what it runs, and of its number.
        weight: what the local batch counts in a mean; 0 when it is empty.
        ids: by exchange, what it looks up by: of a step to come, whose batch is at hand.
    """

    digest: int
    weight: int
    ids: Callable[[], Mapping[Any, Any]] = dict
    failure: str = ""
    """What this worker found wrong with the batch, told to all workers."""
    following: Step | None = None
    """The step after it, if this worker could send that one's ids ahead."""
    told: bool = False
    """A message of its ids is under way, and with it whether there is one that follows."""

    @classmethod
    def of(
        cls, plan: int, number: int, weight: int, ids: Callable[[], Mapping[Any, Any]] = dict
    ) -> Step:
        """A step by what it runs, as a hash, and its number."""
        mixed = (plan ^ (number * 0x9E3779B97F4A7C15)) & 0x7FFFFFFFFFFFFFFF
        return cls(mixed, weight, ids)


@dataclass(frozen=True)
class AskedIds:
    """A message of ids under way.

    Args:
        finish: waits for what others sent: heads by worker, and the ids.
        room: of messages of its kind; None for one worker.
    """

    finish: Callable[[], tuple[list[list[int]], torch.Tensor]]
    room: Room | None = None


@dataclass(frozen=True)
class HeardIds:
    """What others ask this worker for.

    Args:
        counts: by worker, what its ids are.
        ids: worker by worker.
        goes_on: every worker can send the ids of the step that follows.
        most: bytes of the largest message of rows of late, of all workers.
    """

    counts: list[list[int]]
    ids: torch.Tensor
    goes_on: bool
    most: int = 0


class StepControl:
    """The control words of one worker's current step."""

    def __init__(self, world: World, usual_weight: int) -> None:
        """
        Args:
            world: this worker and the others.
            usual_weight: what the usual batch counts, equal on all workers.
        """
        self.world = world
        self.usual_weight = max(usual_weight, 1)
        self.step = Step(0, self.usual_weight)
        self.turns = Turns()
        """Of the step's messages of dense gradients."""
        self.total = self.weight * world.size
        self._rooms: dict[tuple[str, int], Room] = {}
        self._loads: deque[int] = deque(maxlen=LAST)
        self._weighs_early = False
        self._rows: torch.Tensor | None = None
        self._rows_pending: Pending | None = None
        self._early_total: int | None = None

    def begin(self, step: Step) -> None:
        """Start a step of this worker."""
        self.step = step
        self.turns = Turns()
        self.total = step.weight * self.world.size
        if self._weighs_early:
            self._settle_rows()
            self._rows = torch.tensor([step.weight], dtype=torch.float64, device=self.world.device)
            self._rows_pending = self.world.all_reduce(self._rows, "rows")

    def weigh_early(self) -> None:
        """From the next step on, tell all workers' weights when a step begins: what is left of
        one mean and added to another has to be in the unit of that one."""
        self._weighs_early = self.world.size > 1

    def early_correction(self) -> float:
        """As :attr:`correction`, before the control words have come; 1 in the first step, in which
        nothing is left of another."""
        self._settle_rows()
        return 1.0 if self._early_total is None else self.correction_for(self._early_total)

    def _settle_rows(self) -> None:
        if self._rows_pending is not None:
            assert self._rows is not None
            self._rows_pending.wait()
            self._rows_pending = None
            # Once in a step: on a device, reading it waits.
            self._early_total = max(int(self._rows), 1)

    @property
    def weight(self) -> int:
        """What the local batch counts in a mean."""
        return self.step.weight

    # -- With integers, before counts and ids ---------------------------------------------

    def integers(self, bad: str) -> list[int]:
        """The words as integers; ``bad`` says what is wrong with the exchange's ids."""
        return _integers(self.step, bad)

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
            if received[0] != self.step.digest:
                raise self._differs(worker)

    def exchange_counts(self, counts: list[list[int]], bad: str, purpose: str) -> list[list[int]]:
        """Tell each worker its counts, with the words; what all workers tell this one.

        Raises:
            DisagreementError, RowIdError, BatchError: as :meth:`check_integers`.
        """
        words = self.integers(bad)
        told = self.world.exchange_numbers([[*words, *row] for row in counts], purpose)
        return self._checked(told)

    def ask(
        self,
        step: Step,
        counts: list[list[int]],
        ids: torch.Tensor,
        lengths: Sequence[int],
        bad: str,
        purpose: str,
    ) -> AskedIds:
        """Start to send each worker its ids.

        Args:
            step: whose they are: the present one, or the one that follows.
            counts: by worker, what its ids are.
            ids: worker by worker.
            lengths: by worker, how many.
            bad: what is wrong with them, if anything.
            purpose: what the bytes are counted as.
        """
        words = [*_integers(step, bad), int(step.following is not None)]
        step.told = True
        heads = [[*words, *row] for row in counts]
        if self.world.size == 1:
            return AskedIds(lambda: (heads, ids))
        room = self.room("rows", len(heads[0]))
        message = IdsUnderWay(self.world, room, heads, ids, lengths, purpose)
        return AskedIds(message.finish, room)

    def hear(self, asked: AskedIds) -> HeardIds:
        """Wait for what others ask for in the same step.

        Raises:
            DisagreementError, RowIdError, BatchError: as :meth:`check_integers`.
        """
        told, ids = asked.finish()
        rest = self._checked(told)
        goes_on = all(row[0] for row in rest)
        most = 0 if asked.room is None else asked.room.most
        return HeardIds([row[1:] for row in rest], ids, goes_on, most)

    def _checked(self, told: list[list[int]]) -> list[list[int]]:
        self.check_integers([row[:INTEGERS] for row in told])
        return [row[INTEGERS:] for row in told]

    def room(self, group: str, width: int) -> Room:
        """Of messages of ids with a head of that width: all steps share it, so that workers which
        are about to run different ones can still say so to each other."""
        workers = len(self.world.group(group).ranks)
        room = self._rooms.setdefault((group, width), Room(workers))
        room.load = max(self._loads, default=0)
        return room

    def note_load(
        self, sent: Sequence[int], received: Sequence[int], dtype: torch.dtype, group: str
    ) -> None:
        """Note how much this worker sends each of a group, and gets, in a message of rows: with its
        next ids all workers are told, so that they cut what is large into equally many parts."""
        if group in self.world.pieces:
            place = self.world.group(group).place
            most = max(sum(counts) - counts[place] for counts in (sent, received))
            self._loads.append(most * dtype.itemsize)

    # -- With floats, at the end of a bucket of dense gradients ------------------------------

    def floats(self, out: torch.Tensor) -> None:
        """Write the words to the end of a bucket that will be summed."""
        halves = [(self.step.digest >> (8 * i)) & 0xFF for i in range(8)]
        squares = (h * h for h in halves)
        words = [*halves, *squares, self.weight, 1.0, bool(self.step.failure)]
        # A device gets them in its turn, without being waited for.
        out.copy_(torch.tensor(words, dtype=out.dtype, device="cpu"), non_blocking=True)

    def check_floats(self, words: torch.Tensor) -> None:
        """Compare sums: for equal bytes h on all N workers, (sum h)^2 = N sum h^2.

        Raises:
            DisagreementError: some worker ran another step or another plan.
            RowIdError: a worker looks up a row that does not exist.
            BatchError: every worker's batch is empty.
        """
        self._set_total(self.agreed(words))

    def agreed(self, words: torch.Tensor) -> int:
        """The rows of all workers' batches, by the sums of a step that need not be the present.

        Raises:
            DisagreementError, RowIdError: as :meth:`check_floats`.
        """
        values: list[int] = [round(v) for v in words.tolist()]
        size = self.world.size
        if values[17] != size or any(
            values[i] * values[i] != size * values[8 + i] for i in range(8)
        ):
            raise self._differs(None)
        if values[18]:
            raise self._failed()
        return values[16]

    @property
    def scale(self) -> float:
        """What a local gradient is multiplied by before the sum when the mean is wanted."""
        return self.weight / (self.usual_weight * self.world.size)

    @property
    def correction(self) -> float:
        """What the sum is multiplied by afterwards; 1 when all batches had the usual size."""
        return self.correction_for(self.total)

    def correction_for(self, total: int) -> float:
        """As :attr:`correction`, of a step with so many rows in all workers' batches."""
        return self.usual_weight * self.world.size / total

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
        found = self.world.texts("failure", self.step.failure)
        self.world.settle()
        return row_id_error(next(text for text in found if text))

    def _differs(self, worker: int | None) -> DisagreementError:
        who = f"worker {worker}" if worker is not None else "another worker"
        return DisagreementError(
            f"Worker {self.world.rank} and {who} are not running the same step: batches of "
            "different structure, another number of steps, another model, other learning rates, "
            "another number of loaded states, or tensors of a batch that have the same first size "
            "on some workers only. Nothing was updated.",
            hint="give every worker batches of the same nesting, dtypes and ranks (lists of "
            "several lengths, as of micro-batches, as a tensor that the step splits; lists of "
            "texts, such as paths, without what the step keeps or reads of them), the same "
            "number of batches, and keep modules in the same train/eval mode on all workers; call "
            "load_state_dict() on all of them; step schedulers with values that are the same on "
            "all, such as a validation loss over all data; where batches do not have their rows in "
            "front, set Config(weigh_batches=False).",
        )


def _integers(step: Step, bad: str) -> list[int]:
    step.failure = step.failure or bad
    return [step.digest, step.weight, 1 if step.failure else 0]


def row_id_error(problem: str) -> RowIdError:
    """A lookup of a row that a table does not have."""
    return RowIdError(
        problem,
        hint="check the vocabulary the data was encoded with, its padding id, and offsets of bags.",
    )
