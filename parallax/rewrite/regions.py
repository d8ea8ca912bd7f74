"""Cut a worker's graph into regions that a compiler can take as a whole.

What communicates, draws random numbers, or has sizes that only a step's batch decides is *replayed*
operation by operation; all between is *computed* in regions. A region is computed when something
that is replayed needs it: before a message starts, only what the message carries; before a wait,
all that the graph has in front of it, which is what the message is hidden behind. Gradients that
travel in one bucket are put there together, when the last of them is known.

Views and arithmetic on numbers from the optimizer's settings are made wherever they are used.

Regions that a device records (CUDA graphs) hold more: kernels of libraries, random numbers, updates
of many variables; whatever the device can do without the processor. There numbers are not computed
with, as the processor has to give them to the device anyway.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from parallax.graph.common.aliases import base_of
from parallax.graph.common.operations import is_random, is_view, returned_input, written_inputs
from parallax.graph.passes.cleanup import is_effect
from parallax.graph.step_graph import StepGraph
from parallax.ops import marks
from parallax.ops.kernels import OPERATIONS
from parallax.ops.resources import put_gradient
from parallax.ops.specs import BucketsSpec, ResourceSpec
from parallax.ops.updates import UPDATES
from parallax.rewrite.region_graphs import Cutting, Kind, Region, build
from parallax.rewrite.tensor_numbers import is_arithmetic, is_number, tensor_form

aten: Any = torch.ops.aten

# Kernels that a compiler would only call, or write worse.
_LIBRARY = {
    aten.embedding.default,
    aten.embedding_dense_backward.default,
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
    aten._embedding_bag_dense_backward.default,
    aten._embedding_bag_backward.default,
    aten._embedding_bag_per_sample_weights_backward.default,
}
# Results whose sizes do not follow from that of their first input.
_OWN_SIZE = {
    aten.embedding.default,
    aten.linalg_vector_norm.default,
    aten.sum.default,
    aten.mean.default,
}


# What waits for the device, or reads numbers that it has computed.
_WAITING = {
    aten._local_scalar_dense.default,
    aten._ctc_loss.default,
    aten.bincount.default,
    aten.equal.default,
    aten.histc.default,
    aten.multinomial.default,
    aten.repeat_interleave.Tensor,
}
_INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
    aten._unsafe_index_put.default,
}


def cut(
    step: StepGraph,
    resources: Sequence[ResourceSpec],
    recorded_on: str | None = None,
    refused: Collection[Any] = (),
) -> tuple[GraphModule, list[Region]]:
    """A graph that computes the same by calls of regions.

    Args:
        step: of a worker; it is left as it is. Nodes carry example values in ``meta["val"]``.
        resources: descriptions of its first inputs.
        recorded_on: the kind of device that records regions: then they hold all that it can do
            without the processor, and nothing else; and numbers are given to them as numbers.
        refused: operations that it could not record.

    Returns:
        The new graph, and the regions that are its submodules.
    """
    nodes = list(step.graph.nodes)
    same_memory = _same_memory(step)
    kinds = _kinds(nodes, same_memory, recorded_on, refused)
    cutting = Cutting(
        nodes,
        kinds,
        {node: place for place, node in enumerate(nodes)},
        _needs(nodes, kinds, same_memory),
        dict(zip(nodes, resources, strict=False)),
        _state(step, same_memory),
        recorded_on is not None,
        {node for node in nodes if _is_of_processor(node)},
    )
    _plan(cutting)
    return build(step.graph_module, cutting)


def _same_memory(step: StepGraph) -> dict[Node, Node]:
    """Inputs that are part of another: a worker's rows of a variable that it holds whole."""
    inputs = zip(step.inputs, step.own_placeholders(), strict=True)
    return {
        node: whole
        for item, node in (inputs if step.inputs else ())
        if item.kind == "shard" and (whole := step.placeholder(item.name)) is not None
    }


