"""The state of a training step as named leaves, each with a place that it can be put back to.

A leaf is a tensor (parameter, buffer, optimizer slot, moving average) or a number that an
optimizer keeps (a learning rate, a step counter). Leaves are lifted to inputs of the captured
graph; without that, counters and rates would be baked in as constants.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from parallax.errors import UnsupportedError
from parallax.graph.objects.discovery import StepObjects
from parallax.graph.objects.holders import MAX_DEPTH, Attributes, is_container, members
from parallax.graph.objects.paths import Access, Key, access, dotted, get_at, put_at, top

LeafKind = Literal["parameter", "buffer", "slot", "group", "tensor"]


@dataclass(frozen=True)
class Leaf:
    """One piece of state.

    ``variable`` is the name of the parameter that a slot belongs to, and of the parameter itself;
    ``held``, whether it was found in a holder, which may have the name of a model or an optimizer.
    """

    name: str
    kind: LeafKind
    value: Any
    put: Callable[[Any], None]
    get: Callable[[], Any]
    variable: str | None = None
    root: str = ""
    key: Key = ()
    held: bool = False


def parameter_names(objects: StepObjects) -> dict[int, str]:
    """Every parameter's canonical name by its identity; a tied one has the first of its names."""
    names: dict[int, str] = {}
    several = len(objects.models) > 1
    for root, model in objects.models.items():
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), f"{root}.{name}" if several else name)
    for root, holder in objects.holders.items():
        for key, tensor in held_tensors(holder):
            if tensor.is_leaf and (tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)):
                names.setdefault(id(tensor), dotted(root, key))
    return names


def aliases(objects: StepObjects) -> dict[str, list[str]]:
    """Every further name of a tied parameter, by its canonical name."""
    canonical = parameter_names(objects)
    several = len(objects.models) > 1
    result: dict[str, list[str]] = {}
    for root, model in objects.models.items():
        for name, parameter in model.named_parameters(remove_duplicate=False):
            full = f"{root}.{name}" if several else name
            first = canonical[id(parameter)]
            if full != first:
                result.setdefault(first, []).append(full)
    return result


def leaves(objects: StepObjects) -> dict[str, Leaf]:
    """All leaves by name, in an order that depends on the user's code alone."""
    names = parameter_names(objects)
    seen: set[int] = set()
    result: dict[str, Leaf] = {}
    for leaf in _all(objects, names):
        if isinstance(leaf.value, torch.Tensor):
            if id(leaf.value) in seen:
                continue
            seen.add(id(leaf.value))
        result[leaf.name] = leaf
    return result


def _all(objects: StepObjects, names: dict[int, str]) -> Iterator[Leaf]:
    several = len(objects.models) > 1
    for root, model in objects.models.items():
        prefix = f"{root}." if several else ""
        for name, parameter in model.named_parameters():
            full = names[id(parameter)]
            get, _ = _attribute(model, name)
            yield Leaf(full, "parameter", parameter, _refuse(full), get, full, root, (name,))
        for name, buffer in model.named_buffers():
            get, put = _attribute(model, name)
            yield Leaf(f"{prefix}{name}", "buffer", buffer, put, get, None, root, (name,))
    for root, holder in objects.holders.items():
        for key, tensor in held_tensors(holder):
            get, put = access(holder, key)
            known = names.get(id(tensor))
            if known is not None:
                yield Leaf(known, "parameter", tensor, _refuse(known), get, known, root, key, True)
            else:
                yield Leaf(dotted(root, key), "tensor", tensor, put, get, None, root, key, True)
    known_groups: set[int] = set()
    for root, optimizer in objects.optimizers.items():
        yield from _optimizer_leaves(root, optimizer, names, known_groups, objects.counters)


