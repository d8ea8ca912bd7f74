"""What a step prints and logs, with the values that it had when it ran.

While a step is captured there are no values. A text that the step's code makes of what it computes
has a mark for each, and what is printed or logged is kept, to be said after each step, when the
marks are replaced by what the values then are.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import logging
import re
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from parallax.errors import CaptureError, SourceLine
from parallax.graph.common.recording import Call, Recording
from parallax.graph.common.replaced import replaced
from parallax.graph.common.torch_internals import FakeTensor
from parallax.graph.common.user_code import is_internal, is_library_code, is_standard, user_line

WITHOUT_VALUES = (torch.SymFloat, torch.SymInt, torch.SymBool, FakeTensor)
"""What numbers and tensors are while a step is captured."""
_MARK = re.compile("⦃⦅(\\d+)⦆⦄")
"""Around a number, of characters that texts hardly have, and that ``repr`` leaves as they are."""


def without_marks(text: str) -> str:
    """A text with question marks for values."""
    return _MARK.sub("?", text)


def has_marks(value: Any) -> bool:
    """Whether it is a text with a value in it that is not known yet."""
    return isinstance(value, str) and _MARK.search(value) is not None


class _Made(NamedTuple):
    """A text that was made of a value."""

    value: Any
    function: Callable[[Any], str]
    where: SourceLine | None


class _Mark(str):
    """The text of one mark, of which texts are made that are known later, too. In longer texts it
    is a text like any other."""

    __slots__ = ("_number", "_said")
    _number: int
    _said: Said

    def __new__(cls, said: Said, number: int) -> _Mark:
        mark = super().__new__(cls, f"⦃⦅{number}⦆⦄")
        mark._said, mark._number = said, number
        return mark

    def __str__(self) -> str:
        return self

    def __format__(self, form: str) -> str:
        return self._said.again(self._number, lambda text: format(text, form)) if form else self


def _later(name: str) -> Any:
    method = getattr(str, name)

    def later(mark: _Mark, *arguments: Any) -> str:
        return mark._said.again(mark._number, lambda text: method(text, *arguments))

    return later


def _unknown(name: str) -> Any:
    method = getattr(str, name)

    def unknown(mark: _Mark, *arguments: Any) -> Any:
        if is_internal(sys._getframe(1).f_code.co_filename):  # pprint lays out lines
            return method(mark, *arguments)
        raise CaptureError(
            f"The step asks for {name} of the text of a number, which is only known when it runs.",
            hint='give a width (f"{loss:>10.3f}"), or return the number and format it outside.',
            where=user_line(),
        )

    return unknown


_LATER = (
    *("rjust", "ljust", "center", "zfill", "strip", "lstrip", "rstrip", "replace", "upper"),
    *("lower", "title", "capitalize", "removeprefix", "removesuffix", "__getitem__"),
)
_UNKNOWN = (
    *("__len__", "__contains__", "split", "rsplit", "splitlines", "partition", "rpartition"),
    *("find", "rfind", "index", "rindex", "count", "startswith", "endswith", "encode"),
)
for _name in _LATER:
    setattr(_Mark, _name, _later(_name))
for _name in _UNKNOWN:
    setattr(_Mark, _name, _unknown(_name))


class Text(NamedTuple):
    """A text with places for values.

    Args:
        parts: between them.
        made: what makes texts of values.
    """

    parts: tuple[str, ...]
    made: tuple[Callable[[Any], str], ...]

    def of(self, values: Sequence[Any]) -> str:
        """The text for these."""
        found = [self.parts[0]]
        pairs = zip(self.made, values, self.parts[1:], strict=True)
        for function, value, part in pairs:
            found += [function(value), part]
        return "".join(found)


@dataclass
class Said:
    """Texts that are made while a step is captured.

    Args:
        recording: where calls are kept.
    """

    recording: Recording
    _made: list[_Made] = field(default_factory=list)
    _used: set[int] = field(default_factory=set)
    _thread: int = field(default_factory=threading.get_ident)
    _is_saying: bool = False
    """Texts are made of whatever is to be printed."""

    def take(self, text: str) -> tuple[Text, list[Any]]:
        """A text, and the values that are to come into it."""
        pieces = _MARK.split(text)
        numbers = [int(number) for number in pieces[1::2]]
        self._used.update(numbers)
        made = [self._made[number] for number in numbers]
        form = Text(tuple(pieces[::2]), tuple(one.function for one in made))
        return form, [one.value for one in made]

    def taken(self, value: Any) -> tuple[Text, list[Any]]:
        """As :meth:`take`, of the text that printing makes of a value."""
        self._is_saying = True
        try:
            return self.take(str(value))
        finally:
            self._is_saying = False

    def check(self, left: Iterable[Any]) -> None:
        """See that nothing but what is said has such texts.

        Args:
            left: what the step leaves.

        Raises:
            CaptureError: a text is made for something else.
        """
        left_texts = [value for value in left if has_marks(value)]
        others = {int(number) for text in left_texts for number in _MARK.findall(text)}
        if unsaid := set(range(len(self._made))) - self._used - others:
            self.recording.notes.append(
                "the step makes a text of a number that is only known when it runs, and neither "
                f"prints nor logs it ({self._made[min(unsaid)].where}): where it does, it is right"
            )
        if others:
            raise CaptureError(
                "The step formats a number that is only known when it runs (an f-string or "
                "format()).",
                hint="print or log the text, which is done when the step has run, or return the "
                'number and format it outside the step: loss = runner.run(batch); f"{loss:.3f}".',
                where=self._made[min(others)].where,
            )

    # -- While a step is captured ---------------------------------------------------------------

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Make texts with marks, and keep what is printed and logged."""
        names: dict[str, Any] = {"__format__": format, "__str__": str, "__repr__": repr}
        with replaced(
            *(
                (kind, name, self._marking(function, getattr(kind, name)))
                for kind in WITHOUT_VALUES
                for name, function in names.items()
            ),
            (builtins, "print", self._printing(print)),
            *(
                (stream, "write", self._writing(stream, stream.write))
                for stream in dict.fromkeys((sys.stdout, sys.stderr))
                if hasattr(stream, "__dict__")
            ),
            (logging.Logger, "_log", self._logging(logging.Logger._log)),
        ):
            yield

    def _marking(self, function: Callable[..., str], original: Callable[..., str]) -> Any:
        def marking(value: Any, *rest: str) -> str:
            frame = sys._getframe(1)
            if threading.get_ident() != self._thread or not self._is_users(frame):
                return original(value, *rest)
            if isinstance(value, torch.Tensor):  # which the step may change later on
                value = value.detach().clone()
            return self._mark(value, lambda value: function(value, *rest))

        return marking

    def _mark(self, value: Any, function: Callable[[Any], str]) -> _Mark:
        self._made.append(_Made(value, function, user_line()))
        return _Mark(self, len(self._made) - 1)

    def _is_users(self, frame: types.FrameType | None) -> bool:
        """Whether it is the step's own code that runs, or Python's library for it."""
        while frame is not None and is_standard(frame.f_code.co_filename):
            frame = frame.f_back
        if self._is_saying or frame is None:
            return self._is_saying
        return not (is_internal(frame.f_code.co_filename) or is_library_code(frame.f_code))

    def again(self, number: int, change: Callable[[str], str]) -> str:
        """A mark for what is made of the text of another one."""
        made = self._made[number]
        self._used.add(number)
        return self._mark(made.value, lambda value: change(made.function(value)))

    def _printing(self, original: Callable[..., None]) -> Callable[..., None]:
        def say(*items: Any, **named: Any) -> None:
            if threading.get_ident() != self._thread:
                original(*items, **named)
                return
            taken = [self.taken(item) for item in items]
            values = [own for _, own in taken]
            function = functools.partial(_say, [form for form, _ in taken], named)
            self.recording.calls.append(Call(function, False, (values,), is_said=True))

        return say

    def _writing(self, stream: Any, original: Callable[[str], int]) -> Callable[[str], int]:
        def write(text: str) -> int:
            is_users = self._is_users(sys._getframe(1)) or has_marks(text)
            if threading.get_ident() != self._thread or not is_users:
                return original(text)
            form, values = self.take(text)
            function = functools.partial(_write, stream, form)
            self.recording.calls.append(Call(function, False, (values,), is_said=True))
            return len(text)

        return write

    def _logging(self, original: Callable[..., None]) -> Callable[..., None]:
        def log(
            logger: logging.Logger, level: int, message: Any, args: Any, *rest: Any, **named: Any
        ) -> None:
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_globals.get("__name__") == logging.__name__:
                frame = frame.f_back
            if is_library_code(frame.f_code) or threading.get_ident() != self._thread:
                original(logger, level, message, args, *rest, **named)
                return
            place = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
            given = args if isinstance(args, tuple) else ()
            texts = {-1: message, **{at: one for at, one in enumerate(given) if has_marks(one)}}
            taken = {at: self.taken(text) for at, text in texts.items()}
            others = tuple(None if at in texts else _kept(one) for at, one in enumerate(given))
            forms = {at: form for at, (form, _) in taken.items()}
            values = [own for _, own in taken.values()]
            extra = named.get("extra")
            say = functools.partial(_log, logger, level, place, extra, forms)
            self.recording.calls.append(Call(say, False, (values, others), is_said=True))

        return log


