"""Tensors of the capture that the step has put where parallax does not look: caches, above all.

They have no values, so they are taken out again: what is cached is computed anew when it is next
wanted.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from parallax.graph.common.torch_internals import FakeTensor

_WRAPPER: type = type(functools.lru_cache(lambda: None))
_PACKAGES = ("torch", "parallax")
"""Their objects keep what they need, as long as they need it."""


def take_out(tensors: Iterable[torch.Tensor], known: Iterable[Any]) -> list[str]:
    """Take tensors without values out of dicts, lists, attributes and cached functions.

    Args:
        tensors: those of the capture that are still there.
        known: those that are held by the capture itself.

    Returns:
        The attributes that are None from now on, by the class of their object.
    """
    ours = {id(one) for one in known}
    left = [one for one in tensors if isinstance(one, FakeTensor) and id(one) not in ours]
    return _take_out(left) if left else []


def _take_out(left: list[Any], is_inside: bool = False) -> list[str]:
    found = {id(one) for one in left}
    attributes: list[str] = []
    for holder in gc.get_referrers(*left):
        if holder is left or isinstance(holder, types.FrameType):
            continue
        if isinstance(holder, _WRAPPER):
            holder.cache_clear()  # type: ignore[attr-defined]
        elif isinstance(holder, dict):
            owner = _owner(holder)
            if owner is None:
                for key in _keys(holder, found):
                    del holder[key]
            else:
                attributes += _forget(owner, holder, found)
        elif isinstance(holder, list):
            holder[:] = [item for item in holder if id(item) not in found]
        elif isinstance(holder, tuple) and not is_inside:  # several tensors that are cached
            attributes += _take_out([holder], is_inside=True)
        elif hasattr(holder, "__dict__"):
            attributes += _forget(holder, vars(holder), found)
    return attributes


def _keys(holder: Mapping[Any, Any], found: set[int]) -> list[Any]:
    return [key for key, item in list(holder.items()) if id(item) in found]


def _forget(owner: Any, attributes: Mapping[Any, Any], found: set[int]) -> list[str]:
    kind = owner if isinstance(owner, type) else type(owner)
    if kind.__module__.partition(".")[0] in _PACKAGES:
        return []
    keys = _keys(attributes, found)
    for key in keys:
        if owner is not kind and hasattr(kind, key):
            delattr(owner, key)  # a cached property, or one whose first value the class has
        else:
            setattr(owner, key, None)
    return [f"{kind.__qualname__}.{key}" for key in keys]


def _owner(attributes: dict[Any, Any]) -> Any:
    """The object whose attributes a dict has, None if it is a dict of its own."""
    for one in gc.get_referrers(attributes):
        if getattr(one, "__dict__", None) is attributes:
            return one
    return None
