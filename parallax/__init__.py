"""Automatic distributed training: write a training step for one device, run it on many."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# It notes the directory that the script starts in, before the script may change it.
from parallax.cluster import launch as _launch  # noqa: F401

if TYPE_CHECKING:
    from parallax.api import get_runner, parallel_run
    from parallax.config import Config
    from parallax.data import num_shards, shard, shard_id
    from parallax.runtime.runner import Runner
    from parallax.runtime.state.deferral import deferred
    from parallax.strategy.builders.base import StrategyBuilder
    from parallax.strategy.data import Strategy, VariableStrategy
    from parallax.strategy.partitions import get_partitioner

__version__ = "0.1.0"
__all__ = [
    "Config",
    "Runner",
    "Strategy",
    "StrategyBuilder",
    "VariableStrategy",
    "deferred",
    "get_partitioner",
    "get_runner",
    "num_shards",
    "parallel_run",
    "shard",
    "shard_id",
]
_HOMES = {
    "Config": "parallax.config",
    "Runner": "parallax.runtime.runner",
    "Strategy": "parallax.strategy.data",
    "StrategyBuilder": "parallax.strategy.builders.base",
    "VariableStrategy": "parallax.strategy.data",
    "deferred": "parallax.runtime.state.deferral",
    "get_partitioner": "parallax.strategy.partitions",
    "get_runner": "parallax.api",
    "num_shards": "parallax.data",
    "parallel_run": "parallax.api",
    "shard": "parallax.data",
    "shard_id": "parallax.data",
}
_LIGHT = ("cli", "cluster", "commands", "config", "errors")


def __getattr__(name: str) -> Any:
    """Imports what is asked for: launchers and the command line run without torch."""
    if name.startswith("_"):
        raise AttributeError(f"module 'parallax' has no attribute {name!r}")
    if name in _LIGHT:
        # "from parallax import commands" asks here before it looks for a module.
        return importlib.import_module(f"{__name__}.{name}")
    # All of it, so that submodules are attributes too, whatever was asked for first.
    importlib.import_module("parallax.api")
    for public, home in _HOMES.items():
        globals()[public] = getattr(importlib.import_module(home), public)
    if name in globals():
        return globals()[name]
    raise AttributeError(f"module 'parallax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
