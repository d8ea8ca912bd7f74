"""What is known of each trainable variable: how it is read, what follows it, how sparse it is."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch.fx import Node

from parallax.errors import UnsupportedError
from parallax.graph.analysis.compute import operations
from parallax.graph.analysis.factors import products_of
from parallax.graph.analysis.layout import Component, Components
from parallax.graph.analysis.lookups import (
    Lookup,
    RowGradient,
    bag_of,
    gradient_ids,
    is_plain_bag,
    lookup_of,
    padding_id,
    row_gradient,
    scales_by_frequency,
)
from parallax.graph.analysis.reads import RowsRead, rows_read
from parallax.graph.analysis.stages import Stage, stages
from parallax.graph.common.sizes import size_of
from parallax.graph.objects.checks import max_norm_error
from parallax.graph.objects.state import Leaf
from parallax.graph.step_graph import StepGraph
from parallax.ops import marks

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Variable:
    """A trainable parameter with its slots and shadows.

    ``lookups`` name the row-reading operations; it is sparse when all reads are lookups.
    ``factors`` are the (output gradient, input) pairs when the gradient is a sum of products of
    them; ``factor_rows`` the rows of all these pairs (samples of one worker's batch),
    ``factor_widths`` the numbers in a row of either, and ``factor_operations`` what multiplying
    them takes.
    ``sparsity`` is the measured share of rows touched in a step, None until it is measured.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    lookups: tuple[str, ...] = ()
    factors: tuple[tuple[str, str], ...] = ()
    factor_rows: int = 0
    factor_widths: tuple[int, int] = (0, 0)
    factor_operations: int = 0
    gradient: str | None = None
    slots: tuple[str, ...] = ()
    shadows: tuple[str, ...] = ()
    sparsity: float | None = None
    ids_per_step: float = 0.0
    """Ids that one worker looks up in a step, once measured."""
    bags_per_step: float = 0.0
    """Bags that they are in, if it is read in bags."""
    host_rows: float | None = None
    """Distinct rows that the workers of one host look up together in a step, once measured."""
    travelled: tuple[float, float] | None = None
    """Rows (or sums of rows) and numbers that an exchange of bags sent for one worker's step, once
    measured, those included that stayed on the worker."""
    read: RowsRead = field(default_factory=RowsRead)
    """What all lookups read of its rows, if it is sparse."""
    aliases: tuple[str, ...] = ()
    sparse: bool = False
    dense_reason: str = ""
    """Why a variable that is looked up is not sparse."""
    shard_obstacle: str = ""
    """Why its update cannot be sharded."""
    joined: tuple[str, ...] = ()
    """Variables whose rows its update is combined with: they are sharded alike, or none is."""
    elementwise: bool = False
    """Its update treats every element alike: it can be partitioned along any axis."""
    bags: bool = False
    """It is sparse, and all reads sum or average the rows of bags."""
    lazy: bool = False
    """Its gradient is a sparse tensor: only touched rows are updated (``sparse=True``)."""

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def factor_elements(self) -> int:
        """Numbers in both factors of one worker's gradient."""
        return self.factor_rows * sum(self.factor_widths)

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1


@dataclass
class Analysis:
    """The variables of one captured step and the parts of its graph that belong to them."""

    step: StepGraph
    variables: dict[str, Variable]
    components: dict[str, Component]
    lookups: dict[str, list[Lookup]]
    gradients: dict[str, list[Node]]
    stages: dict[Node, Stage]

    @functools.cached_property
    def operations(self) -> dict[Node, int]:
        """What nodes of the captured graph compute."""
        return operations(self.step.graph)

    def row_gradients(self, name: str) -> list[RowGradient]:
        """How each gradient of a sparse variable is made of rows."""
        result = []
        for mark in self.gradients[name]:
            source = mark.args[0]
            assert isinstance(source, Node)
            rows = row_gradient(source, torch.Size(self.variables[name].shape))
            assert rows is not None
            result.append(rows)
        return result


def analyze(
    step: StepGraph,
    leaves: Mapping[str, Leaf],
    aliases: Mapping[str, list[str]],
) -> Analysis:
    """Analyse a captured step.

    Args:
        step: the captured step.
        leaves: the state by name.
        aliases: further names of tied parameters.

    Raises:
        UnsupportedError: a lookup renormalises its table or scales gradients by frequency.
    """
    slots = {
        leaf.name: leaf.variable
        for leaf in leaves.values()
        if leaf.kind == "slot" and leaf.variable is not None
    }
    gradients: dict[str, list[Node]] = {}
    for node in step.graph.nodes:
        if node.target is marks.GRADIENT:
            gradients.setdefault(node.args[1], []).append(node)
        elif node.target is aten.embedding_renorm_.default:
            raise max_norm_error("a lookup of the step", node)
    components: dict[str, Component] = {}
    lookups: dict[str, list[Lookup]] = {}
    parameters = [
        leaf
        for leaf in leaves.values()
        if leaf.kind == "parameter" and (leaf.value.requires_grad or leaf.name in gradients)
    ]
    together = Components(step, slots, gradients)
    slots_of: dict[str, list[str]] = {}
    for slot, owner in slots.items():
        slots_of.setdefault(owner, []).append(slot)
    for leaf in parameters:
        table = step.placeholder(leaf.name)
        users = [] if table is None else list(table.users)
        reads = [lookup_of(user, table, leaf.name) for user in users if table is not None]
        lookups[leaf.name] = [lookup for lookup in reads if lookup is not None]
        components[leaf.name] = (
            together.of(leaf.name) if leaf.name in gradients else Component({leaf.name})
        )
    when = stages(step, lookups, components)
    variables: dict[str, Variable] = {}
    for leaf in parameters:
        name = leaf.name
        component, found = components[name], lookups[name]
        own = tuple(slots_of.get(name, ()))
        found_products = [products_of(mark, step.sizes) for mark in gradients.get(name, [])]
        products = list(chain(*found_products)) if all(found_products) else []
        variable = Variable(
            name=name,
            shape=tuple(leaf.value.shape),
            dtype=leaf.value.dtype,
            trainable=name in gradients,
            lookups=tuple(lookup.node.name for lookup in found),
            factors=tuple((u.name, v.name) for (u, _), (v, _) in (p.factors for p in products)),
            factor_rows=size_of(sum(product.size for product in products)) or 0,
            factor_widths=products[0].widths if products else (0, 0),
            factor_operations=sum(product.operations for product in products),
            gradient=gradients[name][-1].name if name in gradients else None,
            slots=own,
            shadows=tuple(
                s
                for s in component.states
                if s not in own and s not in variables and s not in component.variables
            ),
            aliases=tuple(aliases.get(name, ())),
            shard_obstacle=component.obstacle,
            joined=tuple(sorted(component.variables - {name})),
            elementwise=component.elementwise,
            lazy=any(n.meta["val"].layout is torch.sparse_coo for n in gradients.get(name, ())),
        )
        variables[name] = _sparse_or_not(variable, component, found, gradients.get(name, []), when)
    return Analysis(step, variables, components, lookups, gradients, when)


def _sparse_or_not(
    variable: Variable,
    component: Component,
    lookups: list[Lookup],
    gradients: list[Node],
    when: Mapping[Node, Stage],
) -> Variable:
    if not lookups or not gradients:
        return variable
    _check_supported(variable.name, lookups, component)
    ids = {lookup.ids for lookup in lookups}
    reason = ""
    if component.whole_reads:
        reads = sorted(
            {str(node.target).removesuffix(".default") for node in component.whole_reads}
        )
        reason = f"it is also read as a whole by {', '.join(reads)}"
    sums = [row_gradient(mark.args[0], torch.Size(variable.shape)) for mark in gradients]
    for rows in sums:
        if rows is None:
            reason = reason or "its gradient is not a sum of looked-up rows"
        elif any(origin(gradient_ids(term), ids) is None for term in rows.terms):
            reason = reason or "its gradient is scattered by ids that no lookup used"
        elif len({when[n] for term in rows.terms for n in _readers(term, lookups)}) > 1:
            reason = reason or "ids of one lookup depend on the rows of another"
        elif len({padding_id(term) for term in rows.terms}) > 1:
            reason = reason or "its lookups leave out different padding rows"
    terms = [term for rows in sums if rows is not None for term in rows.terms]
    bags = all(is_plain_bag(lookup.node) for lookup in lookups)
    return replace(
        variable,
        sparse=not reason,
        dense_reason=reason,
        read=RowsRead() if reason else rows_read(lookups, terms, variable.shape[1:]),
        bags=not reason and bags and all(bag_of(term) is not None for term in terms),
    )


def _readers(term: Node, lookups: list[Lookup]) -> list[Node]:
    """The lookups that read by the ids which a term of the gradient scatters by."""
    ids = origin(gradient_ids(term), {lookup.ids for lookup in lookups})
    return [lookup.node for lookup in lookups if lookup.ids is ids]


def is_empty(ids: Node) -> bool:
    """Whether these are the ids of a batch without rows, for which autograd makes new ones."""
    return ids.op == "call_function" and ids.meta["val"].numel() == 0


def origin(node: Node, ids: set[Node]) -> Node | None:
    """The lookup ids that ``node`` reshapes, None if it is something else."""
    if is_empty(node):
        return next(iter(ids), None)  # no row of any lookup: a batch without rows
    current = node
    while current not in ids:
        if current.op != "call_function" or not current.args:
            return None
        source = current.args[0]
        if not isinstance(source, Node):
            return None
        current = source
    return current


def _check_supported(name: str, lookups: list[Lookup], component: Component) -> None:
    for lookup in lookups:
        if scales_by_frequency(lookup.node):
            raise UnsupportedError(
                f"The table {name!r} scales gradients by frequency (scale_grad_by_freq), which "
                "counts ids over the whole batch and differs on every worker.",
                hint="use scale_grad_by_freq=False.",
            )
