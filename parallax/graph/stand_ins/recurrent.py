"""Recurrent layers as they are captured: each layer is one operation per direction.

Those of ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``. PyTorch's own would be recorded step by step, for
the length of one batch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from parallax.graph.common.replaced import replaced
from parallax.ops.cudnn import MODES, cudnn_layer
from parallax.ops.gru import gru
from parallax.ops.recurrent import lstm, onednn_lstm
from parallax.ops.rnn import rnn

State = tuple[torch.Tensor, ...]
Params = Sequence[torch.Tensor]
Layer = Callable[[torch.Tensor, State, Params, bool, bool], tuple[torch.Tensor, State]]
"""Of the inputs [time, batch, features], the state before the first step, the parameters, whether
these have biases, and whether the last step comes first: outputs, and the state in the end."""


@contextlib.contextmanager
def whole_layers() -> Iterator[None]:
    """Let torch's recurrent functions record whole layers, which hold for every length.

    Autocast on the CPU, sequences of no steps, and other devices than the CPU and CUDA's are left
    to PyTorch; packed sequences are not met here (:mod:`parallax.graph.stand_ins.packed`).
    """
    modules: tuple[Any, ...] = (torch, torch._VF)
    recording = {name: _recording(getattr(torch, name), layer) for name, layer in LAYERS.items()}
    with replaced(*((m, name, function) for m in modules for name, function in recording.items())):
        yield


def _recording(original: Callable[..., Any], layer: Layer) -> Callable[..., Any]:
    def record(*args: Any) -> Any:
        # Of packed sequences, of different lengths in one batch, the sizes come second.
        if len(args) == 9 and isinstance(args[3], bool):
            x, state, params, *settings = args
            states = (state,) if isinstance(state, torch.Tensor) else tuple(state)
            with contextlib.ExitStack() as stack:
                if x.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
                    x, states, params = _cast(x, states, params)
                    stack.enter_context(torch.autocast("cuda", enabled=False))
                if _applies(x, states, params, batch_first=args[8]):
                    x, states = stacked(layer, x, states, params, *settings)
                    return x, *states
        return original(*args)

    return record


def _cast(x: torch.Tensor, states: State, params: Params) -> tuple[torch.Tensor, State, Params]:
    """As autocast has them for cuDNN: all of its type."""
    dtype = torch.get_autocast_dtype("cuda")
    return x.to(dtype), tuple(one.to(dtype) for one in states), [one.to(dtype) for one in params]


def _applies(x: torch.Tensor, states: State, params: Params, batch_first: bool) -> bool:
    same = all(tensor.dtype is x.dtype for tensor in (*states, *params))
    return (
        same
        and x.device.type in ("cpu", "cuda")
        and x.shape[1 if batch_first else 0] > 0
        and not (x.device.type == "cpu" and torch.is_autocast_enabled("cpu"))
    )


def stacked(
    layer: Layer,
    x: torch.Tensor,
    states: State,
    params: Params,
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, State]:
    """What torch's function computes, with its arguments: outputs, and the states in the end."""
    if batch_first:
        x = x.transpose(0, 1)
    directions = 2 if bidirectional else 1
    each = len(params) // (layers * directions)
    ends: list[State] = []
    for number in range(layers):
        outputs = []
        for direction in range(directions):
            place = number * directions + direction
            own = params[place * each : (place + 1) * each]
            first = tuple(state[place] for state in states)
            output, end = layer(x, first, own, biases, direction == 1)
            outputs.append(output)
            ends.append(end)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and number < layers - 1:
            x = F.dropout(x, dropout, train)
    if batch_first:
        x = x.transpose(0, 1)
    return x, tuple(torch.stack(parts) for parts in zip(*ends, strict=True))


def _in_onednn(x: torch.Tensor, params: Params, biases: bool) -> bool:
    """Whether oneDNN has the layer: of float32 numbers, with biases, without a projection."""
    return (
        x.dtype is torch.float32
        and x.device.type == "cpu"
        and biases
        and torch.backends.mkldnn.is_available()
        and params[1].shape[0] == 4 * params[1].shape[1]
    )


def _by_cudnn(
    mode: str, x: torch.Tensor, state: State, params: Params, reverse: bool
) -> tuple[torch.Tensor, State] | None:
    """A layer on a CUDA device, where cuDNN has it."""
    if x.device.type != "cuda" or not torch.backends.cudnn.enabled:
        return None
    hidden, cells = (*state, None)[:2]
    output, last, last_cells, *_ = cudnn_layer(x, list(params), hidden, cells, MODES[mode], reverse)
    return output, (last,) if cells is None else (last, last_cells)


def _lstm(
    x: torch.Tensor, state: State, params: Params, biases: bool, reverse: bool
) -> tuple[torch.Tensor, State]:
    hidden, cells = state
    found = _by_cudnn("lstm", x, state, params, reverse)
    if found is not None:
        return found
    if _in_onednn(x, params, biases):
        output, hidden, cells, _ = onednn_lstm(x, list(params), hidden, cells, reverse)
        return output, (hidden, cells)
    gates = F.linear(x, params[0], params[2] + params[3] if biases else None)
    return lstm_steps(gates, state, params, reverse)


def lstm_steps(
    gates: torch.Tensor, state: State, params: Params, reverse: bool
) -> tuple[torch.Tensor, State]:
    """An LSTM layer after what its inputs add to the gates."""
    projection = params[-1] if len(params) % 2 else None
    output, cells, *_ = lstm(gates, params[1], projection, *state, reverse)
    return output, (_last(output, reverse), cells)


def _gru(
    x: torch.Tensor, state: State, params: Params, biases: bool, reverse: bool
) -> tuple[torch.Tensor, State]:
    found = _by_cudnn("gru", x, state, params, reverse)
    if found is not None:
        return found
    gates = F.linear(x, params[0], params[2] if biases else None)
    output, *_ = gru(gates, params[1], params[3] if biases else None, state[0], reverse)
    return output, (_last(output, reverse),)


def _rnn(
    x: torch.Tensor, state: State, params: Params, biases: bool, reverse: bool, *, relu: bool
) -> tuple[torch.Tensor, State]:
    found = _by_cudnn("rnn_relu" if relu else "rnn_tanh", x, state, params, reverse)
    if found is not None:
        return found
    sums = F.linear(x, params[0], params[2] + params[3] if biases else None)
    output = rnn(sums, params[1], state[0], relu, reverse)
    return output, (_last(output, reverse),)


def _last(output: torch.Tensor, reverse: bool) -> torch.Tensor:
    return output[0 if reverse else -1]


LAYERS: dict[str, Layer] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": functools.partial(_rnn, relu=False),
    "rnn_relu": functools.partial(_rnn, relu=True),
}
"""By torch's function."""
