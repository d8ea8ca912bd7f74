"""Only what is read of rows travels: some columns, or a smaller type; with the same numbers."""

from __future__ import annotations

from typing import Any

import partial_rows
import pytest
import torch
from pool import Pool
from torch.fx.experimental.proxy_tensor import make_fx

from parallax.graph.analysis.lookups import lookup_of
from parallax.graph.analysis.reads import RowsRead, rows_read

READ = {
    "whole": (None, "None"),
    "columns": ((2, 7), "None"),
    "smaller": (None, "torch.float32"),
    "both": ((9, 12), "torch.float32"),
}
VALUES = {"whole": 12, "columns": 5, "smaller": 12, "both": 3}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("reader", partial_rows.READERS)
@pytest.mark.parametrize("option", ["HYBRID", "AR"])
def test_training_equals_one_device(
    pool: Pool, option: str, reader: str, optimizer: str, size: int
) -> None:
    found = pool.run(size, partial_rows.compare, reader, optimizer, option)
    assert found[0]["read"] == READ[reader]
    assert max(one["difference"] for one in found) < (1e-12 if "None" in READ[reader][1] else 1e-5)
    formula = sum(one["formula"] for one in found)
    assert sum(sum(one["sent"].values()) for one in found) == pytest.approx(formula, rel=0.1)
    if option == "HYBRID":
        pull = sum(one["sent"]["rows: pull"] for one in found) / VALUES[reader]
        push = sum(one["sent"]["rows: push"] for one in found) / VALUES[reader]
        # Sums of gradients are not of the smaller type: they travel as they are.
        assert push == pull * (2 if reader in ("smaller", "both") else 1)


@pytest.mark.parametrize("reader", ["columns", "both"])
def test_lazy_updates_too(pool: Pool, reader: str) -> None:
    found = pool.run(2, partial_rows.compare, reader, "", "HYBRID", True)
    assert found[0]["read"] == READ[reader]
    assert max(one["difference"] for one in found) < 1e-5


def test_a_half_type_halves_rows(pool: Pool) -> None:
    """Under autocast, pulled rows take half the bytes; with an encoder, pushed ones as well."""
    bytes_of = {
        rows: pool.run(2, partial_rows.autocast, rows)[0]
        for rows in ("float32", "autocast", "encoded")
    }
    usual = bytes_of["float32"]
    pull, push = usual["rows: pull"], usual["rows: push"]
    assert bytes_of["autocast"] == {"rows: pull": pull / 2, "rows: push": push}
    assert bytes_of["encoded"] == {"rows: pull": pull / 2, "rows: push": push / 2}


aten: Any = torch.ops.aten


def _read(step: Any, width: int = 8) -> RowsRead:
    module = make_fx(step, tracing_mode="fake")(torch.ones(20, width), torch.arange(6))
    nodes = list(module.graph.nodes)
    table = nodes[0]
    found = [lookup_of(user, table, "t") for user in table.users]
    assert all(found)
    return rows_read([lookup for lookup in found if lookup], [], (width,))


def half(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda t, i: half(t[i]), RowsRead(None, torch.bfloat16)),
        (lambda t, i: half(t[i].view(2, 3, 8).transpose(0, 1)), RowsRead(None, torch.bfloat16)),
        (lambda t, i: half(t[i]) + half(t[i] * 2), RowsRead()),
        (lambda t, i: half(t[i]) + t[i].to(torch.float16), RowsRead()),
        (lambda t, i: t[i].double(), RowsRead()),
        (lambda t, i: t[i].to(torch.int32), RowsRead()),
        (lambda t, i: t[i], RowsRead()),
        (lambda t, i: t[i][:, 3:5].mul(2), RowsRead((3, 5))),
        (lambda t, i: t[i][:, 3:5].mul(2) + t[i][:, :2] * 2, RowsRead((0, 5))),
        (lambda t, i: half(t[i][:, -2:]), RowsRead((6, 8), torch.bfloat16)),
        (lambda t, i: half(t[i])[:, -2:], RowsRead(None, torch.bfloat16)),
        (lambda t, i: t[i][:, ::2] * 2, RowsRead()),
        (lambda t, i: t[i].t()[:, 1:3] * 2, RowsRead()),
        (lambda t, i: t[i].view(3, 16)[:, 1:3] * 2, RowsRead()),
        (lambda t, i: t[i].view(2, 3, 8)[:, 1:, 1:3] * 2, RowsRead((1, 3))),
        (
            lambda t, i: half(torch.empty_like(t[i]).fill_(0) + 1) + half(t[i]),
            RowsRead(None, torch.bfloat16),
        ),
        (lambda t, i: half(t[i].mul_(2)), RowsRead()),
    ],
)
def test_what_is_read(step: Any, expected: RowsRead) -> None:
    assert _read(step) == expected


def test_gradients_outside_of_the_columns_want_whole_rows() -> None:
    def step(t: torch.Tensor, i: torch.Tensor, g: torch.Tensor) -> Any:
        return t[i][:, 2:4] * 2, aten.embedding_dense_backward(g, i, 20, -1, False)

    inputs = (torch.ones(20, 8), torch.arange(6), torch.ones(6, 8))
    module = make_fx(step, tracing_mode="fake")(*inputs)
    table = next(iter(module.graph.nodes))
    terms = [n for n in module.graph.nodes if n.target is aten.embedding_dense_backward.default]
    found = [lookup for user in table.users if (lookup := lookup_of(user, table, "t"))]
    assert rows_read(found, terms, (8,)) == RowsRead()
    assert rows_read(found, [], (8,)) == RowsRead((2, 4))
