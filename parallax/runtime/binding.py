"""A worker's graph made ready to run: computed the fastest way, with the runtime it asks for."""

from __future__ import annotations

from parallax.ops.specs import BagsSpec, LateSpec, RowsSpec
from parallax.rewrite.context import WorkerGraph
from parallax.runtime.comm.texts import digest
from parallax.runtime.compute.images import use_faster_layout
from parallax.runtime.compute.patches import use_patches
from parallax.runtime.compute.products import use_faster_products
from parallax.runtime.compute.softmaxes import write_softmaxes_in_place
from parallax.runtime.compute.updates import group_updates
from parallax.runtime.exchange.resources import ResourcePool
from parallax.runtime.late import LateUpdates
from parallax.runtime.program import Program
from parallax.runtime.state.state_table import StateTable


def bind(
    rewritten: WorkerGraph, state: StateTable, pool: ResourcePool, description: str
) -> Program:
    """The program of a rewritten graph, which is used up.

    Args:
        rewritten: this worker's graph.
        state: what it reads and writes.
        pool: objects of the runtime, which programs share.
        description: of everything else that all workers must be running alike.
    """
    graph = rewritten.step.graph
    changed = write_softmaxes_in_place(graph) + use_patches(graph)
    changed += use_faster_products(graph) + use_faster_layout(graph)
    if changed + group_updates(graph):
        rewritten.step.graph_module.recompile()
    for update in rewritten.late:
        if group_updates(update.graph):
            update.recompile()
    resources = [
        LateUpdates(rewritten.late) if isinstance(spec, LateSpec) else pool.get(index, spec)
        for index, spec in enumerate(rewritten.resources)
    ]
    # What waits for the next step is each worker's own affair: they hold other parts of the state.
    shared = [spec for spec in rewritten.resources if not isinstance(spec, LateSpec)]
    value = _hashed(f"{description}\n{shared}")
    acts = [act for act in rewritten.step.acts if act.updates]
    return Program(
        *(rewritten.step, state, resources, value, rewritten.resources),
        order=_hashed(f"{_calls(rewritten)}\n{rewritten.step.updates}\n{acts}"),
        kept=_hashed(str(rewritten.step.kept)),
    )


def _hashed(text: str) -> int:
    """A hash that is equal on all workers, and fits into an integer of a message."""
    return int(digest(text), 16) & 0x7FFFFFFFFFFFFFFF


def _calls(rewritten: WorkerGraph) -> list[tuple[str, int]]:
    """In which order rows are exchanged: messages of one group, whose lengths do not tell them
    apart."""
    inputs = rewritten.step.placeholders()
    pairs = zip(inputs, rewritten.resources, strict=False)
    places = {
        node: place
        for place, (node, spec) in enumerate(pairs)
        if isinstance(spec, RowsSpec | BagsSpec)
    }
    return [
        (node.target.__name__, places[node.args[0]])
        for node in rewritten.step.graph.nodes
        if node.op == "call_function" and node.args and node.args[0] in places
    ]
