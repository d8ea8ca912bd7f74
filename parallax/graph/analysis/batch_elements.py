"""What of a captured step follows from the batch, element by element."""

from __future__ import annotations

import collections
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.cut_off import cut_off
from parallax.graph.analysis.how_many import expression, product
from parallax.graph.analysis.loss_terms import REDUCTIONS, SHAPES, SIZES, from_batch
from parallax.graph.analysis.reductions import BY_LABEL
from parallax.graph.common.operations import is_random, is_view, with_gradient
from parallax.graph.common.sizes import same_shape
from parallax.graph.step_graph import StepGraph

aten: Any = torch.ops.aten

_CHOSEN = {
    aten._to_copy.default,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten._unsafe_view.default,
    aten.index.Tensor,
    aten.gather.default,
    aten.masked_select.default,
    aten.constant_pad_nd.default,
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.cat.default,
    aten.stack.default,
    aten.index_select.default,
    aten.repeat_interleave.Tensor,
}
"""Operations, beside views, that have some of their inputs' elements."""
_ALIKE = {*_CHOSEN, aten.sum.dim_IntList, aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar}
"""Operations, beside pointwise ones and views, whose elements follow from those of their inputs."""
_OF_ALL_ROWS = {aten.unique_dim.default, aten.index_add.default, aten.index_reduce.default}
"""Operations along a dimension that compare rows, or add to them by their places."""
_BY_ROWS = {aten.bmm.default, aten.baddbmm.default}
"""Operations on matrices of which each is of one row, or there are several for each."""
_ALIGNED = {aten._ctc_loss.default, aten._ctc_loss.Tensor, aten._cudnn_ctc_loss.Tensor}
_OF_TWO = {aten.mm.default, aten.addmm.default, aten._cdist_forward.default}
"""Operations that may compare each row with each other."""
_SOFTMAX = {aten._log_softmax.default, aten._softmax.default}
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}


