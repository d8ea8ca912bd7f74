"""parallax less its placement of operations: what the paper's table has before +OPAU and +OPSW.

parallax always runs operations where fewer bytes cross; here they are taken back, with the same
numbers. Of the operations after aggregation, such as to clip, the paper's system left to workers
what it did not place, so that aggregated gradients were sent to all of them (section 7.4): they are
sent here as well, and not used. Of the operations on pulled rows, a cast or a slice, all are left
to the worker: rows travel whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from parallax.ops.specs import TableSpec
from parallax.rewrite.synchronizers import row_exchange as rows_pass
from parallax.runtime.comm.world import World
from parallax.runtime.exchange import rows as row_exchange
from parallax.runtime.exchange.dense import Buckets


def unplaced_pulls() -> contextlib.AbstractContextManager[Any]:
    """While graphs are rewritten: rows travel whole, and as the type that the table has."""
    spec_of = rows_pass.table_spec

    def whole(*arguments: Any) -> TableSpec:
        return dataclasses.replace(spec_of(*arguments), read_as=None, columns=None)

    return mock.patch.object(rows_pass, "table_spec", whole)


@contextlib.contextmanager
def unplaced_updates(world: World) -> Any:
    """While steps run: aggregated gradients are sent from their owners to all workers."""
    hand_on, wait = row_exchange.hand_on, Buckets.wait

    def hand_on_to_all(table: TableSpec, count: int, ids: torch.Tensor, rows: torch.Tensor) -> Any:
        send_to_all(world, rows, "rows")
        return hand_on(table, count, ids, rows)

    def wait_for_all(
        buckets: Buckets, changed: Sequence[int] = (), late: Sequence[int] = ()
    ) -> list[torch.Tensor | None]:
        gradients = wait(buckets, changed, late)
        if buckets.spec.owners:
            for bucket in buckets._buckets:
                send_to_all(world, bucket.result, "dense")
        return gradients

    with (
        mock.patch.object(row_exchange, "hand_on", hand_on_to_all),
        mock.patch.object(Buckets, "wait", wait_for_all),
    ):
        yield


def send_to_all(world: World, values: torch.Tensor, group: str) -> None:
    """Send ``values`` to every worker, and wait for theirs, which may be more or fewer."""
    purpose = f"{group}: aggregated"
    size, flat = world.size, values.detach().reshape(-1)
    heard = world.exchange_numbers([[len(flat)]] * size, purpose, group)
    counts = [own for (own,) in heard]
    received = flat.new_empty(sum(counts))
    world.all_to_all(received, flat.repeat(size), counts, [len(flat)] * size, purpose, group).wait()
