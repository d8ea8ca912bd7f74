"""How little has to cross the network: the bytes that any exact synchronous training must send.

For H hosts, of what a host's workers touch together, each host sends on average at least

* for a dense variable of D bytes, 2 (H-1)/H · D: AllReduce;
* for a table, the least of three ways: its distinct rows, (H-1)/H · U · (4 + 2 r), for U rows of r
  bytes that are asked for by 4-byte ids, pulled, and pushed as gradients; its sums of bags, in
  place of rows, (H-1)/H · (4 L + 2 B r), for L lookups that give B sums; or its AllReduce.

Rows of workers on one host are counted once: they can be merged before they cross.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.workloads import Batch, Training, parameter_bytes

ID_BYTES = 4


@dataclass
class Lookups:
    """What a step reads of a table: its ids, how many lookups, how many rows or sums they give."""

    ids: torch.Tensor
    lookups: int
    results: int


class _Watch(TorchDispatchMode):
    """Sees which rows of which table are looked up."""

    def __init__(self, tables: Mapping[int, str]) -> None:
        super().__init__()
        self.tables = tables
        self.seen: dict[str, list[Lookups]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        rows = None
        if func is aten.embedding.default:
            rows = args[1].numel()
        elif func in (aten._embedding_bag.default, aten._embedding_bag_forward_only.default):
            rows = len(result[0])
        if rows is not None and (name := self.tables.get(args[0].data_ptr())) is not None:
            ids = args[1].flatten()
            self.seen.setdefault(name, []).append(Lookups(ids.unique(), ids.numel(), rows))
        return result


def lookups_of_step(training: Training, model: nn.Module, batch: Batch) -> dict[str, Lookups]:
    """What the forward pass of one local batch reads of each table."""
    tables = {}
    for name in training.tables:
        weight = model.get_parameter(f"{name}.weight")
        tables[weight.data_ptr()] = name
    watch = _Watch(tables)
    with watch, torch.no_grad():
        training.loss(model, *batch)
    return {name: _merged(parts) for name, parts in watch.seen.items()}


def bytes_that_must_cross(
    training: Training, model: nn.Module, batch: Batch, host: int, hosts: int
) -> float:
    """Least bytes that the average host must send per step; all workers call this.

    Args:
        training: what is trained.
        model: with tables that are whole.
        batch: this worker's.
        host: number of this worker's host.
        hosts: how many there are.
    """
    mine = lookups_of_step(training, model, batch)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (host, mine))
    by_host: list[list[dict[str, Lookups]]] = [[] for _ in range(hosts)]
    for where, lookups in everyone:
        by_host[where].append(lookups)
    return least_bytes(training, model, by_host)


def least_bytes(
    training: Training, model: nn.Module, by_host: Sequence[Sequence[Mapping[str, Lookups]]]
) -> float:
    """The formulas above, for what each worker of each host looks up of each table."""
    hosts = len(by_host)
    tables = {name: model.get_parameter(f"{name}.weight") for name in training.tables}
    row_bytes = {name: weight[0].nbytes for name, weight in tables.items()}
    table_bytes = {name: weight.nbytes for name, weight in tables.items()}
    total = 2.0 * hosts * (parameter_bytes(model) - sum(table_bytes.values()))
    for name, row in row_bytes.items():
        merged = [_merged([worker[name] for worker in workers]) for workers in by_host]
        rows = sum(len(one.ids) * (ID_BYTES + 2 * row) for one in merged)
        sums = sum(one.lookups * ID_BYTES + one.results * 2 * row for one in merged)
        total += min(rows, sums, 2 * hosts * table_bytes[name])
    return total / hosts * (hosts - 1) / hosts


def _merged(parts: list[Lookups]) -> Lookups:
    ids = torch.cat([part.ids for part in parts]).unique()
    return Lookups(ids, sum(p.lookups for p in parts), sum(p.results for p in parts))
