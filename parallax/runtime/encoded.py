"""Buckets of gradients that travel encoded."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from parallax.ops.resources import BucketEntry
from parallax.runtime.comm import Pending, World
from parallax.runtime.control import StepControl
from parallax.strategy.encoders import Encoder

PURPOSE = "dense: sum"


class EncodedBucket(ABC):
    """Gradients that travel together, encoded, and what is kept of them between steps.

    A step puts the gradients in, which starts the first message when all are there; then it calls
    :meth:`forward`, :meth:`words`, :meth:`finish` and, if all workers agree, :meth:`commit`. Until
    then nothing that is kept has changed.
    """

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
        # Half types are summed in float32's precision.
        dtype = entries[0].dtype
        self.dtype = torch.float32 if dtype.itemsize < 4 else dtype
        self.average = entries[0].average
        self.counts = [math.prod(entry.shape) for entry in entries]
        self.filled = 0
        self.encoded = [self._takes(entry) for entry in entries]
        self.places: list[int] = []
        """Where each gradient begins: among those that are encoded, or the others."""
        sizes = [0, 0]
        for count, encoded in zip(self.counts, self.encoded, strict=True):
            self.places.append(sizes[encoded])
            sizes[encoded] += self._room(count) if encoded else count
        self.plain, self.values = (self._zeros(size) for size in sizes)
        """Gradients as they came: those that are not encoded, and the others with residuals."""
        self.result = self._zeros(sum(sizes))
        """The sums: first of gradients that are encoded, then of the others."""
        self.residual = self._zeros(len(self.values) if encoder.feedback else 0)
        self.pending: Pending | None = None

    def _zeros(self, size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype or self.dtype, device=self.world.device)

    @abstractmethod
    def _takes(self, entry: BucketEntry) -> bool:
        """Whether a gradient is encoded."""

    @abstractmethod
    def _room(self, count: int) -> int:
        """Elements that one has among those that are."""

    # -- A step -----------------------------------------------------------------------------

    def put(self, number: int, gradient: torch.Tensor) -> None:
        """Take one gradient, flat; with the last the first message leaves."""
        first, count = self.places[number], self.counts[number]
        encoded = self.encoded[number]
        out = (self.values if encoded else self.plain)[first : first + count]
        kept = self.residual[first : first + count] if encoded else self.residual[:0]
        if self.control.is_empty:
            out.copy_(kept) if len(kept) else out.zero_()
        elif len(kept):
            scale = self.control.scale if self.average else 1.0
            torch.add(kept, gradient, alpha=scale, out=out)
        elif self.average:
            torch.mul(gradient, self.control.scale, out=out)
        else:
            out.copy_(gradient)
        if encoded:
            self.values[first + count : first + self._room(count)].zero_()
        self.filled += 1
        if self.filled == len(self.entries):
            self.filled = 0
            self._start()

    @abstractmethod
    def _start(self) -> None:
        """Encode, and send the first message."""

    @abstractmethod
    def forward(self) -> None:
        """Wait for the first message, and send what follows from it."""

    @abstractmethod
    def words(self) -> torch.Tensor:
        """The sum of all workers' control words, after :meth:`forward`."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for the last message and decode the sums."""

    @abstractmethod
    def commit(self) -> None:
        """The step is agreed on: keep the residuals."""

    def gradient(self, number: int) -> torch.Tensor:
        """One of the sums after :meth:`finish`, of its own shape: part of ``result``."""
        first, count = self.places[number], self.counts[number]
        if not self.encoded[number]:
            first += len(self.values)
        return self.result[first : first + count].view(self.entries[number].shape)

    # -- What is kept -----------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """What is kept of each gradient, by name; all workers must call this together.

        Returns:
            ``residuals``: of all workers, [workers, *shape]; and what a kind of bucket adds.
        """
        if not len(self.residual):
            return {}
        size = len(self.residual)
        gathered = self.residual.new_empty(self.world.size * size)
        self.world.all_gather(gathered, self.residual, "state").wait()
        return {
            entry.name: {"residuals": part.reshape(self.world.size, *entry.shape).clone()}
            for entry, part in self._parts(gathered.view(-1, size))
        }

    def take(self, name: str, given: Mapping[str, torch.Tensor]) -> None:
        """Take what was kept of one gradient, by any number of workers.

        This worker takes the residuals of each worker whose number is its own modulo their number
        now, so that all arrive, and as before if there are as many workers as there were.
        """
        if len(self.residual) and "residuals" in given:
            (own,) = (part for entry, part in self._parts(self.residual) if entry.name == name)
            own.copy_(given["residuals"][self.world.rank :: self.world.size].sum(0).reshape(-1))

    def forget(self) -> None:
        """Keep nothing of the steps so far."""
        self.residual.zero_()

    def _parts(self, values: torch.Tensor) -> list[tuple[BucketEntry, torch.Tensor]]:
        """The encoded gradients and their parts of what has all of them in its last dimension."""
        return [
            (entry, values[..., first : first + count])
            for entry, first, count, encoded in zip(
                self.entries, self.places, self.counts, self.encoded, strict=True
            )
            if encoded
        ]

    def _wait(self) -> None:
        assert self.pending is not None
        self.pending.wait()
        self.pending = None


def keep(values: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchange what is left of values with the residual; NaN and infinity are not kept."""
    values.nan_to_num_(0.0, 0.0, 0.0)
    return residual, values
