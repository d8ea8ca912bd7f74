"""How a batch reads tables: ids, distinct rows and bags, found by computing the ids alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Interpreter, Node

from parallax.graph.analysis.lookups import Lookup
from parallax.graph.common.operations import ancestors
from parallax.graph.step_graph import StepGraph


@dataclass(frozen=True)
class Access:
    """How one worker reads a table in one step.

    Args:
        ids: how many it looks up.
        rows: the distinct rows among them, sorted.
        bags: how many bags they are in; ids if none.
    """

    ids: int
    rows: torch.Tensor
    bags: int


def measure(
    step: StepGraph,
    lookups: Mapping[str, Sequence[Lookup]],
    batch: Sequence[Any],
    state: Mapping[str, Any],
) -> dict[str, Access]:
    """Count what a batch looks up, before the first step runs.

    Args:
        step: the captured step.
        lookups: of each variable.
        batch: the flat batch.
        state: tensors and numbers by leaf name; without storage where there is none yet.

    Returns:
        By variable; those whose ids depend on rows of a table, or on state without storage, are
        left out. Random ids are drawn without disturbing the step's random numbers.
    """
    inputs: dict[Node, Any] = {}
    for item, node in zip(step.inputs, step.placeholders(), strict=True):
        inputs[node] = batch[item.index] if item.kind == "batch" else state.get(item.name)
    tables = {lookup.node for found in lookups.values() for lookup in found}
    devices = {v.device for v in inputs.values() if isinstance(v, torch.Tensor)}
    interpreter = _Values(step, inputs)
    result: dict[str, Access] = {}
    with torch.random.fork_rng([d for d in devices if d.type == "cuda"]), torch.no_grad():
        for name, found in lookups.items():
            ids: list[torch.Tensor] = []
            bags = 0
            for lookup in found:
                if lookup.is_again:
                    continue
                needed = [lookup.ids]
                if lookup.bag:
                    assert isinstance(lookup.node.args[2], Node)
                    needed.append(lookup.node.args[2])
                values = [interpreter.value(node, tables) for node in needed]
                if any(value is None for value in values):
                    break
                ids.append(values[0].reshape(-1).long())
                bags += values[-1].numel()
            else:
                if ids:
                    flat = torch.cat(ids)
                    result[name] = Access(flat.numel(), torch.unique(flat), bags)
    return result


class _Values:
    """Computes single nodes of a graph and remembers them."""

    def __init__(self, step: StepGraph, inputs: Mapping[Node, Any]) -> None:
        self._interpreter = Interpreter(step.graph_module)
        self._known: dict[Node, Any] = dict(inputs)
        self._order = {node: index for index, node in enumerate(step.graph.nodes)}

    def value(self, node: Node, tables: set[Node]) -> Any:
        """The value of a node; None if it needs the result of a lookup or state that is absent."""
        needed = ancestors([node])
        if needed & tables:
            return None
        environment = self._interpreter.env
        for item in sorted(needed, key=self._order.__getitem__):
            if item not in self._known:
                sources = item.all_input_nodes
                if any(self._known.get(source) is None for source in sources):
                    return None
                environment.update({source: self._known[source] for source in sources})
                self._known[item] = self._interpreter.run_node(item)
            value = self._known[item]
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                self._known[item] = None
        return self._known[node]
