"""What synchronisers share that send gradients which are products as their factors.

The products are of matrices or by a convolution; for the weight of the latter the factors are the
images that went in and the gradients of those that came out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from parallax.graph.analysis.compute import computes_much
from parallax.graph.analysis.factors import Product, products_of
from parallax.graph.analysis.variables import Variable
from parallax.graph.common.aliases import base_of, writes_to
from parallax.ops.factors import SIZES, WHOLE, WORDS, FactorEntry, FactorsSpec, shapes_of_factors
from parallax.ops.resources import finish, start
from parallax.rewrite.blocks import can_multiply_in_blocks
from parallax.rewrite.context import Phase, Rewriting
from parallax.rewrite.turns import in_order, message_of, take_turns, turns
from parallax.strategy.cost import factor_bytes
from parallax.strategy.registry import facts

aten: Any = torch.ops.aten

LEAST_BYTES = 1 << 20
"""From this size on, a matrix is worth not being written."""


def synchronize_factors(work: Rewriting) -> None:
    """Send factors instead of multiplying them; multiply what came where it is first used."""
    for phase_number, phase in enumerate(work.phases):
        for synchronizer in ("factors", "factor_push"):
            names = set(work.names_with(synchronizer))
            marks = [mark for mark in phase.marks if mark.args[1] in names]
            if marks:
                _phase(work, phase_number, synchronizer, marks)


def _phase(work: Rewriting, phase_number: int, synchronizer: str, marks: list[Node]) -> None:
    phase = work.phases[phase_number]
    order = work.order()
    products = {mark: products_of(mark, work.step.sizes) for mark in marks}
    known = {
        mark: max((p.node for p in products[mark]), key=order.__getitem__, default=mark)
        for mark in marks
    }
    waits = take_turns(work)
    marks = in_order(work, marks) if waits else sorted(marks, key=lambda m: order[known[m]])
    messages: dict[object, list[Node]] = {}
    for mark in marks:
        messages.setdefault(message_of(work, mark), []).append(mark)
    ordered = [mark for group in messages.values() for mark in group]
    numbers = {mark: n for n, group in enumerate(messages.values()) for mark in group}
    alone = not any(_in_buckets(work, mark) for mark in phase.marks)
    entries = tuple(_entry(work, mark, products[mark], numbers[mark]) for mark in ordered)
    multiplied = {mark: entry.multiplied for mark, entry in zip(ordered, entries, strict=True)}
    turn = turns(work, phase) if waits else {}
    own = (turn[synchronizer], *(turn[group[0]] for group in messages.values())) if waits else ()
    names = tuple(entry.name for entry in entries)
    resource = work.resource(FactorsSpec(names, entries, alone, phase_number, own), "factors")
    starts = [p.node for group in products.values() for p in group] + list(known.values())
    heavy = [next((node for node in order if computes_much(node)), starts[0])]
    with work.graph.inserting_before(min(starts + heavy, key=order.__getitem__)):
        sizes = [size for mark in ordered for size in _sizes(work, mark, products[mark])]
        work.call(start, resource, SIZES, sizes)
    if alone:
        with work.graph.inserting_before(phase.first_use):
            work.call(finish, resource, WORDS)
    for number, group in enumerate(messages.values()):
        last = max((known[mark] for mark in group), key=order.__getitem__)
        _send(work, resource, number, group, products, last)
        _receive(work, resource, number, group, products, order, phase, multiplied)


def _in_buckets(work: Rewriting, mark: Node) -> bool:
    """Whether the control words travel with a gradient."""
    one = facts(work.strategy.variables[str(mark.args[1])])
    return one.merges and not one.factors


def _entry(work: Rewriting, mark: Node, products: list[Product], message: int) -> FactorEntry:
    variable = work.analysis.variables[str(mark.args[1])]
    choice = work.strategy.variables[variable.name]
    owner = choice.owners[0] if choice.owners else None
    return FactorEntry(
        variable.name,
        variable.shape,
        variable.dtype,
        choice.average,
        message,
        products[0].settings if products else (),
        owner,
        multiplied=not (products and _is_left_to_update(work, mark)),
        operations=variable.factor_operations,
        size=int(factor_bytes(variable)),
    )


def _sizes(work: Rewriting, mark: Node, products: list[Product]) -> list[int | Node]:
    """What is told of a gradient's factors before they are sent."""
    fixed = shapes_of_factors(work.analysis.variables[str(mark.args[1])].shape)
    if not products:
        return [WHOLE] * sum(shape.count(None) for shape in fixed)
    found = []
    for known, shape in zip(fixed, products[0].shapes, strict=True):
        samples = sum(product.size for product in products)
        pairs = zip(known, (samples, *shape[1:]), strict=True)
        found += [work.size(size) for usual, size in pairs if usual is None]
    return found


