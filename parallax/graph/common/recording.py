"""What is noted of a step while it is captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from parallax.errors import SourceLine


class Call(NamedTuple):
    """A call that the host makes in place of the step.

    Args:
        function: is called.
        before: the graph, else behind it.
        args, kwargs: what it is given, with what the step computes.
        is_said: it changes nothing, so that each worker may give it values of its own.
    """

    function: Callable[..., Any]
    before: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}
    is_said: bool = False


@dataclass
class Recording:
    """What the step did besides tensor operations, gathered while it is captured."""

    stepped: set[int] = field(default_factory=set)
    cleared: set[int] = field(default_factory=set)
    marked: dict[str, int] = field(default_factory=dict)
    """Variables that have a gradient, each with the backward pass that it first has one of."""
    passes: int = 0
    """Backward passes that are over."""
    calls: list[Call] = field(default_factory=list)
    left: dict[str, torch.Tensor] = field(default_factory=dict)
    """By variable, the gradient of an earlier call that it was given, to see who reads it."""
    differentiated: SourceLine | None = None
    """Where gradients of parameters are computed that are differentiated further."""
    notes: list[str] = field(default_factory=list)

    def mark(self, name: str) -> None:
        """Note that a variable has a gradient."""
        self.marked.setdefault(name, self.passes)

    def tensors(self) -> list[Any]:
        """All tensors that are kept here."""
        given = [(call.args, call.kwargs) for call in self.calls]
        return [*self.left.values(), *pytree.tree_leaves(given)]
