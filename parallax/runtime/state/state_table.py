"""Where each piece of a worker's state is while training runs.

Whole state stays in the user's own tensors. A sharded tensor leaves the user's object, which
then holds a description without storage, and the worker keeps its rows here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from parallax.errors import CheckpointError
from parallax.graph.common.torch_internals import replace_tensor
from parallax.graph.objects.checks import mark_dealt
from parallax.graph.objects.discovery import StepObjects
from parallax.graph.objects.state import Leaf, leaves
from parallax.graph.step_graph import StepGraph
from parallax.runtime.state.deferral import deferred_device, initial_rows, initial_whole
from parallax.strategy.layout import RowLayout


class StateTable:
    """Reads and writes the state of one worker by leaf name."""

    def __init__(self, objects: StepObjects, worker: int, workers: int) -> None:
        self.objects = objects
        self.worker = worker
        self.workers = workers
        self.shards: dict[str, torch.Tensor] = {}
        self.layouts: dict[str, RowLayout] = {}
        self._views: dict[str, RowLayout] = {}
        self._leaves: dict[str, Leaf] = {}
        self._containers: tuple[int, ...] = ()
        self._used: set[str] | None = None
        self._read: set[str] = set()
        self._unread: set[str] = set()
        self.refresh()
        self._first = {*self._leaves}

    def refresh(self) -> None:
        """Look at the user's objects anew; needed when leaves were created or replaced."""
        self._leaves = leaves(self.objects)
        self._containers = self._container_ids()
        for name in self.layouts:
            leaf = self._leaves.get(name)
            if leaf is not None and leaf.value.device.type != "meta":
                self._shard(leaf)  # the user put a whole value back, load_state_dict for one

    def refresh_if_replaced(self) -> bool:
        """Notice an optimizer whose state was replaced as a whole, as ``load_state_dict`` does.

        Raises:
            CheckpointError: it was, without the values of a sharded slot.
        """
        if self._containers == self._container_ids():
            return False
        before = self._leaves
        self.refresh()
        for name in self.shards:
            old, new = before.get(name), self._leaves.get(name)
            if old is None or new is None or old.value is new.value:
                continue
            if new.value.device.type == "meta":
                raise CheckpointError(
                    f"The slot {name!r} was replaced by one without values: its variable is "
                    "sharded, and load_state_dict() of the optimizer puts slots where that is.",
                    hint="load with runner.load_state_dict(), which gives each worker its rows; "
                    "it can still be called now.",
                )
        return True

    def _container_ids(self) -> tuple[int, ...]:
        ids: list[int] = []
        for optimizer in self.objects.optimizers.values():
            ids += [id(optimizer.state), id(optimizer.param_groups), len(optimizer.state)]
            ids += [id(group) for group in optimizer.param_groups]
        return tuple(ids)

    @property
    def leaves(self) -> dict[str, Leaf]:
        """All leaves by name, as of the last refresh."""
        return self._leaves

    # -- Tensors of the user's objects ------------------------------------------------------

    def use(self, step: StepGraph) -> dict[str, Leaf]:
        """Note what a captured step reads or makes of tensors that the user's objects hold.

        Returns:
            Those that it uses and no step before it.
        """
        before = self._used or set()
        names = {item.name for item in step.inputs if item.kind != "batch"} | {*step.new_leaves}
        self._used = before | names
        self._read |= {item.name for item in step.inputs if item.kind != "batch"}
        later = {leaf.name for leaf in self._leaves.values() if self.is_later(leaf)}
        self._unread = (self._unread | later) - self._read
        return {
            name: leaf
            for name, leaf in self._leaves.items()
            if leaf.kind == "tensor" and name in names - before
        }

    def is_state(self, leaf: Leaf) -> bool | None:
        """Whether it belongs to the run's state: not a tensor that no step uses, such as data, or
        losses that a loop collects, nor one that a step makes and no step reads. None where that is
        not known, before the first step."""
        if leaf.kind != "tensor":
            return True
        if self._used is None:
            return None
        return leaf.name in self._used and leaf.name not in self._unread

    def is_read(self, leaf: Leaf) -> bool:
        """Whether a step reads it."""
        return leaf.name in self._read

    def is_later(self, leaf: Leaf) -> bool:
        """Whether a tensor was not there when the run began."""
        return leaf.kind == "tensor" and leaf.name not in self._first

    # -- Sharding -------------------------------------------------------------------------

    def shard(self, layouts: Mapping[str, RowLayout], views: Mapping[str, RowLayout]) -> None:
        """From now on keep only this worker's rows of these leaves, and free the rest.

        Args:
            layouts: leaves to shard, also ones that the step has not created yet.
            views: variables that stay whole while this worker updates its rows only.
        """
        self._views.update(views)
        for name, layout in layouts.items():
            new = name not in self.layouts
            self.layouts[name] = layout
            if new and name in self._leaves:
                self._shard(self._leaves[name])

    def materialize(self, devices: Mapping[str, torch.device]) -> None:
        """Give deferred tensors that are not sharded their storage and first values."""
        for leaf in self._leaves.values():
            value = leaf.value
            if (
                isinstance(value, torch.Tensor)
                and value.device.type == "meta"
                and leaf.name not in self.layouts
            ):
                device = devices.get(leaf.variable or leaf.name, torch.device("cpu"))
                replace_tensor(value, _like(initial_whole(leaf, self.objects, device), value))

    def _shard(self, leaf: Leaf) -> None:
        layout, value = self.layouts[leaf.name], leaf.value
        if value.device.type == "meta":
            if leaf.name not in self.shards:
                device = self.device_of(leaf)
                self.shards[leaf.name] = initial_rows(
                    leaf, self.objects, layout, self.worker, device
                )
            return
        self.shards[leaf.name] = layout.take(value, self.worker)
        replace_tensor(value, _like(value.detach().to("meta"), value))
        mark_dealt(value)

    def device_of(self, leaf: Leaf) -> torch.device:
        """The device of a leaf: where its own values or its variable's are."""
        if leaf.value.device.type != "meta":
            device: torch.device = leaf.value.device
            return device
        own = self.shards.get(leaf.name, self.shards.get(leaf.variable or ""))
        return own.device if own is not None else torch.device("cpu")

    def fill(self, leaf: Leaf, whole: torch.Tensor) -> None:
        """Give a leaf the values of ``whole``, of which a sharded one keeps its rows."""
        with torch.no_grad():
            if leaf.name in self.shards:
                rows = self.layouts[leaf.name].take(whole, self.worker)
                self.shards[leaf.name].copy_(rows)
            elif leaf.value.device.type == "meta":
                device = deferred_device(leaf.value) or torch.device("cpu")
                replace_tensor(leaf.value, _like(whole.detach().to(device, copy=True), leaf.value))
            else:
                leaf.value.copy_(whole)

    def forget_removed(self) -> None:
        """Free the rows of leaves that the user's objects no longer have."""
        for name in [name for name in self.shards if name not in self._leaves]:
            del self.shards[name]

    # -- Access ---------------------------------------------------------------------------

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

    def view_reader(self, name: str) -> Callable[[], torch.Tensor]:
        """This worker's rows of a variable that it holds whole, as a view."""
        layout, get = self._views[name], self._leaves[name].get
        return lambda: layout.view(get(), self.worker)

    def readers(self, names: Iterable[str]) -> list[Callable[[], Any]]:
        """:meth:`reader` for each name."""
        return [self.reader(name) for name in names]

    def put(self, name: str, value: Any, place: Callable[[Any], None]) -> None:
        """Store a value that the step created or rebound."""
        layout = self.layouts.get(name)
        if layout is None or not isinstance(value, torch.Tensor):
            place(value)
            return
        self.shards[name] = value
        if name not in self._leaves:
            whole = layout.shape_of(value.shape, layout.rows)
            description = torch.empty(whole, dtype=value.dtype, device="meta")
            mark_dealt(description)
            place(description)


def _like(value: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    if isinstance(model, torch.nn.Parameter):
        return torch.nn.Parameter(value, requires_grad=model.requires_grad)
    return value.requires_grad_(model.requires_grad)
