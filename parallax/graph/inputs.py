"""What becomes inputs of a step's graph, and what stands for it while the step is traced.

State and the batch's tensors are stood for by tensors without storage, numbers by symbols. What is
traced is called with the former and with a tensor for each number; :meth:`Inputs.given` makes of
them what the step is called with.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from parallax.graph.common.interface import GraphInput
from parallax.graph.common.sizes import BatchSizes
from parallax.graph.common.slices import is_number
from parallax.graph.common.torch_internals import FakeTensorMode, fake_like
from parallax.graph.objects.discovery import StepObjects
from parallax.graph.objects.draws import Draw
from parallax.graph.objects.outside import Numbers
from parallax.graph.objects.sites import Site
from parallax.graph.objects.state import Leaf, leaves
from parallax.graph.symbols.scalars import ScalarEnv


class Given(NamedTuple):
    """What a step is called with while it is traced, and the numbers that it reads elsewhere."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outside: Sequence[Any]
    drawn: Sequence[Any]


@dataclass(frozen=True)
class Inputs:
    """All that the graph of one capture has as inputs.

    Args:
        leaves: the state, by name.
        free: Python's numbers, besides floats of the batch.
        drawn: random numbers.
        batch: flat.
        batch_spec: what it is.
        parts: to which part of it, and to which list in it, each item belongs.
        common: parts that have the same values on all workers.
    """

    leaves: Mapping[str, Leaf]
    free: Numbers
    drawn: Sequence[Draw]
    batch: Sequence[Any]
    batch_spec: pytree.TreeSpec
    parts: Sequence[tuple[str, str]]
    common: Collection[str] = ()

    @staticmethod
    def of(
        objects: StepObjects,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        free: Numbers,
        drawn: Sequence[Draw],
        common: Collection[str] = (),
    ) -> Inputs:
        """Of a step that reaches these objects, and is called with this batch."""
        batch, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        parts = parts_of(args, kwargs, len(batch))
        return Inputs(leaves(objects), free, drawn, batch, spec, parts, common)

    @property
    def tensors(self) -> list[Leaf]:
        """The state's tensors."""
        return [one for one in self.leaves.values() if isinstance(one.value, torch.Tensor)]

    @property
    def numbers(self) -> list[Leaf]:
        """The state's numbers."""
        return [one for one in self.leaves.values() if not isinstance(one.value, torch.Tensor)]

    @property
    def python(self) -> set[int]:
        """The places of the batch's numbers."""
        floats = {i for i, item in enumerate(self.batch) if isinstance(item, float)}
        return floats | self.free.batch

    @property
    def lifted(self) -> list[int]:
        """The places of the batch's tensors and numbers; all else in it is a constant."""
        python = self.python
        return [
            i for i, item in enumerate(self.batch) if isinstance(item, torch.Tensor) or i in python
        ]

    @property
    def signature(self) -> tuple[GraphInput, ...]:
        """What the placeholders of the graph are, in their order."""
        python = self.python
        return (
            *(
                GraphInput(
                    "state",
                    leaf.name,
                    differentiated=leaf.value.requires_grad,
                    saved=leaf.kind == "buffer",
                )
                for leaf in self.tensors
            ),
            *(GraphInput("number", leaf.name, number=True) for leaf in self.numbers),
            *(GraphInput("outside", site.name, number=True) for site in self.free.outside),
            *(GraphInput("drawn", draw.name, number=True) for draw in self.drawn),
            *(
                GraphInput("batch", batch_name(i), i, i in python, *self.parts[i])
                for i in self.lifted
            ),
        )

    @property
    def common_places(self) -> frozenset[int]:
        """The places of the batch in which all workers have the same."""
        return frozenset(i for i, (part, _) in enumerate(self.parts) if part in self.common)

    def values(self) -> dict[str, Any]:
        """All that is known before the step runs, by name, but for the state's tensors."""
        return {
            **{leaf.name: leaf.value for leaf in self.numbers},
            **{batch_name(i): self.batch[i] for i in self.lifted},
            **{site.name: site.value for site in self.free.outside},
            **{draw.name: draw.value for draw in self.drawn},
        }

    def tell(self, env: ScalarEnv) -> None:
        """Tell what is decided by them which inputs are what."""
        python = self.python
        env.of_batch.update(batch_name(i) for i in self.lifted if i not in python)
        env.each_workers_own = frozenset(map(batch_name, self.lifted))
        env.settled.update(
            leaf.name
            for leaf in self.tensors
            if leaf.kind in ("buffer", "tensor") and not is_number(leaf.value)
        )
        env.of_batch.update(env.settled)

    def given(self, flat: Sequence[Any]) -> Given:
        """What the step is called with, once its own numbers are symbols.

        Args:
            flat: what stands for all of them, in the order of ``signature``.
        """
        lifted, python = self.lifted, self.python
        first, last = len(self.tensors), len(flat) - len(lifted)
        symbols = [item.item() for item in flat[first:last]]
        numbers = self.numbers
        for leaf, symbol in zip(numbers, symbols, strict=False):
            leaf.put(symbol)
        values = list(self.batch)
        for index, item in zip(lifted, flat[last:], strict=True):
            values[index] = item.item() if index in python else item
        args, kwargs = pytree.tree_unflatten(values, self.batch_spec)
        others = symbols[len(numbers) :]
        end = len(others) - len(self.drawn)
        return Given(args, kwargs, others[:end], others[end:])


