"""Take out of a worker's graph the updates that can be finished in the step that follows.

An update by a sum of gradients can wait until its variable is next used: until then the sum is
under way while the next step looks up its rows and computes with other variables (ByteScheduler and
DeAR go across the border of a step so). A *late update* is what follows from the gradients of some
buckets and from nothing that is exchanged later: it waits for them, and changes state. In the step
it is left at the end, and settled in front of the first operation that has to do with what it
changes.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from parallax.graph.common.aliases import memory_of
from parallax.graph.common.interface import GraphInput
from parallax.graph.common.operations import is_random, is_view, is_write, written_inputs
from parallax.graph.passes.cleanup import is_effect, remove_dead
from parallax.ops.checks import ChecksSpec
from parallax.ops.resources import (
    leave,
    pull_bags,
    pull_rows,
    put_gradient,
    settle,
    unique_rows,
    wait_gradients,
    wait_late,
)
from parallax.ops.specs import BucketEntry, BucketsSpec, LateSpec
from parallax.rewrite.context import WorkerGraph

_ASKING = (pull_rows, pull_bags, unique_rows)
"""What tells all workers, in front of a step's updates, whether they agree on it."""


@dataclass
class _Update:
    """Buckets, and what follows from their gradients."""

    buckets: set[tuple[Node, int]]
    """By their wait, and number."""
    nodes: set[Node]
    possible: bool
    gradients: list[Node] = field(default_factory=list)


def defer_updates(result: WorkerGraph, may_wait: Callable[[BucketEntry], bool]) -> None:
    """Leave to the next step what can be left to it.

    Args:
        result: a worker's graph, which is changed; ``result.late`` gets the updates.
        may_wait: whether the sum of a gradient can be awaited while other workers do something
            else.
    """
    if any(isinstance(spec, ChecksSpec) for spec in result.resources):
        return  # a step whose checks fail must leave nothing under way
    graph = result.step.graph
    resources = result.step.placeholders()[: len(result.resources)]
    specs = dict(zip(resources, result.resources, strict=True))
    waits = [node for node in graph.nodes if node.target is wait_gradients]
    found = _Reading(result).updates(
        [(wait, spec) for wait in waits if isinstance(spec := specs[_resource(wait)], BucketsSpec)],
        may_wait,
    )
    if not found:
        return
    with graph.inserting_after(resources[-1]):
        late = graph.placeholder(f"late_{len(resources)}")
    taken = [_take(result, update, specs) for update in found]
    last = next(iter(reversed(graph.nodes)))
    for number, one in enumerate(taken):
        first = _first_touch(graph, one, last)
        with graph.inserting_before(first):
            graph.call_function(settle, (late, number, [*one.changes]))
    with graph.inserting_before(last):
        graph.call_function(leave, (late, [one.inputs for one in taken]))
    names, messages = zip(*((one.names, one.messages) for one in taken), strict=True)
    result.resources.append(LateSpec(names, messages))
    result.late = [one.module for one in taken]
    remove_dead(graph)
    graph.lint()
    result.step.graph_module.recompile()


def _resource(wait: Node) -> Node:
    resource = wait.args[0]
    assert isinstance(resource, Node)
    return resource


# -- Which can wait -----------------------------------------------------------------------------


