"""Numbers that are symbols while the step is captured: learning rates, step counters, floats that
are passed with the batch, and whole numbers in it that differ from call to call.

Python code may branch on them (``if rho_t > 5``, ``if weight > 0``), and on what follows from the
batch alone (``if mask.all()``). The branch is decided with the value at capture and kept as a
guard; when a later step decides otherwise, the step is captured again. Sizes of selections by a
mask that follows from the batch are compared in the same way. A branch on what is computed is a
check (see :mod:`parallax.graph.assertions`) or, if it goes on both ways, a guess (see
:mod:`parallax.graph.guesses`); on a worker's own loss or on random numbers it is refused, and so is
a number of the batch that Python wants for itself (``range(length.max())``), which would have a
graph for each value.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from parallax.errors import DataDependentError
from parallax.graph.assertions import (
    Assertions,
    Found,
    UndecidedError,
    Way,
    checking,
    enforce,
    way_to_here,
)
from parallax.graph.conversions import Conversions
from parallax.graph.early_looks import is_common
from parallax.graph.guards import CHANGES, run_program
from parallax.graph.guesses import Branch, Guess, Guesses, looking
from parallax.graph.operations import is_random, is_view, is_write, written_inputs
from parallax.graph.replaced import replaced
from parallax.graph.torch_internals import (
    GuardOnDataDependentSymNode,
    ShapeEnv,
    evaluate,
)
from parallax.graph.user_code import is_internal, user_line, user_place

aten: Any = torch.ops.aten

STEP = "traced_step"
"""The function that calls the step while it is captured."""
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


def masks_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What chooses the elements that a node selects; nothing if it does not select by masks."""
    arguments: Any = node.args
    if node.target is aten.nonzero.default:
        return [arguments[0]]
    if node.target is aten.masked_select.default:
        return [arguments[1]]
    if node.target is not aten.index.Tensor:
        return []
    return [
        one
        for one in arguments[1]
        if isinstance(one, torch.fx.Node) and one.meta["val"].dtype in (torch.bool, torch.uint8)
    ]


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
            # A number for its own sake (int(x), range(x)) would have a graph for each value.
            of_batch = sliced is not None and not self.of_batch.isdisjoint(sliced[1])
            if sliced is None and _is_condition(orig_expr):
                return self._assert(orig_expr, symbols)
            if sliced is None or (of_batch and not _is_condition(orig_expr)):
                raise self._refusal(orig_expr) from error
            program, names = sliced
            results = run_program(program, [self.values[name] for name in names])
            value = evaluate(orig_expr, dict(zip(symbols, results, strict=True)))
            self._decided[orig_expr] = value
            if names:
                self.pending.append(Pending(orig_expr, symbols, program, names, value))
            return value

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
            # A truth value that is read from a tensor is a symbol's being one.
            read = sympy.Eq(symbol, 1) if isinstance(value, torch.SymBool) else symbol
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


def slice_program(
    nodes: tuple[torch.fx.Node, ...],
    values: Mapping[str, Any],
    root: Any,
    counts: bool = True,
    settled: Collection[str] = (),
) -> tuple[torch.fx.GraphModule, tuple[str, ...]] | None:
    """The part of a graph that computes ``nodes``, or None if more enters it than known numbers and
    the batch.

    Args:
        nodes: numbers, or tensors.
        values: what is known, by the inputs' names.
        root: has the graph's constants.
        counts: of tensors, give how many elements are not zero.
        settled: names of tensors of the state that may enter as the batch's may.
    """
    order = {node: index for index, node in enumerate(nodes[0].graph.nodes)}
    last = max(order[node] for node in nodes)
    needed: set[torch.fx.Node] = set()
    queue = list(nodes)
    while queue:
        node = queue.pop()
        if node in needed:
            continue
        needed.add(node)
        if node.op == "placeholder":
            name = _name_of(node)
            value = values.get(name)
            is_given = "given" in node.meta or name in settled
            if value is None or not (is_number(value) or is_given):
                return None
        elif node.op not in ("call_function", "get_attr") or is_random(node):
            return None
        # A counter is counted in place: what was written earlier belongs to the slice.
        queue += [user for user in _writes(node) if order[user] < last]
        queue += node.all_input_nodes
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    names: list[str] = []
    for node in sorted(needed, key=order.__getitem__):
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        if node.op == "placeholder":
            names.append(_name_of(node))
    found = [_number(graph, n, copies[n]) if counts else copies[n] for n in nodes]
    graph.output(tuple(found))
    fixed = {str(n.target): getattr(root, str(n.target)) for n in needed if n.op == "get_attr"}
    program = torch.fx.GraphModule(fixed, graph)
    program.meta[CHANGES] = any(map(is_write, needed))
    return program, tuple(names)


