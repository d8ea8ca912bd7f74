"""Which files are the user's own code: what has to be the same on every host."""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from parallax.errors import ConfigError

__all__ = ["imported_files", "module_files", "program_files", "script_files"]

_PACKAGE = str(Path(__file__).resolve().parents[1])
_MAX_FILES = 2000


def imported_files() -> list[str]:
    """Files of the modules that this process has imported, but for installed ones and our own."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return sorted(str(file) for file in files if file and _is_own(str(file)))[:_MAX_FILES]


def script_files(script: str, paths: Sequence[str] = ()) -> list[str]:
    """The script and the local modules that it imports, found without running it.

    Args:
        script: its path.
        paths: directories that are searched besides the script's own, as PYTHONPATH has.

    Returns:
        Absolute paths. What a program imports in other ways than by import statements is not found.
    """
    script = os.path.abspath(script)
    return _closure([script], [os.path.dirname(script), *paths])


def module_files(module: str, paths: Sequence[str] = ()) -> list[str]:
    """The same for ``python -m``: the module and what it imports; empty if it is not found.

    Args:
        module: its dotted name.
        paths: directories that are searched besides the current one.
    """
    places = [os.getcwd(), *paths]
    words = module.split(".")
    files = list(_module_files(words, places))
    if not any(Path(file).stem == words[-1] for file in files):
        # A package is run by its __main__.
        files = list(_module_files([*words, "__main__"], places))
        if not any(Path(file).stem == "__main__" for file in files):
            return []
    return _closure(files, places)


def program_files(
    script: str, arguments: Sequence[str], paths: Sequence[str], example: str
) -> list[str]:
    """The files of a program's code.

    Args:
        script: its path, or ``-m``.
        arguments: what follows it on the command line; the module's name comes first after ``-m``.
        paths: directories that PYTHONPATH has.
        example: of a right command line, for the error.

    Raises:
        ConfigError: there is no such program.
    """
    if script != "-m":
        if not Path(script).is_file():
            raise ConfigError(f"The script {script!r} is no file.", hint=example)
        return script_files(script, paths)
    files = module_files(arguments[0], paths) if arguments else []
    if not files:
        name = arguments[0] if arguments else ""
        raise ConfigError(f"The module {name!r} is not found here or in PYTHONPATH.", hint=example)
    return files


def _closure(files: Sequence[str], places: list[str]) -> list[str]:
    """The files and all local ones that they import."""
    found: dict[str, None] = {}
    left = list(files)
    while left and len(found) < _MAX_FILES:
        file = left.pop()
        if file in found or not _is_own(file):
            continue
        found[file] = None
        left += _imports(file, places)
    return sorted(found)


def _is_own(file: str) -> bool:
    if not file.endswith(".py") or not os.path.isabs(file):
        return False
    parts = Path(file).parts
    if "site-packages" in parts or "dist-packages" in parts:
        return False
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")} | {_PACKAGE}
    return not any(file.startswith(place.rstrip(os.sep) + os.sep) for place in installed if place)


def _imports(file: str, places: list[str]) -> Iterable[str]:
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _module_files(alias.name.split("."), places)
        elif isinstance(node, ast.ImportFrom):
            start = places
            if node.level:
                # "from .. import x" is looked up from the file's own package.
                start = [str(Path(file).parents[node.level - 1])]
            words = node.module.split(".") if node.module else []
            for alias in node.names:
                yield from _module_files([*words, alias.name], start)


def _module_files(words: list[str], places: list[str]) -> Iterable[str]:
    """Files of a dotted name, packages on the way included; the last word may be no module."""
    for word in words:
        try:
            spec = PathFinder.find_spec(word, places)
        except (ImportError, ValueError, AttributeError):
            return
        if spec is None:
            return
        if spec.origin is not None and os.path.isabs(spec.origin):
            yield spec.origin
        if spec.submodule_search_locations is None:
            return
        places = list(spec.submodule_search_locations)
