"""Python values that a step reads besides its batch: its graph takes them for granted.

An attribute of a trainer, an entry of a configuration, a global name: what the step's Python does
follows from them, and the script may change them between steps. They are read before each step and
are part of what a graph is valid for; a number of which several values were seen becomes an input
of graphs instead, as a learning rate is. Which of them the step reads is told by names: those that
code loads which the step can reach.
"""

from __future__ import annotations

import contextlib
import dis
import operator
import types
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from parallax.errors import UnsupportedError
from parallax.graph.discovery import GlobalName, StepObjects, is_library_code

DIFFERENT = 3
"""Values of a number with which it becomes an input of graphs."""

_CALLED_UNNAMED = ("forward", "__call__")
_MISSING = object()
_CALLABLE = (types.FunctionType, types.BuiltinFunctionType, type)


@dataclass(frozen=True)
class Site:
    """Where a value is, and how the user would name it."""

    name: str
    source: _Source

    @property
    def value(self) -> Any:
        return self.source()

    def put(self, value: Any) -> None:
        self.source.put(value)


@dataclass(frozen=True)
class Numbers:
    """Python's numbers that are inputs of a graph, besides floats of the batch.

    Args:
        batch: the places of whole numbers in the flat batch.
        outside: where the step reads others.
    """

    batch: frozenset[int] = frozenset()
    outside: tuple[Site, ...] = ()


NO_NUMBERS = Numbers()


class OutsideValues:
    """The values of one step, read anew before each call."""

    def __init__(self, objects: StepObjects) -> None:
        names = _names_of(objects)
        self._sites = list(dict.fromkeys(_sites(objects, names)))
        self._owned = {
            index: (site, value)
            for index, site in enumerate(self._sites)
            if isinstance(value := site.value, torch.nn.Module | Optimizer | LRScheduler)
        }
        self._getters = [site.source for site in self._sites]
        self._last: list[Any] = []
        self._seen: dict[int, set[float]] = {}
        self._constant: set[int] = set()
        self._inputs: dict[int, type] = {}

    @property
    def names(self) -> list[str]:
        """Of the values, as :meth:`read` has them."""
        return [site.name for site in self._sites]

    def read(self) -> tuple[Hashable, ...]:
        """What they are now; of inputs, their type. Other than plain values and functions count for
        nothing.

        Raises:
            UnsupportedError: a model, an optimizer or a scheduler is another one than at first.
        """
        values = [get() for get in self._getters]
        for index, (site, first) in self._owned.items():
            if values[index] is not first:
                raise UnsupportedError(
                    f"{site.name!r} is another {type(first).__name__} than in the first step.",
                    hint="change it in place (its parameter groups, load_state_dict()), or make "
                    "another runner for what comes then.",
                )
        if any(map(operator.is_not, values, self._last)) or not self._last:
            self._look(values)
        told = [_told(value) for value in values]
        for index, kind in self._inputs.items():
            told[index] = kind
        return tuple(told)

    def _look(self, values: list[Any]) -> None:
        """Which numbers are inputs, now that values have changed."""
        self._last = values
        self._inputs.clear()
        for index, value in enumerate(values):
            if type(value) not in (int, float) or index in self._constant:
                continue
            if not self._sites[index].source.writable:
                continue
            seen = self._seen.setdefault(index, set())
            if len(seen) < DIFFERENT:
                seen.add(value)
            if len(seen) >= DIFFERENT:
                self._inputs[index] = type(value)

    def inputs(self) -> list[Site]:
        """Where the numbers are that were inputs when values were read last."""
        return [self._sites[index] for index in self._inputs]

    def keep_constant(self) -> None:
        """A graph could not be made with them as inputs."""
        self._constant.update(self._inputs)
        self._inputs.clear()


@contextlib.contextmanager
def standing_for(sites: Sequence[Site], symbols: Sequence[Any]) -> Iterator[None]:
    """Let symbols be where the numbers are, while the step is captured."""
    values = [site.value for site in sites]
    try:
        for site, symbol in zip(sites, symbols, strict=True):
            site.put(symbol)
        yield
    finally:
        for site, value in zip(sites, values, strict=True):
            if isinstance(site.value, torch.SymInt | torch.SymFloat):
                site.put(value)


def _told(value: Any) -> Hashable:
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    return value if isinstance(value, _CALLABLE) else _MISSING


# -- Which names are read -----------------------------------------------------------------------


def _names_of(objects: StepObjects) -> set[str]:
    """Names that code loads which the step can reach: its functions, and methods by their names."""
    queue = list(objects.functions)
    methods = _methods(objects)
    names: set[str] = set(_CALLED_UNNAMED)
    seen: set[types.CodeType] = set()
    while True:
        while queue:
            function = queue.pop()
            if function.__code__ in seen:
                continue
            seen.add(function.__code__)
            names |= _loaded(function.__code__)
            queue += _called(function)
        queue = [one for name, one in methods if name in names and one.__code__ not in seen]
        if not queue:
            return names


