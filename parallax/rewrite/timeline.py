"""Read off a rewritten graph when it computes, when messages start, and when they are awaited."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from parallax.graph.analysis.compute import computes_much, efforts
from parallax.graph.analysis.variables import Variable
from parallax.graph.common.operations import is_view
from parallax.graph.common.sizes import sizes_of
from parallax.graph.step_graph import StepGraph
from parallax.ops import resources as ops
from parallax.ops.factors import FactorsSpec, update_by_product
from parallax.ops.specs import ResourceSpec, RowsSpec, TableSpec
from parallax.ops.turns import Turns
from parallax.rewrite.context import WorkerGraph
from parallax.strategy.data import Strategy
from parallax.strategy.registry import facts
from parallax.strategy.timeline import (
    TIMES_BY_HOST,
    Awaited,
    Computed,
    Item,
    Started,
    merged,
)

# Small operations for each table of an exchange, as its runtime has them, three times as many: that
# is what it takes to call them. Bags of all tables are handled together.
ASKING, SERVING, SENDING, RECEIVING = 60, 36, 24, 36
# Passes over a variable that has owners: to add up gradients, to repeat values for all workers, and
# to put those of all in their places. What goes round a ring arrives in its place.
ADDED, PACKED, UNPACKED = 1, 2, 2
# To sort an id, and to find a row that lies anywhere in memory, takes as long as so many bytes are
# read and written.
SORTED = 120
FOUND = 2000


@dataclass
class _Reading:
    """The timeline so far, and which messages are under way."""

    resources: Mapping[str, ResourceSpec]
    variables: Mapping[str, Variable]
    strategy: Strategy
    updates: Sequence[Sequence[Computed]]
    """By late update, what it computes."""
    items: list[Item] = field(default_factory=list)
    number: int = 0
    later: dict[Node, list[tuple[str, ...]]] = field(default_factory=dict)
    """By pull of rows, the tables of messages that are not under way."""
    pulls: dict[tuple[Node, str], int] = field(default_factory=dict)
    """By pull and table, the message that brings its rows."""
    arrived: set[int] = field(default_factory=set)
    numbers: dict[Node, list[int]] = field(default_factory=dict)
    """By the node that started them, messages."""
    own: dict[tuple[Node, Any], int] = field(default_factory=dict)
    """By resource of a synchroniser of its own and message, the message that is under way."""
    put: dict[tuple[Node, int], list[str]] = field(default_factory=dict)
    """By bucket, the variables whose gradients are in it."""
    full: dict[Node, Counter[int]] = field(default_factory=dict)
    """By bucket, how many gradients it waits for."""
    turns: Turns = field(default_factory=Turns)
    late: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """By bucket that a late update waits for, the messages that it will start."""

    def work(
        self,
        tables: Sequence[TableSpec],
        nodes: int,
        passes: int,
        sorts: int = 0,
        finds: int = 0,
        together: bool = False,
        times: int = 1,
    ) -> None:
        """What the exchange itself computes: for each table (or for all together) so many small
        operations, so many passes over its touched rows, so many times its ids are sorted, and
        these rows are found; all of it so many times."""
        size = 0.0
        for table in tables:
            variable = self.variables[table.name]
            share = variable.sparsity or 0.0
            ids = max(variable.ids_per_step, share * variable.rows)
            size += passes * share * variable.bytes + sorts * SORTED * ids
            size += finds * FOUND * share * variable.rows
        calls = 1 if together else len(tables)
        self.items.append(Computed(0, round(times * size), times * nodes * calls, added=True))

    def copied(self, names: Sequence[str], passes: int) -> None:
        """Passes over dense variables by the exchange itself."""
        self.computed(0, passes * sum(self.variables[name].bytes for name in names))

    def computed(self, operations: int, passed: int) -> None:
        """So many operations and bytes by the exchange itself, if any."""
        if operations or passed:
            self.items.append(Computed(operations, passed, 1, added=True))

    def start(
        self, kind: Any, names: Sequence[str], share: float = 1.0, number: int | None = None
    ) -> int:
        """
        Args:
            number: the message's, if something waits for it already.
        """
        number = self.next_number() if number is None else number
        self.items.append(Started(number, kind, tuple(names), share))
        return number

    def in_turn(self, turn: tuple[int, int] | None, start: Callable[[], object]) -> None:
        """Start a message in its turn, as the runtime does; at once if it has none."""
        if turn is None:
            start()
        else:
            self.turns.take(*turn, start)

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def exchange(self, kind: Any, names: Sequence[str]) -> None:
        """A message that is awaited at once."""
        self.items.append(Awaited(self.start(kind, names)))

    def next_rows(self, pull: Node) -> None:
        if self.later[pull]:
            names = self.later[pull].pop(0)
            number = self.start("rows", names)
            self.pulls.update({(pull, name): number for name in names})


def timeline(
    graph: WorkerGraph, variables: Mapping[str, Variable], strategy: Strategy
) -> tuple[Item, ...]:
    """The timeline of one worker's graph, as the runtime will run it.

    Args:
        graph: rewritten.
        variables: as measured in the first batch.
        strategy: that it was rewritten for.
    """
    touched = {
        variable.shape: variable.sparsity or 0.0
        for name, variable in variables.items()
        if facts(strategy.variables[name]).sparse
    }
    nodes = list(graph.step.graph.nodes)
    places = [node for node in nodes if node.op == "placeholder"]
    specs = {n.name: spec for n, spec in zip(places, graph.resources, strict=False)}
    counts = efforts(graph.step.graph)
    updates = [_all_computed(late.graph, touched) for late in graph.late]
    reading = _Reading(specs, variables, strategy, updates)
    for node in nodes:
        if node.op != "call_function":
            continue
        reader = _READERS.get(node.target)
        if reader is not None:
            reader(reading, node, specs[node.args[0].name])
        else:
            reading.items.append(_computed(node, counts.get(node, 0), touched))
    return merged(reading.items)


def computation_alone(step: StepGraph, variables: Mapping[str, Variable]) -> Computed:
    """What one device computes in a step as it was captured, all of it together.

    Args:
        step: before it is rewritten.
        variables: as measured in the first batch.
    """
    touched = {v.shape: v.sparsity or 0.0 for v in variables.values() if v.sparse}
    (whole,) = merged([Computed(0, 0, 0), *_all_computed(step.graph, touched)])
    assert isinstance(whole, Computed)
    return whole


def _all_computed(graph: Graph, touched: Mapping[tuple[int, ...], float]) -> list[Computed]:
    """Of a graph in which nothing is exchanged, by operation."""
    counts = efforts(graph)
    return [
        _computed(node, counts.get(node, 0), touched)
        for node in graph.nodes
        if node.op == "call_function"
    ]


def _computed(node: Node, count: int, touched: Mapping[tuple[int, ...], float]) -> Computed:
    if node.target is update_by_product:
        shards: Any = node.args[2]
        return Computed(0, 2 * sum(_bytes(shard, touched) for shard in shards), 1)
    if not isinstance(node.target, torch._ops.OpOverload) or is_view(node):
        return Computed(0, 0, 0)
    if computes_much(node):
        return Computed(count, 0, 1)
    sizes = [_bytes(value, touched) for value in (*node.all_input_nodes, node)]
    return Computed(count, sum(sizes), 1)


def _bytes(node: Node, touched: Mapping[tuple[int, ...], float]) -> int:
    """Of a tensor as it was captured; where it is a table, only of the rows that are touched."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return 0
    sizes = sizes_of(value)
    return round(touched.get(sizes, 1.0) * math.prod(sizes) * value.element_size())


