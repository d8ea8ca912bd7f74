"""What is noted of a step while it is captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Recording:
    """What the step did besides tensor operations, gathered while it is captured."""

    stepped: set[int] = field(default_factory=set)
    cleared: set[int] = field(default_factory=set)
    marked: set[str] = field(default_factory=set)
    carried: list[str] = field(default_factory=list)
    """Variables whose gradient of the previous call was added to."""
    calls: list[tuple[Callable[..., Any], bool, tuple[Any, ...], dict[str, Any]]] = field(
        default_factory=list
    )
    notes: list[str] = field(default_factory=list)
