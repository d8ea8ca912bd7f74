"""Splitting data over workers: disjoint, complete, equally many batches for each."""

from parallax.data.identity import num_shards, shard_id
from parallax.data.sharding import shard

__all__ = ["num_shards", "shard", "shard_id"]
