"""Indexing by numbers that are only known when the step runs: ``scores[0, best.item()]``.

PyTorch's indexing makes Python numbers of integers, and of integer tensors of no dimension, which
symbols are not. Here what these choose is a view by ``select``, which counts negative numbers from
the end and checks the range when the step runs; all else of an index is left to PyTorch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from parallax.graph.common.replaced import replaced
from parallax.graph.common.torch_internals import is_mapped
from parallax.graph.symbols.symbolic_math import has_symbols

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
_MASKS = (torch.bool, torch.uint8)


@contextlib.contextmanager
def indexing_by_symbols() -> Iterator[None]:
    """Let tensors be read and written at symbols, and at integer tensors of no dimension."""
    kind: Any = torch.Tensor
    get, put = kind.__getitem__, kind.__setitem__

    def getitem(self: torch.Tensor, index: Any) -> Any:
        return get(*_chosen(self, index))

    def setitem(self: torch.Tensor, index: Any, value: Any) -> None:
        put(*_chosen(self, index), value)

    with replaced((kind, "__getitem__", getitem), (kind, "__setitem__", setitem)):
        yield


def _chosen(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, Any]:
    """What the symbols of an index choose of a tensor, and the index that is left for that."""
    entries = [_number(entry) for entry in (index if isinstance(index, tuple) else (index,))]
    if not any(map(_is_symbolic, entries)) or _is_like_a_tuple(index):
        return tensor, index
    entries = [_array(entry, tensor.device) for entry in entries]
    counts = [_dimensions(entry) for entry in entries]
    left_out = tensor.dim() - sum(counts)
    dimension = 0
    rest = []
    for entry, count in zip(entries, counts, strict=True):
        if isinstance(entry, torch.SymInt):
            tensor = tensor.select(dimension, entry)
        else:
            rest.append(entry)
            dimension += left_out if entry is ... else count
    return tensor, tuple(rest) or ...


def _number(entry: Any) -> Any:
    """The symbol for what PyTorch makes a number of, if it is an entry of an index or its bound."""
    if isinstance(entry, slice):
        return slice(_number(entry.start), _number(entry.stop), _number(entry.step))
    if not isinstance(entry, torch.Tensor) or entry.dim() or entry.dtype not in _INTEGERS:
        return entry
    return entry if is_mapped(entry) else entry.item()


def _is_symbolic(entry: Any) -> bool:
    if isinstance(entry, slice):
        return has_symbols((entry.start, entry.stop, entry.step))
    return has_symbols(entry)


def _is_like_a_tuple(index: Any) -> bool:
    """Whether PyTorch may take a list for a tuple: it is about to give that up, and refuses symbols
    there."""
    return isinstance(index, list) and not all(isinstance(e, int | torch.SymInt) for e in index)


def _array(entry: Any, device: torch.device) -> Any:
    several = isinstance(entry, list | tuple | np.ndarray)
    return torch.as_tensor(entry, device=device) if several else entry


def _dimensions(entry: Any) -> int:
    """How many dimensions an entry of an index is for; an ellipsis is for those left."""
    if entry is None or entry is ... or isinstance(entry, bool):
        return 0
    return entry.dim() if isinstance(entry, torch.Tensor) and entry.dtype in _MASKS else 1
