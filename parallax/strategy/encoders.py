"""What an encoder is, and the registry of them.

An encoder says what a gradient looks like while it travels. There are two shapes of them. A
:class:`BlockEncoder` turns each block of a gradient into a few small tensors that only their
receiver can add up, after decoding them. A :class:`SumEncoder` turns a gradient into numbers that
can be added as they are, so that an AllReduce of them is one of the gradients.

This room knows what an encoder is called, what it takes and how many bytes it makes of a gradient;
the encoders are in ``rewrite/encoders``, one file each, and are loaded when they are first asked
for; a package adds its own by :func:`register`.
"""

from __future__ import annotations

import difflib
import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch

from parallax.errors import StrategyError
from parallax.graph.analysis.variables import Variable
from parallax.strategy.data import VariableStrategy
from parallax.strategy.registry import Synchronizer

NONE = "none"
"""The name in a strategy of no encoder."""


@dataclass(frozen=True)
class Option:
    """A number that an encoder takes.

    Args:
        default: its value where a strategy does not give one.
        low, high: the least and the greatest that it may be.
        step: it is a multiple of this; 0 for any number between.
    """

    default: float
    low: float
    high: float
    step: float = 0

    def problem(self, value: float) -> str:
        """Why a value will not do; empty if it will."""
        if not self.low <= value <= self.high:
            return f"from {self.low:g} to {self.high:g}"
        if self.step and value % self.step:
            return f"a multiple of {self.step:g}"
        return ""


class Encoder(ABC):
    """How gradients are encoded, with the options of one strategy.

    A subclass has a ``name``, ``options`` by name, and says with ``feedback`` whether what encoding
    lost is kept (the *residual*, as large as the gradient, on each worker) and added to the
    gradient of the next step, so that it arrives late instead of never (Seide et al. 2014).
    """

    name: ClassVar[str]
    options: ClassVar[Mapping[str, Option]] = {}
    cast: ClassVar[torch.dtype | None] = None
    """The dtype as which rows of tables travel, if this is for them as well."""

    def __init__(self, given: Mapping[str, float] | None = None) -> None:
        """
        Args:
            given: options that differ from their default.
        """
        given = given or {}
        self.values = {
            name: given.get(name, option.default) for name, option in self.options.items()
        }

    @property
    def feedback(self) -> bool:
        """Whether residuals are kept."""
        return True

    @abstractmethod
    def encoded_bytes(self, shape: Sequence[int], itemsize: int) -> int:
        """Bytes of an encoded gradient.

        Args:
            shape: of the gradient.
            itemsize: bytes of a number of it that travels as it is.
        """


