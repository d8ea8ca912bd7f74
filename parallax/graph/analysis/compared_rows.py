"""Rows of the batch that a step compares with each other.

In a loss with in-batch negatives (``a @ b.t()``, ``torch.cdist(z, z)``, labels that are compared in
pairs), or of the largest of all rows, each row counts for all others. On one device these are the
rows of all workers' batches. So what is computed from the first tensor that has an element for each
two rows to the last gradient of one is to be computed of all batches, on every worker.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from parallax.graph.analysis.batch_numbers import PRODUCTS, QUOTIENTS, takes_value
from parallax.graph.analysis.compute import computes_much, operations
from parallax.graph.analysis.coupled import LINEAR
from parallax.graph.analysis.cut_off import cut_off
from parallax.graph.analysis.how_many import expression, product
from parallax.graph.analysis.kept_rows import kept_rows
from parallax.graph.analysis.loss_terms import SHAPES, SIZES, losses, made_of
from parallax.graph.analysis.mixed_rows import Mixing, following
from parallax.graph.analysis.row_places import (
    Places,
    RowSizes,
    all_places,
    is_narrow,
    is_tensor,
    shape_of,
    tensor_of,
)
from parallax.graph.analysis.totals import own_numbers
from parallax.graph.common.aliases import memory_of
from parallax.graph.common.operations import (
    gradient_of,
    is_call,
    is_random,
    is_view_of_torch,
    with_gradient,
    written_inputs,
)
from parallax.graph.common.sizes import size_of
from parallax.graph.step_graph import StepGraph
from parallax.ops import marks

aten: Any = torch.ops.aten

_RANDOM = "random numbers are drawn for it"


class Refused(NamedTuple):
    """Why rows are compared by each worker alone, or reduced to numbers.

    Args:
        why: it.
        node: for which it holds.
        reduces: they are reduced to numbers.
    """

    why: str
    node: Node | None = None
    reduces: bool = False


class _RefusedError(Exception):
    """What compares rows cannot be computed of all batches."""

    def __init__(self, node: Node, why: str) -> None:
        super().__init__(why)
        self.refused = Refused(why, node)


class _AgainError(Exception):
    """Other numbers are to be of all rows as well."""


class ComparedRows:
    """What of a step is to be computed of all workers' batches, since it compares their rows.

    Args:
        step: captured with a symbol for how many rows the batch has.
    """

    def __init__(self, step: StepGraph) -> None:
        self.whole: dict[Node, None] = {}
        """What is computed of all rows, in place of this worker's own."""
        self.gathered: dict[Node, Places] = {}
        """What is computed of each worker's own rows, and sent to all."""
        self.copied: set[Node] = set()
        """What is computed of all rows, too: views of these, what is chosen of them, and what
        follows from sizes alone."""
        self.refused: Refused | None = None
        """Why nothing is."""
        self.reduced: Refused | None = None
        """Why numbers that a loss reduces rows to are not of all of them."""
        rows = {expression(one) for one in step.rows}
        if len(rows) != 1 or isinstance(rows.pop(), int):
            return
        self.sizes = RowSizes(step.rows[0])
        self._step = step
        self._order = {node: place for place, node in enumerate(step.graph.nodes)}
        self._follows = following(step)
        self._mixing = Mixing(step, self.sizes, self._follows)
        self._sized: dict[Node, bool] = {}
        own = own_numbers(step, by_rows=True)
        self._known = own.known
        kept = kept_rows(step, self.sizes, self._follows, self.is_sized, self._known)
        self._kept = {*kept}
        marked = step.graph.find_nodes(op="call_function", target=marks.GRADIENT)
        trained = [one for node in marked for one in node.all_input_nodes]
        self._relevant = made_of([*trained, *kept, *(loss for loss, _ in losses(step.graph))])
        compared = {
            node
            for node in step.graph.nodes
            if node in self._follows
            and node in self._relevant
            and (self.sizes.are_pairs(node) or self._mixing.mixes(node))
        }
        # What the batch brings of each two rows, such as an adjacency, is of this worker's alone.
        if not (compared or kept or own.left) or any(map(self.sizes.are_pairs, step.given())):
            return
        self._begin()
        self._writers = self._who_writes()
        self._counting = self._who_counts()
        self._cut_off = cut_off(step.graph)
        self._places = all_places(step, self.sizes, self._follows)
        self.refused = self._look_for({*compared, *kept}, own.left)
        if self.refused is not None and own.left:
            if own.reduced:  # of the others is told elsewhere
                self.reduced = self.refused._replace(reduces=True)
            self.refused = self._look_for({*compared, *kept})

    def _look_for(self, first: Collection[Node], numbers: Collection[Node] = ()) -> Refused | None:
        """See what these lead to, and numbers of this worker's batch; why it cannot be."""
        try:
            self._left = self._made_of_rows(numbers)
            self._first = {*first, *self._left}
            while not self._found():
                pass
            self._refuse_most_of_a_model()
        except _RefusedError as error:
            self._begin()
            return error.refused
        return None

    def _refuse_most_of_a_model(self) -> None:
        """What follows from compared rows is computed by every worker: that may be too much."""
        layers = {
            node: count
            for node, count in operations(self._step.graph).items()
            if node not in self._gradients and any(map(self._is_plain, node.all_input_nodes))
        }
        repeated = sum(count for node, count in layers.items() if node in self.whole)
        if self.whole and repeated > sum(layers.values()) / 2:
            first = next(iter(self.whole))
            raise _RefusedError(first, "most layers of the model follow, which each would compute")

    def _is_plain(self, node: Node) -> bool:
        """Whether a node follows from parameters alone."""
        return node not in self._follows and not self.is_sized(node)

    def _is_trained(self, node: Node) -> bool:
        """Whether a node follows from parameters that have gradients, and from nothing else."""
        return node in self._mixing.of_model and self._is_plain(node)

    def _begin(self) -> None:
        self.whole, self.gathered, self.copied = {}, {}, set()
        self._gradients: set[Node] = set()
        self._calls: dict[int, list[Node]] = collections.defaultdict(list)
        """By PyTorch's number of an operation, what is computed of all rows."""
        self._mixed: set[Node] = set()
        """Sums of numbers of all rows and of numbers of this worker's own."""
        self._of_left: set[Node] = set()
        """What follows from numbers that may be sums: divided by one, a sum is a mean."""
        self._own: set[Node] = set()
        """Gradients of own rows, which count as often as other workers have rows."""

    def _found(self) -> bool:
        """Look through the graph; whether nothing else is to be of all rows."""
        self._begin()
        self._before = self._leading_to_first()
        try:
            for node in self._order:
                if node.op == "call_function":
                    self._look_at(node)
        except _AgainError:
            return False
        return True

    def is_gradient(self, node: Node) -> bool:
        """Whether a backward pass computes a node."""
        return node in self._gradients

    def places(self, node: Node) -> Places | None:
        """Where the rows of the batch lie in a tensor; None if it has not one dimension of them."""
        dims = self.sizes.dims(node)
        if len(dims) != 1:
            return None
        outer = self._places.get((node, dims[0]))
        times = self.sizes.times(shape_of(node)[dims[0]])
        return None if outer is None or times is None else Places(dims[0], outer, times // outer)

    def _look_at(self, node: Node) -> None:
        inputs = node.all_input_nodes
        if node.target is marks.GRADIENT:
            return
        mode = node.meta.get("autograd")
        if isinstance(node.meta.get("val"), int | torch.SymInt):
            mode = "off"  # a size may be asked for in a backward pass first
        if mode == "backward" or (mode is None and any(one in self._gradients for one in inputs)):
            self._gradients.add(node)
        if mode == "on" and any(one in self._gradients for one in inputs):
            raise _RefusedError(node, "gradients are differentiated further")
        own = [one for one in inputs if one in self._follows and one not in self.whole]
        if node.target in SHAPES and not any(one in self.whole for one in inputs):
            return
        if any(one in self._own for one in inputs):
            self._own.add(node)
        if any(one in self._mixed for one in own) and node not in self._gradients:
            self._add_mixed(node, inputs)
        if node not in self._first and not self._is_of_whole(node, inputs, own):
            return
        if node not in self._kept:  # others put together what is kept
            self._have_whole(one for one in own if self._is_number(one))
        if is_random(node):
            raise _RefusedError(node, _RANDOM)
        self.whole[node] = None
        if node in self._left or any(one in self._of_left for one in inputs):
            self._of_left.add(node)
        self._note_call(node)
        for one in inputs:
            self._bring(one, self._mixing.needs_order(node))

    def _is_of_whole(self, node: Node, inputs: Collection[Node], own: Collection[Node]) -> bool:
        """Whether a node is computed of all rows, as something is that it is computed of."""
        given = [one for one in inputs if one in self.whole]
        large = [one for one in given if self.sizes.dims(one) or _has_several(one)]
        if not given:
            return False
        # PyTorch adds up gradients of what is used several times, in whatever call comes last.
        made_by = gradient_of(node) if node.target is not aten.add.Tensor else None
        if made_by is not None:
            several = self._calls.get(made_by[0], ())
            if any(is_call(one, *made_by) for one in several):
                return True
        if not large and own:  # of numbers
            return node not in self._gradients and self._is_shifted(node, given, own)
        if any(memory_of(one).op == "placeholder" for one in written_inputs(node)):
            return False
        # What is computed of own rows has gradients of them, which may be known to be sums of all.
        is_own = node in self._gradients and (own or made_by is not None)
        in_order = any(one in self.copied and one in self._mixing.ordered for one in own)
        if is_own and node not in self._before and not in_order and all(map(self.places, large)):
            self._own.update([node] if large else [])
            return False
        return True

    def _is_shifted(self, node: Node, given: Collection[Node], own: Collection[Node]) -> bool:
        """Whether rows are computed with a number of all rows whose gradient is a sum over all of
        them, or which may be a sum. Else each worker's rows are its own."""
        rows = [one for one in own if self.sizes.dims(one)]
        if rows and any(map(_is_place, given)):
            return True
        shifts = with_gradient(node).intersection(given) - self._cut_off
        shifts = {one for one in shifts & self._mixing.of_model if one.meta.get("autograd") == "on"}
        shifts |= self._of_left.intersection(given)
        if not rows or not shifts or node not in self._relevant:
            self._add_mixed(node, node.all_input_nodes)
            return False
        if any(map(self._is_wide, rows)):
            raise _RefusedError(node, "rows are computed with a number of all of them")
        return True

    def _add_mixed(self, node: Node, inputs: Collection[Node]) -> None:
        """Note what is computed of numbers of all rows and of others, if it is a sum of them; else
        these have to be of all rows, too."""
        of_batch = [one for one in inputs if one in self._follows]
        is_sum = node.target in LINEAR or (
            node.target in PRODUCTS | QUOTIENTS and len(of_batch) == 1
        )
        is_sum = is_sum or is_view_of_torch(node)
        if node in self._relevant and (not is_sum or any(map(self.is_sized, inputs))):
            own = [one for one in of_batch if one not in self.whole]
            self._have_whole(one for one in own if self._is_number(one))
        if not self.sizes.dims(node):
            self._mixed.add(node)

    def _is_number(self, node: Node) -> bool:
        """Whether a node has no rows of the batch."""
        return not self.sizes.dims(node) and not _has_several(node)

    def _have_whole(self, numbers: Iterable[Node]) -> None:
        """See to it that numbers of this worker's batch are of all rows.

        Raises:
            _AgainError: what they follow from is to be looked through anew.
        """
        more = self._made_of_rows(numbers)
        if more:
            if more <= self._first:
                raise _RefusedError(next(iter(more)), "it follows from itself")
            self._first |= more
            raise _AgainError

    def _made_of_rows(self, numbers: Iterable[Node]) -> set[Node]:
        """What first makes numbers of rows of this worker's batch, for these."""
        queue, seen = list(numbers), set()
        more: set[Node] = set()
        for node in queue:
            given = [one for one in node.all_input_nodes if one in self._follows]
            given = [one for one in given if one not in self.whole]
            if node in seen or not given:
                continue
            seen.add(node)
            rows = [one for one in given if self.sizes.dims(one)]
            is_layer = computes_much(node) and any(map(self._is_trained, node.all_input_nodes))
            if node in self._gradients or any(map(self._is_wide, rows)) or is_layer:
                why = "it is computed with a number of each worker's batch"
                raise _RefusedError(node, why)
            if rows:
                more.add(node)
            queue += [one for one in given if one not in rows]
        return more

    def _is_wide(self, node: Node) -> bool:
        return is_tensor(node) and not is_narrow(node, self.sizes)

    def _bring(self, node: Node, in_order: bool) -> None:
        """Have what something of all batches is computed of.

        Args:
            node: it.
            in_order: the order of rows makes a difference there.
        """
        queue = [node]
        while queue:
            one = queue.pop()
            if one in self.whole or one in self.copied or one in self.gathered:
                continue
            if one not in self._follows:
                if self.is_sized(one):
                    if is_random(one):
                        raise _RefusedError(one, _RANDOM)
                    self.copied.add(one)
                    queue += () if self._is_of_rows(one) else one.all_input_nodes
                    queue += self._writers.get(memory_of(one), ())
            elif self._is_number(one) and one.op == "call_function":
                if one not in self._known:  # it may be computed with how many rows there are
                    self.copied.add(one)
                    queue += one.all_input_nodes
            elif self._is_copied(one, in_order):
                if one in self._own:
                    raise _RefusedError(one, "gradients of rows are compared again")
                self.copied.add(one)
                self._note_call(one)
                queue += one.all_input_nodes
            else:
                self._gather(one)

    @staticmethod
    def _is_of_rows(node: Node) -> bool:
        """Whether a node is a size, and no values tell it."""
        return node.target in SIZES and size_of(node.meta["val"]) is not None

    def _note_call(self, node: Node) -> None:
        if node.meta.get("autograd") == "on":
            self._calls[node.meta["forward"]].append(node)

    def _is_copied(self, node: Node, in_order: bool) -> bool:
        """Whether what is computed of own rows is computed of all once more, since that takes
        little, or is another thing."""
        if node.op != "call_function":
            return False
        is_heavy = computes_much(node) or is_random(node) or node in self._gradients
        if node in self._counting:
            return True
        if node.target is operator.getitem and node.args[0] in self.copied:
            return True
        if _has_several(node):
            return not is_heavy
        if node in self._mixing.ordered:
            if self._mixing.is_light(node):
                return True
            if in_order:
                raise _RefusedError(node, "rows are put in order, and a layer follows")
        source: Any = node.args[0] if node.args else None
        if is_view_of_torch(node) and source in self._follows and is_tensor(source):
            alike = product(shape_of(source)) == product(shape_of(node))
            return alike and len(self.sizes.dims(source)) == 1
        return self.places(node) is None and not is_heavy and self.sizes.dims(node) != []

    def _who_counts(self) -> set[Node]:
        """Rows that are computed with how many there are, as of all batches: ``len(x) * weight``;
        and what layers have not yet taken."""
        found: set[Node] = set()
        for node in self._order:
            if node not in self._follows or not is_tensor(node) or computes_much(node):
                continue
            if is_random(node) or node.meta.get("autograd") == "backward":
                continue
            if any(
                one in found
                or (not is_tensor(one) and self.is_sized(one) and takes_value(node, one))
                for one in node.all_input_nodes
            ):
                found.add(node)
        return found

    def _gather(self, node: Node) -> None:
        places = self.places(node)
        if node in self._own:
            raise _RefusedError(node, "gradients of rows are compared again")
        if places is None:
            raise _RefusedError(node, "where the rows of the batch lie in it is not known")
        others = [size for dim, size in enumerate(shape_of(node)) if dim != places.dim]
        if not all(isinstance(size, int) for size in others):
            raise _RefusedError(node, "another size than that of the batch varies")
        later = self._writers.get(memory_of(node), ())
        if any(self._order[one] > self._order[node] for one in later):
            raise _RefusedError(node, "it is changed in place")
        self.gathered[node] = places

    def is_sized(self, node: Node) -> bool:
        """Whether a node follows from how many rows the batch has, and from no values of it."""
        known = self._sized
        queue = [node]
        while queue:
            one = queue[-1]
            if one in known:
                queue.pop()
            elif one in self._follows or one.op != "call_function":
                known[one] = False
            elif self._has_rows(one):
                known[one] = True
            elif unknown := [each for each in one.all_input_nodes if each not in known]:
                queue += unknown
            else:
                known[one] = any(known[each] for each in one.all_input_nodes)
        return known[node]

    def _has_rows(self, node: Node) -> bool:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return self.sizes.grows(value)
        return bool(self.sizes.dims(node))

    def _leading_to_first(self) -> set[Node]:
        """What leads to these, or to what is computed of pairs of rows, within one pass."""
        pairs = {node for node in self._first if self.sizes.are_pairs(node)}
        return made_of(
            node
            for node in self._step.graph.nodes
            if node in self._first or any(one in pairs for one in node.all_input_nodes)
        )

    def _who_writes(self) -> dict[Node, list[Node]]:
        writers: dict[Node, list[Node]] = collections.defaultdict(list)
        for node in self._step.graph.nodes:
            for one in written_inputs(node):
                if memory_of(one).op != "placeholder":  # state is the same on all workers
                    writers[memory_of(one)].append(node)
        return writers


def _is_place(node: Node) -> bool:
    """Whether a tensor may say which rows are taken."""
    value = tensor_of(node)
    return value is not None and value.dim() > 0 and not value.dtype.is_floating_point


def _has_several(node: Node) -> bool:
    """Whether a node gives several results, of which others take one."""
    return isinstance(node.meta.get("val"), tuple | list) and tensor_of(node) is None
