"""A weight's gradient comes before that of its layer's input, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from parallax.graph.capture import capture
from parallax.graph.objects.discovery import discover
from parallax.graph.passes.gradient_order import advance_gradients
from parallax.ops import marks

aten = torch.ops.aten
Function = Callable[..., object]
SIZES = ((4, 3), (3, 5), (4, 5))


def products(graph: Graph) -> list[str]:
    """Which matrix products give gradients of weights and which of inputs, in their order."""
    found = []
    for node in graph.find_nodes(op="call_function", target=aten.mm.default):
        users = list(node.users)
        is_weight = any(user.target is marks.GRADIENT for user in users)
        found.append("weight" if is_weight else "input")
    return found


def test_weights_come_first_in_a_captured_step() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, bias=bias) for bias in (False, True, False)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    graph = capture(step, discover(step), (torch.ones(3, 4),), {}).graph
    assert products(graph) == [
        *["input", "input"],  # forward; the layer with a bias is no plain product
        *["weight", "input", "weight", "input", "weight"],
    ]
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in order:
        assert all(order[source] < order[node] for source in node.all_input_nodes)


def _plain(gradient: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> object:
    of_output = gradient * 2
    of_input = of_output @ weight
    return of_input.tanh(), marks.GRADIENT(of_output.t() @ x, "w")


def _changed_between(gradient: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> object:
    of_output = gradient * 2
    of_input = of_output @ weight
    of_output.view(-1).mul_(3)
    return of_input.tanh(), marks.GRADIENT(of_output.t() @ x, "w")


def _changed_before(gradient: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> object:
    of_output = gradient * 2
    of_output.mul_(3)
    of_input = of_output @ weight
    return of_input.tanh(), marks.GRADIENT(of_output.t() @ x, "w")


def _of_the_input(gradient: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> object:
    of_output = gradient * 2
    of_input = of_output @ weight
    return of_input.tanh(), marks.GRADIENT(of_output.t() @ of_input, "w")


def _written_afterwards(gradient: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> object:
    of_output = gradient * 2
    of_input = of_output @ weight
    of_weight = of_output.t() @ x
    of_weight.mul_(2)
    return of_input.tanh(), marks.GRADIENT(of_weight, "w")


def _random(gradient: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> object:
    of_output = gradient * 2
    of_input = of_output @ weight
    noise = aten.rand_like.default(of_output)
    return of_input.tanh(), marks.GRADIENT(noise, "w")


def _two(gradient: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> object:
    of_output = gradient * 2
    of_input = of_output @ weight
    bias = of_output.sum(0)
    of_weight = of_output.t() @ x
    return of_input.tanh(), marks.GRADIENT(bias, "b"), marks.GRADIENT(of_weight, "w")


@pytest.mark.parametrize(
    ("function", "moved"),
    [
        (_plain, 1),
        (_changed_between, 0),
        (_changed_before, 1),
        (_of_the_input, 0),
        (_written_afterwards, 0),
        (_random, 0),
        (_two, 2),
    ],
)
def test_what_moves_reads_what_it_read_before(function: Function, moved: int) -> None:
    torch.manual_seed(0)
    given = [torch.randn(size, dtype=torch.float64) for size in SIZES]
    module = make_fx(function)(*(value.clone() for value in given))
    nodes = list(module.graph.nodes)
    torch.manual_seed(1)
    expected = module(*(value.clone() for value in given))
    assert advance_gradients(module.graph) == moved
    module.graph.lint()
    module.recompile()
    assert set(module.graph.nodes) == set(nodes)
    assert (list(module.graph.nodes) == nodes) is (moved == 0)
    torch.manual_seed(1)
    for value, wanted in zip(module(*(one.clone() for one in given)), expected, strict=True):
        assert torch.equal(value, wanted)
    if moved:
        assert products(module.graph)[0] == "weight"


def test_gradients_of_one_layer_keep_their_order() -> None:
    given = [torch.ones(size) for size in SIZES]
    module = make_fx(_two)(*given)
    advance_gradients(module.graph)
    names: list[Node] = [n for n in module.graph.nodes if n.op == "call_function"]
    order = [n.target for n in names if n.target is not aten.t.default]
    assert order[:4] == [aten.mul.Tensor, aten.sum.dim_IntList, aten.mm.default, aten.mm.default]


def _one_after_another(gradient: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> object:
    of_output = gradient * 2
    of_input = of_output @ weight
    first = marks.GRADIENT(of_input.t() @ gradient, "first")
    other = of_input @ weight.t()
    return other, first, marks.GRADIENT(of_output.t() @ x, "second")


def test_no_gradient_passes_another() -> None:
    module = make_fx(_one_after_another)(*(torch.ones(size) for size in SIZES))
    first, second = module.graph.find_nodes(op="call_function", target=marks.GRADIENT)
    assert advance_gradients(module.graph) == 1  # behind the first, before what ``other`` needs
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    (other,) = (node for node in order if node.op == "output")
    products = [first.args[0], second.args[0], other.args[0][0]]
    assert [order[node] for node in products] == sorted(order[node] for node in products)