def _state(step: StepGraph, same_memory: dict[Node, Node]) -> dict[Node, Node]:
    """By input that is part of the run's state, the memory that it is part of."""
    inputs = zip(step.inputs, step.own_placeholders(), strict=True)
    return {
        node: same_memory.get(node, node)
        for item, node in (inputs if step.inputs else ())
        if item.kind in ("state", "shard")
    }


# -- What is computed and what is replayed ----------------------------------------------------


def _kinds(
    nodes: Sequence[Node],
    same_memory: dict[Node, Node],
    recorded_on: str | None,
    refused: Collection[Any],
) -> dict[Node, Kind]:
    kinds: dict[Node, Kind] = {}
    varying: set[Node] = set()
    unknown = _of_unknown_memory(nodes, same_memory)
    if recorded_on is not None:
        unknown |= _left_to_the_processor(nodes, recorded_on)
        unknown |= {node for node in nodes if node.target in refused}
    for node in nodes:
        if node.op == "placeholder":
            kinds[node] = "input"
        elif node.op != "call_function":
            kinds[node] = "replayed"
        else:
            whole = recorded_on is not None
            kinds[node] = "replayed" if node in unknown else _kind(node, kinds, varying, whole)
            if _varies(node, varying):
                varying.add(node)
    for node in reversed(nodes):
        # What is replayed wants numbers, not tensors: so does what they are made of.
        if kinds[node] == "computed" and is_number(node) and _meets(node, kinds, "replayed"):
            kinds[node] = "replayed"
    return kinds


def _kind(node: Node, kinds: dict[Node, Kind], varying: set[Node], whole: bool) -> Kind:
    if is_number(node):
        if is_arithmetic(node) and all(
            kinds[source] in ("input", "remade") for source in node.all_input_nodes
        ):
            return "remade"
        return "computed" if tensor_form(node) is not None else "replayed"
    if any(source in varying for source in node.all_input_nodes):
        return "replayed"
    if node.target is operator.getitem:
        kind = kinds[node.all_input_nodes[0]]
        return "replayed" if kind == "input" else kind
    if node.target in UPDATES:
        return "computed" if whole and tensor_form(node) is not None else "replayed"
    if not _is_static(node):
        return "replayed"
    is_operation = isinstance(node.target, torch._ops.OpOverload)
    if is_operation and _only_views(node):
        return "remade"
    computable = _can_be_recorded(node) if whole else _is_computable(node)
    return "computed" if computable else "replayed"


def _only_views(node: Node) -> bool:
    return is_view(node) and not written_inputs(node)


def _of_unknown_memory(nodes: Sequence[Node], same_memory: dict[Node, Node]) -> set[Node]:
    """Views that numbers of the step choose (``x[i]``), and what changes memory with such views:
    which inputs of a region share what is changed would only be known in each step."""

    def memory(node: Node) -> Node:
        base = base_of(node)
        return same_memory.get(base, base)

    views = {
        node
        for node in nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and _only_views(node)
        and any(map(is_number, node.all_input_nodes))
    }
    viewed = {memory(view) for view in views}
    return views | {
        node for node in nodes if any(memory(source) in viewed for source in written_inputs(node))
    }


def _is_computable(node: Node) -> bool:
    target = node.target
    if target in OPERATIONS or target in OPERATIONS.values():
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target.namespace != "aten" or target in _LIBRARY:
        return False
    if is_random(node) or torch.Tag.dynamic_output_shape in target.tags:
        return False
    return tensor_form(node) is not None


