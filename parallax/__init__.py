"""Automatic distributed training: write a training step for one device, run it on many."""

from parallax.api import get_runner, parallel_run
from parallax.config import Config
from parallax.data import num_shards, shard, shard_id
from parallax.runtime.deferral import deferred
from parallax.runtime.runner import Runner

__version__ = "0.1.0"
__all__ = [
    "Config",
    "Runner",
    "deferred",
    "get_runner",
    "num_shards",
    "parallel_run",
    "shard",
    "shard_id",
]
