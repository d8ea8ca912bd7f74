"""What is noted of a step while it is captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from parallax.errors import SourceLine

BY_VALUES = " by values"
"""How kinds of acts end that are."""


class Act(NamedTuple):
    """What a step does beside computing.

    Args:
        kind: it begins a ``backward`` pass, lets an optimizer ``step`` or a scheduler, as
            ``schedule``, or clears gradients, of an optimizer or a model, or clips some.
        name: of the optimizer, the scheduler or the model; or what is clipped, and how.
        place: hash of the calls that it is in.
        lines: of these, from the step on.
    """

    kind: str
    name: str
    place: int
    lines: Sequence[int]

    @property
    def updates(self) -> bool:
        """Whether something follows from it that is kept; other acts add to gradients."""
        return self.kind.partition(" ")[0] in ("step", "schedule") or "clip" in self.kind

    @property
    def by_values(self) -> bool:
        """Whether it is given what this worker has computed, so that no other can do the same."""
        return self.kind.endswith(BY_VALUES)


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
    zeroed: set[int] = field(default_factory=set)
    """Variables whose gradients were cleared, and that have none since."""
    gradients: dict[str, dict[int, bool]] = field(default_factory=dict)
    """By variable that has a gradient, the backward passes that it has one of, from 0 on, and
    whether it had none before."""
    passes: int = 0
    """Backward passes that have begun."""
    had: set[str] = field(default_factory=set)
    """Variables that had a gradient when the last one began."""
    acts: list[Act] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    left: dict[str, torch.Tensor] = field(default_factory=dict)
    """By variable, the gradient of an earlier call that it was given, to see who reads it."""
    differentiated: SourceLine | None = None
    """Where gradients of parameters are computed that are differentiated further."""
    notes: list[str] = field(default_factory=list)

    def mark(self, name: str) -> None:
        """Note that a variable has a gradient."""
        self.gradients.setdefault(name, {}).setdefault(self.last_pass, name not in self.had)

    @property
    def last_pass(self) -> int:
        """The backward pass that runs, or was the last."""
        return max(self.passes - 1, 0)

    def tensors(self) -> list[Any]:
        """All tensors that are kept here."""
        given = [(call.args, call.kwargs) for call in self.calls]
        return [*self.left.values(), *pytree.tree_leaves(given)]
