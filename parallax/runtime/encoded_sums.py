"""Buckets of gradients that are encoded as numbers to be summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from parallax.ops.resources import BucketEntry
from parallax.runtime.comm import World
from parallax.runtime.control import FLOATS, StepControl
from parallax.runtime.encoded import PURPOSE, EncodedBucket, keep
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
        chosen = [entry for entry, _ in self._parts(self.values)]
        self._coders = [
            encoder.coder(entry.name, entry.shape, self.dtype, world.device) for entry in chosen
        ]
        by_round = list(zip(*(encoder.sizes(entry.shape) for entry in chosen), strict=True))
        self._sizes = by_round or [()]
        """By round, how many numbers it sums of each gradient."""
        self._messages = [self._zeros(sum(sizes)) for sizes in self._sizes]
        self._messages[0] = self._zeros(len(self._messages[0]) + len(self.plain) + FLOATS)
        self._own = torch.zeros_like(self._numbers(-1))
        self._scratch = self._zeros(max((part.numel() for _, part in self._encoded()), default=0))

    def _takes(self, entry: BucketEntry) -> bool:
        return bool(self.encoder.sizes(entry.shape))

    def _room(self, count: int) -> int:
        return count

    # -- A step -----------------------------------------------------------------------------

    def _start(self) -> None:
        rest = self._messages[0][sum(self._sizes[0]) :]
        rest[:-FLOATS].copy_(self.plain)
        self.control.floats(rest[-FLOATS:])
        self._send(0)

    def _send(self, number: int) -> None:
        """Start a round."""
        before = self._split(number - 1) if number else [None] * len(self._coders)
        for coder, (_, gradient), summed, out in zip(
            self._coders, self._encoded(), before, self._split(number), strict=True
        ):
            out.copy_(coder.values(gradient, summed).reshape(-1))
        if number == len(self._messages) - 1:
            self._own.copy_(self._numbers(number))
        self.pending = self.world.all_reduce(self._messages[number], PURPOSE)

    def forward(self) -> None:
        """See :meth:`EncodedBucket.forward`."""
        self._wait()
        if len(self._messages) > 1:
            self._send(1)

    def words(self) -> torch.Tensor:
        """See :meth:`EncodedBucket.words`."""
        return self._messages[0][-FLOATS:]

    def finish(self) -> None:
        """See :meth:`EncodedBucket.finish`."""
        for number in range(2, len(self._messages)):
            self._wait()
            self._send(number)
        if len(self.residual):  # while the sums travel
            own = self._own.split(self._sizes[-1])
            for coder, (entry, gradient), numbers in zip(
                self._coders, self._encoded(), own, strict=True
            ):
                decoded = self._scratch[: gradient.numel()].view(entry.shape)
                coder.decode(numbers, decoded)
                gradient.sub_(decoded)
        if self.pending is not None:
            self._wait()
        first = sum(self._sizes[0])
        others = self.result[len(self.values) :]
        others.copy_(self._messages[0][first : first + len(self.plain)])
        for coder, (entry, part), summed in zip(
            self._coders, self._parts(self.result), self._split(-1), strict=True
        ):
            coder.decode(summed, part.view(entry.shape))

    def commit(self) -> None:
        """See :meth:`EncodedBucket.commit`."""
        if len(self.residual):
            self.values, self.residual = keep(self.values, self.residual)
        for coder, summed in zip(self._coders, self._split(-1), strict=True):
            coder.remember(summed)

    def _encoded(self) -> list[tuple[BucketEntry, torch.Tensor]]:
        """The gradients that are encoded, as they came, with their residuals."""
        return [(entry, part.view(entry.shape)) for entry, part in self._parts(self.values)]

    def _numbers(self, number: int) -> torch.Tensor:
        """What of a round's message is encoded."""
        return self._messages[number][: sum(self._sizes[number])]

    def _split(self, number: int) -> Sequence[torch.Tensor]:
        """The same, by gradient."""
        parts: tuple[torch.Tensor, ...] = self._numbers(number).split(self._sizes[number])
        return parts

    # -- What is kept -----------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """See :meth:`EncodedBucket.state`; ``memory`` is that of a gradient's coder."""
        state = super().state()
        for coder, (entry, _) in zip(self._coders, self._encoded(), strict=True):
            state.setdefault(entry.name, {})["memory"] = coder.memory.clone()
        return state

    def take(self, name: str, given: Mapping[str, torch.Tensor]) -> None:
        """See :meth:`EncodedBucket.take`; memory of other options is left out."""
        super().take(name, given)
        for coder, (entry, _) in zip(self._coders, self._encoded(), strict=True):
            memory = given.get("memory")
            if entry.name == name and memory is not None and memory.shape == coder.memory.shape:
                coder.memory = memory.to(coder.memory, copy=True)

    def forget(self) -> None:
        """See :meth:`EncodedBucket.forget`."""
        super().forget()
        for coder in self._coders:
            coder.forget()
