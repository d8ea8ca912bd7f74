"""Numbers that are symbols while the step is captured: learning rates, step counters, floats that
are passed with the batch, and whole numbers in it that differ from call to call.

Python code may branch on them (``if rho_t > 5``, ``if weight > 0``), and on what follows from the
batch alone (``if mask.all()``). The branch is decided with the value at capture and kept as a
guard; when a later step decides otherwise, the step is captured again. Sizes of selections by a
mask that follows from the batch are compared in the same way. A branch on what is computed is a
check (see :mod:`parallax.graph.symbols.assertions`) or, if it goes on both ways, a guess (see
:mod:`parallax.graph.symbols.guesses`); on a worker's own loss or on random numbers it is refused.
A whole number of the batch that Python wants for itself (``range(length.max())``) is decided like a
branch, and has a graph for each value.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from parallax.errors import DataDependentError
from parallax.graph.common.guards import run_program
from parallax.graph.common.slices import is_common, masks_of, slice_program
from parallax.graph.common.torch_internals import GuardOnDataDependentSymNode, ShapeEnv, evaluate
from parallax.graph.common.user_code import STEP, is_internal, user_line, user_place
from parallax.graph.symbols.assertions import (
    Assertions,
    Found,
    UndecidedError,
    Way,
    checking,
    enforce,
    way_to_here,
)
from parallax.graph.symbols.conversions import Conversions
from parallax.graph.symbols.guesses import Branch, Guess, Guesses, looking

aten: Any = torch.ops.aten

_MOST_CHECKS = 10_000
"""In a step; more are a loop without an end."""


def _emptiness(expression: Any) -> Any:
    """torch's own question whether a selection is empty: answered with no, as the kernels treat
    both alike. The same question in the user's code is a branch on values: None."""
    import sympy

    if not isinstance(expression, sympy.Eq | sympy.Ne) or expression.args[1] != 0:
        return None
    stack = traceback.extract_stack()
    for inner, outer in zip(reversed(stack), reversed(stack[:-1]), strict=False):
        if inner.name == "__bool__" and not is_internal(outer.filename):
            return None
    return sympy.false if isinstance(expression, sympy.Eq) else sympy.true


class Pending(NamedTuple):
    """What a branch has been decided by: ``program`` computes the symbols from what has ``names``.
    It is taken at the branch, since nodes that nothing else uses do not stay in the graph."""

    expression: Any
    symbols: tuple[Any, ...]
    program: torch.fx.GraphModule
    names: tuple[str, ...]
    value: Any


