"""What a captured graph is valid for: everything that the step's Python may have looked at."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from parallax.errors import BatchError
from parallax.graph.common.sizes import Shapes
from parallax.graph.objects.containers import flatten
from parallax.graph.objects.discovery import StepObjects
from parallax.graph.objects.outside import DIFFERENT, Numbers, OutsideValues
from parallax.graph.stand_ins.unread import Texts, Unread
from parallax.graph.step_graph import StepGraph

logger = logging.getLogger("parallax")

MANY_CHANGES = 5
"""Of values that a step reads besides its batch, after which its user is told."""

Signature = tuple[Hashable, ...]
STRUCTURE = 0
"""Where a signature has the nesting of the batch."""
_BATCH = 1
"""Where it describes the items of the batch."""


class _WholeNumbers:
    """Which whole numbers of a batch are inputs rather than constants, by its structure.

    A number that counts steps, or a sentence's words, would have the step captured for each of its
    values; one that chooses between two kinds of steps is best a constant.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[Hashable, int], set[int]] = {}
        self._constant: set[Hashable] = set()
        self._free: set[Hashable] = set()

    def inputs(self, spec: Hashable, flat: Sequence[Any]) -> frozenset[int]:
        """Their places, as far as is known with this batch."""
        found = []
        for index, item in enumerate(flat):
            if type(item) is int:
                seen = self._seen.setdefault((spec, index), set())
                if len(seen) < DIFFERENT:
                    seen.add(item)
                varies = len(seen) >= DIFFERENT or spec in self._free
                if varies and spec not in self._constant:
                    found.append(index)
        return frozenset(found)

    def keep_constant(self, spec: Hashable) -> None:
        """A graph could not be made with them as inputs."""
        self._constant.add(spec)

    def free(self, spec: Hashable) -> None:
        """They are inputs from now on, whatever they were."""
        self._free.add(spec)


class SignatureReader:
    """Computes the signature of a call; cheap, since it runs before every step."""

    def __init__(self, objects: StepObjects) -> None:
        self._objects = objects
        self._outside = OutsideValues(objects)
        self._last: tuple[Hashable, ...] = ()
        self._changes = 0
        self._known: set[int] = set()
        self._rates: tuple[list[float], int] = ([], 0)
        self._numbers = _WholeNumbers()
        self.texts = Texts()
        """What of batches is hidden from the step."""
        self._plain = 0
        self._look()

    def _look(self) -> None:
        models = self._objects.models.values()
        self._modules = [m for model in models for m in model.modules()]
        self._parameters = [p for model in models for p in model.parameters()]
        self._parts = [part for m in self._modules for part in (m._modules, m._parameters)]
        self._structure = self._read_structure()

    def _read_structure(self) -> list[int]:
        """What the models are made of, to notice modules and parameters put in or replaced."""
        return [id(item) for part in self._parts for item in part.values()]

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Signature, list[Any]]:
        """The signature of one call and the flat batch.

        Raises:
            BatchError: the batch holds something that cannot be an input of a graph.
        """
        flat, spec = flatten(self.texts.hidden(args, kwargs))
        inputs = self._numbers.inputs(spec, flat)
        batch = tuple(
            [int if index in inputs else _describe(item) for index, item in enumerate(flat)]
        )
        structure = self._read_structure()
        if structure != self._structure:
            self._look()
        return (
            spec,
            batch,
            tuple([module.training for module in self._modules]),
            tuple([parameter.requires_grad for parameter in self._parameters]),
            self._optimizer_part(),
            tuple(self._structure),
            self._read_outside(),
        ), flat

    def numbers(self, signature: Signature) -> Numbers:
        """Numbers that are inputs of the graph for the call that was read last."""
        batch: Any = signature[_BATCH]
        own = frozenset(index for index, item in enumerate(batch) if item is int)
        return Numbers(own, *map(tuple, self._outside.inputs()))

    def follow(self, step: StepGraph, signature: Signature) -> bool:
        """Let numbers that a captured step changes be inputs from now on, as those of the batch
        that it has for inputs, and read what it sets; whether the call has another signature by
        that."""
        batch: Any = signature[_BATCH]
        given = {item.index for item in step.inputs if item.kind == "batch" and item.number}
        freed = any(index in given for index, item in enumerate(batch) if _is_whole(item))
        if freed:
            self._numbers.free(signature[STRUCTURE])
        counted = self._outside.count(step.outside)
        found, self._plain = len(self._objects.plain) > self._plain, len(self._objects.plain)
        return self._outside.watch(step.places) or counted or found or freed

    def keep_constant(self, signature: Signature) -> bool:
        """What were inputs for a call that could not be captured are constants from now on.

        Returns:
            Whether there was any: the call has another signature then.
        """
        names = self._outside.keep_constant()
        if self.numbers(signature).batch:
            self._numbers.keep_constant(signature[STRUCTURE])
            names.append("a whole number of the batch")
        if names:
            logger.warning(
                "%s: %d values were seen, and the step cannot be captured with a number that "
                "varies; it is captured anew for each: pass a float or a tensor, or choose outside",
                ", ".join(names),
                DIFFERENT,
            )
        return bool(names)

    def rates(self) -> int:
        """A hash of the numbers in the optimizers' groups, learning rates above all. Digits that
        machines may compute differently do not count."""
        found = [
            value
            for optimizer in self._objects.optimizers.values()
            for group in optimizer.param_groups
            for value in group.values()
            if isinstance(value, float)
        ]
        if found != self._rates[0]:
            text = " ".join(f"{value:.5e}" for value in found)
            self._rates = (found, zlib.crc32(text.encode()))
        return self._rates[1]

    def _read_outside(self) -> tuple[Hashable, ...]:
        """Python values that the step reads besides its batch."""
        values = self._outside.read()
        if values == self._last:
            return (self._outside.version, values)
        known = hash(values) in self._known
        self._known.add(hash(values))
        if not known and len(values) == len(self._last):
            self._changes += 1
            if self._changes == MANY_CHANGES:
                pairs = zip(self._outside.names, self._last, values, strict=True)
                changed = [name for name, old, new in pairs if old != new]
                logger.warning(
                    "the step reads %s, which has changed %d times; it is captured anew for each "
                    "new value: pass what often changes to runner.run() as a float or a tensor",
                    ", ".join(changed[:3]),
                    MANY_CHANGES,
                )
        self._last = values
        return (self._outside.version, values)

    def _optimizer_part(self) -> Hashable:
        parts: list[Hashable] = []
        counters = self._objects.counters
        for name, optimizer in self._objects.optimizers.items():
            parts.append(len(optimizer.state))
            for index, group in enumerate(optimizer.param_groups):
                parts.append(len(group["params"]))
                parts.extend(
                    (key, value)
                    for key, value in group.items()
                    if isinstance(value, bool | str | int | None.__class__)
                    and not (counters and f"{name}.group{index}.{key}" in counters)
                )
        parts.extend([entry.told() for entry in self._objects.plain.values()])
        return tuple(parts)


