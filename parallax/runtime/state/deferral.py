"""Tables without storage: each owner makes the first values of its own rows.

``with deferred():`` around a model's construction records how every table is initialised instead
of doing it. Rows are made in blocks of fixed size, each from a seed of its own, so that a table
has the same first values on any number of workers, and nobody ever holds it whole.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallax.errors import UnsupportedError
from parallax.graph.objects.discovery import StepObjects
from parallax.graph.objects.state import Leaf
from parallax.strategy.layout import RowLayout

BLOCK_ROWS = 8192

aten: Any = torch.ops.aten

_TABLES: tuple[type[torch.nn.Module], ...] = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_SAME = {aten.detach.default, aten.alias.default, aten.view.default}


@dataclass
class Recipe:
    """How a table is initialised: operations on all its elements, or on one row."""

    seed: int
    device: torch.device
    steps: list[tuple[Any, int | None, tuple[Any, ...], dict[str, Any]]] = field(
        default_factory=list
    )

    def block(self, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The first values of ``shape[0]`` rows from row ``first`` on."""
        rows = torch.zeros(shape, dtype=dtype, device=self.device)
        devices = [] if self.device.type == "cpu" else [self.device]
        with torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed((self.seed * 1_000_003 + first) & 0x7FFFFFFFFFFFFFFF)
            for function, row, args, kwargs in self.steps:
                if row is None:
                    function(rows, *args, **kwargs)
                elif first <= row < first + len(rows):
                    function(rows[row - first], *args, **kwargs)
        return rows


