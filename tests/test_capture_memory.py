"""What a capture leaves behind."""

from __future__ import annotations

import gc

import equality
import torch
from torch.fx import Graph

from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import single
from parallax.runtime.runner import Runner


def train() -> None:
    case = equality.build("sparse", "adam", "clip_norm")
    runner = Runner(case.step, discover(case.step), Config(workers=1), single(torch.device("cpu")))
    for batch in equality.batches(1)[:3]:
        runner.run(*batch)


def graphs() -> int:
    gc.collect()
    return sum(type(item) is Graph for item in gc.get_objects())


def test_graphs_go_with_their_runner() -> None:
    """Though torch's caches keep the ShapeEnv of a capture."""
    train()
    before = graphs()
    for _ in range(3):
        train()
    assert graphs() <= before
