"""Sizes of a batch that differ from call to call: symbols of a captured graph.

The first batch is captured as it is. When one of another shape comes, the sizes that differ become
symbols, and the new graph holds for every batch that decides its Python branches alike: for
sentences of any length, unless the step's own Python counts their words.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from parallax.graph.common.torch_internals import (
    FakeTensorMode,
    ShapeEnv,
    evaluate,
    is_equation,
    new_size,
)

Place = tuple[int, int]
"""A size of the flat batch: of which item, and its dimension."""
Shapes = tuple[tuple[int, ...] | None, ...]
"""Of each item of the flat batch; None where it is no strided tensor."""

LEAST = 2
"""A size of one or none means something else (one is broadcast), and never stands for others."""


def varying(seen: Sequence[Shapes]) -> dict[Place, int]:
    """The sizes that were not always the same, by place.

    Args:
        seen: the shapes of batches of equal structure.

    Returns:
        By place a number; sizes that were always equal to each other have the same. Those that are
        one or none in the last batch are left out.
    """
    numbers: dict[tuple[int, ...], int] = {}
    found: dict[Place, int] = {}
    for index, shape in enumerate(seen[0]):
        for dimension in range(len(shape or ())):
            sizes = tuple(shapes[index][dimension] for shapes in seen)  # type: ignore[index]
            if len(set(sizes)) > 1 and sizes[-1] >= LEAST:
                found[index, dimension] = numbers.setdefault(sizes, len(numbers))
    return found


def with_rows(
    found: Mapping[Place, int], shapes: Shapes, common: Collection[int], least: int
) -> dict[Place, int]:
    """The same, with how many rows a batch has.

    Args:
        found: as :func:`varying` tells.
        shapes: of a batch whose tensors have one first size.
        common: of it, places of tensors that have other ones.
        least: what the step does is what it does with so many rows or more: a negative number of
            the result says so.
    """
    number = -max(least, LEAST)
    rows = {(place, 0) for place, shape in enumerate(shapes) if shape and place not in common}
    alike = {one for place, one in found.items() if place in rows}
    others = {place: number if one in alike else one for place, one in found.items()}
    return others | dict.fromkeys(rows, number)


def shapes_of(batch: Sequence[Any]) -> Shapes:
    """The shapes of a flat batch's strided tensors."""
    return tuple(
        tuple(item.shape)
        if isinstance(item, torch.Tensor) and item.layout is torch.strided
        else None
        for item in batch
    )


def size_of(size: int | torch.SymInt) -> int | None:
    """A size as a number: where it is a symbol, that of the batch which was captured.

    None for a size that depends on values, such as that of a selection.
    """
    return size if isinstance(size, int) else size.node.hint


def sizes_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of an example value as numbers; 0 for a size that depends on values."""
    return tuple(size_of(size) or 0 for size in tensor.shape)


def same_shape(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes are equal for all batches that a graph holds for.

    To ask ``one == other`` would take the answer for this batch for granted in the graph.
    """
    return len(one) == len(other) and all(map(same_size, one, other))