class ScalarEnv(ShapeEnv):
    """A ShapeEnv that decides branches on known numbers by their present values."""

    def __init__(
        self,
        values: Mapping[str, Any],
        assertions: Assertions | None = None,
        conversions: Conversions | None = None,
        guesses: Guesses | None = None,
    ) -> None:
        super().__init__(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
        self.values = values
        """The state at capture and the batch, by the inputs' names."""
        self._assertions = assertions or {}
        self._conversions = conversions or Conversions()
        self._guesses = guesses or Guesses()
        self.decisions: dict[Branch, bool] = {}
        """What branches that go on both ways are taken to be."""
        self.looked: list[Found] = []
        """What they were found to be in the present step."""
        self._asserted = 0
        self._is_trying = False
        """A branch has been taken to see what comes then."""
        self.notes: list[str] = []
        """Of ways on which the step ends."""
        self.before_branch: frozenset[str] = frozenset()
        """The names of the nodes before it; none if none has."""
        self.of_batch: set[str] = set()
        """Of them, the batch's tensors."""
        self.each_workers_own: frozenset[str] = frozenset()
        """Of them, all of the batch."""
        self.settled: set[str] = set()
        """Of them, tensors that are neither parameters nor slots: what is decided by them may be
        decided anew before each step."""
        self._tracer: Any = None
        self._decided: dict[Any, Any] = {}
        self.pending: list[Pending] = []

    def attach(self, tracer: Any) -> None:
        """Where to look for the node that computes a symbol."""
        self._tracer = tracer

    def release(self) -> None:
        """Let go of the capture: torch's caches keep a ShapeEnv itself for a long time."""
        self._tracer = None
        self.values = {}
        self.pending = []

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().evaluate_expr(orig_expr, *args, **kwargs)
        except GuardOnDataDependentSymNode as error:
            if orig_expr in self._decided:
                return self._decided[orig_expr]
            symbols = tuple(sorted(orig_expr.free_symbols, key=str))
            emptiness = _emptiness(orig_expr)
            if emptiness is not None and all(self.is_size(s) for s in symbols):
                return emptiness
            found = [self._selection_of(symbol) or self._node_of(symbol) for symbol in symbols]
            nodes = tuple(node for node in found if node is not None)
            if self._is_trying and not _is_condition(orig_expr):
                return 1 if orig_expr.is_integer else math.nan  # for a message
            if not _is_condition(orig_expr) or _is_truth(orig_expr):
                self._conversions.look(self._refusal(orig_expr))
            if self._tracer is None or len(nodes) < len(symbols):
                raise self._refusal(orig_expr) from error
            sliced = slice_program(nodes, self.values, self._tracer.root, settled=self.settled)
            of_batch = sliced is not None and not self.of_batch.isdisjoint(sliced[1])
            if sliced is None and _is_condition(orig_expr):
                return self._assert(orig_expr, symbols)
            # A number for its own sake (range(depth)) has a graph for each value.
            repeats = _is_condition(orig_expr) or orig_expr.is_integer
            if sliced is None or (of_batch and not repeats):
                raise self._refusal(orig_expr) from error
            program, names = sliced
            results = run_program(program, [self.values[name] for name in names])
            value = evaluate(orig_expr, dict(zip(symbols, results, strict=True)))
            self._decided[orig_expr] = value
            if names:
                self.pending.append(Pending(orig_expr, symbols, program, names, value))
            return value

    def value_of(self, expression: Any) -> Any:
        """What a number of symbols is for the batch that is captured; None if that is not known
        before the step runs. The graph holds for others, too."""
        if self._tracer is None:
            return None
        symbols = tuple(expression.free_symbols)
        found = [self._selection_of(one) or self._node_of(one) for one in symbols]
        nodes = tuple(node for node in found if node is not None)
        if len(nodes) < len(found):
            return None
        sliced = slice_program(nodes, self.values, self._tracer.root, settled=self.settled)
        if sliced is None:
            return None
        program, names = sliced
        results = run_program(program, [self.values[name] for name in names])
        return evaluate(expression, dict(zip(symbols, results, strict=True)))

    def is_size(self, symbol: Any) -> bool:
        """Whether a symbol is the size of a selection (by a mask), as against a value."""
        return symbol in self.size_like

    def _assert(self, condition: Any, symbols: Sequence[Any]) -> Any:
        """Decide what follows from parameters as the way that does not raise, or that was taken
        last, and look at it when the graph runs."""
        import sympy

        found = [self._node_of(symbol) for symbol in symbols]
        nodes = [node for node in found if node is not None]
        if len(nodes) < len(found):
            raise self._refusal(condition)
        way = way_to_here(STEP)
        if way in self._guesses.ways:
            return self._guess(condition, symbols, nodes, way)
        assertion = self._assertions.get(way)
        self._asserted += 1
        # What is tried is tried once: a loop may come here again, without an end.
        if assertion is None or (self._is_trying and not assertion.known):
            may_go_on = is_common(nodes, self.each_workers_own)
            raise UndecidedError(self._refusal(condition), way, may_go_on)
        if self._asserted > _MOST_CHECKS:
            raise self._refusal(condition)
        graph = self._tracer.graph
        if assertion.known:
            check = checking(condition, symbols, assertion)
            results: tuple[Any, ...] = ()
            if assertion.ending is not None:
                results = tuple(assertion.ending.results(graph))
                self.notes += assertion.ending.notes
            given = {"results": results} if results else {}
            failed = graph.call_function(check, tuple(nodes), given)
            for node in (failed, graph.call_function(enforce, ([failed],))):
                node.meta.update(val=None, user_place=user_place())
        else:
            self._is_trying = True
            self.before_branch = frozenset(node.name for node in graph.nodes)
        self._decided[condition] = sympy.true if assertion.expected else sympy.false
        return self._decided[condition]

    def _guess(
        self, condition: Any, symbols: Sequence[Any], nodes: Sequence[torch.fx.Node], way: Way
    ) -> Any:
        """Decide what goes on both ways as it was decided last, and look when the graph runs."""
        import sympy

        if not is_common(nodes, self.each_workers_own) or len(self.decisions) >= _MOST_CHECKS:
            raise self._refusal(condition)
        branch = Branch(way, sum(one.way == way for one in self.decisions))
        # Of a number, that it is another one is what is seen mostly.
        value = self._guesses.decisions.get(branch, not isinstance(condition, sympy.Eq))
        look = looking(condition, symbols, Guess(branch, value), self.looked)
        node = self._tracer.graph.call_function(look, tuple(nodes))
        node.meta.update(val=None, user_place=user_place())
        self.decisions[branch] = value
        self._decided[condition] = sympy.true if value else sympy.false
        return self._decided[condition]

    def _refusal(self, expression: Any) -> DataDependentError:
        return DataDependentError(
            "Python control flow or conversion in the step depends on the values of tensors "
            f"(condition: {expression}), so the step is not one graph.",
            hint="choose with torch.where or multiply by a mask instead of `if`; return numbers "
            "that texts, NumPy, range() and places in lists need; move decisions outside the step.",
            where=user_line(),
        )

    def _selection_of(self, symbol: Any) -> torch.fx.Node | None:
        """What chooses the elements that a size is the number of, or the size as it is read."""
        if self._tracer is None or not self.is_size(symbol):
            return None
        for node in self._tracer.graph.nodes:
            value = node.meta.get("val")
            shape: Any = value.shape if isinstance(value, torch.Tensor) else ()
            places = [
                place
                for place, size in enumerate(shape)
                if isinstance(size, torch.SymInt) and size.node.expr == symbol
            ]
            if not places:
                continue
            if masks := masks_of(node):
                return masks[0] if len(masks) == 1 else None
            read: torch.fx.Node = self._tracer.graph.call_function(
                aten.sym_size.int, (node, places[0])
            )
            read.meta["val"] = shape[places[0]]
            return read
        return None

    def _node_of(self, symbol: Any) -> torch.fx.Node | None:
        import sympy

        if self._tracer is None:
            return None
        for node in reversed(self._tracer.graph.nodes):
            value = node.meta.get("val")
            if not isinstance(value, torch.SymFloat | torch.SymInt | torch.SymBool):
                continue
            # A truth value that is read from a tensor is a symbol's being one; one that is
            # compared with one (`number == 1`) looks the same.
            is_truth = node.target is aten._local_scalar_dense.default
            is_truth = is_truth and isinstance(value, torch.SymBool)
            read = sympy.Eq(symbol, 1) if is_truth else symbol
            if getattr(value.node, "expr", None) == read:
                return node  # type: ignore[no-any-return]
        return None


def _is_condition(expression: Any) -> bool:
    import sympy

    kinds = (sympy.core.relational.Relational, sympy.logic.boolalg.BooleanFunction)
    return isinstance(expression, kinds)


def _is_truth(condition: Any) -> bool:
    """Whether it is a truth value's own, as ``if mask.any()`` and ``float(mask.any())`` ask."""
    import sympy

    is_equation = isinstance(condition, sympy.Eq)
    return is_equation and condition.args[0].is_symbol and condition.args[1] == 1
