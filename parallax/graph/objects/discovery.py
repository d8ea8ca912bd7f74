"""Find what a training step touches: models, optimizers, schedulers and tensors it keeps.

They are reached through the step's closure, the globals it names, its bound ``self`` and the
functions it calls, and are named as the user's code names them.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from parallax.errors import ConfigError, ModelError
from parallax.graph.common.user_code import is_library_code, is_users_class
from parallax.graph.objects.holders import (
    MAX_DEPTH,
    Attributes,
    Binding,
    begin,
    complete,
    holds_tensors,
    is_container,
    is_user_object,
    members,
)
from parallax.graph.symbols.conversions import Conversions
from parallax.graph.symbols.guesses import Guesses

_MAX_CONTAINERS = 10_000


@dataclass
class StepObjects:
    """What the step reaches, by the name its code uses. Order is the same on every worker."""

    models: dict[str, torch.nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    schedulers: dict[str, LRScheduler] = field(default_factory=dict)
    holders: dict[str, Any] = field(default_factory=dict)
    """Containers and objects that hold tensors (a moving-average dict), and names of tensors."""
    attributes: dict[int, Root] = field(default_factory=dict)
    """Those of modules and optimizers, by the identity of these."""
    containers: list[Contained] = field(default_factory=list)
    """Every mutable container and object of the user, closure cell and global: what the step's
    Python can change unseen by the graph."""
    functions: list[types.FunctionType] = field(default_factory=list)
    """The user's functions that the step may call, itself first."""
    roots: dict[tuple[int, str], Root] = field(default_factory=dict)
    """Of names, by the identity of what has them and of what they are bound to if nobody can bind
    them anew."""
    walk: Callable[[StepObjects], None] = field(default=lambda found: None)
    """Finds all of this again."""
    counters: set[str] = field(default_factory=set)
    """Whole numbers in optimizers' groups that captures saw the step change: state, by leaf name;
    all others are settings."""
    plain: dict[str, Any] = field(default_factory=dict)
    """Entries of optimizers' state that are more than tensors and numbers, as captures saw them."""
    conversions: Conversions = field(default_factory=Conversions)
    guesses: Guesses = field(default_factory=Guesses)

    def attributes_of(self, name: str, owner: torch.nn.Module | Optimizer) -> Root:
        """Those of a module or an optimizer, which may have come after the others."""
        return self.attributes.setdefault(id(owner), Root(name, Attributes(owner)))

    def look_again(self) -> None:
        """Find containers that the script has made in the place of others."""
        found = StepObjects(roots=self.roots)
        self.walk(found)
        self.containers = found.containers

    def hold(self, root: Root) -> None:
        """Let tensors that a step puts there be state."""
        if not any(root.holder is holder for holder in self.holders.values()):
            self.holders[unique_name(root.name, self.holders)] = root.holder


@dataclass(frozen=True, eq=False)
class Root:
    """A name of the step's own, and what holds the state that is reached by it."""

    name: str
    holder: Any


class Contained(NamedTuple):
    """One place that the step's Python can write to, as the user would name it."""

    name: str
    value: Any
    root: Root


def unique_name(name: str, taken: Mapping[str, Any]) -> str:
    """A name that is not taken yet."""
    index, unique = 1, name
    while unique in taken:
        index += 1
        unique = f"{name}_{index}"
    return unique


def discover(
    step: Callable[..., Any],
    model: Any = None,
    optimizer: Any = None,
) -> StepObjects:
    """Everything that ``step`` reaches.

    Args:
        step: the training step.
        model: a module, or a sequence or mapping of them, for a step that hides its own.
        optimizer: the same for optimizers.

    Raises:
        ConfigError: ``step`` is not callable, or runs later, or ``model`` or ``optimizer`` is of
            another kind.
        ModelError: no model or tensor to train is reached.
    """
    if not callable(step) or isinstance(step, torch.nn.Module):
        raise ConfigError(
            f"step must be a function that runs one training step, found {type(step).__name__}.",
            hint="pass the function itself: parallax.get_runner(train_step), where train_step "
            "computes the loss, calls loss.backward() and optimizer.step().",
        )
    if inspect.isgeneratorfunction(step) or inspect.iscoroutinefunction(step):
        kind = "a generator" if inspect.isgeneratorfunction(step) else "a coroutine"
        raise ConfigError(
            f"step is {kind}: calling it runs nothing yet.",
            hint="make it a plain function that runs one whole step and returns its results.",
        )
    found = StepObjects(walk=functools.partial(_walk, step, model, optimizer))
    found.walk(found)
    _absorb_optimized_tensors(found)
    if not found.models and not found.holders:
        raise ModelError(
            "The step reaches no model: neither its closure, nor its globals, nor a bound self "
            "holds an nn.Module or a tensor.",
            hint="pass it: parallax.get_runner(step, model=model, optimizer=optimizer).",
        )
    return found


