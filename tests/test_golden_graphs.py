"""Golden prints: what each pass makes of a small step, for a person to review.

``PARALLAX_UPDATE_GOLDEN=1 pytest tests/test_golden_graphs.py`` writes them anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from strategies import built
from torch import nn

from parallax.config import RUN_OPTIONS
from parallax.graph.analysis.variables import Analysis, analyze
from parallax.graph.capture import capture
from parallax.graph.objects.discovery import discover
from parallax.graph.objects.state import Leaf, aliases, leaves
from parallax.graph.step_graph import StepGraph
from parallax.ops import marks
from parallax.rewrite.pipeline import passes, prepare, rewrite
from parallax.strategy.messages import merge_messages

GOLDEN = Path(__file__).parent / "golden"

# Decompositions differ between versions of torch; the prints are of the pinned one.
pinned = pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="golden prints are of torch 2.13"
)


def captured() -> Analysis:
    """A table, a bias that is expanded, clipping and Adagrad: one step of every kind of work."""
    return captured_with_state()[0]


def captured_with_state() -> tuple[Analysis, dict[str, Leaf]]:
    """The same, and the state that it was captured with."""
    torch.manual_seed(0)
    table = nn.Embedding(8, 2)
    out = nn.Linear(2, 1)
    parameters = [*table.parameters(), *out.parameters()]
    optimizer = torch.optim.Adagrad(parameters, 0.1)

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = out(table(ids)).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss

    objects = discover(step)
    graph = capture(step, objects, (torch.tensor([1, 2, 1]),), {})
    state = leaves(objects)
    return analyze(graph, state, aliases(objects)), state


def text(step: StepGraph) -> str:
    """One line per node, with names that do not depend on the process."""
    lines = []
    for node in step.graph.nodes:
        target = node.target if isinstance(node.target, str) else _name(node.target)
        leaf = f"  # {node.meta['leaf']}" if "leaf" in node.meta else ""
        if node.op == "placeholder":
            lines.append(f"{node.name}: input{leaf}")
        elif node.op == "output":
            lines.append(f"return {node.args[0]}")
        else:
            arguments = [str(a) for a in node.args]
            arguments += [f"{k}={v}" for k, v in node.kwargs.items() if k != "pin_memory"]
            lines.append(f"{node.name} = {target}({', '.join(arguments)})")
    return "\n".join(lines) + "\n"


def _name(target: object) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return str(getattr(target, "__name__", target))


def check(name: str, found: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("PARALLAX_UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8"), f"{path.name} differs; see this file's head"


@pinned
def test_captured_step() -> None:
    analysis = captured()
    check("captured", text(analysis.step))
    assert analysis.variables["table.weight"].sparse
    assert not analysis.variables["out.weight"].sparse
    assert analysis.variables["out.weight"].factors


@pinned
@pytest.mark.parametrize("option", RUN_OPTIONS)
def test_every_pass(option: str) -> None:
    """The graph after each pass that changed it, one after the other."""
    analysis = captured()
    strategy = merge_messages(built(option, analysis.variables.values(), 2), analysis)
    work = prepare(analysis, strategy, 0, 2)
    before = text(work.step)
    prints = []
    for one_pass in passes({choice.synchronizer for choice in strategy.variables.values()}):
        one_pass(work)
        after = text(work.step)
        if after != before:
            prints.append(f"== {one_pass.__name__}\n{_changes(before, after)}")
        before = after
    check(option.lower(), "\n".join(prints))


def _changes(before: str, after: str) -> str:
    """Lines that a pass removed (-) and added (+)."""
    old, new = before.splitlines(), after.splitlines()
    removed = [f"- {line}" for line in old if line not in new]
    added = [f"+ {line}" for line in new if line not in old]
    return "\n".join([*removed, *added]) + "\n"


@pinned
@pytest.mark.parametrize("option", RUN_OPTIONS)
def test_workers_run_the_same_collectives_in_the_same_order(option: str) -> None:
    """Invariant 5, for four workers of every option."""
    calls = []
    for worker in range(4):
        analysis = captured()
        strategy = built(option, analysis.variables.values(), 4)
        graph = rewrite(analysis, strategy, worker, 4)
        calls.append(
            (
                graph.resources,
                [
                    node.target.__name__
                    for node in graph.step.graph.nodes
                    if getattr(node.target, "parallax_effect", False)
                ],
            )
        )
    assert len(calls[0][1]) > 3
    assert all(found == calls[0] for found in calls)


def test_one_worker_keeps_the_captured_step() -> None:
    analysis = captured()
    before = [node.target for node in analysis.step.graph.nodes]
    marked = sum(node.target is marks.GRADIENT for node in analysis.step.graph.nodes)
    strategy = built("HYBRID", analysis.variables.values(), 1)
    graph = rewrite(analysis, strategy, 0, 1)
    assert marked == 3
    after = [node.target for node in graph.step.graph.nodes]
    added = [t for t in after if t not in before]
    # Transposes of transposes go; nothing else of the user's step does.
    gone = (marks.GRADIENT, torch.ops.aten.t.default)
    assert [t for t in after if t not in (*added, *gone)] == [t for t in before if t not in gone]
    # The one addition: a row id is refused before anything is changed, as on several workers.
    assert [getattr(t, "__name__", t) for t in added] == ["row_ids_0", "checked_ids"]