def _kept(value: Any) -> Any:
    """A value as it is now: the step may change tensors, lists and dicts later on."""
    return pytree.tree_map_only(torch.Tensor, lambda one: one.detach().clone(), value)


def _say(forms: Sequence[Text], named: Mapping[str, Any], values: Sequence[Sequence[Any]]) -> None:
    print(*(form.of(own) for form, own in zip(forms, values, strict=True)), **named)


def _write(stream: Any, form: Text, values: Sequence[Any]) -> None:
    stream.write(form.of(values))


def _log(
    logger: logging.Logger,
    level: int,
    place: tuple[str, int, str],
    extra: Mapping[str, Any] | None,
    forms: Mapping[int, Text],
    values: Sequence[Sequence[Any]],
    others: Sequence[Any],
) -> None:
    """Log a message.

    Args:
        logger, level, extra: as they were given.
        place: the file, the line and the function that it comes from.
        forms: by argument, the texts with values; the message itself has the number -1.
        values: for each of these.
        others: the arguments that are no such texts, in their places.
    """
    file, line, function = place
    texts = {at: form.of(own) for (at, form), own in zip(forms.items(), values, strict=True)}
    arguments = tuple(texts.get(at, one) for at, one in enumerate(others))
    record = logger.makeRecord(
        logger.name, level, file, line, texts[-1], arguments, None, function, extra
    )
    logger.handle(record)
