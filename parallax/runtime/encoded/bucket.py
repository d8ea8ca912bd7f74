"""Buckets of gradients that travel encoded."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from parallax.ops.specs import BucketEntry
from parallax.runtime.comm.control import StepControl
from parallax.runtime.comm.pending import Pending
from parallax.runtime.comm.world import World
from parallax.strategy.encoders import Encoder

PURPOSE = "dense: sum"
LATER = "dense later"
"""The group of messages that follow the first: they start when these have arrived, which is not at
the same time on all workers, and the order within a group must be."""


class EncodedBucket(ABC):
    """Gradients that travel together, encoded, and what is kept of them between steps.

    A step puts the gradients in, and starts the first message when all are there. It calls
    :meth:`advance` until no further message follows, then :meth:`words`, :meth:`finish` and, if all
    workers agree, :meth:`commit`. Until then nothing that is kept has changed.
    """

    values: torch.Tensor
    """Where gradients that are encoded are put, one after the other."""
    messages: int
    """How many follow one another in a step, each when the one before it has arrived."""
    early = True
    """The second message may start before gradients are awaited: it has a group of its own."""

    def __init__(
        self, entries: Sequence[BucketEntry], encoder: Encoder, world: World, control: StepControl
    ) -> None:
        """
        Args:
            entries: the gradients, in the same order in every graph that has the bucket.
            encoder: how they are encoded.
            world, control: the workers, and the words that travel along.
        """
        self.entries = tuple(entries)
        self.world = world
        self.control = control
        world.open_group(LATER)
        # Half types are summed in float32's precision.
        dtype = entries[0].dtype
        self.dtype = torch.float32 if dtype.itemsize < 4 else dtype
        self.average = entries[0].average
        self.feedback = encoder.feedback
        if self.feedback and self.average:
            control.weigh_early()
        self.filled = 0
        self.pending: Pending | None = None
        self._started = 0
        self._counts = [math.prod(entry.shape) for entry in entries]
        self._encoded = [self._takes(entry) for entry in entries]
        self._places: list[int] = []
        """Where each gradient begins: among those that are encoded, or the others."""
        sizes = [0, 0]
        for count, encoded in zip(self._counts, self._encoded, strict=True):
            self._places.append(sizes[encoded])
            sizes[encoded] += self._room(count) if encoded else count
        self.size = sizes[True]
        """Elements of gradients that are encoded, with room after each."""
        self.plain = self.zeros(sizes[False])
        """Where the other gradients are put."""
        self.result = self.zeros(sum(sizes))
        """The sums: first of gradients that are encoded, then of the others."""

    def zeros(self, size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A buffer, of the dtype of sums if no other is given."""
        return torch.zeros(size, dtype=dtype or self.dtype, device=self.world.device)

    @abstractmethod
    def _takes(self, entry: BucketEntry) -> bool:
        """Whether a gradient is encoded."""

    @abstractmethod
    def _room(self, count: int) -> int:
        """Elements that one has among those that are."""

    # -- A step -----------------------------------------------------------------------------

    def put(self, number: int, gradient: torch.Tensor) -> bool:
        """Take one gradient, flat. Whether it is the last, and the first message can leave."""
        first, count = self._places[number], self._counts[number]
        encoded = self._encoded[number]
        target = self.values if encoded else self.plain
        self.control.put(gradient, target[first : first + count], self.average)
        if encoded:
            target[first + count : first + self._room(count)].zero_()
        self.filled += 1
        return self.filled == len(self.entries)

    def start(self) -> None:
        """Start the first message, when all gradients are there."""
        self.filled = self._started = 0
        self._start(0)

    def advance(self, number: int) -> None:
        """Start a message, unless that is done, when the one before it has arrived."""
        if number < self.messages and self._started < number:
            self._wait()
            self._started += 1
            self._start(self._started)

    def advance_early(self) -> bool:
        """Start the second message if nothing has to be waited for; whether it is started."""
        if self._started or self.messages == 1:
            return True
        if not self.early or self.pending is None or not self.pending.has_arrived:
            return False
        self.advance(1)
        return True

    @property
    def unit(self) -> float:
        """What residuals are multiplied by to be added to this step's gradients. They are kept as
        what is owed to the mean, and gradients enter a sum that batches of other sizes weigh
        otherwise."""
        return 1.0 / self.control.early_correction() if self.average else 1.0

    @abstractmethod
    def _start(self, number: int) -> None:
        """Start a message; the ones before it have arrived."""

    @abstractmethod
    def words(self) -> torch.Tensor:
        """The sum of all workers' control words, when the last message was started."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for the last message and decode the sums."""

    @abstractmethod
    def commit(self) -> None:
        """The step is agreed on: keep the residuals."""

    def gradient(self, number: int) -> torch.Tensor:
        """One of the sums after :meth:`finish`, of its own shape: part of ``result``."""
        first, count = self._places[number], self._counts[number]
        if not self._encoded[number]:
            first += self.size
        return self.result[first : first + count].view(self.entries[number].shape)

    def _wait(self) -> None:
        assert self.pending is not None
        self.pending.wait()
        self.pending = None

    # -- What is kept -----------------------------------------------------------------------

    @abstractmethod
    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """What is kept of each gradient, by name; all workers must call this together.

        Of what has residuals, ``residuals`` are those of all that encode it, [number, *shape].
        """

    @abstractmethod
    def take(self, name: str, given: Mapping[str, torch.Tensor]) -> None:
        """Take what was kept of one gradient, beside what is here already.

        Of ``residuals`` of another number, each that encodes takes those whose number is its own
        modulo how many there are now, so that all are taken once.
        """

    @abstractmethod
    def forget(self) -> None:
        """Keep nothing of the steps so far."""

    def parts(self, values: torch.Tensor) -> list[tuple[BucketEntry, torch.Tensor]]:
        """The encoded gradients and their parts of what has all of them in its last dimension."""
        return [
            (entry, values[..., first : first + count])
            for entry, first, count, encoded in zip(
                self.entries, self._places, self._counts, self._encoded, strict=True
            )
            if encoded
        ]

    def spread(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """All encoded gradients, of which one has a value and the others are zero."""
        whole = self.zeros(self.size)
        for entry, part in self.parts(whole):
            if entry.name == name:
                part.copy_(value.reshape(-1))
        return whole


def keep(
    values: torch.Tensor, residual: torch.Tensor, unit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchange what is left of values with the residual; NaN and infinity are not kept."""
    values.nan_to_num_(0.0, 0.0, 0.0)
    if unit != 1.0:
        values.div_(unit)
    return residual, values