class _Reading:
    """What is known of a graph before anything is taken out of it."""

    def __init__(self, result: WorkerGraph) -> None:
        step = result.step
        self.nodes = list(step.graph.nodes)
        self.order = {node: place for place, node in enumerate(self.nodes)}
        self.inputs: dict[Node, GraphInput] = dict(
            zip(step.own_placeholders(), step.inputs, strict=True)
        )
        self.guarded = {name for guard in step.guards for name in guard.inputs}
        self.touched: dict[Node, list[Node]] = defaultdict(list)
        """By memory, what reads or changes it."""
        self.written: dict[Node, set[Node]] = {}
        """By node, the memory that it changes."""
        for node in self.nodes:
            for memory in {memory_of(source) for source in node.all_input_nodes}:
                self.touched[memory].append(node)
            self.written[node] = {memory_of(source) for source in written_inputs(node)}

    def updates(
        self,
        waits: Sequence[tuple[Node, BucketsSpec]],
        may_wait: Callable[[BucketEntry], bool],
    ) -> list[_Update]:
        found: list[_Update] = []
        for wait, spec in waits:
            for number in dict.fromkeys(entry.bucket for entry in spec.entries):
                found.append(self._update(wait, spec, number, may_wait))
        found = [update for update in _apart(found) if update.possible and update.nodes]
        if not any(node.target in _ASKING for node in self.nodes):
            # The bucket that is full last tells whether all workers agree on the step.
            last = self._last_put(waits)
            found = [update for update in found if last not in update.buckets]
        return found

    def _update(
        self,
        wait: Node,
        spec: BucketsSpec,
        number: int,
        may_wait: Callable[[BucketEntry], bool],
    ) -> _Update:
        places = [i for i, entry in enumerate(spec.entries) if entry.bucket == number]
        gradients = [
            user
            for user in wait.users
            if user.target is operator.getitem and user.args[1] in places
        ]
        possible = not spec.owners and all(
            spec.entries[i].encoder == "none" and may_wait(spec.entries[i]) for i in places
        )
        nodes = self._following(gradients)
        return _Update({(wait, number)}, nodes, possible and self._can_wait(nodes), gradients)

    def _following(self, gradients: Iterable[Node]) -> set[Node]:
        """What has to do with gradients, or with what was changed by them."""
        found: set[Node] = set()
        queue = list(gradients)
        while queue:
            node = queue.pop()
            if node in found:
                continue
            found.add(node)
            queue += node.users
            for memory in self.written[node]:
                queue += [n for n in self.touched[memory] if self.order[n] > self.order[node]]
        return found

    def _can_wait(self, nodes: Collection[Node]) -> bool:
        return all(self._is_own(node) for node in nodes) and not any(
            self._is_changed_later(memory, nodes)
            for memory in {memory_of(source) for node in nodes for source in node.all_input_nodes}
        )

    def _is_own(self, node: Node) -> bool:
        """Whether nothing but the state of this worker comes of a node."""
        if node.op != "call_function" or is_random(node):
            return False
        if is_effect(node) and not isinstance(node.target, torch._ops.OpOverload):
            return False
        for memory in self.written[node]:
            if memory.op == "placeholder":
                item = self.inputs.get(memory)
                if item is None or item.kind != "state" or item.name in self.guarded:
                    return False
        return True

    def _is_changed_later(self, memory: Node, nodes: Collection[Node]) -> bool:
        """Whether what is read here is changed by others after it was read."""
        touching = self.touched[memory]
        read = min((self.order[n] for n in touching if n in nodes), default=math.inf)
        return any(
            self.order[node] > read and memory in self.written[node]
            for node in touching
            if node not in nodes
        )

    def _last_put(self, waits: Sequence[tuple[Node, BucketsSpec]]) -> tuple[Node, int] | None:
        by_resource = {_resource(wait): (wait, spec) for wait, spec in waits}
        for node in reversed(self.nodes):
            if node.target is put_gradient and node.args[0] in by_resource:
                wait, spec = by_resource[node.args[0]]
                index: Any = node.args[1]
                return wait, spec.entries[index].bucket
        return None


def _apart(updates: Sequence[_Update]) -> list[_Update]:
    """Updates that have operations in common are one: possible if all of them are."""
    result: list[_Update] = []
    for update in updates:
        alike = [other for other in result if other.nodes & update.nodes]
        for other in alike:
            update = _Update(
                update.buckets | other.buckets,
                update.nodes | other.nodes,
                update.possible and other.possible,
                [*other.gradients, *update.gradients],
            )
        result = [other for other in result if other not in alike] + [update]
    return result


# -- Taken out ----------------------------------------------------------------------------------