class BatchElements:
    """Where the elements of tensors come from.

    Args:
        step: as it was captured.
        parameters: the placeholders of all parameters, and of what the step changes.
        by_item: tell apart what belongs to one item of the batch.
    """

    def __init__(self, step: StepGraph, parameters: Collection[Node], by_item: bool = True) -> None:
        self.batch = from_batch(step)
        """What follows from the batch, and maybe from parameters as well."""
        given = {node: node.meta.get("val") for node in step.given()}
        self._given = {
            node: value
            for node, value in given.items()
            if isinstance(value, torch.Tensor) and value.dim()
        }
        self._by_item = by_item
        self._items = _items(step, self._given)
        """Of what follows from one item alone, its place in a list; -1 where it is of several."""
        self._of_row: dict[Node, Any] = {}
        """What follows from one row alone, in whatever way, and that row's place."""
        self._drawn: set[Node] = set()
        self._other = set(parameters)
        self._data: set[Node] = set()
        """What follows from the batch and has no gradient, nor is one."""
        inputs = zip(step.own_placeholders(), step.inputs, strict=True)
        self._plain = {n for n, item in inputs if item.kind == "state" and not item.differentiated}
        """What follows from state that requires no gradients, and from nothing of the batch."""
        self._cut_off = cut_off(step.graph)
        self._gradients: set[Node] = set()
        """What a backward pass computes."""
        self._updated: set[Node] = set()
        """What follows from gradients alone, such as parameters after an update."""
        self._merged = {count for node in step.graph.nodes for count in self._merges(node)}
        """How many rows tensors have that give each row of the batch several: views with one for
        each place, and views of the batch that are put together."""
        for node in step.graph.nodes:
            if node.target in SIZES:
                if node in self.batch:
                    self._data.add(node)
                continue
            if self._items and node not in given:
                places = {
                    self._items.get(one, -1) for one in node.all_input_nodes if one in self.batch
                }
                if places:
                    self._items[node] = places.pop() if len(places) == 1 else -1
            if (place := self._row_of(node)) is not None:
                self._of_row[node] = place
            if is_random(node) or any(one in self._drawn for one in node.all_input_nodes):
                self._drawn.add(node)
            if node in self._drawn or any(one in self._other for one in node.all_input_nodes):
                self._other.add(node)
            if self._is_plain(node):
                self._plain.add(node)
            if self._is_gradient(node):
                self._gradients.add(node)
            elif node.op == "call_function" and self._is_updated(node):
                self._updated.add(node)
            if node in self.batch and self._has_no_gradient(node):
                self._data.add(node)

    def _row_of(self, node: Node) -> Any:
        """The place of the only row that a node follows from; None if it follows from others."""
        if node in self.batch and self.takes_row(node):
            return node.args[-1]
        given = [one for one in node.all_input_nodes if one in self.batch and not _is_size(one)]
        places = {self._of_row.get(one) for one in given}
        return places.pop() if len(places) == 1 else None

    def _is_gradient(self, node: Node) -> bool:
        mode = node.meta.get("autograd")
        if mode is None and node.op != "placeholder":  # as made of others by a pass over the graph
            return any(one in self._gradients for one in node.all_input_nodes)
        return mode == "backward"

    def _is_updated(self, node: Node) -> bool:
        given = [one for one in node.all_input_nodes if one in self.batch]
        return bool(given) and all(one in self._gradients or one in self._updated for one in given)

    def _has_no_gradient(self, node: Node) -> bool:
        """Of what follows from the batch: whether it does so from nothing that changes, or by what
        is not differentiated, such as comparisons."""
        if node not in self._other:
            return True
        if node in self._drawn or node in self._gradients or node in self._updated:
            return False
        if node.op == "placeholder":
            return False
        if node.meta.get("autograd") == "off" or node in self._cut_off:
            return True
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not value.dtype.is_floating_point:
            return not value.dtype.is_complex
        return all(
            one in self._data or one in self._plain or one not in self._other
            for one in with_gradient(node)
        )

    def _is_plain(self, node: Node) -> bool:
        if node in self.batch or node in self._drawn or node.op != "call_function":
            return False
        changing = [one for one in node.all_input_nodes if one in self._other]
        return bool(changing) and all(one in self._plain for one in changing)

    def is_of_other(self, node: Any) -> bool:
        """Whether a node follows from parameters or random numbers."""
        return node in self._other

    def is_weight(self, node: Node) -> bool:
        """Whether terms of a loss may be multiplied by a number: it does not follow from
        parameters, or from these and nothing of the batch, and is one on all workers then."""
        return node not in self._other or (node not in self.batch and node not in self._drawn)

    def is_of_batch(self, node: Any) -> bool:
        """Whether a node follows from the batch and from nothing that changes."""
        return isinstance(node, Node) and node in self.batch and node not in self._other

    def is_data(self, node: Any) -> bool:
        """Whether a node follows from the batch and has no gradient: it does so from nothing that
        changes, or by what is not differentiated, such as what is predicted with confidence, or a
        value that is detached."""
        return isinstance(node, Node) and node in self._data

    def adds_up(self, node: Node, numbers: Collection[Node] = ()) -> bool:
        """Whether each element of a tensor follows from the same place of the batch, so that sums
        over workers' batches are the sum over all of them in one.

        Args:
            node: the tensor.
            numbers: what it may be computed with, too, as they are of the whole batch.
        """
        return not self.is_of_item(node) and self._are_in_place(node, numbers)

    def _are_in_place(self, node: Node, numbers: Collection[Node] = ()) -> bool:
        return all(
            one.op == "placeholder"
            or one not in self.batch
            or all(map(_is_size, one.all_input_nodes))  # as a range is
            or (one not in self._gradients and self._is_in_place(one))
            for one in self._elements(node, numbers)
        )

    def _elements(self, node: Node, numbers: Collection[Node] = ()) -> Iterator[Node]:
        """What the elements of a tensor follow from; see :func:`elements`."""
        return elements(node, numbers, self._of_row)

    def _is_in_place(self, node: Node) -> bool:
        is_own = _is_alike(node) or node.target in REDUCTIONS or node in self._of_row
        return is_own or self.is_of_model(node)

    def is_by_row(self, node: Node) -> bool:
        """Whether each row of what a node gives follows from the same row of what it is given, or
        from several, whose elements it has."""
        return node.target in _CHOSEN or _is_along_rows(node) or self.is_of_model(node)

    def is_of_model(self, node: Node) -> bool:
        """Whether a model has made a tensor, which has no element for each two rows."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.dim():
            return False
        given = [one in self.batch and one not in self._updated for one in node.all_input_nodes]
        if node not in self._other and all(given):  # nor has a frozen one
            return False
        if node.target in BY_LABEL and not self.are_rows(value.shape[0]):
            return False
        return node.target not in _OF_TWO or sum(given) < 2

    def add_up_by_rows(self, nodes: Sequence[Node]) -> bool:
        """Whether tensors follow each from another row of the batch, all together from all rows, so
        that their sums are a sum over the batch."""
        places: set[Any] = set()
        counts: set[Any] = set()
        for node in nodes:
            rows = [one for one in self._elements(node) if self.takes_row(one)]
            places.update(one.args[-1] for one in rows)
            counts.update(_taken(one)[0].meta["val"].shape[0] for one in rows)  # type: ignore[union-attr]
            if not rows or not self._are_in_place(node):
                return False
        return len(counts) == 1 and places == set(range(*counts)) and len(nodes) == len(places)

    def is_of_item(self, node: Any) -> bool:
        """Whether a tensor has elements of one item of the batch, such as an image: what is taken
        by its place along the first dimension. A number of these says nothing of other workers'
        items, and a mean over them counts as much as that of any other item."""
        if not self._by_item:
            return False
        read = list(self._elements(node))
        places = {place for one in read if (place := self._items.get(one, -1)) >= 0}
        return len(places) == 1 or any(self._takes_item(one, node) for one in read)

    def takes_row(self, node: Node) -> bool:
        """Whether a tensor is one row of a tensor that has the rows of the batch, or a group of
        these."""
        source, place = _taken(node)
        if source is None or place != 0:
            return False
        return self.are_rows(source.meta["val"].shape[0]) or self._are_groups(source)

    def _takes_item(self, node: Node, whole: Node) -> bool:
        if self.takes_row(node):
            return True
        source, place = _taken(node)
        if source is None or place != 0:
            return False
        count = source.meta["val"].shape[0]
        # Or the batch has a list of tensors, one for each item.
        return any(
            one in self.batch and self._is_of_list(one, count)
            for one in elements(whole)
            if one.op == "placeholder"
        )

    def are_rows(self, count: Any) -> bool:
        """Whether a size is how many rows each tensor of the batch has."""
        return all(same_shape(value.shape[:1], (count,)) for value in self._given.values())

    def are_places(self, count: Any) -> bool:
        """Whether a size is how many rows each tensor of the batch has, or how many places all of
        its rows have, such as pixels, or two augmented views of each."""
        return self.are_rows(count) or expression(count) in self._merged

    def _merges(self, node: Node) -> Iterator[Any]:
        if node not in self.batch or node.target not in {*_VIEWS, aten.cat.default}:
            return
        made = node.meta["val"].shape
        if node.target is aten.cat.default:
            parts: Any = node.args[0]
            is_first = len(node.args) < 2 or node.args[1] == 0
            if is_first and all(self.are_rows(one.meta["val"].shape[0]) for one in parts):
                yield expression(made[0])
            return
        given: Any = node.args[0].meta["val"].shape  # type: ignore[union-attr]
        if made and self.are_rows(given[0] if given else 0):
            merged = (product(given[:count]) for count in range(2, len(given) + 1))
            yield from (count for count in merged if count == expression(made[0]))

    def are_sequences(self, count: Any) -> bool:
        """Whether a size is how many items a batch may have whose first dimension is time: all its
        tensors have it next, some with features and some without."""
        values = list(self._given.values())
        return len({value.dim() for value in values}) > 1 and all(
            same_shape(value.shape[1:2], (count,)) for value in values
        )

    def _are_groups(self, node: Node) -> bool:
        """Whether a view puts the rows of a batch into groups."""
        shape: Any = node.meta["val"].shape
        return node.target in _VIEWS and len(shape) > 1 and self.are_rows(shape[0] * shape[1])

    def _is_of_list(self, node: Node, count: int | torch.SymInt) -> bool:
        own: Any = node.meta["val"]
        alike = [
            value
            for value in self._given.values()
            if value.dtype is own.dtype and same_shape(value.shape[1:], own.shape[1:])
        ]
        return isinstance(count, int) and len(alike) >= count > 1


def _items(step: StepGraph, given: Mapping[Node, torch.Tensor]) -> dict[Node, int]:
    """By tensor its place, for lists that have one for each item of the batch: as many as another
    tensor has rows, or of several such lists, where those of one place have no number of rows in
    common. Lists of micro-batches are none."""
    lists: dict[str, list[Node]] = collections.defaultdict(list)
    is_list: set[str] = set()
    for node, item in zip(step.own_placeholders(), step.inputs, strict=True):
        if node in given:
            name = item.listed or item.part
            lists[name].append(node)
            is_list.update([name] if item.listed else ())
    several = [
        nodes
        for name, nodes in lists.items()
        if (len(nodes) > 1 or name in is_list)
        and len({(given[one].dtype, given[one].dim()) for one in nodes}) == 1
    ]
    alone = [(nodes, given[nodes[0]].shape[0]) for nodes in lists.values() if len(nodes) == 1]
    found: dict[Node, int] = {}
    for nodes in several:
        others = [one for one in several if len(one) == len(nodes)]
        apart = any(
            not same_shape(given[first].shape[:1], given[other].shape[:1])
            for one in others
            for first, other in zip(nodes, one, strict=True)
        )
        # Else each has the rows of the batch, which are as many by chance.
        of_rows = all(same_shape(given[one].shape[:1], (len(nodes),)) for one in nodes)
        told = any(one != nodes and same_shape((size,), (len(nodes),)) for one, size in alone)
        if apart or (told and not of_rows):
            found.update((node, place) for place, node in enumerate(nodes))
    return found


def elements(
    node: Any, without: Collection[Node] = (), of_row: Collection[Node] = ()
) -> Iterator[Node]:
    """What the elements of a tensor follow from, each from those in the same place.

    Args:
        node: the tensor.
        without: what is not looked at, nor what it follows from.
        of_row: what follows from one row alone, so that all of it lies in one place.
    """
    seen = set(without)
    queue = [node]
    while queue:
        one = queue.pop()
        if not isinstance(one, Node) or one in seen or _is_size(one):
            continue
        seen.add(one)
        yield one
        if _is_alike(one) or one in of_row:
            queue += one.all_input_nodes
        elif one.target in REDUCTIONS:  # not reduced: an element for each label
            queue += one.args[:2]
        elif one.target in _SOFTMAX and one.args[1] != 0:  # each row from its own
            queue += one.args[:1]
        elif one.target in _ALIGNED:  # nor this: an element for each row of labels and of lengths
            queue += one.args[1:4]


def _taken(node: Node) -> tuple[Node | None, int]:
    """Of what takes one place of a dimension: from which tensor, and which dimension."""
    arguments: Any = node.args
    if node.target is operator.getitem:
        node, arguments = arguments[0], arguments[0].args
        if node.target is not aten.unbind.int:
            return None, 0
    elif node.target is not aten.select.int:
        return None, 0
    return arguments[0], arguments[1] if len(arguments) > 1 else 0


def _is_size(node: Node) -> bool:
    """Whether a node is a number of Python's, as the sizes of views are."""
    return not isinstance(node.meta.get("val"), torch.Tensor | tuple | list)


