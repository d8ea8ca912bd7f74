"""Buckets of gradients that are encoded as numbers to be summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from parallax.ops.specs import BucketEntry
from parallax.runtime.comm.control import FLOATS, StepControl
from parallax.runtime.comm.world import World
from parallax.runtime.encoded.bucket import LATER, PURPOSE, EncodedBucket, keep
from parallax.strategy.encoders import SumEncoder


class SumBucket(EncodedBucket):
    """A bucket whose encoded gradients are summed by AllReduce, in one message for each round.

    With e encoded bytes N workers send 2 (N-1)/N e each, in all rounds together. Gradients that
    are not encoded, and the control words, are in the first message.
    """

    def __init__(
        self,
        entries: Sequence[BucketEntry],
        encoder: SumEncoder,
        world: World,
        control: StepControl,
    ) -> None:
        self.encoder = encoder
        super().__init__(entries, encoder, world, control)
        self.values = self.zeros(self.size)
        self._residual = self.zeros(self.size if self.feedback else 0)
        chosen = [entry for entry, _ in self.parts(self.values)]
        self._coders = [
            encoder.coder(entry.name, entry.shape, self.dtype, world.device) for entry in chosen
        ]
        by_round = list(zip(*(encoder.sizes(entry.shape) for entry in chosen), strict=True))
        self._sizes = by_round or [()]
        """By round, how many numbers it sums of each gradient."""
        self.messages = len(self._sizes)
        self._buffers = [self.zeros(sum(sizes)) for sizes in self._sizes]
        self._buffers[0] = self.zeros(len(self._buffers[0]) + len(self.plain) + FLOATS)
        self._own = torch.zeros_like(self._numbers(-1))
        self._scratch = self.zeros(max((part.numel() for _, part in self._gradients()), default=0))

    def _takes(self, entry: BucketEntry) -> bool:
        return bool(self.encoder.sizes(entry.shape))

    def _room(self, count: int) -> int:
        return count

    # -- A step -----------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        if not number:
            if self.feedback:
                self.values.add_(self._residual, alpha=self.unit)
            rest = self._buffers[0][sum(self._sizes[0]) :]
            rest[:-FLOATS].copy_(self.plain)
            self.control.floats(rest[-FLOATS:])
        before = self._split(number - 1) if number else [None] * len(self._coders)
        for coder, (_, gradient), summed, out in zip(
            self._coders, self._gradients(), before, self._split(number), strict=True
        ):
            out.copy_(coder.values(gradient, summed).reshape(-1))
        if number == self.messages - 1:
            self._own.copy_(self._numbers(number))
        group = LATER if number else "dense"
        self.pending = self.world.all_reduce(self._buffers[number], PURPOSE, group)

    def words(self) -> torch.Tensor:
        """See :meth:`EncodedBucket.words`."""
        return self._buffers[0][-FLOATS:]

    def finish(self) -> None:
        """See :meth:`EncodedBucket.finish`."""
        if self.feedback:  # while the sums travel
            own = self._own.split(self._sizes[-1])
            for coder, (entry, gradient), numbers in zip(
                self._coders, self._gradients(), own, strict=True
            ):
                decoded = self._scratch[: gradient.numel()].view(entry.shape)
                coder.decode(numbers, decoded)
                gradient.sub_(decoded)
        self._wait()
        first = sum(self._sizes[0])
        self.result[self.size :].copy_(self._buffers[0][first : first + len(self.plain)])
        for coder, (entry, part), summed in zip(
            self._coders, self.parts(self.result), self._split(-1), strict=True
        ):
            coder.decode(summed, part.view(entry.shape))

    def commit(self) -> None:
        """See :meth:`EncodedBucket.commit`."""
        if self.feedback:
            self.values, self._residual = keep(self.values, self._residual, self.unit)
        for coder, summed in zip(self._coders, self._split(-1), strict=True):
            coder.remember(summed)

    def _gradients(self) -> list[tuple[BucketEntry, torch.Tensor]]:
        """The gradients that are encoded, as they came, with their residuals."""
        return [(entry, part.view(entry.shape)) for entry, part in self.parts(self.values)]

    def _numbers(self, number: int) -> torch.Tensor:
        """What of a round's message is encoded."""
        return self._buffers[number][: sum(self._sizes[number])]

    def _split(self, number: int) -> Sequence[torch.Tensor]:
        """The same, by gradient."""
        parts: tuple[torch.Tensor, ...] = self._numbers(number).split(self._sizes[number])
        return parts

    # -- What is kept -----------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """See :meth:`EncodedBucket.state`; ``memory`` is that of a gradient's coder."""
        found = {
            entry.name: {"memory": coder.memory.clone()}
            for coder, (entry, _) in zip(self._coders, self._gradients(), strict=True)
        }
        if self.feedback:
            size = self.world.size
            gathered = self.zeros(size * self.size)
            self.world.all_gather(gathered, self._residual, "state").wait()
            for entry, part in self.parts(gathered.view(size, -1)):
                found[entry.name]["residuals"] = part.reshape(size, *entry.shape).clone()
        return found

    def take(self, name: str, given: Mapping[str, torch.Tensor]) -> None:
        """See :meth:`EncodedBucket.take`; memory of other options is left out."""
        if self.feedback and "residuals" in given:
            own = given["residuals"][self.world.rank :: self.world.size]
            self._residual.add_(self.spread(name, own.sum(0)))
        for coder, (entry, _) in zip(self._coders, self._gradients(), strict=True):
            memory = given.get("memory")
            if entry.name == name and memory is not None and memory.shape == coder.memory.shape:
                coder.memory = memory.to(coder.memory, copy=True)

    def forget(self) -> None:
        """See :meth:`EncodedBucket.forget`."""
        self._residual.zero_()
        for coder in self._coders:
            coder.forget()