@dataclass
class _Taken:
    """An update as a graph of its own."""

    module: GraphModule
    inputs: list[Node]
    """What it needs of the step."""
    changes: dict[Node, None]
    """State that it changes."""
    reads: set[Node]
    messages: tuple[tuple[str, int], ...]
    """The buckets that it waits for: by resource, and number."""
    names: tuple[str, ...]
    """The variables whose gradients are in them."""


def _take(result: WorkerGraph, update: _Update, specs: dict[Node, Any]) -> _Taken:
    taking = _Taking(update)
    names: list[str] = []
    # In an order that does not depend on the process, as that of a set does.
    for wait in dict.fromkeys(gradient.all_input_nodes[0] for gradient in update.gradients):
        names += taking.wait_for_gradients(wait, specs[_resource(wait)])
    graph = result.step.graph
    ordered = [node for node in graph.nodes if node in update.nodes]
    for node in ordered:
        taking.copy(node)
    taking.own.output(())
    for node in reversed(ordered):
        graph.erase_node(node)
    messages = sorted((_resource(wait).name, number) for wait, number in update.buckets)
    return _Taken(
        GraphModule(result.step.graph_module, taking.own),
        taking.inputs,
        taking.changes,
        taking.reads,
        tuple(messages),
        tuple(names),
    )


class _Taking:
    """Writes the graph of an update."""

    def __init__(self, update: _Update) -> None:
        self.own = Graph()
        self.inputs: list[Node] = []
        self.changes: dict[Node, None] = {}
        self.reads: set[Node] = set()
        self._update = update
        self._copies: dict[Node, Node] = {}
        self._first: Node | None = None
        """Of what is computed."""

    def wait_for_gradients(self, wait: Node, spec: BucketsSpec) -> list[str]:
        """Let the update do the waiting of a step, and tell whose gradients those are."""
        numbers = {number for other, number in self._update.buckets if other is wait}
        places = [i for i, entry in enumerate(spec.entries) if entry.bucket in numbers]
        changed: Any = wait.args[1] if len(wait.args) > 1 else ()
        kept = tuple(i for i in places if i in changed)
        resource = self._given(_resource(wait))
        sums = self.own.call_function(wait_late, (resource, tuple(places), kept))
        self._first = self._first or sums
        for gradient in self._update.gradients:
            if gradient.args[0] is wait:
                at: Any = gradient.args[1]
                copy = self.own.call_function(operator.getitem, (sums, places.index(at)))
                copy.meta.update(gradient.meta)
                self._copies[gradient] = copy
        earlier: Any = wait.args[2] if len(wait.args) > 2 else ()
        wait.args = (wait.args[0], changed, (*earlier, *places))
        return [spec.entries[i].name for i in places]

    def copy(self, node: Node) -> None:
        """Let the update do what the step did."""
        for source in node.all_input_nodes:
            if source not in self._update.nodes:
                self.reads.add(memory_of(source))
        for source in written_inputs(node):
            if memory_of(source).op == "placeholder":
                self.changes[memory_of(source)] = None
        if node not in self._copies:
            self._copies[node] = self.own.node_copy(node, self._given)

    def _given(self, node: Node) -> Node:
        """What stands for a node of the step: an input, unless it is part of the update."""
        if node not in self._copies:
            with self.own.inserting_before(self._first):
                self._copies[node] = self.own.placeholder(node.name)
            self._copies[node].meta.update(node.meta)
            self.inputs.append(node)
        return self._copies[node]


def _first_touch(graph: Graph, update: _Taken, last: Node) -> Node:
    """The first node before which an update must be complete."""
    node: Node
    for node in graph.nodes:
        is_torch = isinstance(node.target, torch._ops.OpOverload)
        if node.op != "call_function" or (is_torch and is_view(node) and not is_write(node)):
            continue
        memory = {memory_of(source) for source in node.all_input_nodes}
        if memory & update.changes.keys():
            return node
        changed = {memory_of(source) for source in written_inputs(node)}
        if not is_torch and is_effect(node):
            changed = memory
        if changed & update.reads:
            return node
    return last
