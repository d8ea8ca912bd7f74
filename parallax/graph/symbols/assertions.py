"""Branches of which one way raises: checks of what the step computes, such as of a loss that is no
number.

Which way a branch takes that follows from parameters is not known before the step runs. Where one
way raises, the graph is that of the other one, with an operation that sees whether it is taken.
"""

from __future__ import annotations

import contextlib
import dis
import io
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from parallax.errors import (
    CaptureError,
    CheckError,
    DataDependentError,
    ParallaxError,
    SourceLine,
    UnsupportedError,
)
from parallax.graph.common.replaced import replaced
from parallax.graph.common.torch_internals import evaluate
from parallax.graph.common.user_code import is_internal, position, user_line
from parallax.graph.stand_ins.said import WITHOUT_VALUES, without_marks
from parallax.graph.symbols.endings import Ending
from parallax.ops.resources import effect, fixed_sizes

Way = tuple[tuple[str, str, tuple[int | None, ...]], ...]
"""A branch, by the calls that lead to it: files, functions and places in these."""
T = TypeVar("T")

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

    def stop(self, found: Sequence[Found], number: int, place: str = "") -> Exception:
        """What is raised where it failed.

        Args:
            found: what this and others found.
            number: which of them this one is.
            place: on which worker it failed, if there are several.
        """
        if self.ending is not None:
            return LeftOutError(self.ending, found[number].results)
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
        may_go_on: it may go on both ways, since the condition is one on all workers.
    """

    def __init__(self, refusal: DataDependentError, way: Way, may_go_on: bool) -> None:
        super().__init__(refusal.problem, hint=refusal.hint, where=refusal.where)
        self.refusal = refusal
        self.way = way
        self.may_go_on = may_go_on


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
            found.append((file, frame.f_code.co_name, position(frame.f_code, frame.f_lasti)))
        frame = frame.f_back
    return tuple(found)


def decided(capture: Callable[[Assertions], T], on_both: Callable[[Way], None]) -> T:
    """Capture a step whose checks are not known yet.

    Args:
        capture: captures it, given those that are known.
        on_both: told of a branch that goes on both ways, and may.

    Raises:
        DataDependentError: a branch goes on both ways, and must not.
    """
    known: dict[Way, Assertion] = {}
    while True:
        try:
            return capture(known)
        except UndecidedError as error:
            if (found := _settle(capture, known, error)) is not None:
                known[error.way] = found
            else:
                on_both(error.way)


def _settle(
    capture: Callable[[Assertions], Any], known: Assertions, undecided: UndecidedError
) -> Assertion | None:
    """See which way raises, or else ends, by taking each; None if both go on, and may. If both end,
    it is each worker's own loss that decides about nothing but its numbers, and none can be taken
    for all."""
    ends: list[Assertion] = []
    refusal: ParallaxError = undecided.refusal
    for value in (False, True):
        with _silent():
            try:
                capture({**known, undecided.way: Assertion(value, known=False)})
            except EndsError as error:
                where = undecided.where
                ends.append(Assertion(not value, where=where, ending=error.ending))
            except UndecidedError:  # it goes on to another one
                pass
            except UnsupportedError as error:
                refusal = error  # which says more
            except (Exception, SystemExit) as error:
                if (raised := _raised_by_step(error)) is not None:
                    where = user_line(raised.__traceback__) or undecided.where
                    return Assertion(not value, _as_text(raised), where)
    if len(ends) == 1:
        return ends[0]
    if undecided.may_go_on and not ends and refusal is undecided.refusal:
        return None
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
    kind, text = type(raised).__name__, without_marks(str(raised)).strip()
    return f"{kind}: {text.splitlines()[0]}" if text else kind


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """What a check says before it raises is not said by looking at it, nor has it values to say."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
        # Whether a logger is enabled is seen by the step, and what it logs is kept.
        replaced(
            (logging.Logger, "handle", lambda logger, record: None),
            *((kind, name, _without_value) for kind in WITHOUT_VALUES for name in _TEXTS),
        ),
    ):
        warnings.simplefilter("ignore")
        yield


def _without_value(*_: Any, **__: Any) -> str:
    return "?"


class Expected(Protocol):
    """What a check expects, and raises if it is not so: see :meth:`Assertion.stop`."""

    def stop(self, found: Sequence[Found], number: int, place: str = "") -> Exception: ...


class Found(NamedTuple):
    """What a check found when it ran."""

    assertion: Expected
    failed: bool
    results: Sequence[Any] = ()
    """What the step leaves if it did."""


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
def enforce(found: Sequence[Found]) -> None:
    """Go on only if no check failed.

    Raises:
        CheckError: one failed.
        LeftOutError: the step ends where it fails.
        WrongGuessError: a branch goes another way.
    """
    for number, one in enumerate(found):
        if one.failed:
            raise one.assertion.stop(found, number)
