"""Encoded buckets of a run, and what they keep in its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from parallax.ops.specs import BucketEntry
from parallax.runtime.comm.control import StepControl
from parallax.runtime.comm.world import World
from parallax.runtime.encoded.block_buckets import BlockBucket, HostBucket
from parallax.runtime.encoded.bucket import EncodedBucket
from parallax.runtime.encoded.sum_bucket import SumBucket
from parallax.strategy.encoders import BlockEncoder, SumEncoder, encoders

STATE = "parallax.encoders"
"""Under this name a run's state has what encoders keep; no variable of a script can have it."""

Key = tuple[int, tuple[BucketEntry, ...]]


class EncodedBuckets:
    """Makes encoded buckets. Graphs with the same gradients in a bucket share it, in whatever order
    each makes them, and so what the bucket keeps."""

    def __init__(self, world: World, control: StepControl) -> None:
        self._world = world
        self._control = control
        self._made: dict[Key, EncodedBucket] = {}
        self._given: dict[str, Mapping[str, torch.Tensor]] = {}
        """State that was loaded, of gradients whose buckets are not made yet."""

    def get(self, phase: int, entries: Sequence[BucketEntry]) -> EncodedBucket:
        """The bucket of a phase with these gradients, which it has in the order of their names."""
        ordered = tuple(sorted(entries, key=lambda entry: entry.name))
        key = (phase, ordered)
        if key not in self._made:
            made = self._make(ordered)
            self._made[key] = made
            self._hand_out(key)
        return self._made[key]

    def _make(self, entries: tuple[BucketEntry, ...]) -> EncodedBucket:
        encoder = encoders()[entries[0].encoder](dict(entries[0].encoder_options))
        if isinstance(encoder, BlockEncoder):
            kind = HostBucket if entries[0].by_host else BlockBucket
            return kind(entries, encoder, self._world, self._control)
        assert isinstance(encoder, SumEncoder)
        return SumBucket(entries, encoder, self._world, self._control)

    # -- State ------------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """What encoders keep of each gradient, by its name; all workers must call this together."""
        result = {name: dict(kept) for name, kept in self._given.items()}
        for key in sorted(self._made, key=repr):
            for name, kept in self._made[key].state().items():
                own = result.setdefault(_name(key, name), {})
                for part, value in kept.items():
                    # Graphs with other buckets keep residuals of their own: all are still owed.
                    owed = part != "memory" and part in own
                    own[part] = own[part] + value if owed else value
        return result

    def load(self, given: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take what :meth:`state` gave, and forget all else."""
        self._given = dict(given)
        for key in sorted(self._made, key=repr):
            self._made[key].forget()
            self._hand_out(key)

    def _hand_out(self, key: Key) -> None:
        for entry in key[1]:
            kept = self._given.pop(_name(key, entry.name), None)
            if kept is not None:
                self._made[key].take(entry.name, kept)


def _name(key: Key, variable: str) -> str:
    """A gradient's name: its variable's, with the number of the phase where there are several."""
    return f"{variable}, phase {key[0]}" if key[0] else variable


def problems(given: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Why the state of encoders does not fit; empty if it does.

    Args:
        given: what should be such a state.
        shapes: of the variables, by name.
    """
    if not isinstance(given, Mapping):
        return [f"{STATE!r} is a {type(given).__name__}, not a state of encoders"]
    found = []
    for name, kept in given.items():
        shape = shapes.get(str(name).partition(", phase ")[0])
        if shape is None:
            found.append(f"unexpected {name!r} in {STATE!r}")
        elif not isinstance(kept, Mapping) or not all(
            isinstance(value, torch.Tensor) for value in kept.values()
        ):
            found.append(f"{name!r} in {STATE!r} is not the state of an encoder")
        else:
            sizes = {part: tuple(value.shape) for part, value in kept.items()}
            for part, size in (
                ("residuals", sizes.get("residuals", (0, *shape))[1:]),
                ("sums", sizes.get("sums", shape)),
            ):
                if size != shape:
                    found.append(f"{part} of {name!r} in {STATE!r} are of {size}, expected {shape}")
    return found