def _times(spec: Any) -> int:
    return TIMES_BY_HOST if isinstance(spec, RowsSpec) and spec.by_host else 1


def _pull_rows(reading: _Reading, node: Node, spec: Any) -> None:
    names = [table.name for table in spec.tables]
    times = _times(spec)
    reading.work(spec.tables, ASKING, 0, 1, times=times)
    reading.exchange("ids", names)
    reading.work(spec.tables, SERVING, 2, 1, 1, times=times)
    messages: Any = node.args[3]
    reading.later[node] = [tuple(names[t] for t in tables) for tables in messages]
    reading.next_rows(node)


def _pulled_rows(reading: _Reading, node: Node, spec: Any) -> None:
    handle: Any = node.args[1]
    pull, name = handle.args[0], spec.tables[node.args[2]].name
    while (pull, name) not in reading.pulls:
        reading.next_rows(pull)
    number = reading.pulls[pull, name]
    if number not in reading.arrived:
        reading.arrived.add(number)
        reading.items.append(Awaited(number))
        reading.next_rows(pull)


def _unique_rows(reading: _Reading, node: Node, spec: Any) -> None:
    reading.work(spec.tables, ASKING, 0, 1)
    reading.exchange("words", ())


def _push_rows(reading: _Reading, node: Node, spec: Any) -> None:
    tables: Any = node.args[2]
    names = [spec.tables[t].name for t in tables]
    reading.work([spec.tables[t] for t in tables], SENDING, 3, times=_times(spec))
    reading.numbers[node] = [reading.start("rows" if spec.sharded else "gathered", names)]


def _pull_bags(reading: _Reading, node: Node, spec: Any) -> None:
    names = [table.name for table in spec.tables]
    reading.work(spec.tables, ASKING, 0, 1, together=True)
    reading.exchange("ids", names)
    reading.work(spec.tables, SERVING, 2, 1, 1, together=True)
    reading.numbers[node] = [reading.start("rows", names)]


def _push_bags(reading: _Reading, node: Node, spec: Any) -> None:
    features: Any = node.args[2]
    names = dict.fromkeys(spec.tables[spec.features[f].table].name for f in features)
    reading.work([spec.tables[spec.features[f].table] for f in features], SENDING, 3, together=True)
    reading.numbers[node] = [reading.start("rows", list(names))]


