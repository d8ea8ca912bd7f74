"""The code that a step can reach, and what that does with names."""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallax.graph.common.user_code import is_library_code, is_users_class
from parallax.graph.objects.discovery import StepObjects

_CALLED_UNNAMED = ("forward", "__call__")
_LOADS = (
    *("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"),
    *("LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF", "LOAD_CONST"),
)
_METHODS, _APPENDING = ("LOAD_ATTR", "LOAD_METHOD"), ("append", "extend")
_TAKING = ("GET_ITER", "CALL", "PRECALL", "DICT_MERGE", "DICT_UPDATE", "LIST_EXTEND", "UNPACK")
_NAMING = ("BUILD_CONST_KEY_MAP", "CALL", "KW_NAMES", "IMPORT")


@dataclass
class Loads:
    """What code does with names: of attributes, globals and cells, and texts, which may be keys."""

    read: set[str] = field(default_factory=set)
    """Loaded for more than to append."""
    appended: set[str] = field(default_factory=set)
    """Loaded, and then appended to."""
    passed: set[str] = field(default_factory=set)
    """Iterated over, or passed to a function."""

    def add(self, code: types.CodeType) -> None:
        """With the code inside it."""
        following = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
        for place, instruction in enumerate(following):
            after = following[place + 1 : place + 3]
            is_constant = instruction.opname == "LOAD_CONST"
            if is_constant and _is_item(after[:1]):
                after = after[1:]
            if after and after[0].opname.startswith(_METHODS) and after[0].argval in _APPENDING:
                self._add(instruction, self.appended)
            elif not is_constant or "STORE_SUBSCR" not in [one.opname for one in after[:1]]:
                self._add(instruction, self.read)
            if after and after[0].opname.startswith(_TAKING) and not is_constant:
                self._add(instruction, self.passed)
            if is_constant and after and not after[0].opname.startswith(_NAMING):
                self._add_keys(instruction.argval)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.add(constant)

    def _add(self, instruction: dis.Instruction, names: set[str]) -> None:
        if instruction.opname.startswith(_LOADS) and isinstance(instruction.argval, str):
            names.add(instruction.argval)

    def _add_keys(self, value: Any) -> None:
        """Of a tuple of texts, which may be keys."""
        if isinstance(value, tuple):
            self.read |= {item for item in value if isinstance(item, str)}

    @property
    def logged(self) -> set[str]:
        """Of lists that are appended to, and nothing else."""
        return self.appended - self.read


def _is_item(after: Sequence[dis.Instruction]) -> bool:
    return bool(after) and (
        after[0].opname == "BINARY_SUBSCR"
        or (after[0].opname == "BINARY_OP" and after[0].argrepr == "[]")
    )


@dataclass(frozen=True)
class Code:
    """What the step can reach.

    Args:
        functions: its functions, and methods by their names.
        loads: what they do with names.
    """

    functions: tuple[types.FunctionType, ...]
    loads: Loads


def reached_code(objects: StepObjects, others: Sequence[Any] = ()) -> Code:
    """The code that the step can reach, methods of other objects included."""
    queue = list(objects.functions)
    methods = _methods(objects, others)
    loads = Loads(set(_CALLED_UNNAMED))
    seen: dict[types.CodeType, types.FunctionType] = {}
    while True:
        while queue:
            function = queue.pop()
            if function.__code__ in seen:
                continue
            seen[function.__code__] = function
            loads.add(function.__code__)
            queue += _called(function)
        queue = [one for name, one in methods if name in loads.read and one.__code__ not in seen]
        if not queue:
            return Code(tuple(seen.values()), loads)


def _called(function: types.FunctionType) -> Iterator[types.FunctionType]:
    for name in function.__code__.co_names:
        value = inspect.unwrap(v) if callable(v := function.__globals__.get(name)) else None
        if isinstance(value, types.FunctionType) and not is_library_code(value.__code__):
            yield value
        elif isinstance(value, type) and is_users_class(value):
            yield from (one for _, one in _methods_of(value))


def _methods(objects: StepObjects, others: Sequence[Any]) -> list[tuple[str, types.FunctionType]]:
    """Of the user's classes, by name."""
    holders = [*others, *objects.optimizers.values(), *objects.schedulers.values()]
    holders += [value for _, value, _ in objects.containers]
    holders += [module for model in objects.models.values() for module in model.modules()]
    kinds = dict.fromkeys(one for value in holders for one in type(value).__mro__)
    return [found for kind in kinds for found in _methods_of(kind)]


def _methods_of(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    """Of the user's, what decorators wrap and what properties call included."""
    for name, value in vars(kind).items():
        function = value.fget if isinstance(value, property) else value
        function = getattr(function, "__func__", getattr(function, "func", function))
        function = inspect.unwrap(function) if callable(function) else None
        if isinstance(function, types.FunctionType) and not is_library_code(function.__code__):
            yield name, function
