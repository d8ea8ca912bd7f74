"""What holds state besides parameters, buffers and slots.

Names, attributes, containers, and objects of the user's own classes.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import types
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from parallax.graph.common.user_code import is_installed, is_users_class

MAX_DEPTH = 6
"""Of containers in containers."""

_STATEFUL = (torch.Tensor, torch.nn.Module, Optimizer, LRScheduler, torch.utils.data.Dataset)
_NO_KEEPERS = {"builtins", "torch", "numpy", "parallax"}
"""Packages whose objects are known for what they are, or hold no state of a step."""
_MOST_DEPTH, _MOST_ITEMS = 2, 1000


@dataclass(eq=False)
class Binding:
    """A name of a closure cell or of the globals, and what it is bound to."""

    name: str
    home: Any
    value: Any

    def current(self) -> Any:
        if isinstance(self.home, types.CellType):
            return self.home.cell_contents
        if isinstance(self.home, dict):
            return self.home.get(self.name)
        return self.value

    def rebind(self, value: Any) -> None:
        if isinstance(self.home, types.CellType):
            self.home.cell_contents = value
        elif isinstance(self.home, dict):
            self.home[self.name] = value
        self.value = value


_OF_OPTIMIZERS = vars(torch.optim.SGD([torch.zeros(1)], lr=0.1))
_OWN_ATTRIBUTES = {
    *vars(torch.nn.Module()),
    *_OF_OPTIMIZERS,
    *("forward_pre_hooks", "training"),
}
"""What modules and optimizers keep by themselves."""


def begin(scaler: torch.amp.GradScaler) -> None:
    """Let a scaler have its tensors, which it otherwise makes when it first scales a loss."""
    if scaler._scale is None:
        device = torch.device(scaler._device)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        scaler._lazy_init_scale_growth_tracker(device)


def complete(optimizer: Optimizer) -> None:
    """Give an optimizer whose class does not call its base class's the hooks that its
    ``state_dict()`` asks for, and defaults."""
    for name, value in _OF_OPTIMIZERS.items():
        if name.endswith("_hooks") or name == "defaults":
            vars(optimizer).setdefault(name, type(value)())


class Attributes:
    """The attributes of a module or an optimizer that are its user's, as an object of their own."""

    def __init__(self, owner: torch.nn.Module | Optimizer) -> None:
        self.owner = owner
        self._computed: set[str] = set()
        self.note_computed()

    def note_computed(self) -> None:
        """Look which attributes are computed with gradients now, between steps: no state, since
        each step computes them anew (a normalised weight)."""
        self._computed = {
            key
            for key, value in vars(self.owner).items()
            if isinstance(value, torch.Tensor) and value.requires_grad
        }

    def items(self) -> list[tuple[str, Any]]:
        """By name; tensors only where they are state: not trained, computed, or of a parameter.

        What an optimizer within has is that one's.
        """
        shared = _memory_of_variables(self.owner)
        inner = [one for one in vars(self.owner).values() if isinstance(one, Optimizer)]
        known = {id(part) for one in inner for part in (one.state, one.param_groups)}
        return [
            (key, value)
            for key, value in vars(self.owner).items()
            if key not in _OWN_ATTRIBUTES
            and key not in self._computed
            and id(value) not in known
            and not _is_computed(value, shared)
        ]


def _memory_of_variables(owner: torch.nn.Module | Optimizer) -> set[int]:
    if isinstance(owner, Optimizer):
        return set()
    return {
        t.untyped_storage()._cdata
        for t in (*owner.parameters(), *owner.buffers())
        if t.layout is torch.strided and not torch.nn.parameter.is_lazy(t)
    }


def _is_computed(value: Any, shared: set[int]) -> bool:
    return isinstance(value, torch.Tensor) and (
        value.layout is not torch.strided or value.untyped_storage()._cdata in shared
    )


def holds_tensors(value: Any, depth: int) -> bool:
    return depth <= MAX_DEPTH and any(
        isinstance(item, torch.Tensor)
        or (isinstance(item, dict | list | tuple) and holds_tensors(item, depth + 1))
        for _, item in members(value)
    )


def members(value: Any) -> list[tuple[Any, Any]]:
    """Keys and values of a container, or the attributes of a user's object."""
    if isinstance(value, Attributes):
        return list(value.items())
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    items = list(vars(value).items()) if hasattr(value, "__dict__") else []
    if dataclasses.is_dataclass(value):
        names = {f.name for f in dataclasses.fields(value)}
        items += [(n, getattr(value, n)) for n in sorted(names - {k for k, _ in items})]
    return items


def is_container(value: Any) -> bool:
    """Whether state is looked for in what ``value`` holds."""
    if isinstance(value, MutableMapping | list | tuple):
        return True
    if isinstance(value, torch.amp.GradScaler):
        return value.is_enabled()
    if isinstance(value, torch.nn.Module | type):
        return False
    return is_user_object(value) or (not callable(value) and is_keeper(value))


def is_keeper(value: Any) -> bool:
    """Whether an object of an installed package keeps state, by its attributes and what is in
    containers there: moving averages, or an optimizer that is wrapped."""
    kind = type(value)
    if kind.__module__.partition(".")[0] in _NO_KEEPERS or isinstance(value, _STATEFUL):
        return False
    if not hasattr(value, "__dict__") or isinstance(value, type | types.ModuleType):
        return False
    module = sys.modules.get(kind.__module__)
    if not is_installed(getattr(module, "__file__", None)):
        return False
    return any(_is_stateful(item, 0) for item in list(vars(value).values()))


def _is_stateful(value: Any, depth: int) -> bool:
    if isinstance(value, _STATEFUL):
        return not isinstance(value, torch.utils.data.Dataset)
    if depth > _MOST_DEPTH or not isinstance(value, dict | list | tuple):
        return False
    items = value.values() if isinstance(value, dict) else value
    return any(_is_stateful(item, depth + 1) for item in itertools.islice(items, _MOST_ITEMS))


def is_user_object(value: Any) -> bool:
    if isinstance(value, types.SimpleNamespace | argparse.Namespace):
        return True
    if not hasattr(value, "__dict__") or isinstance(value, torch.utils.data.Dataset):
        return False
    return is_users_class(type(value))


def slots_of(kind: type) -> set[str]:
    """The attributes that objects of a class may have without a dictionary."""
    found: set[str] = set()
    for one in kind.__mro__:
        slots = vars(one).get("__slots__", ())
        found |= {slots} if isinstance(slots, str) else set(slots)
    return found - {"__dict__", "__weakref__"}