def _writes(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """What changes a tensor, or a view of it, in place."""
    aliases = [node]
    for alias in aliases:
        for user in alias.users:
            if not isinstance(user.target, torch._ops.OpOverload):
                continue
            if alias in written_inputs(user):
                yield user
            if user.args[:1] == (alias,) and is_view(user):
                aliases.append(user)


def _name_of(node: torch.fx.Node) -> str:
    """The input that a placeholder stands for."""
    return str(node.meta.get("leaf") or node.meta.get("given") or "")


def _number(graph: torch.fx.Graph, node: torch.fx.Node, copy: torch.fx.Node) -> torch.fx.Node:
    if not isinstance(node.meta["val"], torch.Tensor):
        return copy
    count = graph.call_function(torch.ops.aten.count_nonzero.default, (copy,))
    return graph.call_function(torch.ops.aten._local_scalar_dense.default, (count,))


def is_number(value: Any) -> bool:
    """Whether it is a number, or a tensor of the state is: of no dimension, or a whole one in a
    list (the pointer of a queue)."""
    if not isinstance(value, torch.Tensor):
        return True
    return value.dim() == 0 or (value.numel() == 1 and not value.is_floating_point())


@contextlib.contextmanager
def symbolic_math() -> Iterator[None]:
    """Let functions of Python's numbers take symbols too, where torch's optimizers call them, and
    ``isinstance`` in users' code.

    Functions of ``math``, of tensors as well, and NumPy's of one number; ``torch.tensor`` and
    ``torch.as_tensor`` (SparseAdam, ASGD; schedules in the step); and ``max`` and ``min`` in
    Adafactor's module, which are names of its own for as long.
    """
    adafactor: Any = torch.optim._adafactor
    functions = {name: _by_tensors(name) for name in _OF_NUMBERS}
    functions["sqrt"] = _of_tensors(_or_symbolic(math.sqrt, torch.sym_sqrt))
    functions["pow"] = _of_tensors(_or_symbolic(math.pow, _power))
    with replaced(
        (builtins, "isinstance", _is_instance),
        *((math, name, function) for name, function in functions.items()),
        *((np, name, _of_one(getattr(np, name), functions[name])) for name in _OF_NUMPY),
        (torch, "as_tensor", _lifting(torch.as_tensor)),
        (torch, "tensor", _lifting(torch.tensor)),
        (adafactor, "max", _or_symbolic(max, torch.sym_max)),
        (adafactor, "min", _or_symbolic(min, torch.sym_min)),
    ):
        yield


def _is_instance(value: Any, kinds: Any) -> bool:
    """``isinstance``, by which users' code takes a symbol for the number that it stands for."""
    found = _isinstance(value, kinds)
    if found or type(value) not in _KINDS or is_internal(sys._getframe(1).f_code.co_filename):
        return found
    return _isinstance(_KINDS[type(value)], kinds)


_isinstance = isinstance
_KINDS: dict[type, Any] = {torch.SymInt: 1, torch.SymFloat: 1.0, torch.SymBool: True}
_OF_NUMPY = ("exp", "log", "sqrt", "isfinite", "isinf", "isnan")
_OF_NUMBERS = (
    *("cos", "cosh", "sin", "sinh", "tan", "tanh", "acos", "asin", "atan"),
    *("exp", "expm1", "log", "log10", "log1p", "log2", "erf"),
    *("isfinite", "isinf", "isnan"),
)


def _by_tensors(name: str) -> Callable[..., Any]:
    """A function of ``math`` that has torch's of the same name compute it for symbols."""
    operation = getattr(torch, name)

    def symbolic(value: Any, base: Any = None) -> Any:
        result = operation(torch.scalar_tensor(value, dtype=torch.float64, device="cpu")).item()
        return result if base is None else result / math.log(base)

    return _of_tensors(_or_symbolic(getattr(math, name), symbolic))


def _power(base: Any, exponent: Any) -> Any:
    return torch.sym_float(base) ** torch.sym_float(exponent)


def _of_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of numbers take tensors of one element for these, as ``math`` does."""

    def called(*values: Any) -> Any:
        return function(*(v.item() if isinstance(v, torch.Tensor) else v for v in values))

    return called


def _of_one(original: Callable[..., Any], symbolic: Callable[..., Any]) -> Callable[..., Any]:
    """A function of NumPy that another one computes for a symbol, or a tensor of no dimension."""

    def called(value: Any, *others: Any, **named: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor) and value.dim() == 0
        if others or named or not (is_tensor or _is_symbol(value)):
            return original(value, *others, **named)
        return symbolic(value)

    return called


def _or_symbolic(plain: Callable[..., Any], symbolic: Callable[..., Any]) -> Callable[..., Any]:
    def function(*values: Any) -> Any:
        return (symbolic if any(map(_is_symbol, values)) else plain)(*values)

    return function


def _lifting(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, list | tuple) and has_symbols(data):
            return torch.stack([make(number, *args, **kwargs) for number in data])
        if not _is_symbol(data):
            return original(data, *args, **kwargs)
        if "dtype" not in kwargs and not args:
            floating = isinstance(data, torch.SymFloat)
            kwargs["dtype"] = torch.get_default_dtype() if floating else torch.int64
        return torch.scalar_tensor(data, *args, **kwargs)

    return make


def has_symbols(value: Any) -> bool:
    """Whether a number is a symbol, or any in lists and tuples."""
    if isinstance(value, list | tuple):
        return any(map(has_symbols, value))
    return _is_symbol(value)


def _is_symbol(value: Any) -> bool:
    return isinstance(value, torch.SymFloat | torch.SymInt)