class _Recipes:
    """Recipes by tensor; a table whose model is gone is forgotten."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[torch.Tensor], Recipe]] = {}

    def add(self, tensor: torch.Tensor, recipe: Recipe) -> None:
        self._by_id[id(tensor)] = (weakref.ref(tensor), recipe)

    def of(self, tensor: torch.Tensor) -> Recipe | None:
        found = self._by_id.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None


_recipes = _Recipes()


class _Recorder(TorchDispatchMode):
    """Records what is done to tables that have no storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keep: list[torch.Tensor] = []
        self.views: dict[int, tuple[Recipe, int | None]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        target: Any = args[0] if args else None
        known = self._known(target)
        result = func(*args, **kwargs)
        if known is None:
            return result
        recipe, row = known
        if func in _SAME and isinstance(result, torch.Tensor):
            self._remember(result, recipe, row)
        elif func is aten.select.int and row is None and args[1] == 0:
            self._remember(result, recipe, args[2] % target.shape[0])
        elif func._schema.is_mutable:
            if any(isinstance(a, torch.Tensor) and a.dim() > 0 for a in args[1:]):
                raise UnsupportedError(
                    f"A deferred table is initialised from another tensor ({func}), which needs "
                    "all its rows.",
                    hint="initialise it with in-place functions of numbers (normal_, uniform_, "
                    "zeros_), or build the model without parallax.deferred().",
                )
            recipe.steps.append((func, row, args[1:], kwargs))
            if isinstance(result, torch.Tensor):
                self._remember(result, recipe, row)
        return result

    def _remember(self, tensor: torch.Tensor, recipe: Recipe, row: int | None) -> None:
        self.keep.append(tensor)
        self.views[id(tensor)] = (recipe, row)

    def _known(self, tensor: Any) -> tuple[Recipe, int | None] | None:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "meta":
            return None
        found = self.views.get(id(tensor))
        if found is None:
            recipe = _recipes.of(tensor)
            found = None if recipe is None else (recipe, None)
        return found


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Build a model whose embedding tables have no storage yet.

    Tables of ``nn.Embedding`` and ``nn.EmbeddingBag`` made inside the block, and what is done to
    them there (``nn.init`` functions, ``weight[i].fill_()``), are recorded; each worker makes the
    rows it owns when training starts. A table that turns out not to be sharded is made whole.

    Raises:
        UnsupportedError: a table is initialised from another tensor.
    """
    recorder = _Recorder()
    originals: list[tuple[Any, Callable[..., None], Callable[..., None]]] = []
    for table in _TABLES:
        cls: Any = table
        originals.append((cls, cls.__init__, cls.reset_parameters))
        cls.__init__ = _on_meta(cls.__init__)
        cls.reset_parameters = _recorded(cls.reset_parameters)
    try:
        with recorder:
            yield
    finally:
        for cls, init, reset in originals:
            cls.__init__, cls.reset_parameters = init, reset


def _on_meta(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = kwargs.get("_weight")
        if given is not None:
            original(self, *args, **kwargs)
            return
        device = torch.device(kwargs.get("device") or torch.get_default_device())
        self._parallax_device = device
        original(self, *args, **{**kwargs, "device": torch.device("meta")})
        del self._parallax_device

    return init


def _recorded(original: Callable[..., None]) -> Callable[..., None]:
    def reset(self: Any) -> None:
        if self.weight.device.type == "meta":
            device = getattr(self, "_parallax_device", torch.device("cpu"))
            # Drawn from the user's generator: seeding makes deferred tables reproducible too.
            with torch.utils._python_dispatch._disable_current_modes():
                seed = int(torch.randint(2**31, ()))
            _recipes.add(self.weight, Recipe(seed, device))
        original(self)

    return reset


def deferred_device(tensor: torch.Tensor) -> torch.device | None:
    """Where a deferred table will live; None if it is not one."""
    recipe = _recipes.of(tensor)
    return None if recipe is None else recipe.device


def common_seeds(tensors: list[torch.Tensor], seeds: list[int] | None = None) -> list[int]:
    """The seeds of deferred tables; with ``seeds``, set them (workers take the chief's)."""
    recipes = [recipe for t in tensors if (recipe := _recipes.of(t)) is not None]
    if seeds is not None:
        for recipe, seed in zip(recipes, seeds, strict=True):
            recipe.seed = seed
    return [recipe.seed for recipe in recipes]


def initial_rows(
    leaf: Leaf, objects: StepObjects, layout: RowLayout, worker: int, device: torch.device
) -> torch.Tensor:
    """The first values of one worker's rows of a leaf without storage."""
    shape = layout.shape_of(leaf.value.shape, layout.local_rows(worker))
    recipe = _recipes.of(leaf.value)
    if recipe is None:
        return torch.full(shape, _slot_fill(leaf, objects), dtype=leaf.value.dtype, device=device)
    if layout.axis:
        return layout.take(initial_whole(leaf, objects, device), worker)
    result = torch.empty(shape, dtype=leaf.value.dtype, device=recipe.device)
    filled = 0
    for first, block in _blocks(leaf, recipe):
        if layout.partition == "cyclic":
            own = block[layout.dealt_from(worker, first)]
        else:
            low, high = layout.range(worker)
            own = block[max(low - first, 0) : max(high - first, 0)]
        result[filled : filled + len(own)] = own
        filled += len(own)
    return result


def initial_whole(leaf: Leaf, objects: StepObjects, device: torch.device) -> torch.Tensor:
    """The first values of a leaf without storage that is not sharded."""
    recipe = _recipes.of(leaf.value)
    if recipe is None:
        fill = _slot_fill(leaf, objects)
        return torch.full(leaf.value.shape, fill, dtype=leaf.value.dtype, device=device)
    return torch.cat([block for _, block in _blocks(leaf, recipe)])


def _blocks(leaf: Leaf, recipe: Recipe) -> Iterator[tuple[int, torch.Tensor]]:
    rows, rest = leaf.value.shape[0], leaf.value.shape[1:]
    for first in range(0, max(rows, 1), BLOCK_ROWS):
        size = min(BLOCK_ROWS, rows - first)
        yield first, recipe.block(first, (size, *rest), leaf.value.dtype)


def _slot_fill(leaf: Leaf, objects: StepObjects) -> float:
    """The constant that a slot without storage starts with: what its optimizer gives a new one."""
    optimizer = objects.optimizers.get(leaf.root)
    if leaf.kind != "slot" or optimizer is None:
        raise UnsupportedError(
            f"The tensor {leaf.name!r} has no storage (it is on the meta device) and parallax does "
            "not know its first values.",
            hint="run its initialisation, or build it inside parallax.deferred().",
        )
    group = next(
        g for g in optimizer.param_groups if any(p.device.type == "meta" for p in g["params"])
    )
    settings = {k: v for k, v in group.items() if k in optimizer.defaults}
    probe = torch.nn.Parameter(torch.zeros(2, *[1] * (leaf.value.dim() - 1)))
    kind: Any = type(optimizer)
    twin: Any = kind([{"params": [probe], **settings}])
    slot = twin.state[probe].get(leaf.key[-1])
    if not isinstance(slot, torch.Tensor) or slot.numel() == 0 or (slot != slot.flatten()[0]).any():
        raise UnsupportedError(
            f"parallax does not know the first values of the slot {leaf.name!r}."
        )
    return float(slot.flatten()[0])
