"""What to load instead of what was given, where that has the state of a run in another shape.

Scripts save more than a run's state (an epoch, a scheduler), or save it under other names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

DEPTH = 2
"""How deep the state is looked for."""

WHERE = ", where loaded is what was given"

Fits = Callable[[Any], bool]
Path = tuple[Any, ...]


def advice(given: Mapping[Any, Any], parts: Mapping[str, Fits], models: Collection[str]) -> str:
    """How to load what was given; empty if its parts are not known.

    Args:
        given: a state that does not fit.
        parts: by name of what a state of this run has, whether something is that.
        models: those of them that a script can load itself, before the first step.
    """
    for path, inner in _inside(given):
        if all(name in inner and fits(inner[name]) for name, fits in parts.items()):
            if path:
                return f"pass {_read(path)}{WHERE}"
            names = ", ".join(map(repr, parts))
            return f"pass {{name: loaded[name] for name in [{names}]}}{WHERE}"
    places = ((name, _place(given, name, fits)) for name, fits in parts.items())
    found = {name: path for name, path in places if path is not None}
    if len(found) == len(parts):
        pairs = ", ".join(f"{name!r}: {_read(path)}" for name, path in found.items())
        return f"pass {{{pairs}}}{WHERE}"
    if not models or any(name not in found for name in models):
        return ""
    if any(name in given for name in parts.keys() - set(models)):
        return ""
    calls = ", ".join(f"{name}.load_state_dict({_read(found[name])})" for name in models)
    return f"it has models alone: call {calls} before the first step, on all workers{WHERE}"


def _inside(given: Mapping[Any, Any], depth: int = DEPTH) -> Iterator[tuple[Path, Any]]:
    """The mapping, and those inside it, each with the keys that lead there."""
    yield (), given
    if depth:
        for key, value in given.items():
            if isinstance(value, Mapping):
                for path, inner in _inside(value, depth - 1):
                    yield (key, *path), inner


def _place(given: Mapping[Any, Any], name: str, fits: Fits) -> Path | None:
    """Where a part is: under its name, or at the only place where there is one like it."""
    if name in given and fits(given[name]):
        return (name,)
    found = [path for path, inner in _inside(given) if fits(inner)]
    return found[0] if len(found) == 1 else None


def _read(path: Path) -> str:
    return "loaded" + "".join(f"[{key!r}]" for key in path)
