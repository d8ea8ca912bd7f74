"""Batches in containers of their users' own: dataclasses, mappings that are no plain dicts, and
objects with tensors in their attributes."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from parallax.graph.common.user_code import is_users_class
from parallax.graph.objects.holders import is_user_object, slots_of


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """What a batch holds, and how; kinds of containers that torch does not know are made known.

    A copy of such a container has its fields, its items, or its attributes.
    """
    while True:
        leaves, spec = pytree.tree_flatten(value)
        unknown = {type(leaf) for leaf in leaves if _is_container(leaf)}
        if not unknown:
            return leaves, spec
        for kind in unknown:
            _register(kind)


def _is_container(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor | type):
        return False
    if isinstance(leaf, Mapping) or dataclasses.is_dataclass(leaf):
        return True
    is_users = is_user_object(leaf) or (slots_of(type(leaf)) and is_users_class(type(leaf)))
    return bool(is_users) and not callable(leaf) and _holds_tensors(leaf)


def _holds_tensors(value: Any) -> bool:
    """Whether an object is there for its tensors. Others are values, as settings are, and those
    that refer to themselves."""
    try:
        return any(
            isinstance(leaf, torch.Tensor) or _is_container(leaf)
            for leaf in pytree.tree_leaves(list(_attributes(value).values()))
        )
    except RecursionError:
        return False


def _attributes(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    slots = sorted(name for name in slots_of(type(value)) if hasattr(value, name))
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots}}


def _register(kind: type) -> None:
    if issubclass(kind, Mapping):
        pytree.register_pytree_node(
            kind,
            lambda value: (list(value.values()), tuple(value.keys())),
            lambda values, keys: _mapping(kind, dict(zip(keys, values, strict=True))),
        )
        return
    pytree.register_pytree_node(
        kind,
        lambda value: (list((found := _attributes(value)).values()), tuple(found)),
        lambda values, names: _object(kind, names, list(values)),
    )


def _object(kind: type, names: Sequence[str], values: Sequence[Any]) -> Any:
    made: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def _mapping(kind: Any, items: dict[Any, Any]) -> Any:
    if not issubclass(kind, dict | collections.UserDict):
        return kind(items)
    made: Any = kind.__new__(kind)
    if issubclass(kind, dict):
        dict.update(made, items)
    else:
        made.data = items
    return made