def same_size(one: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """The same of two sizes."""
    if isinstance(one, int) or isinstance(other, int):
        return isinstance(one, int) and isinstance(other, int) and one == other
    return bool(one.node.expr == other.node.expr)


class BatchSizes:
    """The symbols of one capture, and what is known of them."""

    def __init__(self, env: ShapeEnv, numbers: Mapping[Place, int], shapes: Shapes) -> None:
        """
        Args:
            env: of the capture; it notes what the graph takes for granted.
            numbers: which sizes may vary, as :func:`varying` and :func:`with_rows` tell; as they
                are now, those of one number are equal.
            shapes: of the batch that is captured.
        """
        self._env = env
        self._shapes = shapes
        self._numbers = dict(numbers)
        self._found = {number: place for place, number in self._numbers.items()}
        """By symbol, one of the sizes that it stands for."""
        made = {
            number: new_size(
                env, f"batch{place[0]}.size{place[1]}", max(_at(shapes, place), -number)
            )
            for place, number in reversed(self._numbers.items())
        }
        self._symbols = {number: symbol for number, (symbol, _) in made.items()}
        self._sizes = {number: size for number, (_, size) in made.items()}
        self._least = LEAST

    def tensor(self, mode: FakeTensorMode, index: int, value: torch.Tensor) -> torch.Tensor | None:
        """An item of the batch without storage, with symbols for sizes; None if it has none.

        It is contiguous, whatever ``value`` is: strides would be numbers that vary as well.
        """
        shape = [
            self._sizes[self._numbers[index, dimension]]
            if (index, dimension) in self._numbers
            else size
            for dimension, size in enumerate(value.shape)
        ]
        if all(isinstance(size, int) for size in shape):
            return None
        with mode:
            return torch.empty(shape, dtype=value.dtype, device=value.device)

    def places(self, symbol: Any) -> list[Place]:
        """The sizes that a symbol stands for."""
        return [place for place, number in self._numbers.items() if self._symbols[number] == symbol]

    def are_of_batch(self, size: torch.SymInt) -> bool:
        """Whether the shapes of a batch say how large a size is."""
        return all(map(self.places, size.node.expr.free_symbols))

    def fits(self, shapes: Shapes) -> bool:
        """Whether the graph holds for a batch of these shapes."""
        values: dict[int, int] = {}
        for index, (shape, captured) in enumerate(zip(shapes, self._shapes, strict=True)):
            for dimension, size in enumerate(shape or ()):
                number = self._numbers.get((index, dimension))
                if number is None:
                    if size != captured[dimension]:  # type: ignore[index]
                        return False
                elif size < self._least or values.setdefault(number, size) != size:
                    return False
        found: dict[Any, float | int] = {
            self._symbols[number]: size for number, size in values.items()
        }
        guards = [one.expr for one in self._env.guards if one.expr.free_symbols <= found.keys()]
        try:
            return all(evaluate(one, found) for one in guards)
        except ZeroDivisionError:  # by a size of none
            return False

    def another(self, name: str, value: int) -> torch.SymInt:
        """A size that is none of this worker's batch, as it is now."""
        return new_size(self._env, name, value)[1]

    def is_free(self, size: torch.SymInt) -> bool:
        """Whether nothing has been taken for granted of how large a size is."""
        return bool(self._env.replace(size.node.expr).free_symbols)

    def is_counted(self, size: torch.SymInt) -> bool:
        """Whether Python has taken a number that follows from a size, as to count up to half of it.

        That another number is a multiple of it, as an assertion wants, is no such number.
        """
        symbol, hint = size.node.expr, size.node.hint
        others = [count * hint for count in (2, 3, 5)]
        return any(
            is_equation(one.expr)
            and one.expr.free_symbols == {symbol}
            and not all(evaluate(one.expr, {symbol: other}) for other in others)
            for one in self._env.guards
        )

    def hold_for_any(self) -> None:
        """Let the graph hold for batches of one row, and of none, too, as if they had several."""
        self._least = 0

    def values(self, batch: Sequence[Any]) -> tuple[int, ...]:
        """The sizes of a flat batch that the graph holds for, those that vary: of each symbol."""
        return tuple(batch[index].shape[dimension] for index, dimension in self._found.values())

    def symbols(self, values: Sequence[int]) -> dict[Any, int]:
        """By symbol of the graph its size, of what :meth:`values` gave."""
        pairs = dict(zip((self._symbols[number] for number in self._found), values, strict=True))
        return pairs | {self._env.replace(symbol): size for symbol, size in pairs.items()}

    def settled(self) -> set[Place]:
        """Sizes that turned out to be part of the graph, as where Python counts up to them."""
        return {
            place
            for place, number in self._numbers.items()
            if not self._env.replace(self._symbols[number]).free_symbols
        }


def _at(shapes: Shapes, place: Place) -> int:
    shape = shapes[place[0]]
    assert shape is not None
    return shape[place[1]]
