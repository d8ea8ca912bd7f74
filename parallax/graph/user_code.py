"""Which line of the user's own code is running, or raised."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import sys
import types
from pathlib import Path

import sympy
import torch

from parallax.errors import SourceLine

_STANDARD = f"{Path(contextlib.__file__).parent}{os.sep}"
_INSTALLED = tuple(f"{_STANDARD}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_PACKAGES = (
    "<",
    *(f"{Path(module.__file__ or '').parent}{os.sep}" for module in (torch, sympy)),
    f"{Path(__file__).parents[1]}{os.sep}",
)


@functools.lru_cache(maxsize=4096)
def is_internal(filename: str) -> bool:
    """Whether a file belongs to torch, sympy, this package or Python's own library."""
    return filename.startswith(_PACKAGES) or is_standard(filename)


@functools.lru_cache(maxsize=4096)
def is_standard(filename: str) -> bool:
    """Whether a file belongs to Python's own library."""
    return filename.startswith(_STANDARD) and not filename.startswith(_INSTALLED)


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


def source_line(file: str, line: int) -> SourceLine:
    """A place with its text."""
    return SourceLine(file, line, linecache.getline(file, line).strip())


def line_of(node: torch.fx.Node | None) -> SourceLine | None:
    """The user's line that made a node of a captured graph."""
    place = None if node is None else node.meta.get("user_place")
    return None if place is None else source_line(*place)
