"""Every way of reading rows of a table, trained on several workers and on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from equality import difference
from torch import nn

from parallax.config import Config
from parallax.graph.discovery import discover
from parallax.runtime.comm import World
from parallax.runtime.runner import Runner

ROWS, WIDTH, LOCAL, STEPS = 11, 4, 2, 6

BAGS = ("sum", "mean", "max", "sum-lazy", "mean-lazy")


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


def _build(kind: str) -> tuple[Callable[..., torch.Tensor], nn.Module]:
    torch.manual_seed(7)
    reader = _Reader(kind).double()
    optimizer = torch.optim.SGD(reader.parameters(), 0.1)

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = reader(ids).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, reader


def compare(world: World, kind: str, run_option: str) -> dict[str, Any]:
    """The difference from one device, and whether the table was found to be sparse."""
    generator = torch.Generator().manual_seed(1)
    low = -ROWS if kind == "index" else 0  # indexing counts negative ids from the end
    data = [
        torch.randint(low, ROWS, (world.size * LOCAL, 3), generator=generator) for _ in range(STEPS)
    ]
    step, expected = _build(kind)
    for batch in data:
        step(batch)
    step, found = _build(kind)
    config = Config(run_option=run_option, workers=1, seed=1)  # type: ignore[arg-type]
    runner = Runner(step, discover(step), config, world)
    for batch in data:
        runner.run(batch[world.rank * LOCAL : (world.rank + 1) * LOCAL])
    variables = {row.variable.name: row.variable for row in runner.plan.rows}
    table = variables["table" if kind in DIRECT else "bag.weight"]
    del found
    return {
        "difference": difference(dict(expected.state_dict()), runner.state_dict()["reader"]),
        "sparse": table.sparse,
        "reason": table.dense_reason,
    }
