"""LSTM layers as whole operations: the numbers of torch's own, with gradients and final states."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from errors_help import alone
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from parallax.graph.compute import operations
from parallax.graph.recurrent import whole_layers
from parallax.ops import recurrent
from parallax.runtime.products import has_onednn, use_faster_products

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "projected": {"proj_size": 3},
    "both directions": {"bidirectional": True, "num_layers": 2},
    "batch first": {"bidirectional": True, "batch_first": True},
    "all": {"bidirectional": True, "num_layers": 2, "proj_size": 2, "bias": False},
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning"),
    pytest.mark.usefixtures("one_thread"),
]


def found(layer: nn.LSTM, x: torch.Tensor, whole: bool, used: str) -> list[torch.Tensor]:
    """Outputs, states and all gradients, where a loss reads outputs, final states or both."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with whole_layers() if whole else contextlib.nullcontext():
        output, (hidden, cells) = layer(x)
    loss = torch.zeros((), dtype=x.dtype)
    if used != "states":
        weights = torch.arange(output.numel(), dtype=x.dtype).view_as(output).cos()
        loss = loss + (output * weights).sum()
    if used != "outputs":
        loss = loss + (hidden * 2).sum() + (cells * cells).sum()
    loss.backward()
    gradients = [parameter.grad for parameter in layer.parameters()]
    return [output, hidden, cells, x.grad, *gradients]  # type: ignore[list-item]


@pytest.mark.parametrize("used", ["outputs", "states", "both"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_give_the_numbers_of_torch(kind: str, dtype: torch.dtype, used: str) -> None:
    torch.manual_seed(3)
    layer = nn.LSTM(5, 7, dtype=dtype, **KINDS[kind])
    x = torch.randn(4, 3, 5, dtype=dtype)
    expected, own = (found(layer, x, whole, used) for whole in (False, True))
    for one, other in zip(expected, own, strict=True):
        if dtype is torch.float64:
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)
        elif kind in ("projected", "no bias", "all"):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(other, one), "the very call that torch makes"


def test_one_operation_each_layer_and_direction() -> None:
    """And the graph does not grow with the sequence."""
    layer = nn.LSTM(5, 7, num_layers=2, bidirectional=True, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = layer(x)[0].square().sum()
        loss.backward()
        optimizer.step()
        return loss

    counts = []
    for length in (3, 9):
        runner = alone(step)
        runner.run(torch.randn(length, 2, 5, dtype=torch.float64))
        nodes = list(runner._last.step.graph.nodes)  # type: ignore[union-attr]
        counts.append(len(nodes))
        for target in (torch.ops.parallax.lstm, torch.ops.parallax.lstm_backward):
            assert sum(node.target == target.default for node in nodes) == 4
    assert counts[0] == counts[1]


def test_packed_sequences_and_other_types_are_left_to_torch() -> None:
    layer = nn.LSTM(5, 7)
    x = torch.randn(4, 2, 5)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 2]))
    with torch.profiler.profile() as profile, whole_layers():
        layer(packed)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x)[0].dtype is torch.bfloat16
    assert not any(event.key.startswith("parallax::") for event in profile.key_averages())
    assert "lstm" not in vars(torch._VF), "all is as it was"


@pytest.mark.skipif(not has_onednn(), reason="this build of torch has no oneDNN")
def test_products_in_onednn_give_the_same_numbers() -> None:
    torch.manual_seed(5)
    gates, weight = torch.randn(4, 3, 28), torch.randn(28, 5)
    state = (torch.randn(5, 7), torch.randn(3, 5), torch.randn(3, 7))
    made = [recurrent.lstm(gates, weight, *state, True, onednn=flag) for flag in (False, True)]
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
    kept = made[0][2:5]
    gradient, last = torch.randn(4, 3, 5), torch.randn(3, 7)
    made = [
        recurrent.lstm_backward(
            gradient, last, *kept, weight, state[0], state[2], True, onednn=flag
        )
        for flag in (False, True)
    ]
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


def test_the_faster_library_computes_the_products_of_the_steps() -> None:
    layer = nn.LSTM(5, 7, proj_size=3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = layer(x)[0].sum()
        loss.backward()
        optimizer.step()
        return loss

    runner = alone(step)
    runner.run(torch.randn(4, 2, 5))
    graph = runner._last.step.graph  # type: ignore[union-attr]
    asked = []
    use_faster_products(graph, lambda product: bool(asked.append(product)) or True)
    layers = [node for node in graph.nodes if "parallax.lstm" in str(node.target)]
    assert [node.kwargs["onednn"] for node in layers] == [True, True]
    assert {(p.rows, p.inner, p.columns) for p in asked} >= {(2, 3, 28)}


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_descriptions_fit_what_is_computed(projected: bool, reverse: bool) -> None:
    outputs = 3 if projected else 7
    gates = torch.randn(4, 2, 28).transpose(0, 1).contiguous().transpose(0, 1)
    weight, hidden, cells = torch.randn(28, outputs), torch.randn(2, outputs), torch.randn(2, 7)
    projection = torch.randn(3, 7) if projected else None
    x, biases = torch.randn(4, 2, 5), [torch.randn(28), torch.randn(28)]
    fused = [torch.randn(28, 5), torch.randn(28, 7), *biases]
    gradient, last = torch.randn(4, 2, outputs), torch.randn(2, 7)

    def compute(inputs: Any) -> list[torch.Tensor]:
        gates, weight, hidden, cells, projection, x, fused, gradient, last = inputs
        made = recurrent.lstm(gates, weight, projection, hidden, cells, reverse)
        back = recurrent.lstm_backward(
            gradient, last, *made[2:5], weight, projection, cells, reverse
        )
        layer = recurrent.onednn_lstm(x, fused, cells, cells.clone(), reverse)
        return [*made, *back, *layer[:3]]

    given = (gates, weight, hidden, cells, projection, x, fused, gradient, last)
    real = compute(given)
    with FakeTensorMode() as mode:
        fakes = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, given)
        described = compute(fakes)
    for one, other in zip(real, described, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def test_operations_are_counted() -> None:
    """As many as of the products that a layer is made of."""
    counts = []
    for dtype in (torch.float32, torch.float64):
        layer = nn.LSTM(5, 7, dtype=dtype)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(x: torch.Tensor, layer: Any = layer, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = layer(x)[0].sum()
            loss.backward()
            optimizer.step()
            return loss

        runner = alone(step, model=layer, optimizer=optimizer)
        runner.run(torch.randn(4, 2, 5, dtype=dtype))
        counts.append(sum(operations(runner._last.step.graph).values()))  # type: ignore[union-attr]
    forward = 2 * 4 * 2 * 28 * (5 + 7)
    assert counts[1] == forward + 2 * 4 * 2 * 28 * (5 + 7 + 7), "x needs no gradient"
    assert counts[0] == 3 * forward
