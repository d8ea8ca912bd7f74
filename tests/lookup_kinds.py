"""Every way of reading rows of a table, trained on several workers and on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from equality import difference
from torch import nn

from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner

ROWS, WIDTH, LOCAL, STEPS = 11, 4, 2, 6

BAGS = ("sum", "mean", "max", "sum-lazy", "mean-lazy")
LAZY: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.01),
    "sparse_adam": lambda p: torch.optim.SparseAdam(list(p), 0.05),
}
"""Optimizers that take sparse gradients; all but the first have slots."""


def _uneven_bags(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Bags of two and of four ids, one after the other, given by the places where they begin."""
    sample = torch.arange(len(ids))
    return F.embedding_bag(ids.flatten(), table, 3 * sample - sample % 2, mode="sum")


DIRECT: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "uneven_bags": _uneven_bags,
    "index": lambda table, ids: table[ids].mean(1),
    "index_select": lambda table, ids: (
        torch.index_select(table, 0, ids.reshape(-1)).view(*ids.shape, WIDTH).mean(1)
    ),
    "gather": lambda table, ids: table.gather(0, ids[:, :1].expand(-1, WIDTH)),
    "rows_of_rows": lambda table, ids: table[table[ids[:, 0]].argmax(-1)] + table[ids[:, 1]],
}
KINDS = (*BAGS, *DIRECT)


class _Reader(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind in DIRECT:
            self.table = nn.Parameter(torch.randn(ROWS, WIDTH))
        else:
            mode, _, lazy = kind.partition("-")
            self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode=mode, sparse=bool(lazy))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = DIRECT[self.kind](self.table, ids) if self.kind in DIRECT else self.bag(ids)
        return self.out(rows)


def _build(
    kind: str, lazy: str
) -> tuple[Callable[..., torch.Tensor], nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    reader = _Reader(kind).double()
    rest = torch.optim.SGD(reader.out.parameters(), 0.1)
    table = LAZY[lazy](p for name, p in reader.named_parameters() if not name.startswith("out"))

    def step(ids: torch.Tensor) -> torch.Tensor:
        rest.zero_grad()
        table.zero_grad()
        loss: torch.Tensor = reader(ids).pow(2).mean()
        loss.backward()
        rest.step()
        table.step()
        return loss

    return step, reader, table


def compare(world: World, kind: str, run_option: str, lazy: str = "sgd") -> dict[str, Any]:
    """The difference from one device, whether the table was found to be sparse, and its place.

    ``lazy`` is the table's optimizer; it takes sparse gradients, but need not get them.
    """
    generator = torch.Generator().manual_seed(1)
    low = -ROWS if kind == "index" else 0  # indexing counts negative ids from the end
    data = [
        torch.randint(low, ROWS, (world.size * LOCAL, 3), generator=generator) for _ in range(STEPS)
    ]
    step, expected, slots = _build(kind, lazy)
    for batch in data:
        step(batch)
    step, found, _ = _build(kind, lazy)
    config = Config(run_option=run_option, workers=1, seed=1)  # type: ignore[arg-type]
    runner = Runner(step, discover(step), config, world)
    for batch in data:
        runner.run(batch[world.rank * LOCAL : (world.rank + 1) * LOCAL])
    rows = {row.variable.name: row for row in runner.plan.rows}
    row = rows["table" if kind in DIRECT else "bag.weight"]
    del found
    state = runner.state_dict()
    return {
        "difference": difference(dict(expected.state_dict()), state["reader"]),
        "slots": difference(slots.state_dict()["state"], state["table"]["state"]),
        "sparse": row.variable.sparse,
        "reason": row.variable.dense_reason,
        "synchronizer": row.choice.synchronizer,
        "obstacle": row.variable.shard_obstacle,
    }