def _receive(reading: _Reading, node: Node, spec: Any) -> None:
    started: Any = node.args[1]
    reading.items += [Awaited(number) for number in reading.numbers[started]]
    copies, rows = 1, isinstance(spec, RowsSpec)
    if rows and not spec.sharded:
        copies = reading.strategy.replicas  # the rows of all workers come, and are sorted then
    work = (RECEIVING, 3 * copies, copies - 1)
    reading.work(spec.tables, *work, together=not rows, times=_times(spec))


def _put_gradient(reading: _Reading, node: Node, spec: Any) -> None:
    resource: Any = node.args[0]
    index: Any = node.args[1]
    entry = spec.entries[index]
    kind = facts(reading.strategy.variables[entry.name]).messages[0]
    late = reading.late.get((resource.name, entry.bucket))
    piece: Any = node.args[3] if len(node.args) > 3 else 0
    turn = (spec.phase, spec.turns[entry.bucket] + piece) if spec.turns else None
    if entry.pieces > 1:
        _send(reading, resource, kind, [entry.name], late, turn, 1 / entry.pieces)
        return
    if resource not in reading.full:
        reading.full[resource] = Counter(e.bucket for e in spec.entries)
    names = reading.put.setdefault((resource, entry.bucket), [])
    names.append(entry.name)
    if len(names) == reading.full[resource][entry.bucket]:
        _send(reading, resource, kind, names, late, turn)


def _send(
    reading: _Reading,
    resource: Node,
    kind: Any,
    names: Sequence[str],
    late: list[int] | None,
    turn: tuple[int, int] | None,
    share: float = 1.0,
) -> None:
    if late is None:
        number = reading.next_number()
        reading.numbers.setdefault(resource, []).append(number)
    else:
        number = late.pop(0)
    reading.in_turn(turn, lambda: reading.start(kind, names, share, number))


def _settle(reading: _Reading, node: Node, spec: Any) -> None:
    """Wait for what the step before sent, under the numbers that this step's will have."""
    update: Any = node.args[1]
    for key in spec.messages[update]:
        buckets: Any = reading.resources[key[0]]
        pieces = max(entry.pieces for entry in buckets.entries if entry.bucket == key[1])
        reading.late[key] = [reading.next_number() for _ in range(pieces)]
        reading.items += [Awaited(number) for number in reading.late[key]]
    reading.items += reading.updates[update]


def _wait_gradients(reading: _Reading, node: Node, spec: Any) -> None:
    resource: Any = node.args[0]
    reading.items += [Awaited(number) for number in reading.numbers.pop(resource, [])]
    if spec.owners:  # which add up what all workers sent
        reading.copied([entry.name for entry in spec.entries], ADDED)


def _pull_values(reading: _Reading, node: Node, spec: Any) -> None:
    in_place = spec.ring is not None
    reading.copied(spec.names, 0 if in_place else PACKED)
    reading.exchange("owned", spec.names)
    reading.copied(spec.names, 0 if in_place else UNPACKED)


def _combine(reading: _Reading, node: Node, spec: Any) -> None:
    reading.exchange("words", ())


def _start(reading: _Reading, node: Node, spec: Any) -> None:
    resource: Any = node.args[0]
    number: Any = node.args[1]
    message = reading.own[resource, number] = reading.next_number()

    def begin() -> None:
        reading.computed(0, spec.packed(number, reading.strategy.replicas))
        kind, names = spec.message(number)
        reading.start(kind, names, number=message)

    waits = isinstance(spec, FactorsSpec) and spec.turns
    reading.in_turn((spec.phase, spec.turns[number + 1]) if waits else None, begin)


def _finish(reading: _Reading, node: Node, spec: Any) -> None:
    resource: Any = node.args[0]
    number: Any = node.args[1]
    started = reading.own.pop((resource, number), None)
    if started is None:
        reading.exchange(*spec.message(number))
    else:
        reading.items.append(Awaited(started))
    workers = reading.strategy.replicas
    reading.computed(spec.operations(number, workers), spec.passed(number, workers))


_READERS: dict[Any, Callable[[_Reading, Node, Any], None]] = {
    ops.pull_rows: _pull_rows,
    ops.pulled_rows: _pulled_rows,
    ops.unique_rows: _unique_rows,
    ops.push_rows: _push_rows,
    ops.receive_rows: _receive,
    ops.pull_bags: _pull_bags,
    ops.pulled_bags: _receive,
    ops.push_bags: _push_bags,
    ops.receive_bags: _receive,
    ops.put_gradient: _put_gradient,
    ops.wait_gradients: _wait_gradients,
    ops.settle: _settle,
    ops.pull_values: _pull_values,
    ops.combine: _combine,
    ops.start: _start,
    ops.finish: _finish,
}
