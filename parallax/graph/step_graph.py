"""The captured step: one graph over lifted state, and what its inputs and outputs are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from parallax.errors import SourceLine
from parallax.graph.common.guards import ScalarGuard
from parallax.graph.common.interface import GraphInput, GraphOutput, HostCall, Written
from parallax.graph.common.recording import Act
from parallax.graph.common.sizes import BatchSizes
from parallax.graph.objects.draws import Draw
from parallax.graph.objects.sites import Site, Source
from parallax.graph.symbols.assertions import Found
from parallax.graph.symbols.guesses import Decisions


class GradientPlace(NamedTuple):
    """Where a step has a gradient.

    Args:
        name: of the variable.
        number: of the backward pass.
        form: it is ``whole``, of ``rows`` that were looked up, or a ``sparse`` tensor of these;
            ``late`` where ids follow from more than the batch.
        read: of tables, where in the graph they are read first.
        anew: it had none before this pass.
    """

    name: str
    number: int
    form: str
    read: int = 0
    anew: bool = True


Gradients = Sequence[GradientPlace]
"""In the order of the variables' first ones."""


class _Unwritten(torch.fx.GraphModule):
    """A graph of which no Python code is written."""

    def recompile(self) -> Any:
        return None


@dataclass(frozen=True)
class _Named:
    """The placeholders of state leaves by name, of a graph with these inputs."""

    graph: torch.fx.Graph
    inputs: tuple[GraphInput, ...]
    nodes: dict[str, torch.fx.Node]


@dataclass
class StepGraph:
    """One captured step. The graph is the one mutable thing; each pass owns it while it runs."""

    graph_module: torch.fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    return_spec: pytree.TreeSpec
    return_constants: tuple[Any, ...]
    """Flat returned values; those that the graph computes are ``COMPUTED``."""
    new_leaves: dict[str, Callable[[Any], None]]
    """Where a state leaf that the step creates or rebinds is put, by leaf name."""
    created: frozenset[str] = frozenset()
    """Those leaves that were not there before."""
    constants: dict[str, Any] = field(default_factory=dict)
    """New values of state leaves that do not depend on any input (a counter's first value)."""
    calls: tuple[HostCall, ...] = ()
    guards: tuple[ScalarGuard, ...] = ()
    draws: tuple[Draw, ...] = ()
    """Random numbers that are inputs, in the order in which they are drawn."""
    outside: Mapping[str, Source] = field(default_factory=dict)
    """Where numbers are read and left that the step takes from elsewhere, by the inputs' names."""
    left: Mapping[str, float] = field(default_factory=dict)
    """Of these, the numbers that do not depend on any input."""
    writes: Sequence[Written] = ()
    places: Sequence[Site] = ()
    """Where the step sets values that follow from what the graph is valid for, which includes what
    is there before."""
    sizes: BatchSizes | None = None
    """What is known of sizes that may vary; None if the graph is for one batch shape only."""
    rows: tuple[int | torch.SymInt, ...] = ()
    """How many rows the batch's tensors have, also those that the graph has no use for; without
    parts that have the same values on all workers."""
    common: frozenset[int] = frozenset()
    """Places of the batch that have the same values on all workers, such as weights of classes."""
    gradients: Gradients = ()
    acts: Sequence[Act] = ()
    """Its backward passes, and steps of optimizers and schedulers, in their order."""
    updates: Mapping[str, int] = field(default_factory=dict)
    """By piece of the workers' common state that it changes, a hash of how."""
    kept: Sequence[str] = ()
    """What else it leaves for the next one, of this worker's own."""
    is_lent: bool = False
    """Some of them are zero, for other workers' batches have them."""
    decisions: Decisions = field(default_factory=dict)
    """What branches are taken to be that go on both ways; the graph sees whether they are."""
    looked: list[Found] = field(default_factory=list)
    """What it has seen in the present step."""
    differentiated: SourceLine | None = None
    """Where gradients of parameters are computed that are differentiated further."""
    notes: list[str] = field(default_factory=list)
    _named: _Named | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def graph(self) -> torch.fx.Graph:
        return self.graph_module.graph

    def given(self) -> list[torch.fx.Node]:
        """The placeholders of what each worker's batch brings: not of parts that have the same
        values on all workers."""
        inputs = zip(self.own_placeholders(), self.inputs, strict=True)
        return [n for n, item in inputs if item.kind == "batch" and item.index not in self.common]

    @property
    def decides_by_batch(self) -> bool:
        """Whether other batches may have other graphs."""
        return any(guard.of_batch for guard in self.guards)

    def copy(self, runs: bool = True) -> StepGraph:
        """The same step with a graph of its own, for passes that use it up.

        Args:
            runs: it can be run; else no code is written for it, which takes as long as to copy it.
        """
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        last, original = (next(iter(reversed(one.nodes))) for one in (graph, self.graph))
        last.meta.update(original.meta)
        kind = torch.fx.GraphModule if runs else _Unwritten
        return replace(self, graph_module=kind(self.graph_module, graph))

    def placeholder(self, name: str) -> torch.fx.Node | None:
        """The placeholder of a state leaf, None if the step does not use it."""
        known = self._named
        if known is None or known.inputs is not self.inputs or known.graph is not self.graph:
            known = self._named = self._name_placeholders()
        return known.nodes.get(name)

    def placeholders(self) -> list[torch.fx.Node]:
        """All inputs of the graph."""
        return list(self.graph.find_nodes(op="placeholder"))

    def own_placeholders(self) -> list[torch.fx.Node]:
        """The nodes of ``inputs``, one each."""
        nodes = self.placeholders()
        return nodes[len(nodes) - len(self.inputs) :]  # the runtime's objects come first

    def _name_placeholders(self) -> _Named:
        named = {
            item.name: node
            for item, node in zip(self.inputs, self.own_placeholders(), strict=True)
            if item.kind in ("state", "number")
        }
        return _Named(self.graph, self.inputs, named)