class BlockEncoder(Encoder):
    """An encoder that makes the same number of bytes of each block of a gradient.

    Gradients are padded with zeros to whole blocks, so that no block has parts of two. One that is
    smaller than a block travels as it is.
    """

    @property
    @abstractmethod
    def block(self) -> int:
        """Elements of a block."""

    @property
    @abstractmethod
    def fields(self) -> tuple[tuple[torch.dtype, int], ...]:
        """Of what an encoded block consists: dtype and number of elements of each part."""

    @abstractmethod
    def encode(self, values: torch.Tensor, fields: Sequence[torch.Tensor]) -> None:
        """Encode blocks.

        Args:
            values: [blocks, block], float32 or float64; not to be changed.
            fields: to fill, for each field [blocks, its number of elements].
        """

    @abstractmethod
    def decode(self, fields: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Decode blocks to ``out``, [blocks, block]; arguments as :meth:`encode` filled them.

        All workers decode the same bytes, and must come to the same numbers.
        """

    def takes(self, count: int) -> bool:
        """Whether a gradient of so many elements is encoded."""
        return count >= self.block

    def blocks(self, count: int) -> int:
        """Blocks of a gradient of so many elements."""
        return -(-count // self.block)

    @property
    def block_bytes(self) -> int:
        """Bytes of an encoded block."""
        return sum(dtype.itemsize * count for dtype, count in self.fields)

    def encoded_bytes(self, shape: Sequence[int], itemsize: int) -> int:
        """See :meth:`Encoder.encoded_bytes`."""
        count = math.prod(shape)
        return self.blocks(count) * self.block_bytes if self.takes(count) else count * itemsize


class Coder(ABC):
    """One gradient's part in a :class:`SumEncoder`: what it adds to each round's sum.

    In each step :meth:`values` is called for each round, with what the round before summed to.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        """
        Args:
            memory: what it starts from.
        """
        self.first = memory
        self.memory = memory
        """What it remembers between steps, equal on all workers."""

    def forget(self) -> None:
        """Start anew."""
        self.memory = self.first

    @abstractmethod
    def values(self, gradient: torch.Tensor, summed: torch.Tensor | None) -> torch.Tensor:
        """This worker's numbers for the next round.

        Args:
            gradient: of its own shape; not to be changed.
            summed: the numbers of the round before, over all workers; None in the first round.
        """

    @abstractmethod
    def decode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """The gradient that a worker's numbers of the last round stand for, or their sum."""

    @abstractmethod
    def remember(self, summed: torch.Tensor) -> None:
        """The step is done: remember what the next one needs of the last round's sum.

        ``summed`` is part of a buffer that the next step overwrites.
        """


class SumEncoder(Encoder):
    """An encoder of gradients to numbers that are summed, in one or more rounds."""

    @abstractmethod
    def sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """How many numbers of a gradient each round sums; empty if it travels as it is."""

    @abstractmethod
    def coder(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Coder:
        """A coder for one gradient, the same on all workers."""

    def encoded_bytes(self, shape: Sequence[int], itemsize: int) -> int:
        """See :meth:`Encoder.encoded_bytes`."""
        return itemsize * (sum(self.sizes(shape)) or math.prod(shape))


_HOME = "parallax.rewrite.encoders"
_MODULES = ("fp16", "bf16", "int8", "onebit", "topk", "powersgd")
"""Files of ``rewrite/encoders``."""

_known: dict[str, type[Encoder]] = {}

Kind = TypeVar("Kind", bound=type[Encoder])


def encoders() -> Mapping[str, type[Encoder]]:
    """All encoders by name."""
    if not _known:
        found = [importlib.import_module(f"{_HOME}.{name}").ENCODER for name in _MODULES]
        _known.update({one.name: one for one in found})
    return _known


def register(kind: Kind) -> Kind:
    """Make an encoder known to strategies; may be used as a decorator of its class.

    A script does so before ``get_runner``, on every worker.

    Raises:
        StrategyError: another one has its name.
    """
    encoders()
    if kind.name == NONE or _known.setdefault(kind.name, kind) is not kind:
        raise StrategyError(
            f"There is an encoder {kind.name!r} already.", hint="give it another name."
        )
    return kind


def encoder_of(choice: VariableStrategy) -> Encoder | None:
    """The encoder of a variable's gradient; None if it travels as it is."""
    if choice.encoder == NONE:
        return None
    return encoders()[choice.encoder](choice.encoder_options)


def encodes_by_host(choice: VariableStrategy) -> bool:
    """Whether what it encodes may be summed inside each host first: blocks, and what is as it was.

    Of a :class:`SumEncoder` every worker has part in all rounds.
    """
    return choice.encoder == NONE or issubclass(encoders()[choice.encoder], BlockEncoder)


def encoder_problems(
    one: Synchronizer, choice: VariableStrategy, variable: Variable
) -> Iterator[tuple[str, str, str]]:
    """What is wrong with the encoder of a variable and its options: field, problem and remedy.

    Args:
        one: the facts of its synchroniser.
        choice: how it is synchronised.
        variable: the variable.
    """
    name = choice.encoder
    if name == NONE:
        if choice.encoder_options:
            problem = "it has options of an encoder, but none is named"
            yield "encoder_options", problem, "name an encoder, or leave them out"
        return
    kind = encoders().get(name)
    if kind is None:
        yield "encoder", f"encoder {name!r} is unknown", _nearest(name, (NONE, *encoders()))
        return
    if one.casts:
        yield from _problems_of_rows(kind, one, choice, variable)
    elif not one.encodes:
        problem = f"{one.name} cannot sum encoded values"
        yield "encoder", problem, "use 'none', or synchronizer 'allreduce'"
    elif choice.hierarchy != "flat" and not encodes_by_host(choice):
        problem = f"gradients encoded by {name} are summed by all workers alike"
        yield "hierarchy", problem, "use 'flat', or encoder 'none'"
    if not variable.dtype.is_floating_point:
        problem = f"{name} encodes floating-point gradients, not {variable.dtype}"
        yield "encoder", problem, f"use {NONE!r}"
    if choice.pieces != 1:
        yield "pieces", f"gradients encoded by {name} travel whole", "use 1, or encoder 'none'"
    for option, value in choice.encoder_options.items():
        if option not in kind.options:
            problem = f"{name} has no option {option!r}"
            yield "encoder_options", problem, _nearest(option, kind.options)
        elif text := kind.options[option].problem(value):
            yield "encoder_options", f"{option!r} of {name} is {value:g}", f"it must be {text}"


def _problems_of_rows(
    kind: type[Encoder], one: Synchronizer, choice: VariableStrategy, variable: Variable
) -> Iterator[tuple[str, str, str]]:
    """Rows are other ones in each step: they keep no residuals, and are in no blocks."""
    known = [known.name for known in encoders().values() if known.cast is not None]
    remedy = f"use {' or '.join(map(repr, (NONE, *known)))}"
    if kind.cast is None:
        yield "encoder", f"{one.name} cannot send rows encoded by {kind.name}", remedy
    elif kind.cast.itemsize >= variable.dtype.itemsize:
        problem = f"rows of {variable.dtype} are no smaller as {kind.cast}"
        yield "encoder", problem, f"use {NONE!r}"
    if choice.encoder_options.get("feedback"):
        problem = f"{one.name} keeps no residuals of rows"
        yield "encoder_options", problem, "leave 'feedback' out, or use 0"


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    if not names:
        return "it takes none"
    close = difflib.get_close_matches(name, names, 1)
    listed = ", ".join(names)
    return f"use {close[0]}; there are {listed}" if close else f"use one of {listed}"


__all__ = [
    "BlockEncoder",
    "Coder",
    "Encoder",
    "Option",
    "SumEncoder",
    "encoder_of",
    "encoder_problems",
    "encoders",
    "encodes_by_host",
    "register",
]