def _can_be_recorded(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target in OPERATIONS
    if node.target.namespace not in ("aten", "parallax") or node.target in _WAITING:
        return False
    if torch.Tag.dynamic_output_shape in node.target.tags and node.target not in _INDEXED:
        return False
    return tensor_form(node) is not None


def _left_to_the_processor(nodes: Sequence[Node], device: str) -> set[Node]:
    """Numbers, what has to do with another device or is sparse, what looks through a mask, and,
    where a step sets the state of random numbers, these too."""
    states = any(node.target in (marks.SET_RNG_STATE, marks.RNG_STATE) for node in nodes)
    found = set()
    for node in nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        values = [value for source in (node, *node.all_input_nodes) for value in _tensors(source)]
        sparse = any(value.layout is not torch.strided for value in values)
        # Constants of the step stay as they are.
        elsewhere = any(value.device.type != device for value in _tensors(node)) or any(
            value.device.type != device
            for source in node.all_input_nodes
            if source.op != "get_attr"
            for value in _tensors(source)
        )
        masks = node.target in _INDEXED and any(
            value.dtype in (torch.bool, torch.uint8) for value in values[1:]
        )
        own_numbers = node.kwargs.get("generator") is not None
        random = is_random(node) and (states or own_numbers)
        if is_number(node) or elsewhere or sparse or masks or random:
            found.add(node)
    return found


def _is_of_processor(node: Node) -> bool:
    """Whether a node has nothing to do with a device besides the processor."""
    return (
        node.op == "call_function"
        and all(
            value.device.type == "cpu"
            for source in (node, *node.all_input_nodes)
            for value in _tensors(source)
        )
        and (is_number(node) or bool(_tensors(node)))
    )


def _tensors(node: Node) -> list[torch.Tensor]:
    values = node.meta.get("val")
    parts = values if isinstance(values, tuple | list) else [values]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _is_static(node: Node) -> bool:
    values = node.meta.get("val")
    parts = values if isinstance(values, tuple | list) else [values]
    return (
        bool(parts)
        and all(
            part is None
            or (
                isinstance(part, torch.Tensor)
                and part.layout is torch.strided
                and all(isinstance(size, int) for size in part.shape)
            )
            for part in parts
        )
        and any(part is not None for part in parts)
    )


def _varies(node: Node, varying: set[Node]) -> bool:
    """Whether sizes of a node are decided by a batch's values."""
    if node.target in _OWN_SIZE:
        return False
    if not isinstance(node.target, torch._ops.OpOverload) and node.target is not operator.getitem:
        return not (is_number(node) or getattr(node.target, "parallax_fixed_sizes", False))
    changed = returned_input(node)
    if changed is not None:
        return changed in varying
    return any(source in varying for source in node.all_input_nodes)


def _meets(node: Node, kinds: dict[Node, Kind], kind: Kind) -> bool:
    return any(
        kinds[user] == kind or (kinds[user] == "remade" and _meets(user, kinds, kind))
        for user in node.users
    )


# -- What must run before what ----------------------------------------------------------------


def _needs(
    nodes: Sequence[Node], kinds: dict[Node, Kind], same_memory: dict[Node, Node]
) -> dict[Node, dict[Node, None]]:
    def base(node: Node) -> Node:
        found = base_of(node)
        return same_memory.get(found, found)

    needs: dict[Node, dict[Node, None]] = {}
    written: dict[Node, Node] = {}
    read: dict[Node, list[Node]] = {}
    effect: Node | None = None
    drawn: Node | None = None
    for node in nodes:
        if kinds[node] not in ("computed", "replayed"):
            continue
        before: dict[Node, None] = {}
        sources = list(_sources(node.all_input_nodes, kinds))
        before.update(dict.fromkeys(s for s in sources if kinds[s] != "input"))
        changed = _changed(node)
        writes = {base(source) for source in changed}
        for memory in dict.fromkeys(base(source) for source in node.all_input_nodes):
            if memory in written:
                before[written[memory]] = None
            if memory in writes:
                before.update(dict.fromkeys(read.pop(memory, ())))
                written[memory] = node
            else:
                read.setdefault(memory, []).append(node)
        if _is_event(node, kinds):
            if effect is not None:
                before[effect] = None
            effect = node
        if is_random(node):
            if drawn is not None:
                before[drawn] = None
            drawn = node
        before.pop(node, None)
        needs[node] = before
    return needs


def _sources(inputs: Iterable[Node], kinds: dict[Node, Kind]) -> Iterable[Node]:
    """What a node's inputs are made of, through what is remade where it is used."""
    for source in inputs:
        if kinds[source] == "remade":
            yield from _sources(source.all_input_nodes, kinds)
        else:
            yield source


def _changed(node: Node) -> list[Node]:
    """Inputs that a node changes, or may: what calls of the runtime do is not known."""
    if node.op == "output" or isinstance(node.target, torch._ops.OpOverload):
        return written_inputs(node)
    if getattr(node.target, "parallax_starts", False) or not is_effect(node):
        return []
    return node.all_input_nodes


# -- In which order ---------------------------------------------------------------------------


def _plan(cutting: Cutting) -> None:
    """Go through what has effects, in its order, and run before each what has to be."""
    buckets = _Buckets(cutting)
    waiting: list[Node] = []
    for node in cutting.nodes:
        if not _is_event(node, cutting.kinds):
            continue
        waiting.append(node)
        if buckets.have_room_after(node):
            continue
        if not (getattr(node.target, "parallax_starts", False) or is_random(node)):
            limit = cutting.order[node]
            _run(cutting, [other for other in cutting.needs if cutting.order[other] < limit])
        _run(cutting, waiting)
        waiting = []


def _is_event(node: Node, kinds: dict[Node, Kind]) -> bool:
    """Whether a node has its place in an order: a call of the runtime, a random number.

    What is only changed in place is known, and comes when it is needed.
    """
    if kinds[node] != "replayed" or not is_effect(node):
        return False
    return not written_inputs(node) or is_random(node)


class _Buckets:
    """Knows which gradient is the last of its bucket."""

    def __init__(self, cutting: Cutting) -> None:
        self._specs = cutting.specs
        self._left: dict[tuple[Any, int], int] = {}
        for node, spec in cutting.specs.items():
            if isinstance(spec, BucketsSpec):
                whole = (entry.bucket for entry in spec.entries if entry.pieces == 1)
                self._left.update({(node, b): n for b, n in Counter(whole).items()})

    def have_room_after(self, node: Node) -> bool:
        """Whether a node puts a gradient in a bucket that then waits for others."""
        if node.target is not put_gradient:
            return False
        resource, index = node.args[:2]
        spec = self._specs[resource]  # type: ignore[index]
        assert isinstance(spec, BucketsSpec)
        key = (resource, spec.entries[index].bucket)  # type: ignore[index]
        if spec.entries[index].pieces > 1:  # type: ignore[index]
            return False
        self._left[key] -= 1
        return self._left[key] > 0


def _run(cutting: Cutting, wanted: Sequence[Node]) -> None:
    """Run nodes and what they need: in regions as large as what is replayed between allows.

    A message that is replayed is hidden behind what is computed after it. But of what is recorded
    as much as possible should be in one piece, so what is replayed is first: and before what may
    wait for the device, what the processor does meanwhile.
    """
    needed: set[Node] = set()
    queue = [node for node in wanted if node not in cutting.done]
    while queue:
        node = queue.pop()
        if node not in needed:
            needed.add(node)
            # All parts of a result leave an operation together.
            queue += [
                user
                for user in node.users
                if user.target is operator.getitem
                and cutting.kinds[node] == cutting.kinds[user] == "computed"
                and user not in cutting.done
            ]
            queue += [before for before in cutting.needs[node] if before not in cutting.done]
    left = sorted(needed, key=cutting.order.__getitem__)
    usual = (("computed", False), ("replayed", False))
    recorded = (("replayed", True), ("replayed", False), ("computed", False))
    while left:
        for kind, own in recorded if cutting.recorded else usual:
            ready = []
            for node in left:
                if (
                    cutting.kinds[node] == kind
                    and (not own or node in cutting.of_processor)
                    and all(before in cutting.done for before in cutting.needs[node])
                ):
                    cutting.done.add(node)
                    ready.append(node)
            left = [node for node in left if node not in cutting.done]
            if kind == "computed" and ready:
                cutting.plan.append(ready)
            else:
                cutting.plan += ready