def _optimizer_leaves(
    root: str,
    optimizer: Optimizer,
    names: dict[int, str],
    known_groups: set[int],
    counters: set[str],
) -> Iterator[Leaf]:
    """Of a group that an optimizer shares with one that it calls, the numbers are told once."""
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key == "params" or id(group) in known_groups:
                continue
            for sub, number in _numbers(value):
                name = dotted(f"{root}.group{index}", named((key, *sub), names))
                if isinstance(number, float | torch.Tensor | torch.SymFloat) or name in counters:
                    path: Key = ("group", index, key, *sub)
                    get, put = access(group, (key, *sub))
                    yield Leaf(name, "group", number, put, get, None, root, path)
        for parameter in group["params"]:
            variable = names.get(id(parameter), "?")
            for key, value in optimizer.state.get(parameter, {}).items():
                for sub, item in _numbers(value):
                    path = ("state", variable, key, *sub)
                    name = dotted(f"{root}.{variable}", (key, *sub))
                    get, put = _slot(optimizer, parameter, (key, *sub))
                    yield Leaf(name, "slot", item, put, get, variable, root, path)
        known_groups.add(id(group))
    kept: dict[Any, Any] = {**optimizer.state}
    for own in [key for key in kept if not isinstance(key, torch.Tensor)]:  # of no parameter
        for sub, item in _numbers(kept[own]):
            path = (own, *sub)
            get, put = access(optimizer.state, path)
            yield Leaf(dotted(f"{root}.state", path), "slot", item, put, get, None, root, path)


def named(path: tuple[Any, ...], names: dict[int, str]) -> Key:
    """A way with names in place of parameters, where these are keys."""
    return tuple(names.get(id(k), "?") if isinstance(k, torch.Tensor) else k for k in path)


def is_number(value: Any) -> bool:
    """Whether it is one that an input of a graph can stand for."""
    if isinstance(value, torch.SymFloat | torch.SymInt):
        return True
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(value: Any) -> Iterator[tuple[Key, Any]]:
    if isinstance(value, torch.Tensor) or is_number(value):
        yield (), value
    elif isinstance(value, torch.Size):
        return
    elif isinstance(value, tuple | list | collections.deque):
        for index, item in enumerate(value):
            for sub, number in _numbers(item):
                yield (index, *sub), number
    elif isinstance(value, dict):
        for name, item in value.items():
            for sub, number in _numbers(item):
                yield (name, *sub), number


def held_tensors(holder: Any) -> Iterator[tuple[Key, torch.Tensor]]:
    """What a holder, or a container, holds, and the way to it; tensors can come twice."""
    value = top(holder)
    if isinstance(value, torch.Tensor):
        yield (), value
    else:
        yield from _within(holder if isinstance(holder, Attributes) else value, (), {})


def _within(container: Any, key: Key, seen: dict[int, int]) -> Iterator[tuple[Key, torch.Tensor]]:
    depth = len(key)
    if depth > MAX_DEPTH or seen.get(id(container), depth + 1) <= depth:
        return
    if isinstance(container, torch.nn.Module | Optimizer):
        return
    seen[id(container)] = depth
    for name, value in members(container):
        if isinstance(value, torch.Tensor):
            yield (*key, name), value
        elif is_container(value):
            yield from _within(value, (*key, name), seen)


def _refuse(name: str) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        raise UnsupportedError(
            f"The step replaces the parameter {name!r} by another tensor.",
            hint="change it in place, with torch.no_grad(): parameter.copy_(value).",
        )

    return put


def _attribute(model: torch.nn.Module, name: str) -> Access:
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    holder = module._parameters if attribute in module._parameters else module._buffers

    def put(value: Any) -> None:
        setattr(module, attribute, value)

    return lambda: holder[attribute], put


def _slot(optimizer: Optimizer, parameter: torch.Tensor, path: Key) -> Access:
    def put(value: Any) -> None:
        put_at(optimizer.state[parameter], path, value)

    if len(path) == 1:
        head = path[0]
        return lambda: optimizer.state[parameter][head], put
    return lambda: get_at(optimizer.state[parameter], path), put
