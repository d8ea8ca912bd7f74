"""Update only the rows that a step touched, where that is the same as updating all.

A dense gradient of a looked-up table is zero in every row that no worker looked up. Where zero
gradients leave a row as it is (SGD without momentum, Adagrad), the update is rewritten to work on
the touched rows alone. Each value of the update is of one kind:

* *zero*: zero in untouched rows (the gradient, its multiples);
* *state*: the shard of the variable, a slot or a shadow;
* *read*: computed row by row from state, and used by the update of touched rows only.

A write that adds a *zero* value to *state* is done for touched rows; any other write (the decay of
a moving average) stays on all rows. If something fits neither, the update stays as it was.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.fx import Node

from parallax.graph.analysis.layout import Component, Reduction
from parallax.graph.common.operations import is_write
from parallax.ops.resources import spread_rows
from parallax.rewrite.context import Rewriting

aten: Any = torch.ops.aten

Kind = Literal["zero", "state", "read", "full"]

_KEEPS_ZERO = {
    aten.neg.default,
    aten.neg_.default,
    aten.clone.default,
    aten.abs.default,
    aten.sign.default,
    aten.sqrt.default,
    aten._to_copy.default,
}
_MULTIPLIES = {aten.mul.Tensor, aten.mul_.Tensor, aten.mul.Scalar, aten.mul_.Scalar}
_DIVIDES = {aten.div.Tensor, aten.div_.Tensor, aten.div.Scalar}
_CLAMPS = {aten.clamp.default, aten.clamp_.default}
_ADDS = {aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor}
_ADD_WRITES = {aten.add_.Tensor, aten.sub_.Tensor}
_PRODUCT_WRITES = {aten.addcmul_.default, aten.addcdiv_.default}


def touch_only_rows(work: Rewriting) -> None:
    """Rewrite the updates of variables whose gradients arrived as touched rows."""
    for name, (ids, rows) in work.touched.items():
        component = work.analysis.components[name]
        kinds = classify(work, component, {rows})
        assert kinds is not None
        if work.own_rows(name):
            _Narrowing(work, component, kinds, ids, rows).run()
        else:
            _drop_writes(work, component, kinds)


def _drop_writes(work: Rewriting, component: Component, kinds: dict[Node, Kind]) -> None:
    """Of a table that lives elsewhere nothing is updated."""
    for node in list(work.graph.nodes):
        if kinds.get(node) == "state" and is_write(node):
            target = node.args[0]
            assert isinstance(target, Node)
            node.replace_all_uses_with(target)
            work.graph.erase_node(node)


def can_touch_only_rows(work: Rewriting, name: str, marks: list[Node]) -> bool:
    """Whether the update of ``name`` may work on touched rows; asked before it is rewritten."""
    if work.analysis.variables[name].lazy or len(marks) != 1:
        return False
    return classify(work, work.analysis.components[name], set(marks)) is not None


def classify(
    work: Rewriting, component: Component, gradients: set[Node]
) -> dict[Node, Kind] | None:
    """The kind of every member, or None if the update has to work on all rows."""
    kinds: dict[Node, Kind] = dict.fromkeys(gradients, "zero")
    for reduction in component.reductions:
        if not _survives(reduction, kinds, gradients):
            return None
    for node in work.graph.nodes:
        if node not in component.members or node in kinds:
            continue
        if node.op == "placeholder":
            kinds[node] = "state"
            continue
        kind = _kind(node, kinds)
        if kind is None:
            return None
        kinds[node] = kind
    for reduction in component.reductions:
        source = reduction.node.args[0]
        if isinstance(source, Node) and kinds.get(source) == "read":
            return None
        if kinds.get(source) == "zero" and not ignores_zeros(reduction):  # type: ignore[arg-type]
            return None
    created = [n for n in component.members if any(u.op == "output" for u in n.users)]
    if any(kinds[node] != "state" for node in created):
        return None
    return kinds if _rows_are_private(component, kinds) else None


def _survives(reduction: Reduction, kinds: dict[Node, Kind], gradients: set[Node]) -> bool:
    return reduction.node.args[0] not in gradients or ignores_zeros(reduction)


def ignores_zeros(reduction: Reduction) -> bool:
    """Whether rows of zeros leave a reduction as it is."""
    if reduction.kind == "norm":
        return reduction.order > 0
    return reduction.kind in ("sum", "mean")


def _kind(node: Node, kinds: dict[Node, Kind]) -> Kind | None:
    inputs = [kinds[source] for source in node.all_input_nodes if source in kinds]
    first = kinds.get(node.args[0]) if isinstance(node.args[0], Node) else None
    if is_write(node) and first == "state":
        return "state" if _write_fits(node, kinds, inputs) else None
    if "zero" not in inputs:
        if "state" in inputs or "read" in inputs:
            return "read" if not is_write(node) or first == "read" else None
        return None
    zeros = {source: None for source in node.all_input_nodes if kinds.get(source) == "zero"}
    return "zero" if keeps_zero(node, zeros) else None


def keeps_zero(node: Node, zeros: Mapping[Node, None]) -> bool:
    """Whether a node is zero wherever its inputs among ``zeros`` are."""
    target = node.target
    inputs = [source in zeros for source in node.all_input_nodes]
    first = node.args[0] in zeros if node.args and isinstance(node.args[0], Node) else False
    if not any(inputs):
        return False
    if target in _KEEPS_ZERO or (target in _CLAMPS and _spans_zero(node)):
        return True
    if target in _MULTIPLIES or (target in _DIVIDES and first and sum(inputs) == 1):
        return True
    if target in _ADDS:
        return len(inputs) == 2 and all(inputs)
    return (
        target is aten.pow.Tensor_Scalar
        and isinstance(node.args[1], int | float)
        and node.args[1] > 0
    )


def _write_fits(node: Node, kinds: dict[Node, Kind], inputs: list[Kind]) -> bool:
    if "zero" not in inputs:
        return "read" not in inputs
    if node.target in _ADD_WRITES:
        return kinds.get(node.args[1]) == "zero"  # type: ignore[arg-type]
    if node.target is aten.addcmul_.default:
        return "zero" in (kinds.get(node.args[1]), kinds.get(node.args[2]))  # type: ignore[arg-type]
    return (
        node.target is aten.addcdiv_.default
        and kinds.get(node.args[1]) == "zero"  # type: ignore[arg-type]
        and kinds.get(node.args[2]) != "zero"  # type: ignore[arg-type]
    )


def _spans_zero(node: Node) -> bool:
    low = node.args[1] if len(node.args) > 1 else None
    high = node.args[2] if len(node.args) > 2 else None
    low = -math.inf if low is None else low
    high = math.inf if high is None else high
    return isinstance(low, int | float) and isinstance(high, int | float) and low <= 0 <= high


def _rows_are_private(component: Component, kinds: dict[Node, Kind]) -> bool:
    """Whether what is narrowed to touched rows serves their update, and reductions, only."""
    reduced = {reduction.node for reduction in component.reductions}
    for node, kind in kinds.items():
        if kind == "zero" and any(user not in kinds and user not in reduced for user in node.users):
            return False
        if kind == "read" and any(
            user not in kinds or (kinds[user] == "state" and not _is_narrow(user, kinds))
            for user in node.users
        ):
            return False
    return True


def _is_narrow(node: Node, kinds: dict[Node, Kind]) -> bool:
    """Whether a write adds a zero value to state."""
    return any(kinds.get(source) == "zero" for source in node.all_input_nodes)


class _Narrowing:
    """Rewrites one component to touched rows."""

    def __init__(
        self,
        work: Rewriting,
        component: Component,
        kinds: dict[Node, Kind],
        ids: Node,
        rows: Node,
    ) -> None:
        self.work = work
        self.component = component
        self.kinds = kinds
        self.ids = ids
        self.gradient = rows
        self.base: dict[Node, Node] = {}
        self.gathered: dict[Node, Node] = {}

    def run(self) -> None:
        """Rewrite all members in their order."""
        for node in list(self.work.graph.nodes):
            kind = self.kinds.get(node)
            if kind is None or node.op == "placeholder" or node is self.gradient:
                continue
            if kind == "zero":
                self._spread(node)
                self._use_rows(node)
            elif kind == "read":
                self._use_rows(node)
            elif kind == "state" and is_write(node):
                self._write(node)

    def _state(self, node: Node) -> Node:
        """The shard that a state value is."""
        return self.base.get(node, node)

    def _use_rows(self, node: Node) -> None:
        """Let a value be computed from gathered rows of state."""
        for source in node.all_input_nodes:
            if self.kinds.get(source) == "state":
                node.replace_input_with(source, self._rows_of(self._state(source), node))

    def _rows_of(self, shard: Node, before: Node) -> Node:
        if shard not in self.gathered:
            with self.work.graph.inserting_before(before):
                self.gathered[shard] = self.work.call(aten.index_select.default, shard, 0, self.ids)
        return self.gathered[shard]

    def _write(self, node: Node) -> None:
        target = node.args[0]
        assert isinstance(target, Node)
        shard = self._state(target)
        self.base[node] = shard
        if not _is_narrow(node, self.kinds):
            self.gathered.pop(shard, None)
            for source in node.all_input_nodes:
                if self.kinds.get(source) == "state":
                    node.replace_input_with(source, self._state(source))
            return
        rows = self._rows_of(shard, node)
        self._use_rows(node)
        node.replace_input_with(target, rows)
        with self.work.graph.inserting_after(node):
            stored = self.work.call(aten.index_copy_.default, shard, 0, self.ids, node)
        self.gathered[shard] = node
        for user in list(node.users):
            # The name of the write means the shard for everyone but the touched rows.
            if user is not stored and self.kinds.get(user) not in ("zero", "read", "state"):
                user.replace_input_with(node, shard)

    def _spread(self, node: Node) -> None:
        name = next(iter(self.component.variables))
        count = self.work.own_rows(name)
        zeros = {n for n, kind in self.kinds.items() if kind == "zero"}
        ids = spread_where_needed(self.work, node, zeros, self.ids, count)
        if ids is not self.ids:
            self.ids = ids
            self.gathered.clear()


def spread_where_needed(
    work: Rewriting, node: Node, zeros: set[Node], ids: Node, count: int
) -> Node:
    """Before touched rows are multiplied by a tensor, make them all rows if it is not finite.

    Zero times infinity is NaN: a dense gradient would become NaN in every row. Returns the node of
    the row numbers from there on.
    """
    factors = [
        source
        for source in node.all_input_nodes
        if source not in zeros and isinstance(source.meta.get("val"), torch.Tensor)
    ]
    sources = [source for source in node.all_input_nodes if source in zeros]
    if not factors or len(sources) != 1:
        return ids
    with work.graph.inserting_before(node):
        spread = work.call(spread_rows, ids, sources[0], factors, count)
        spread_ids = work.graph.call_function(operator.getitem, (spread, 0))
        wide = work.graph.call_function(operator.getitem, (spread, 1))
    node.replace_input_with(sources[0], wide)
    return spread_ids
