"""Lists of texts in a batch, such as the paths of its images, that the step does not read.

As constants they would have the step captured anew for every batch. They are taken out before it is
captured: what stands in their place fails whatever it is asked, and the step is captured with the
texts then, as with all other constants.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn


class Unread:
    """Stands for a list of texts."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # which lists do not have either
            raise AttributeError(name)
        raise ReadError(name)


class ReadError(Exception):
    """A step reads texts of its batch. Not for users to see."""


def _fail(self: Unread, *_: Any) -> NoReturn:
    raise ReadError


_ASKED = (
    *("eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "len", "iter", "getitem", "contains"),
    *("str", "repr", "format", "add", "radd", "mul", "rmul", "mod", "rmod", "reversed", "fspath"),
    *("index", "int", "float", "copy", "deepcopy", "reduce_ex"),
)
for _name in _ASKED:
    setattr(Unread, f"__{_name}__", _fail)


class Texts:
    """Hides lists of texts, until a step was seen to read them."""

    def __init__(self) -> None:
        self._are_shown = False

    def hidden(
        self, batch: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The batch without them."""
        if self._are_shown:
            return tuple(batch), dict(named)
        return tuple(map(_hidden, batch)), {name: _hidden(one) for name, one in named.items()}

    def show(self) -> None:
        """From now on they are constants."""
        self._are_shown = True


def unread_in(value: Any) -> list[Unread]:
    """What stands for texts in a batch."""
    if isinstance(value, Unread):
        return [value]
    inside = value.values() if type(value) is dict else value if _is_list(value) else ()
    return [found for one in inside for found in unread_in(one)]


@contextlib.contextmanager
def left_unread(flat: Sequence[Any]) -> Iterator[None]:
    """See that a step does not put them somewhere, or return them.

    Args:
        flat: its batch.

    Raises:
        ReadError: it does.
    """
    found = [one for one in flat if isinstance(one, Unread)]
    before = _references(found)
    yield
    if _references(found) != before:
        gc.collect()  # frames may refer to each other
        if _references(found) != before:
            raise ReadError


def _references(found: Sequence[Unread]) -> list[int]:
    return [sys.getrefcount(one) for one in found]


def _hidden(value: Any) -> Any:
    if not _has_texts(value):  # most have none: they are not copied before every step
        return value
    if type(value) is dict:
        return {key: _hidden(one) for key, one in value.items()}
    return Unread() if _are_texts(value) else type(value)(map(_hidden, value))


def _has_texts(value: Any) -> bool:
    if type(value) is dict:
        return any(map(_has_texts, value.values()))
    return _is_list(value) and (_are_texts(value) or any(map(_has_texts, value)))


def _are_texts(value: Sequence[Any]) -> bool:
    return bool(value) and all(type(one) is str for one in value)


def _is_list(value: Any) -> bool:
    return type(value) is list or type(value) is tuple
