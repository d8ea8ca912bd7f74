"""What the inputs and outputs of a step's graph are, and what the host does with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch.utils import _pytree as pytree

InputKind = Literal["state", "number", "batch", "outside", "drawn", "shard"]
OutputKind = Literal["return", "state", "call", "said", "outside", "write"]


@dataclass(frozen=True)
class GraphInput:
    """One placeholder.

    A state tensor or number by leaf name, this worker's rows of a variable, part of the batch by
    index, or a number that the step reads elsewhere, or draws.
    """

    kind: InputKind
    name: str
    index: int = 0
    number: bool = False
    """A Python number rather than a tensor."""
    part: str = ""
    """Of the batch, which: the argument, and keys of mappings in it. Places in lists, which may
    have several lengths, are no part of it."""
    listed: str = ""
    """Of the batch, in which list or tuple it is, or in the mappings of which one by which keys;
    nothing if it is in none."""
    differentiated: bool = False
    """Of the state, a tensor that requires a gradient."""
    saved: bool = False
    """Of the state, a buffer of a module: evaluation may use it, whether the step does or not."""


@dataclass(frozen=True)
class GraphOutput:
    """One output: part of the return value, a new value of a state leaf, a call's argument, a value
    in a text that is printed or logged, a number that the step leaves where it is an input, or one
    that it sets elsewhere."""

    kind: OutputKind
    name: str = ""


@dataclass(frozen=True)
class HostCall:
    """A call that the step makes on a Python object which stays on the host (a scheduler's step).

    It runs before or after the graph, with graph outputs in place of captured tensors.
    """

    function: Callable[..., Any]
    before: bool
    spec: pytree.TreeSpec
    constants: tuple[Any, ...]
    """Flat arguments; those that the graph computes are ``None`` here and listed in ``outputs``."""
    outputs: tuple[tuple[int, int], ...]
    """(position among the flat arguments, index among the graph's outputs)."""


Written = Callable[[Mapping[str, Any]], None]
"""Sets what the step has set, given the outputs that are numbers for that, by name."""


class _Computed:
    def __repr__(self) -> str:
        return "<computed>"


COMPUTED = _Computed()
