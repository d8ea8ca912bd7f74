"""Training while another device is the default, for the tests."""

from __future__ import annotations

import torch
from equality import SEED, batches, built, difference, distributed, moved, single_device

from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner


def compare(world: World, run_option: str, case: tuple[str, str, str]) -> float:
    """How far workers are from one device, if whatever they make without saying where has no
    values: as ``torch.set_default_device`` has it, for scripts that set it."""
    data = moved(batches(world.size), world.device)
    expected = single_device(built(world.device, case), data)
    own = built(world.device, case)
    config = Config(run_option=run_option, workers=1, seed=SEED)  # type: ignore[arg-type]
    torch.set_default_device("meta")
    try:
        runner = Runner(own.step, discover(own.step), config, world)
        found = distributed(own, data, runner)
    finally:
        torch.set_default_device(None)
    return difference(expected, found)
