"""When rows can be fetched: lookups that may share one exchange have the same stage.

A lookup whose ids follow from another lookup's result comes later; so does one that follows a
write to its own table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Node

from parallax.graph.analysis.layout import Component
from parallax.graph.analysis.lookups import Lookup
from parallax.graph.common.operations import is_write
from parallax.graph.step_graph import StepGraph

Stage = tuple[int, int]


def stages(
    step: StepGraph,
    lookups: Mapping[str, Sequence[Lookup]],
    components: Mapping[str, Component],
) -> dict[Node, Stage]:
    """Every lookup's stage by its node: (how deep its ids depend on lookups, writes before)."""
    by_node = {lookup.node: lookup for found in lookups.values() for lookup in found}
    depth: dict[Node, int] = {}
    writes: dict[Node, list[str]] = {}
    for name, component in components.items():
        for node in _writes(component):
            writes.setdefault(node, []).append(name)
    written: dict[str, int] = {}
    result: dict[Node, Stage] = {}
    for node in step.graph.nodes:
        level = max((depth[source] for source in node.all_input_nodes), default=0)
        for name in writes.get(node, ()):
            written[name] = written.get(name, 0) + 1
        lookup = by_node.get(node)
        if lookup is not None:
            level = depth[lookup.ids]
            result[node] = (level, written.get(lookup.variable, 0))
            level = max(level + 1, max(depth[source] for source in node.all_input_nodes))
        depth[node] = level
    return result


def _writes(component: Component) -> set[Node]:
    """In-place operations on a variable of the component."""
    return {node for node in component.members if is_write(node)}
