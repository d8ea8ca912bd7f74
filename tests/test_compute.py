"""What a graph's operations take, before any of it has run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from parallax.graph.analysis.compute import FUNCTION, STEPPED, efforts, operations
from parallax.graph.capture import capture
from parallax.graph.objects.discovery import discover

ROWS, WIDTH = 3, 8


def graph_of(compute: Callable[[torch.Tensor], object], x: torch.Tensor) -> Graph:
    return make_fx(compute, tracing_mode="fake")(x).graph


def by_name(found: dict[torch.fx.Node, int]) -> dict[str, int]:
    return {str(node.target): count for node, count in found.items()}


def test_functions_take_as_long_as_many_operations() -> None:
    graph = graph_of(lambda x: (x @ x.t()).tanh().logsumexp(1) + 1, torch.ones(ROWS, WIDTH))
    products = {"aten.mm.default": 2 * ROWS * WIDTH * ROWS}
    assert by_name(operations(graph)) == products
    # Of a sum over a row, each of its numbers is the function's.
    each = FUNCTION * ROWS * ROWS
    functions = {"aten.tanh.default": each, "aten.logsumexp.default": each}
    assert by_name(efforts(graph)) == products | functions


@pytest.mark.parametrize("heads", [1, 2])
def test_attention_on_cpus_is_products(heads: int) -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)

    graph = graph_of(attend, torch.ones(1, heads, ROWS, WIDTH))
    (count,) = operations(graph).values()
    assert count == 2 * 2 * heads * ROWS * ROWS * WIDTH


def test_layers_of_many_steps_take_longer_than_their_products() -> None:
    layer = nn.LSTM(WIDTH, WIDTH, proj_size=2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def train(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        layer(x)[0].sum().backward()
        optimizer.step()

    graph = capture(train, discover(train), (torch.ones(ROWS, 2, WIDTH),), {}).graph
    counts, times = by_name(operations(graph)), by_name(efforts(graph))
    for name in ("parallax.lstm.default", "parallax.lstm_backward.default"):
        assert times[name] == round(STEPPED * counts[name]) > counts[name]