@dataclass(frozen=True)
class StandIns:
    """What stands for inputs while a step is traced: for tensors and for numbers of the state, for
    numbers from elsewhere, and for the batch, in the order of :attr:`Inputs.signature`."""

    tensors: Sequence[torch.Tensor]
    numbers: Sequence[torch.Tensor]
    batch: Sequence[torch.Tensor]

    @staticmethod
    def of(
        inputs: Inputs,
        mode: FakeTensorMode,
        sizes: BatchSizes,
        devices: Mapping[str, torch.device],
    ) -> StandIns:
        """Those of all inputs.

        Args:
            mode: which tensors without storage are of.
            sizes: that are to be symbols.
            devices: where parameters that have no storage yet will live, by name.
        """
        numbers: list[Leaf | Site | Draw] = [
            *inputs.numbers,
            *inputs.free.outside,
            *inputs.drawn,
        ]
        return StandIns(
            [fake_like(mode, leaf.value, _device(leaf, devices)) for leaf in inputs.tensors],
            [_number_tensor(mode, one.value) for one in numbers],
            [_batch_tensor(mode, inputs.batch[i], sizes, i) for i in inputs.lifted],
        )

    @property
    def all(self) -> list[torch.Tensor]:
        """All of them."""
        return [*self.tensors, *self.numbers, *self.batch]


def batch_name(index: int) -> str:
    """The name of an input that is part of the batch."""
    return f"batch{index}"


def parts_of(args: Sequence[Any], kwargs: Mapping[str, Any], count: int) -> list[tuple[str, str]]:
    """Of a batch of so many items, to which part each belongs, and to which list."""
    given = tuple(args), dict(kwargs)
    try:
        paths = [path for path, _ in pytree.tree_flatten_with_path(given)[0]]
    except ValueError:  # it has a class that does not tell
        return [("", "")] * count
    # Of all arguments, and those by name, which one; then keys.
    parts = [
        (*path[:2], *(one for one in path[2:] if not isinstance(one, pytree.SequenceKey)))
        for path in paths
    ]
    return list(zip(map(pytree.keystr, parts), map(_list_of, paths), strict=True))


def _list_of(path: tuple[Any, ...]) -> str:
    """In which list an item of a batch is that lies there: the innermost one."""
    for place in reversed(range(2, len(path))):
        if isinstance(path[place], pytree.SequenceKey):
            return f"{pytree.keystr(path[:place])}[]{pytree.keystr(path[place + 1 :])}"
    return ""


def _device(leaf: Leaf, devices: Mapping[str, torch.device]) -> torch.device:
    own: torch.device = leaf.value.device
    if own.type != "meta":
        return own
    of_variable = devices.get(leaf.variable or "", torch.device("cpu"))
    return devices.get(leaf.name, of_variable)


def _number_tensor(mode: FakeTensorMode, value: float | int) -> torch.Tensor:
    dtype = torch.float64 if isinstance(value, float) else torch.int64
    with mode:
        return torch.empty((), dtype=dtype)


def _batch_tensor(
    mode: FakeTensorMode, value: torch.Tensor | float, sizes: BatchSizes, index: int
) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return _number_tensor(mode, value)
    fake = sizes.tensor(mode, index, value)
    if fake is None:
        fake = fake_like(mode, value.detach(), value.device)
    return fake.requires_grad_(value.requires_grad)