def _describe(item: Any) -> Hashable:
    if isinstance(item, torch.Tensor):
        # 2 for what was computed with gradients, which is refused.
        gradients = item.requires_grad and (1 if item.is_leaf else 2)
        return (item.shape, item.dtype, item.device, item.layout, gradients)
    if isinstance(item, float):
        return float
    if isinstance(item, Unread):
        return Unread
    if item is None or isinstance(item, str | int | bool | bytes):
        return (type(item), item)
    if type(item).__module__ == "numpy":
        raise BatchError(
            f"The batch holds a numpy {type(item).__name__}, whose values would be fixed when the "
            "step is captured.",
            hint="convert it with torch.from_numpy() (or torch.as_tensor) before runner.run().",
        )
    try:
        hash(item)
    except TypeError:
        raise BatchError(
            f"The batch holds a {type(item).__name__}, which is neither a tensor, a number, "
            "a string nor a container of them.",
            hint="pass tensors in tuples, lists, mappings or dataclasses; register other "
            "containers with torch.utils._pytree.",
        ) from None
    return (type(item), item)


def _is_whole(description: Any) -> bool:
    """Whether it is of a whole number that is a constant."""
    return isinstance(description, tuple) and description[0] is int


def shapes_in(signature: Signature) -> Shapes:
    """The shapes of the flat batch of a call."""
    batch: Any = signature[_BATCH]
    return tuple(tuple(item[0]) if _may_vary(item) else None for item in batch)


def without_shapes(signature: Signature) -> Signature:
    """What calls have in common that differ in nothing but the sizes of their batches."""
    batch: Any = signature[_BATCH]
    ranks = tuple((len(item[0]), *item[1:]) if _may_vary(item) else item for item in batch)
    return (*signature[:_BATCH], ranks, *signature[_BATCH + 1 :])


def _may_vary(description: Any) -> bool:
    """Whether it is of a tensor whose sizes may be symbols: a strided one."""
    return (
        isinstance(description, tuple)
        and isinstance(description[0], torch.Size)
        and description[3] is torch.strided
    )


def structure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What must be equal on all workers of a batch: nesting, kinds, dtypes and ranks."""
    named = (f"{name}={_described(value)}" for name, value in kwargs.items())
    return ", ".join([*map(_described, args), *named])


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor of {value.dim()} dimensions"
    if type(value) is dict:
        return f"{{{', '.join(f'{key!r}: {_described(item)}' for key, item in value.items())}}}"
    if type(value) in (list, tuple):
        inside = ", ".join(map(_described, value))
        return f"[{inside}]" if type(value) is list else f"({inside})"
    leaves, spec = flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return type(value).__name__
    # Its fields, or what else tells its kind of container apart, are in the text of the spec.
    inside = ", ".join(map(_described, leaves))
    return f"{type(value).__name__}({inside}; {' '.join(str(spec).split())})"
