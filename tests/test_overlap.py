"""Rows travel while the model computes: pulls start early, and only what is needed is awaited."""

from __future__ import annotations

import re

import overlap
import pytest
from pool import Pool


def test_rows_travel_while_the_model_computes(pool: Pool) -> None:
    for graph, difference in pool.run(3, overlap.train):
        assert difference <= 1e-10
        lines = [line.partition("=")[2].strip() for line in graph.splitlines()]
        calls = [line.partition("(")[0].rpartition(".")[2].rpartition("_ops_")[2] for line in lines]
        events = [
            name
            for line, call in zip(lines, calls, strict=True)
            for name in ("pull_rows", "pulled_rows", "push_rows", "receive_rows", "addmm")
            if line.startswith((f"parallax_ops_resources_{name}", f"torch.ops.aten.{name}."))
            or call == name
        ]
        places = [event for event in events if event != "addmm"]
        assert places == [
            "pull_rows",
            "pulled_rows",
            "pulled_rows",
            "push_rows",
            "push_rows",
            "receive_rows",
            "receive_rows",
        ]
        products = [events[: i + 1].count("addmm") for i, e in enumerate(events) if e != "addmm"]
        assert products[0] == 0  # before the perceptron below
        assert products[1] == 4  # after it
        assert products[2] == 8  # after the perceptron between


@pytest.mark.parametrize("average", [True, False])
def test_a_large_product_travels_piece_by_piece(pool: Pool, average: bool) -> None:
    for graph, difference in pool.run(2, overlap.train_wide, average):
        assert difference <= 1e-10
        puts = re.findall(r"put_gradient\(buckets_0, (\d), \w+(?:, (\d))?\)", graph)
        assert puts == [("0", ""), ("1", ""), ("2", "0"), ("2", "1")], graph
