"""Compute of all workers' batches what compares their rows with each other, or keeps them.

On every worker: rows are sent where they are compared first, so that nothing has to be sent on the
way back. There, gradients of pairs of rows give gradients of all rows, of which each worker goes on
with those of its own.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.compared_rows import ComparedRows, Refused
from parallax.graph.analysis.how_many import expression as known
from parallax.graph.analysis.loss_terms import SIZES
from parallax.graph.analysis.mixed_rows import compared_first, kept_first
from parallax.graph.analysis.row_places import Places
from parallax.graph.common.torch_internals import expression
from parallax.graph.common.user_code import line_of
from parallax.graph.step_graph import StepGraph
from parallax.ops.whole_batch import OWN_ROWS, WHOLE_ROWS, count_rows

aten: Any = torch.ops.aten

logger = logging.getLogger("parallax")


ROWS_ARE_A_NUMBER = "how many rows a batch has is asked for as a number"


def has_free_rows(step: StepGraph) -> bool:
    """Whether a step that was captured with a symbol for how many rows the batch has holds for any
    number of them."""
    assert step.sizes is not None
    free: list[Any] = [one for one in step.rows if not isinstance(known(one), int)]
    return bool(free) and not step.sizes.is_counted(free[0])


def of_whole_batch(step: StepGraph) -> tuple[StepGraph | None, Refused | None]:
    """The same step, with what compares rows computed of all workers' batches.

    Args:
        step: captured with a symbol for how many rows the batch has, which holds for any number of
            them. It stays as it is.

    Returns:
        None if it compares and keeps no rows, or they cannot be those of all; and why they cannot,
        or some of them.
    """
    made = step.copy()
    found = ComparedRows(made)
    if found.refused is not None or not found.whole:
        return None, found.refused or found.reduced
    try:
        _Rewritten(made, found).run()
    except Exception as error:  # what PyTorch says of sizes may be anything
        logger.debug("what compares rows is each worker's own", exc_info=True)
        first, *_ = [*str(error).splitlines(), type(error).__name__]
        why = f"it does not run for any number of rows ({first})"
        return None, Refused(why, next(iter(found.whole)))
    return made, found.reduced


def noted(step: StepGraph, refused: Refused | None) -> StepGraph:
    """A step in which each worker compares rows of its own batch, with a note that says so.

    Args:
        step: it.
        refused: why; None if it compares none.
    """
    if refused is None:
        return step
    if refused.reduces and refused.node is not None:
        step.notes.append(
            "the loss follows from numbers that rows of the batch are reduced to, which on one "
            "device are of the whole batch, and each worker takes those of its own batch alone, as "
            f"{refused.why} ({line_of(refused.node)})"
        )
        return step
    node = refused.node or compared_first(step) or kept_first(step)
    if node is not None:
        step.notes.append(
            "rows of the batch are compared with each other (in-batch negatives, distances of "
            "pairs, the largest of all) or kept (queues, banks of features), and each worker takes "
            f"those of its own batch alone, as {refused.why} ({line_of(node)})"
        )
    return step


class _Rewritten:
    """Puts copies of what is computed of all rows into a graph, in place of the worker's own."""

    def __init__(self, step: StepGraph, found: ComparedRows) -> None:
        self._step = step
        self._graph = step.graph
        self._found = found
        self._copies: dict[Node, Any] = {}
        self._own: dict[tuple[Node, bool], Node] = {}
        self._batch = next(
            node
            for node in step.given()
            if isinstance(value := node.meta.get("val"), torch.Tensor) and value.dim()
        )
        assert step.sizes is not None
        rows: Any = step.rows[0]
        first = next(node for node in self._graph.nodes if node.op != "placeholder")
        with self._graph.inserting_before(first):
            self._count = self._graph.call_function(count_rows)
        # It stands for as many rows as all first batches have.
        self._count.meta["val"] = step.sizes.another("rows of all batches", rows.node.hint)
        self._symbol = rows.node.expr
        self._mode = self._batch.meta["val"].fake_mode

    def run(self) -> None:
        found = self._found
        for node in self._graph.find_nodes(op="call_function", target=aten.split.Tensor):
            self._split_by_sizes(node)
        for node in list(self._graph.nodes):
            if node in found.gathered:
                self._use(node)
                self._gather(node, found.gathered[node])
            elif node in found.copied or node in found.whole:
                self._copy(node)
            else:
                self._use(node)
        for node in reversed(found.whole):
            self._graph.erase_node(node)
        sizes = self._step.sizes
        assert sizes is not None
        if not sizes.is_free(self._count.meta["val"]):
            raise ValueError("of several batches it runs for one number of rows alone")
        sizes.hold_for_any()
        self._graph.lint()

    def _split_by_sizes(self, node: Node) -> None:
        """Have as many parts of a tensor where a batch has no rows."""
        source, _, *rest = node.args
        dim: Any = rest[0] if rest else 0
        sizes = [part.shape[dim] for part in node.meta["val"]]
        if all(isinstance(size, int) for size in sizes) or node in self._found.whole:
            return
        with self._graph.inserting_before(node):
            parts = [self._size(size) for size in sizes]
        node.target = aten.split_with_sizes.default
        node.args = (source, parts, dim)

    def _size(self, size: int | torch.SymInt) -> int | Node:
        """A size of this worker's batch, at the graph's insertion point."""
        if isinstance(size, int):
            return size
        rows = self._graph.call_function(aten.sym_size.int, (self._batch, 0))
        rows.meta["val"] = self._step.rows[0]
        found = expression(size.node.expr, {self._symbol: rows})
        _evaluate(found)
        return found

    def _gather(self, node: Node, places: Places) -> None:
        with self._graph.inserting_after(self._after_inputs(node)):
            made = self._graph.call_function(WHOLE_ROWS, (node, *places, self._count))
        self._describe(made, node)
        self._copies[node] = made

    def _after_inputs(self, node: Node) -> Node:
        """Where what a node gives may be used first."""
        if node.op != "placeholder":
            return node
        return self._count

    def _copy(self, node: Node) -> None:
        graph = self._graph
        if node.target in SIZES and node.args[0] not in self._copies:
            with graph.inserting_before(node.next):  # there may be several operations
                size = expression(node.meta["val"].node.expr, {self._symbol: self._count})
            _evaluate(size)
            self._copies[node] = size
            return
        with graph.inserting_after(node):
            made = graph.node_copy(node, lambda one: self._copies.get(one, one))
        self._describe(made, node)
        self._copies[node] = made

    def _describe(self, made: Node, node: Node) -> None:
        """Give a copy the example value that it has with all rows."""
        made.meta = {key: value for key, value in node.meta.items() if key != "val"}
        values, others = torch.fx.node.map_arg(
            (made.args, made.kwargs), lambda one: one.meta["val"]
        )
        with self._mode:
            made.meta["val"] = made.target(*values, **others)  # type: ignore[operator]

    def _use(self, node: Node) -> None:
        """Let what is the worker's own use its rows of what is computed of all."""
        for one in node.all_input_nodes:
            if one not in self._found.whole:
                continue
            places = self._found.places(one)
            if not self._found.sizes.dims(one) or (places is None and node.op == "output"):
                node.replace_input_with(one, self._copies[one])
            else:
                assert places is not None
                node.replace_input_with(one, self._rows(node, one, places))

    def _rows(self, node: Node, whole: Node, places: Places) -> Node:
        is_gradient = self._found.is_gradient(node)
        key = whole, is_gradient
        if key not in self._own:
            with self._graph.inserting_before(node):
                arguments = (self._copies[whole], self._batch, *places, is_gradient)
                made = self._graph.call_function(OWN_ROWS, arguments)
            made.meta.update(whole.meta)
            self._own[key] = made
        return self._own[key]


def _evaluate(made: Any) -> Any:
    """Give what a size is computed of its example values."""
    if isinstance(made, Node) and "val" not in made.meta:
        made.meta["val"] = made.target(*map(_evaluate, made.args))  # type: ignore[operator]
    return made.meta["val"] if isinstance(made, Node) else made