def _walk(step: Callable[..., Any], model: Any, optimizer: Any, found: StepObjects) -> None:
    walker = _Walker(found)
    for name, value in _named(model, torch.nn.Module, "model"):
        walker.visit_own(name, value, 0)
    for name, value in _named(optimizer, Optimizer, "optimizer"):
        walker.visit_own(name, value, 0)
    walker.visit_callable(step, 0)
    walker.visit_optimizers()


def _named(value: Any, kind: type, label: str) -> Iterator[tuple[str, Any]]:
    if value is None:
        return
    if isinstance(value, kind):
        yield label, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(item, kind, str(key))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, item in enumerate(value):
            yield from _named(item, kind, f"{label}{index}")
    else:
        raise ConfigError(
            f"{label} must be of kind {kind.__name__}, or a list or dict of them, "
            f"found {type(value).__name__}."
        )


def _absorb_optimized_tensors(found: StepObjects) -> None:
    """Tensors that only an optimizer holds are state too."""
    known = {id(t) for m in found.models.values() for t in m.parameters()}
    for name, optimizer in found.optimizers.items():
        extra = [
            p for group in optimizer.param_groups for p in group["params"] if id(p) not in known
        ]
        if extra:
            found.holders.setdefault(f"{name}.params", extra)


class _Walker:
    def __init__(self, found: StepObjects) -> None:
        self.found = found
        self.seen: dict[int, Any] = {}
        self.root = Root("", None)

    def visit(self, name: str, value: Any, depth: int, place: str = "") -> bool:
        """Record what ``value`` is; True when it is or holds tensors.

        Args:
            name: that it is saved by.
            value: see above.
            depth: of containers that it is in.
            place: how a message names it, if not by its name.
        """
        if id(value) in self.seen:
            return False
        found = self.found
        if isinstance(value, torch.nn.Module):
            self._keep(value)
            if not any(value in m.modules() for m in found.models.values()):
                unique = unique_name(name, found.models)
                found.models[unique] = value
                for path, module in value.named_modules():
                    self._visit_attributes(f"{unique}.{path}" if path else unique, module)
            return False
        if isinstance(value, Optimizer):
            self._keep(value)
            complete(value)
            unique = unique_name(name, found.optimizers)
            found.optimizers[unique] = value
            for key, item in Attributes(value).items():  # an optimizer that this one calls
                if isinstance(item, Optimizer | LRScheduler):
                    self.visit(f"{name}.{key}", item, depth + 1)
            self._visit_attributes(unique, value)
            return False
        if isinstance(value, LRScheduler):
            self._keep(value)
            found.schedulers[unique_name(name, found.schedulers)] = value
            return False
        if isinstance(value, torch.amp.GradScaler):
            self._keep(value)
            if value.is_enabled():
                begin(value)
                self._contain(name, value)
                return self._visit_members(name, value, depth)
            return False
        if isinstance(value, torch.Tensor):
            self._keep(value)
            return True
        if depth >= MAX_DEPTH:
            return False
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            self.visit_callable(value, depth)
            return False
        if isinstance(value, type):
            self._visit_class(value, depth)
            return False
        if isinstance(value, types.ModuleType | str | bytes | int | float | complex | None):
            return False
        if isinstance(value, set | collections.deque):
            self._contain(place or name, value)
            return False
        if is_container(value):
            self._keep(value)
            self._contain(place or name, value)
            self._visit_class(type(value), depth)
            return self._visit_members(name, value, depth)
        if is_user_object(value):  # which is called: what its code reads is looked for as well
            self._keep(value)
            self._contain(place or name, value)
            self.visit_callable(type(value).__dict__.get("__call__"), depth + 1)
            self._visit_class(type(value), depth)
            return self._visit_members(name, value, depth)
        return False

    def _visit_class(self, kind: type, depth: int) -> None:
        """Models, optimizers and schedulers in attributes of a class, or in lists and dicts there;
        tensors are not state there."""
        if id(kind) in self.seen or not is_users_class(kind):
            return
        self._keep(kind)
        for name, value in [item for one in kind.__mro__[:-1] for item in vars(one).items()]:
            inner = _values(value) if isinstance(value, dict | list | tuple) else [value]
            for one in inner:
                if isinstance(one, torch.nn.Module | Optimizer | LRScheduler):
                    self.visit(name, one, depth + 1)

    def visit_optimizers(self) -> None:
        """Of schedulers, those optimizers that the step has no name for."""
        for scheduler in list(self.found.schedulers.values()):
            self.visit("optimizer", scheduler.optimizer, 1)

    def _visit_attributes(self, name: str, owner: torch.nn.Module | Optimizer) -> None:
        """Tensors that a module or an optimizer holds besides those that it is known for."""
        root = self.found.attributes_of(name, owner)
        may_keep = isinstance(owner, Optimizer) and any(
            isinstance(item, dict | list) for _, item in root.holder.items()
        )
        if self._visit_objects(name, root) or may_keep or holds_tensors(root.holder, 0):
            self.found.hold(root)

    def _visit_objects(self, name: str, root: Root) -> bool:
        """Objects of the user's classes in attributes; whether they hold tensors."""
        holds = False
        with self._rooted(root):
            for key, item in root.holder.items():
                if isinstance(item, dict | list | tuple):
                    inner = [one for one in _values(item) if _is_plain_object(one)]
                else:
                    inner = [item] if _is_plain_object(item) else []
                for one in inner:
                    holds |= self.visit(f"{name}.{key}", one, 1)
        return holds

    def _keep(self, value: Any) -> None:
        # The reference keeps ids from being reused while walking.
        self.seen[id(value)] = value

    def _contain(self, name: str, value: Any) -> None:
        if not isinstance(value, tuple) and len(self.found.containers) < _MAX_CONTAINERS:
            self.found.containers.append(Contained(name, value, self.root))

    def _visit_members(self, name: str, value: Any, depth: int) -> bool:
        holds = False
        for key, item in members(value):
            is_named = isinstance(key, str) and not isinstance(value, list | tuple)
            place = "" if is_named else f"{name}[{key!r}]"
            holds |= self.visit(key if is_named else name, item, depth + 1, place)
        if holds and depth == 0:
            self.found.hold(self.root)
        return holds

    def visit_callable(self, function: Any, depth: int) -> None:
        if isinstance(function, functools.partial):
            self.visit_callable(function.func, depth)
            for index, item in enumerate(function.args):
                self.visit_own(f"argument{index}", item, depth)
            for key, item in function.keywords.items():
                self.visit_own(key, item, depth)
            return
        if isinstance(function, types.MethodType):
            self.visit_own("self", function.__self__, depth)
            function = function.__func__
        wrapper = function
        while (wrapped := getattr(wrapper, "__wrapped__", None)) is not None:
            self._visit_own_attributes(wrapper)
            wrapper = wrapped
        function = inspect.unwrap(function)
        if not isinstance(function, types.FunctionType):
            if depth == 0 and not isinstance(function, type):
                self.visit_own("self", function, depth)
                call = vars(type(function)).get("__call__")
                if isinstance(call, types.FunctionType):
                    self.visit_callable(call, depth + 1)
            return
        if id(function) in self.seen or (depth > 0 and is_library_code(function.__code__)):
            return
        self._keep(function)
        self._visit_own_attributes(function)
        self.found.functions.append(function)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                content = cell.cell_contents
            except ValueError:  # assigned after the function was made
                continue
            with self._rooted(self._root(name, cell, content)):
                self._contain(name, cell)
                self._top(name, content, depth)
        for name in _global_names(function.__code__):
            if name in function.__globals__:
                value = function.__globals__[name]
                with self._rooted(self._root(name, function.__globals__, value)):
                    self._contain(name, GlobalName(name, function.__globals__))
                    self._top(name, value, depth)
        for name, default in _defaults(function):
            self.visit_own(name, default, depth)

    def _visit_own_attributes(self, function: Any) -> None:
        """Of a function of the user (``step.count``)."""
        if isinstance(function, types.FunctionType) and not is_library_code(function.__code__):
            own = vars(function)
            if own.keys() - {"__wrapped__"}:
                self.visit_own(function.__name__, own, 0)

    def _root(self, name: str, home: Any, value: Any) -> Root:
        root = Root(name, Binding(name, home, value))
        return self.found.roots.setdefault((id(home), name), root)

    @contextlib.contextmanager
    def _rooted(self, root: Root) -> Iterator[None]:
        outer, self.root = self.root, root
        try:
            yield
        finally:
            self.root = outer

    def visit_own(self, name: str, value: Any, depth: int) -> None:
        """Record what has a name that nobody can bind anew."""
        root = Root(name, Binding(name, None, value))
        with self._rooted(self.found.roots.setdefault((id(value), name), root)):
            self._top(name, value, depth)

    def _top(self, name: str, value: Any, depth: int) -> None:
        """What a name of the step is bound to, the present root's."""
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            if depth < MAX_DEPTH:
                self.visit_callable(value, depth + 1)
        elif self.visit(name, value, 0) and isinstance(value, torch.Tensor):
            self.found.hold(self.root)


@dataclass(frozen=True)
class GlobalName:
    """A name of a module that a function of the step uses, and may assign."""

    name: str
    home: dict[str, Any]


def _defaults(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Parameters with a default value."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return [*zip(names, values, strict=True), *(function.__kwdefaults__ or {}).items()]


def _global_names(code: types.CodeType) -> list[str]:
    """Names that code reads or sets as globals; ``co_names`` has those of attributes as well."""
    names = [
        str(instruction.argval)
        for instruction in dis.get_instructions(code)
        if "GLOBAL" in instruction.opname or instruction.opname in ("LOAD_NAME", "STORE_NAME")
    ]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _global_names(constant)
    return list(dict.fromkeys(names))


def _values(content: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> Iterable[Any]:
    return content.values() if isinstance(content, dict) else content


def _is_plain_object(value: Any) -> bool:
    """Whether it is an object of a user's class that is none of torch's kinds."""
    known = torch.Tensor | torch.nn.Module | Optimizer | LRScheduler | type | types.FunctionType
    return not isinstance(value, known) and is_user_object(value)
