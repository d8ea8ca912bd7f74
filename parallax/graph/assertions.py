"""Branches of which one way raises: checks of what the step computes, such as of a loss that is no
number.

Which way a branch takes that follows from parameters is not known before the step runs. Where one
way raises, the graph is that of the other one, with an operation that sees whether it is taken.
"""

from __future__ import annotations

import contextlib
import dis
import io
import itertools
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from parallax.errors import (
    CaptureError,
    CheckError,
    DataDependentError,
    ParallaxError,
    SourceLine,
    UnsupportedError,
)
from parallax.graph.endings import Ending
from parallax.graph.replaced import replaced
from parallax.graph.torch_internals import FakeTensor, evaluate
from parallax.graph.user_code import is_internal, user_line
from parallax.ops.resources import effect, fixed_sizes

Way = tuple[tuple[str, str, tuple[int | None, ...]], ...]
"""A branch, by the calls that lead to it: files, functions and places in these."""
T = TypeVar("T")

_WITHOUT_VALUES = (torch.SymFloat, torch.SymInt, torch.SymBool, FakeTensor)
_TEXTS = ("__format__", "__repr__", "__str__")
_BRANCHING = ("torch/nn/", "torch/distributions/", "torch/optim/")
"""PyTorch's own code that looks at values."""
_TRACING = ("torch/_subclasses/", "torch/fx/", "torch/_dynamo/", "parallax/graph/")
"""Where what is raised is about capturing."""


@dataclass(frozen=True)
class Assertion:
    """A branch of which one way raises.

    Args:
        expected: what the condition is on the other way.
        failure: what is raised, as text.
        where: the user's line that raises it.
        known: this is so; else what is taken to be so, to see what comes then.
        ending: how the step ends where it failed; None if it raises then.
    """

    expected: bool
    failure: str = ""
    where: SourceLine | None = None
    known: bool = True
    ending: Ending | None = None

    def stop(self, results: Sequence[Any], place: str = "") -> Exception:
        """What is raised where it failed.

        Args:
            results: what the step leaves then.
            place: on which worker, if there are several.
        """
        if self.ending is not None:
            return LeftOutError(self.ending, results)
        return CheckError(
            f"A check in the step failed{place}: {self.failure}.",
            hint="on one device the step raises here, too; nothing that comes after it was done.",
            where=self.where,
        )


class LeftOutError(Exception):
    """The rest of a step is left out: it ends with these results. Not for users to see."""

    def __init__(self, ending: Ending, results: Sequence[Any]) -> None:
        super().__init__("the rest of the step is left out")
        self.ending = ending
        self.results = results


class EndsError(Exception):
    """A way that is tried ends without a change. Not for users to see."""

    def __init__(self, ending: Ending) -> None:
        super().__init__("the step ends")
        self.ending = ending


Assertions = Mapping[Way, Assertion]


class UndecidedError(DataDependentError):
    """A branch that nothing is known of.

    Args:
        refusal: what is raised if neither way raises.
        way: which branch.
    """

    def __init__(self, refusal: DataDependentError, way: Way) -> None:
        super().__init__(refusal.problem, hint=refusal.hint, where=refusal.where)
        self.refusal = refusal
        self.way = way


def way_to_here(last: str) -> Way:
    """The calls that led to the running one, without those of tracing, which has caches.

    Args:
        last: the function that the way begins at.
    """
    found = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != last:
        file = frame.f_code.co_filename
        if not is_internal(file) or any(part in file for part in _BRANCHING):
            found.append((file, frame.f_code.co_name, _place(frame)))
        frame = frame.f_back
    return tuple(found)


def _place(frame: types.FrameType) -> tuple[int | None, ...]:
    """Where a frame is in its source: lines and columns, if Python knows them. Of several
    instructions that belong together it may be at another one each time."""
    code: Any = frame.f_code
    if not hasattr(code, "co_positions"):  # before Python 3.11
        return (frame.f_lasti,)
    return next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None), (frame.f_lineno,))


def decided(capture: Callable[[Assertions], T]) -> T:
    """Capture a step whose checks are not known yet.

    Args:
        capture: captures it, given those that are known.

    Raises:
        DataDependentError: a branch goes on both ways.
    """
    known: dict[Way, Assertion] = {}
    while True:
        try:
            return capture(known)
        except UndecidedError as error:
            known[error.way] = _settle(capture, known, error)


def _settle(
    capture: Callable[[Assertions], Any], known: Assertions, undecided: UndecidedError
) -> Assertion:
    """See which way raises, or else ends, by taking each. If both end, it is each worker's own loss
    that decides about nothing but its numbers, and none can be taken for all."""
    ends: list[Assertion] = []
    refusal: ParallaxError = undecided.refusal
    for value in (False, True):
        with _silent():
            try:
                capture({**known, undecided.way: Assertion(value, known=False)})
            except EndsError as error:
                where = undecided.where
                ends.append(Assertion(not value, where=where, ending=error.ending))
            except UnsupportedError as error:
                refusal = error  # which says more
            except (Exception, SystemExit) as error:
                if (raised := _raised_by_step(error)) is not None:
                    where = user_line(raised.__traceback__) or undecided.where
                    return Assertion(not value, _as_text(raised), where)
    if len(ends) == 1:
        return ends[0]
    raise refusal


def _raised_by_step(error: BaseException) -> BaseException | None:
    """What the step itself raised in Python; None if an operation failed, or capturing."""
    raised = error.__cause__ if type(error) is CaptureError else error
    if raised is None or isinstance(raised, ParallaxError) or raised.__traceback__ is None:
        return None
    trace = raised.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    if any(part in code.co_filename for part in _TRACING):
        return None
    operation = dis.opname[code.co_code[trace.tb_lasti]]
    if operation != "RAISE_VARARGS" and not isinstance(raised, SystemExit):
        return None
    return raised


def _as_text(raised: BaseException) -> str:
    kind, text = type(raised).__name__, str(raised).strip()
    return f"{kind}: {text.splitlines()[0]}" if text else kind


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """What a check says before it raises is not said by looking at it, nor has it values to say."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            warnings.catch_warnings(),
            replaced(
                *((kind, name, _without_value) for kind in _WITHOUT_VALUES for name in _TEXTS),
            ),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _without_value(*_: Any, **__: Any) -> str:
    return "?"


class Found(NamedTuple):
    """What a check found when it ran."""

    assertion: Assertion
    failed: bool
    results: Sequence[Any] = ()
    """What the step leaves if it did."""

    def stop(self, place: str = "") -> Exception:
        """See :meth:`Assertion.stop`."""
        return self.assertion.stop(self.results, place)


def checking(condition: Any, symbols: Sequence[Any], assertion: Assertion) -> Callable[..., Found]:
    """An operation that sees whether a condition is as expected.

    Args:
        condition: of symbols.
        symbols: the operation takes their values, and what the step leaves if it ends there.
        assertion: what is expected.
    """

    def check(*values: float | int | bool, results: Sequence[Any] = ()) -> Found:
        found = evaluate(condition, dict(zip(symbols, values, strict=True)))
        return Found(assertion, bool(found) is not assertion.expected, results)

    return fixed_sizes(check)


@effect
@fixed_sizes
def enforce(found: Found) -> None:
    """Go on only if a check did not fail.

    Raises:
        CheckError: it failed.
        LeftOutError: the step ends where it fails.
    """
    if found.failed:
        raise found.stop()