def _called(function: types.FunctionType) -> Iterator[types.FunctionType]:
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, types.FunctionType) and not is_library_code(value.__code__):
            yield value


def _loaded(code: types.CodeType) -> set[str]:
    """Attributes, globals, and texts, which may be keys."""
    names = {
        str(instruction.argval)
        for instruction in dis.get_instructions(code)
        if instruction.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER", "LOAD_GLOBAL"))
    }
    for constant in code.co_consts:
        if isinstance(constant, str):
            names.add(constant)
        elif isinstance(constant, types.CodeType):
            names |= _loaded(constant)
    return names


def _methods(objects: StepObjects) -> list[tuple[str, types.FunctionType]]:
    """Of the user's classes, by name."""
    holders = [*objects.optimizers.values(), *(value for _, value in objects.containers)]
    holders += [module for model in objects.models.values() for module in model.modules()]
    found: list[tuple[str, types.FunctionType]] = []
    for kind in dict.fromkeys(one for value in holders for one in type(value).__mro__):
        for name, value in vars(kind).items():
            function = value.fget if isinstance(value, property) else value
            function = getattr(function, "__func__", function)
            if isinstance(function, types.FunctionType) and not is_library_code(function.__code__):
                found.append((name, function))
    return found


# -- Where values are ---------------------------------------------------------------------------


def _sites(objects: StepObjects, names: set[str]) -> Iterator[Site]:
    for name, container in objects.containers:
        if isinstance(container, types.CellType):
            yield Site(name, _Cell(container))
        elif isinstance(container, GlobalName):
            yield Site(name, _Item(container.home, container.name))
        elif isinstance(container, Mapping):
            keys = [key for key in container if isinstance(key, str) and key in names]
            yield from (Site(f"{name}[{key!r}]", _Item(container, key)) for key in keys)
        elif hasattr(container, "__dict__"):
            yield from _attributes(name, container, names)
    for name, optimizer in objects.optimizers.items():
        if not is_library_class(type(optimizer)):
            own = names - vars(Optimizer).keys()
            yield from _attributes(name, optimizer, {n for n in own if not n.startswith("_")})
    for root, model in objects.models.items():
        for path, module in model.named_modules():
            known = names - {"training"}
            if is_library_class(type(module)):  # its own code is not read; rates and thresholds
                known = {key for key, value in vars(module).items() if isinstance(value, float)}
            label = f"{root}.{path}" if path else root
            yield from _attributes(label, module, known)


def _attributes(name: str, owner: Any, names: set[str]) -> Iterator[Site]:
    """Plain attributes, of an object or of its class."""
    own = vars(owner)
    of_class = {key for kind in type(owner).__mro__ for key in vars(kind)} - own.keys()
    for key in sorted(names & {*own, *of_class}):
        if key in own or _is_plain(getattr(type(owner), key, None)):
            yield Site(f"{name}.{key}", _Attribute(owner, key))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def is_library_class(kind: type) -> bool:
    """Whether a class is of an installed package."""
    forward: Any = vars(kind).get("forward") or vars(kind).get("step") or vars(kind).get("__init__")
    code = getattr(forward, "__code__", None)
    return code is not None and is_library_code(code)


class _Source(Protocol):
    """Reads a value when called, and writes one without the ways of the user's class."""

    @property
    def writable(self) -> bool: ...
    def __call__(self) -> Any: ...
    def put(self, value: Any) -> None: ...


@dataclass(frozen=True, eq=False)
class _Cell:
    cell: types.CellType
    writable: bool = True

    def __call__(self) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:
            return _MISSING

    def put(self, value: Any) -> None:
        self.cell.cell_contents = value


@dataclass(frozen=True, eq=False)
class _Item:
    home: Mapping[Any, Any]
    key: str

    @property
    def writable(self) -> bool:
        return isinstance(self.home, dict)

    def __call__(self) -> Any:
        return self.home.get(self.key, _MISSING)

    def put(self, value: Any) -> None:
        self.home[self.key] = value  # type: ignore[index]


@dataclass(frozen=True, eq=False)
class _Attribute:
    owner: Any
    key: str

    @property
    def writable(self) -> bool:
        """A plain attribute of its own, neither of its class nor computed."""
        of_class = getattr(type(self.owner), self.key, None)
        return self.key in vars(self.owner) and not hasattr(of_class, "__get__")

    def __call__(self) -> Any:
        return getattr(self.owner, self.key, _MISSING)

    def put(self, value: Any) -> None:
        vars(self.owner)[self.key] = value
