"""What code is the user's own, and which line of it is running, or raised."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import linecache
import os
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import sympy
import torch

from parallax.errors import SourceLine

STEP = "traced_step"
"""The function that the user's step is called by while it is captured."""
Calls = tuple[tuple[types.CodeType, int], ...]
"""Calls that led somewhere, innermost first: their code, and the instruction that each is at."""

_STANDARD = f"{Path(contextlib.__file__).parent}{os.sep}"
_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of packages; an environment may have several (the user's own, those of another one)."""
_OWN = f"{Path(__file__).parents[2]}{os.sep}"
_BESIDE = tuple(f"{_STANDARD}{name}{os.sep}" for name in sorted(_INSTALLED))
_PACKAGES = (
    "<",
    *(f"{Path(module.__file__ or '').parent}{os.sep}" for module in (torch, sympy)),
    _OWN,
)
_LIBRARY_ROOTS = tuple(
    {
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        _OWN,  # its objects are not the user's, wherever it is installed
    }
)


@functools.lru_cache(maxsize=4096)
def is_internal(filename: str) -> bool:
    """Whether a file belongs to torch, sympy, this package or Python's own library."""
    return filename.startswith(_PACKAGES) or is_standard(filename)


@functools.lru_cache(maxsize=4096)
def is_standard(filename: str) -> bool:
    """Whether a file belongs to Python's own library."""
    return filename.startswith(_STANDARD) and not filename.startswith(_BESIDE)


def user_line(trace: types.TracebackType | None = None) -> SourceLine | None:
    """The innermost line of the user's own code: now, or where ``trace`` went through."""
    found = user_place() if trace is None else None
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if not is_internal(filename):
            found = (filename, trace.tb_lineno)
        trace = trace.tb_next
    return None if found is None else source_line(*found)


def user_place() -> tuple[str, int] | None:
    """File and line of the user's code that runs now; cheap enough to call at every operation."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not is_internal(filename):
            return filename, frame.f_lineno
        frame = frame.f_back
    return None


def user_calls() -> Calls:
    """The calls of the user's code from the step on that run now, if it does; cheap enough, too."""
    found: list[tuple[types.CodeType, int]] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == STEP:
            return tuple(found)
        if not is_internal(frame.f_code.co_filename):
            found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return ()


def position(code: types.CodeType, instruction: int) -> tuple[int | None, ...]:
    """Where an instruction is in its source: lines and columns, if Python knows them. Of several
    instructions that belong together a frame may be at another one each time."""
    if not hasattr(code, "co_positions"):  # before Python 3.11
        return (instruction,)
    return next(itertools.islice(code.co_positions(), instruction // 2, None), (instruction,))


def line_in(code: types.CodeType, instruction: int) -> int:
    """The line of an instruction."""
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
    return next(lines, None) or code.co_firstlineno


def places_of(calls: Calls) -> list[tuple[object, ...]]:
    """Where calls are, alike on all workers, whose files may lie elsewhere."""
    return [
        (os.path.basename(code.co_filename), code.co_name, position(code, instruction))
        for code, instruction in calls
    ]


def source_line(file: str, line: int) -> SourceLine:
    """A place with its text."""
    return SourceLine(file, line, linecache.getline(file, line).strip())


def line_of(node: torch.fx.Node | None) -> SourceLine | None:
    """The user's line that made a node of a captured graph."""
    place = None if node is None else node.meta.get("user_place")
    return None if place is None else source_line(*place)


def is_installed(file: str | None) -> bool:
    """Whether a file is of an installed package."""
    return file is not None and not _INSTALLED.isdisjoint(Path(file).parts)


def is_library_code(code: types.CodeType) -> bool:
    """Whether code is of an installed package."""
    return _is_library(code.co_filename)


@functools.lru_cache(maxsize=4096)
def _is_library(filename: str) -> bool:
    if filename.startswith("<frozen") or is_installed(filename):
        return True
    return any(root and filename.startswith(root) for root in _LIBRARY_ROOTS)


def is_users_class(kind: type) -> bool:
    """Whether a class is of the user's own code."""
    return kind.__module__ == "__main__" or is_users_module(sys.modules.get(kind.__module__))


def is_users_module(module: Any) -> bool:
    """Whether a module is of the user's own code."""
    file = getattr(module, "__file__", None)
    return file is not None and not _is_library(file)


def is_library_class(kind: type) -> bool:
    """Whether a class is of an installed package."""
    forward: Any = vars(kind).get("forward") or vars(kind).get("step") or vars(kind).get("__init__")
    # An optimizer's step is wrapped by torch.
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and is_library_code(code)
