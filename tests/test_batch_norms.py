"""Layers that normalise over the batch, over those of all workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import batch_norm_steps
import pytest
import torch
from batch_norm_steps import MODELS, STEPS
from pool import Pool

from parallax.errors import UnsupportedError
from parallax.rewrite.batch_norms import over_all_workers

CELLS = [
    *((name, "HYBRID", 2) for name in MODELS),
    *(("images", builder, 3) for builder in ("PS", "AR", "ZeRO")),
]


@pytest.mark.parametrize(("name", "builder", "size"), CELLS)
def test_the_numbers_of_one_device(pool: Pool, name: str, builder: str, size: int) -> None:
    settings = {} if name == "synchronised by torch" else {"sync_batch_norm": True}
    run = batch_norm_steps.train
    for found, _ in pool.run(size, run, name, builder, None, torch.float64, settings):
        assert found < 1e-10


@pytest.mark.parametrize("name", ["images", "features", "sequences"])
@pytest.mark.parametrize("division", [[5, 3], [1, 6, 2], [6, 0]])
def test_workers_whose_batches_differ(pool: Pool, name: str, division: list[int]) -> None:
    run, settings = batch_norm_steps.train, {"sync_batch_norm": True}
    found = pool.run(len(division), run, name, "HYBRID", division, torch.float64, settings)
    assert all(one < 1e-10 for one, _ in found), found


def test_a_single_value_of_all_workers_is_refused(pool: Pool) -> None:
    run, settings = batch_norm_steps.refused, {"sync_batch_norm": True}
    for problem in pool.run(2, run, "features", [1, 0], settings):
        assert "one value or none for each channel" in problem


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_smaller_types(pool: Pool, kind: torch.dtype) -> None:
    run, settings = batch_norm_steps.train, {"sync_batch_norm": True}
    bound = {torch.float32: 1e-3, torch.bfloat16: 0.2}[kind]
    for found, _ in pool.run(2, run, "images", "HYBRID", None, kind, settings):
        assert found < bound


def test_without_it_each_worker_has_its_own(pool: Pool) -> None:
    found = pool.run(2, batch_norm_steps.train, "images", "HYBRID", None, torch.float64, {})
    assert all(one > 1e-4 and not sent.get("batch norms") for one, sent in found), found


def test_what_is_sent(pool: Pool) -> None:
    """16 (C + 1) bytes to each other worker, for each layer and pass."""
    run, settings = batch_norm_steps.train, {"sync_batch_norm": True}
    for _, sent in pool.run(3, run, "images", "AR", None, torch.float64, settings):
        assert sent["batch norms"] == 2 * STEPS * 2 * sum(16 * (c + 1) for c in (4, 3))


@pytest.mark.parametrize("size", [1, 2])
def test_compiled_without_running_statistics(pool: Pool, size: int) -> None:
    run = batch_norm_steps.train
    settings = {"sync_batch_norm": True, "compile": "inductor"}
    for found, _ in pool.run(size, run, "features", "HYBRID", None, torch.float64, settings, 6):
        assert found < 1e-10


def test_operations_of_libraries_are_refused() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.aten.cudnn_batch_norm.default, (x,))
    work: Any = SimpleNamespace(graph=graph, workers=2)
    with pytest.raises(UnsupportedError, match="cannot normalise over the batches") as found:
        over_all_workers(True)(work)
    assert "leave out sync_batch_norm" in str(found.value)
