"""Branches of a step's Python by which its graph is valid: what a later step must decide alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from parallax.graph.common.torch_internals import evaluate, outside_tracing

CHANGES = "changes its inputs"
"""In the ``meta`` of a program: it counts in place, so that it is run on copies."""


@dataclass(frozen=True)
class ScalarGuard:
    """``expression`` over numbers that ``program`` computes must stay ``expected``."""

    expression: Any
    symbols: tuple[Any, ...]
    program: torch.fx.GraphModule
    inputs: Mapping[str, int | None]
    """The program's placeholders in order: 0-dim tensors and numbers of the state, and items of the
    batch with their place among these."""
    expected: Any
    of_batch: bool = False
    """It follows from tensors of the batch."""

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether the branch is decided as at capture, for these values."""
        results = run_program(self.program, [values[name] for name in self.inputs])
        found = evaluate(self.expression, dict(zip(self.symbols, results, strict=True)))
        return bool(found == self.expected)


def run_program(program: torch.fx.GraphModule, arguments: list[Any]) -> tuple[Any, ...]:
    """The numbers a slice computes; tensors are copied where they are counted in place."""
    with outside_tracing(), torch.no_grad():
        changes = program.meta[CHANGES]
        copies = [_as_counter(argument, changes) for argument in arguments]
        return tuple(program.forward(*copies))


def _as_counter(value: Any, is_changed: bool) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if is_changed else value.detach()
    dtype = torch.float64 if isinstance(value, float) else torch.int64
    return torch.tensor(value, dtype=dtype, device="cpu")
