"""Which gradients and rows travel together, and what is cut: decided once, from the first graph.

A message costs about as much as a little computation does. So what is known at about the same time
travels together, and what has computation after it leaves at once, to travel meanwhile. Later
graphs of the same step, for batches of other sizes, follow what was decided here: all workers must
send the same messages, whatever each computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch.fx import Node

from parallax.graph.analysis.compute import split_by_compute, work_between
from parallax.graph.analysis.variables import Analysis, Variable
from parallax.graph.common.aliases import known_after
from parallax.strategy.cost import factor_bytes
from parallax.strategy.data import Strategy, VariableStrategy
from parallax.strategy.message_sizes import MessageSizes
from parallax.strategy.registry import facts, names_where

aten: Any = torch.ops.aten

USUAL = MessageSizes()


def merge_messages(strategy: Strategy, analysis: Analysis, sizes: MessageSizes = USUAL) -> Strategy:
    """The strategy with its groups, pieces and pull groups set, for the order of this graph."""
    chosen = dict(strategy.variables)
    for name, group in _pulls(strategy, analysis, sizes).items():
        chosen[name] = msgspec.structs.replace(chosen[name], pull_group=group)
    numbers: dict[object, int] = {}
    for name, key in _pushes(strategy, analysis, sizes).items():
        group = numbers.setdefault(key, len(numbers) + 1)
        chosen[name] = msgspec.structs.replace(chosen[name], group=group)
    found = {
        name: ((synchronizer, number), pieces)
        for synchronizer in names_where(lambda one: one.merges)
        for name, (number, pieces) in _dense(strategy, analysis, sizes, synchronizer).items()
    }
    place = {node: index for index, node in enumerate(analysis.step.graph.nodes)}
    known = {n: min(place[known_after(mark)] for mark in analysis.gradients[n]) for n in found}
    full: dict[object, int] = {}
    for name in sorted(found, key=known.__getitem__):
        full[found[name][0]] = known[name]
    # Numbered in the order in which they are full: so they start.
    for name, (key, pieces) in sorted(found.items(), key=lambda item: full[item[1][0]]):
        group = numbers.setdefault(key, len(numbers) + 1)
        chosen[name] = msgspec.structs.replace(chosen[name], group=group, pieces=pieces)
    return msgspec.structs.replace(strategy, variables=chosen)


def dense_bytes(strategy: Strategy, variables: Mapping[str, Variable]) -> int:
    """What a worker sends of gradients that are merged in buckets, once each."""
    return sum(
        _dense_bytes(variables[name], choice)
        for name, choice in strategy.variables.items()
        if facts(choice).merges
    )


def _dense_bytes(variable: Variable, choice: VariableStrategy) -> int:
    return int(factor_bytes(variable)) if facts(choice).factors else variable.bytes


def _pulls(strategy: Strategy, analysis: Analysis, sizes: MessageSizes) -> dict[str, int]:
    """Tables in the order in which they are read, together unless there is work in between."""
    order = list(analysis.step.graph.nodes)
    place = {node: index for index, node in enumerate(order)}
    first: dict[Node, list[str]] = {}
    for name, choice in strategy.variables.items():
        reads: list[Node] = []
        if choice.synchronizer == "rows":
            reads = [lookup.node for lookup in analysis.lookups.get(name, ())]
        elif facts(choice).sharded and not facts(choice).whole and not facts(choice).sparse:
            reads = analysis.components[name].whole_reads
        if reads:
            first.setdefault(min(reads, key=place.__getitem__), []).append(name)
    groups = split_by_compute(first, order, analysis.operations, sizes.operations)
    return {
        name: number
        for number, nodes in enumerate(groups)
        for node in nodes
        for name in first[node]
    }


def _pushes(strategy: Strategy, analysis: Analysis, sizes: MessageSizes) -> dict[str, object]:
    """Gradients of rows, in the order in which backward makes them: equal keys travel together."""
    marks = {
        mark: name
        for name, found in analysis.gradients.items()
        if facts(strategy.variables[name]).sparse
        for mark in found
    }
    groups = split_by_compute(
        marks, analysis.step.graph.nodes, analysis.operations, sizes.operations
    )
    return {
        marks[node]: (number, _kind(strategy, analysis, marks[node]))
        for number, nodes in enumerate(groups)
        for node in nodes
    }


def _kind(strategy: Strategy, analysis: Analysis, name: str) -> object:
    """What is equal of gradients that travel together, whenever they are made."""
    choice = strategy.variables[name]
    encoded = (choice.encoder, tuple(sorted(choice.encoder_options.items())))
    how = (choice.synchronizer, choice.hierarchy, choice.reduction, choice.order, *encoded)
    return (analysis.variables[name].dtype, choice.average, *how)


def _dense(
    strategy: Strategy, analysis: Analysis, sizes: MessageSizes, synchronizer: str
) -> dict[str, tuple[int, int]]:
    """Group and pieces of each dense gradient."""
    order, counts = list(analysis.step.graph.nodes), analysis.operations
    place = {node: index for index, node in enumerate(order)}
    names = [n for n, c in strategy.variables.items() if c.synchronizer == synchronizer]
    marks = [mark for name in names for mark in analysis.gradients.get(name, ())]
    known = {mark: known_after(mark) for mark in marks}
    marks.sort(key=lambda mark: place[known[mark]])
    groups = split_by_compute([known[m] for m in marks], order, counts, sizes.operations)
    first_of_group = {group[0] for group in groups}
    result: dict[str, tuple[int, int]] = {}
    filled: dict[object, tuple[int, int]] = {}
    number = -1
    for mark in marks:
        name = _name(mark)
        variable, choice = analysis.variables[name], strategy.variables[name]
        pieces = choice.pieces
        if pieces == 1:
            pieces = _pieces(choice, variable, mark, known[mark], counts, sizes)
        if pieces > 1:
            number += 1
            result[name] = (number, pieces)
            continue
        if known[mark] in first_of_group:
            filled = {key: one for key, one in filled.items() if one[1] < sizes.overlapped}
        key = _kind(strategy, analysis, name)
        group, size = filled.get(key, (-1, sizes.most))
        own = _dense_bytes(variable, choice)
        if size and size + own > sizes.most:
            number += 1
            group, size = number, 0
        filled[key] = (group, size + own)
        result[name] = (group, 1)
    if marks and result[_name(marks[-1])][1] == 1:
        last = [mark for mark in marks if result[_name(mark)] == result[_name(marks[-1])]]
        names = [_name(mark) for mark in last]
        sent = [_dense_bytes(analysis.variables[n], strategy.variables[n]) for n in names]
        between = work_between([known[mark] for mark in last], order, counts)
        for name, count in zip(names, sizes.cuts(sent, between), strict=True):
            if count:
                result[name] = (number + count, 1)
    return result


def _name(mark: Node) -> str:
    return str(mark.args[1])


def is_own_product(mark: Node, known: Node) -> bool:
    """Whether a gradient is one matrix product that is used for nothing else."""
    return mark.args[0] is known and known.target is aten.mm.default and len(known.users) == 1


def _pieces(
    choice: VariableStrategy,
    variable: Variable,
    mark: Node,
    known: Node,
    counts: Mapping[Node, int],
    sizes: MessageSizes,
) -> int:
    """Into how many pieces to cut a product: as each is computed, those before it travel."""
    cut = facts(choice).pieces and choice.hierarchy == "flat" and choice.encoder == "none"
    if not cut or not is_own_product(mark, known):
        return 1
    most = min(counts.get(known, 0) // sizes.operations, variable.rows)
    return max(min(variable.bytes // sizes.overlapped, most), 1)
