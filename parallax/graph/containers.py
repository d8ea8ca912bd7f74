"""Batches in containers of their users' own: dataclasses, and mappings that are no plain dicts."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """What a batch holds, and how; kinds of containers that torch does not know are made known.

    A copy of such a container has its fields, or its items, and no other attributes.
    """
    while True:
        leaves, spec = pytree.tree_flatten(value)
        unknown = {type(leaf) for leaf in leaves if _is_container(leaf)}
        if not unknown:
            return leaves, spec
        for kind in unknown:
            _register(kind)


def _is_container(leaf: Any) -> bool:
    if type(leaf) is torch.Tensor or isinstance(leaf, type):
        return False
    return isinstance(leaf, Mapping) or dataclasses.is_dataclass(leaf)


def _register(kind: type) -> None:
    if issubclass(kind, Mapping):
        pytree.register_pytree_node(
            kind,
            lambda value: (list(value.values()), tuple(value.keys())),
            lambda values, keys: _mapping(kind, dict(zip(keys, values, strict=True))),
        )
        return
    fields: Any = kind
    names = tuple(field.name for field in dataclasses.fields(fields))
    pytree.register_pytree_node(
        kind,
        lambda value: ([getattr(value, name) for name in names], names),
        lambda values, names: _dataclass(kind, names, list(values)),
    )


def _dataclass(kind: type, names: Sequence[str], values: Sequence[Any]) -> Any:
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