def _is_alike(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.pointwise in node.target.tags or node.target in _ALIKE or is_view(node):
        return True
    if node.target in SHAPES:  # one constant
        return True
    if node.target is aten.index_put.default:
        chosen: Any = node.args[1]
        return all(one is not None and one.meta["val"].dtype is torch.bool for one in chosen)
    return _is_along_rows(node)


def _is_along_rows(node: Node) -> bool:
    """Whether an operation along some dimensions leaves the first one, so that each row follows
    from the same row."""
    target: Any = node.target
    if target in _BY_ROWS:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target is aten.as_strided.default:
        return _has_frames(node)
    source: Any = node.args[0] if node.args else None
    if target is aten.repeat.default:
        repeats: Any = node.args[1]
        return len(repeats) == len(source.meta["val"].shape) and bool(repeats[0] == 1)
    names = [argument.name for argument in target._schema.arguments]
    place = next((names.index(name) for name in ("dim", "dims") if name in names), None)
    if place is None or target in _OF_ALL_ROWS or not isinstance(source, Node):
        return False
    dims = node.args[place] if place < len(node.args) else node.kwargs.get(names[place])
    value = source.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    several = dims if isinstance(dims, list | tuple) else [dims]
    return bool(several) and all(
        isinstance(one, int) and one % max(value.dim(), 1) for one in several
    )


def _has_frames(node: Node) -> bool:
    """Whether each row of a tensor has some places of the same row of another one, which may lie in
    several: the frames of a signal."""
    arguments: Any = node.args
    source, _, strides, *offset = arguments
    value = source.meta["val"]
    if not value.dim() or not value.is_contiguous() or offset not in ([], [0], [None]):
        return False
    made = node.meta["val"].shape
    row = product(value.shape[1:])
    last = sum((size - 1) * stride for size, stride in zip(made[1:], strides[1:], strict=True))
    if not all(isinstance(one, int) for one in (row, last, *strides)):
        return False
    return bool(same_shape(made[:1], value.shape[:1]) and strides[0] == row and last < row)
