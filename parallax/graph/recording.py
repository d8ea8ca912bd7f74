"""What is noted of a step while it is captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass
class Recording:
    """What the step did besides tensor operations, gathered while it is captured."""

    stepped: set[int] = field(default_factory=set)
    cleared: set[int] = field(default_factory=set)
    marked: set[str] = field(default_factory=set)
    calls: list[tuple[Callable[..., Any], bool, tuple[Any, ...], dict[str, Any]]] = field(
        default_factory=list
    )
    left: dict[str, torch.Tensor] = field(default_factory=dict)
    """By variable, the gradient of an earlier call that it was given, to see who reads it."""
    notes: list[str] = field(default_factory=list)

    def tensors(self) -> list[Any]:
        """All tensors that are kept here."""
        given = [(args, kwargs) for _, _, args, kwargs in self.calls]
        return [*self.left.values(), *pytree.tree_leaves(given)]
