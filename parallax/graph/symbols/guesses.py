"""What branches that go on both ways are taken to be before a step runs, and were when it ran.

A branch on what the step computes may leave out a factor of an update where a norm is zero, or
scale gradients only where they are large. Neither way raises, and neither ends the step. A graph
has one way of each such branch, the one that it took last; an operation sees whether it is taken
again, before the graph changes anything. If not, the step is run from its start by the graph of
the way that is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from parallax.graph.common.torch_internals import evaluate
from parallax.graph.symbols.assertions import Found, Way
from parallax.ops.resources import effect, fixed_sizes


class Branch(NamedTuple):
    """A branch when it is come to once more.

    Args:
        way: where it is.
        number: how often the step came there before.
    """

    way: Way
    number: int

    @property
    def place(self) -> str:
        """The function and the file."""
        file, function, _ = self.way[0]
        return f"{function}() in {file}"


Decisions = Mapping[Branch, bool]
"""By branch, what its condition is."""


@dataclass
class Guesses:
    """What is known of branches from the captures and the steps before.

    Args:
        ways: those that go on both ways.
        decisions: what the conditions were last.
    """

    ways: set[Way] = field(default_factory=set)
    decisions: dict[Branch, bool] = field(default_factory=dict)

    def agree(self, decisions: Decisions) -> bool:
        """Whether branches are taken to go as in a graph."""
        known = self.decisions
        return all(known.get(branch, value) is value for branch, value in decisions.items())


class WrongGuessError(Exception):
    """A branch goes another way than in the graph that ran. Not for users to see.

    Args:
        decisions: what the graph's branches are. After the first wrong one it may be otherwise.
        restored: tensors that the graph had changed, each with what it was before.
    """

    def __init__(
        self, decisions: Decisions, restored: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        super().__init__("a branch goes another way")
        self.decisions = decisions
        self.restored = restored


@dataclass(frozen=True)
class Guess:
    """What a branch is taken to be.

    Args:
        branch: which one.
        expected: what its condition is then.
    """

    branch: Branch
    expected: bool

    def stop(self, found: Sequence[Found], number: int, place: str = "") -> Exception:
        """What is raised if it is another way; see :meth:`Assertion.stop`."""
        decisions = {
            one.assertion.branch: one.assertion.expected is not one.failed
            for one in found
            if isinstance(one.assertion, Guess)
        }
        # Where floats are rounded otherwise, the first worker that finds it so decides for all.
        decisions[self.branch] = not self.expected
        before = found[number].results
        return WrongGuessError(decisions, list(zip(before[::2], before[1::2], strict=True)))


def looking(
    condition: Any, symbols: Sequence[Any], guess: Guess, looked: list[Found]
) -> Callable[..., Found]:
    """An operation that sees whether a branch goes as it is taken to.

    Args:
        condition: of symbols.
        symbols: the operation takes their values, and what to restore if it does not: tensors, each
            followed by a copy of what it was before.
        guess: what it is taken to be.
        looked: gets what is found.
    """

    is_so = _compiled(condition, list(symbols))

    @effect
    @fixed_sizes
    def look(*values: float | int | bool, before: Sequence[torch.Tensor] = ()) -> Found:
        looked.append(Found(guess, bool(is_so(values)) is not guess.expected, before))
        return looked[-1]

    look.parallax_looks = True  # type: ignore[attr-defined]
    return look


def _compiled(condition: Any, symbols: list[Any]) -> Callable[[Sequence[float]], Any]:
    """What computes a condition from the values of symbols. A step may look at hundreds, most of
    which compare one with a number."""
    import sympy

    comparisons = {
        sympy.Eq: operator.eq,
        sympy.Ne: operator.ne,
        sympy.Gt: operator.gt,
        sympy.Ge: operator.ge,
        sympy.Lt: operator.lt,
        sympy.Le: operator.le,
    }
    compares = comparisons.get(type(condition))
    if compares is not None and condition.lhs in symbols and condition.rhs.is_number:
        place, number = symbols.index(condition.lhs), float(condition.rhs)
        return lambda values: compares(values[place], number)
    return lambda values: evaluate(condition, dict(zip(symbols, values, strict=True)))


def wrong_guess(looked: Sequence[Found]) -> Exception | None:
    """What is raised if a look found a branch to go another way, and what came then failed."""
    wrong = (number for number, one in enumerate(looked) if one.failed)
    number = next(wrong, None)
    return None if number is None else looked[number].assertion.stop(looked, number)


def is_look(node: Node) -> bool:
    """Whether a node is such an operation."""
    return getattr(node.target, "parallax_looks", False)
