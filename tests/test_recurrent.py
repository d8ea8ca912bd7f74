"""Recurrent layers as whole operations: the numbers of torch's own, with gradients and states."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import recurrent_steps
import torch
from errors_help import alone
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from parallax.graph.analysis.compute import operations
from parallax.graph.stand_ins.recurrent import LAYERS as recurrent_layers
from parallax.graph.stand_ins.recurrent import whole_layers
from parallax.ops import gru, recurrent, rnn
from parallax.runtime.compute.products import has_onednn, use_faster_products

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "projected": {"proj_size": 3},
    "both directions": {"bidirectional": True, "num_layers": 2},
    "batch first": {"bidirectional": True, "batch_first": True},
    "all": {"bidirectional": True, "num_layers": 2, "proj_size": 2, "bias": False},
}
LAYERS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": functools.partial(nn.RNN, nonlinearity="relu"),
}
OPERATIONS: dict[str, tuple[Any, Any]] = {
    "lstm": (torch.ops.parallax.lstm, torch.ops.parallax.lstm_backward),
    "gru": (torch.ops.parallax.gru, torch.ops.parallax.gru_backward),
    "tanh": (torch.ops.parallax.rnn, torch.ops.parallax.rnn_backward),
    "relu": (torch.ops.parallax.rnn, torch.ops.parallax.rnn_backward),
}
# Only an LSTM has projections.
KINDS = [
    (kind, settings)
    for kind in LAYERS
    for settings, values in SETTINGS.items()
    if kind == "lstm" or "proj_size" not in values
]
pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning"),
    pytest.mark.usefixtures("one_thread"),
]


def found(layer: nn.RNNBase, x: torch.Tensor, whole: bool, used: str) -> list[torch.Tensor]:
    """Outputs, states and all gradients, where a loss reads outputs, final states or both."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with whole_layers() if whole else contextlib.nullcontext():
        output, states = layer(x)
    states = states if isinstance(states, tuple) else (states,)
    loss = torch.zeros((), dtype=x.dtype)
    if used != "states":
        weights = torch.arange(output.numel(), dtype=x.dtype).view_as(output).cos()
        loss = loss + (output * weights).sum()
    if used != "outputs":
        for number, state in enumerate(states, 1):
            loss = loss + (state * number + state * state).sum()
    loss.backward()
    gradients = [parameter.grad for parameter in layer.parameters()]
    return [output, *states, x.grad, *gradients]  # type: ignore[list-item]


@pytest.mark.parametrize("used", ["outputs", "states", "both"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_layers_give_the_numbers_of_torch(
    kind: str, settings: str, dtype: torch.dtype, used: str
) -> None:
    torch.manual_seed(3)
    layer = LAYERS[kind](5, 7, dtype=dtype, **SETTINGS[settings])
    x = torch.randn(4, 3, 5, dtype=dtype)
    expected, own = (found(layer, x, whole, used) for whole in (False, True))
    for one, other in zip(expected, own, strict=True):
        if dtype is torch.float64:
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)
        elif kind != "lstm" or settings in ("projected", "no bias", "all"):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(other, one), "the very call that torch makes"


@pytest.mark.parametrize("kind", LAYERS)
def test_one_operation_each_layer_and_direction(kind: str) -> None:
    """And the graph does not grow with the sequence."""
    layer = LAYERS[kind](5, 7, num_layers=2, bidirectional=True, dtype=torch.float64)
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
        for target in OPERATIONS[kind]:
            assert sum(node.target == target.default for node in nodes) == 4
    assert counts[0] == counts[1]


@pytest.mark.parametrize("kind", LAYERS)
def test_packed_sequences_and_other_types_are_left_to_torch(kind: str) -> None:
    layer = LAYERS[kind](5, 7)
    x = torch.randn(4, 2, 5)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 2]))
    with torch.profiler.profile() as profile, whole_layers():
        layer(packed)
        # Torch's own LSTM raises where the CPU cannot compute in bfloat16.
        if kind != "lstm" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
            with torch.autocast("cpu", torch.bfloat16):
                layer(x)
    assert not any(event.key.startswith("parallax::") for event in profile.key_averages())
    assert not vars(torch._VF).keys() & recurrent_layers.keys(), "all is as it was"


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


@pytest.mark.parametrize("kind", LAYERS)
def test_the_faster_library_computes_the_products_of_the_steps(kind: str) -> None:
    layer = LAYERS[kind](5, 7, **({"proj_size": 3} if kind == "lstm" else {}))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = layer(x)[0].sum()
        loss.backward()
        optimizer.step()
        return loss

    runner = alone(step, model=layer, optimizer=optimizer)
    runner.run(torch.randn(4, 2, 5))
    graph = runner._last.step.graph  # type: ignore[union-attr]
    asked = []
    use_faster_products(graph, lambda product: bool(asked.append(product)) or True)
    targets = {operation.default for operation in OPERATIONS[kind]}
    layers = [node for node in graph.nodes if node.target in targets]
    assert [node.kwargs["onednn"] for node in layers] == [True, True]
    gates, inner = layer.weight_hh_l0.shape
    again = {(p.rows, p.inner, p.columns, p.right_turned) for p in asked if p.again}
    assert again == {(2, inner, gates, True), (2, gates, inner, False)}


@pytest.mark.skipif(not has_onednn(), reason="this build of torch has no oneDNN")
@pytest.mark.parametrize("reverse", [False, True])
def test_products_in_onednn_are_those_of_gru_and_rnn_too(reverse: bool) -> None:
    torch.manual_seed(6)
    x, hidden, gradient = torch.randn(4, 3, 21), torch.randn(3, 7), torch.randn(4, 3, 7)
    weight, bias = torch.randn(21, 7), torch.randn(21)
    made = []
    for flag in (False, True):
        kept = gru.gru(x, weight, bias, hidden, reverse, onednn=flag)
        back = gru.gru_backward(gradient, *kept, weight, hidden, reverse, onednn=flag)
        output = rnn.rnn(x[..., :7], weight[:7], hidden, False, reverse, onednn=flag)
        more = rnn.rnn_backward(gradient, output, weight[:7], False, reverse, onednn=flag)
        made.append([*kept, *back, output, *more])
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


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
        sums, square = gates[..., :21], weight[:21, :1].expand(21, 7)
        gated = gru.gru(sums, square, square[:, 0], cells, reverse)
        of_gated = gru.gru_backward(gated[0].cos(), *gated, square, cells, reverse)
        plain = rnn.rnn(sums[..., :7], square[:7], cells, True, reverse)
        of_plain = rnn.rnn_backward(plain.cos(), plain, square[:7], True, reverse)
        return [*made, *back, *layer[:3], *gated, *of_gated, plain, *of_plain]

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


@pytest.mark.parametrize("kind", recurrent_steps.LAYERS)
def test_training_is_that_of_one_device(kind: str) -> None:
    assert recurrent_steps.compare(kind, torch.float64, torch.device("cpu")) < 1e-12