def _is_left_to_update(work: Rewriting, mark: Node) -> bool:
    """Whether the update multiplies the factors itself: a large matrix is not written then."""
    variable = work.analysis.variables[str(mark.args[1])]
    one = facts(work.strategy.variables[variable.name])
    large = len(variable.shape) == 2 and variable.bytes >= LEAST_BYTES
    large &= variable.dtype.itemsize >= 4
    return large and not one.sharded and can_multiply_in_blocks(work, variable.name, mark)


def _send(
    work: Rewriting,
    resource: Node,
    number: int,
    marks: list[Node],
    products: dict[Node, list[Product]],
    last: Node,
) -> None:
    """Start a message where the last of its factors is known.

    A gradient that is a product no longer (in a graph that was captured later) travels whole.
    """
    pairs = []
    for mark in marks:
        if not products[mark]:
            pairs.append([mark.args[0]])
            continue
        factors = [[_factor(work, product, i) for product in products[mark]] for i in (0, 1)]
        with work.graph.inserting_before(last):
            pairs.append([f[0] if len(f) == 1 else _stack(work, f) for f in factors])
    with work.graph.inserting_before(last):
        work.call(start, resource, number, pairs)


def _factor(work: Rewriting, product: Product, index: int) -> Node:
    """One factor [K, M] of a product, before the product: a copy if its memory is changed."""
    source, transposed = product.factors[index]
    value = source.meta["val"]
    with work.graph.inserting_before(product.node):
        if any(True for _ in writes_to(base_of(source))):
            source = work.call(aten.clone.default, source)
            source.meta["val"] = value
        if transposed:
            source = work.call(aten.t.default, source)
            source.meta["val"] = value.t()
    return source


def _stack(work: Rewriting, factors: list[Node]) -> Node:
    stacked = work.call(aten.cat.default, factors)
    stacked.meta["val"] = torch.cat([factor.meta["val"] for factor in factors])
    return stacked


def _receive(
    work: Rewriting,
    resource: Node,
    number: int,
    marks: list[Node],
    products: dict[Node, list[Product]],
    order: dict[Node, int],
    phase: Phase,
    multiplied: dict[Node, bool],
) -> None:
    users = [user for mark in marks for user in mark.users]
    first_use = min(users, key=order.__getitem__, default=phase.first_use)
    if phase.wait is not None and any(multiplied[mark] for mark in marks):
        # While buckets are under way there is time to multiply.
        first_use = phase.wait
    with work.graph.inserting_before(first_use):
        gradients = work.call(finish, resource, number)
        for index, mark in enumerate(marks):
            value = work.item(gradients, index)
            if not multiplied[mark]:
                name = str(mark.args[1])
                work.multiplied[name] = value
                work.analysis.components[name].members[value] = None
            value.meta.update(mark.meta)
            mark.replace_all_uses_with(value)
    for mark in marks:
        source = mark.args[0]
        assert isinstance(source, Node)
        work.graph.erase_node(mark)
        if not source.users and source.op == "call_function":
            work.graph.erase_node(source)
        for product in products[mark]:
            product.drop()


def all_products(variable: Variable, workers: int) -> float:
    """The products of all other workers' factors."""
    return (workers - 1) * variable.factor_operations
