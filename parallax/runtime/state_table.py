"""Where each piece of a worker's state is while training runs.

Whole state stays in the user's own tensors. A sharded tensor leaves the user's object, which
then holds a description without storage, and the worker keeps its rows here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from parallax.graph.discovery import StepObjects
from parallax.graph.state import Leaf, leaves


class StateTable:
    """Reads and writes the state of one worker by leaf name."""

    def __init__(self, objects: StepObjects) -> None:
        self.objects = objects
        self.shards: dict[str, torch.Tensor] = {}
        self._leaves: dict[str, Leaf] = {}
        self._containers: tuple[int, ...] = ()
        self.refresh()

    def refresh(self) -> None:
        """Look at the user's objects anew; needed when leaves were created or replaced."""
        self._leaves = leaves(self.objects)
        self._containers = self._container_ids()

    def refresh_if_replaced(self) -> bool:
        """Notice an optimizer whose state was replaced as a whole, as ``load_state_dict`` does."""
        if self._containers == self._container_ids():
            return False
        self.refresh()
        return True

    def _container_ids(self) -> tuple[int, ...]:
        ids: list[int] = []
        for optimizer in self.objects.optimizers.values():
            ids += [id(optimizer.state), id(optimizer.param_groups), len(optimizer.state)]
            ids += [id(group) for group in optimizer.param_groups]
        return tuple(ids)

    @property
    def leaves(self) -> dict[str, Leaf]:
        return self._leaves

    def value(self, name: str) -> Any:
        """The shard this worker owns, or the whole value."""
        shard = self.shards.get(name)
        return shard if shard is not None else self._leaves[name].get()

    def reader(self, name: str) -> Callable[[], Any]:
        """A fast way to :meth:`value` for every step."""
        if name in self.shards:
            shards = self.shards
            return lambda: shards[name]
        return self._leaves[name].get

    def readers(self, names: Iterable[str]) -> list[Callable[[], Any]]:
        return [self.reader(name) for name in names]

    def put(self, name: str, value: Any, place: Callable[[Any], None]) -> None:
        """Store a value that the step created or rebound."""
        place(value)
