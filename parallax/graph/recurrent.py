"""Recurrent layers as they are captured: each layer of an LSTM is one operation per direction."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from parallax.ops.recurrent import lstm, onednn_lstm

State = tuple[torch.Tensor, torch.Tensor]


@contextlib.contextmanager
def whole_layers() -> Iterator[None]:
    """Let ``torch.lstm`` record whole layers, which hold for sequences of every length.

    Packed sequences, autocast and other devices than the CPU are left to PyTorch.
    """
    modules: tuple[Any, ...] = (torch, torch._VF)
    original = torch.lstm

    def recording(*args: Any) -> Any:
        # With a second tensor, the sequences are packed: of different lengths in one batch.
        if len(args) == 9 and not isinstance(args[1], torch.Tensor) and _applies(*args[:3]):
            return _layers(*args)
        return original(*args)

    saved = [vars(module).get("lstm") for module in modules]
    try:
        for module in modules:
            module.lstm = recording
        yield
    finally:
        for module, value in zip(modules, saved, strict=True):
            if value is None:
                del module.lstm
            else:
                module.lstm = value


def _applies(
    x: torch.Tensor, state: Sequence[torch.Tensor], params: Sequence[torch.Tensor]
) -> bool:
    same = all(tensor.dtype is x.dtype for tensor in (*state, *params))
    return same and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


def _in_onednn(x: torch.Tensor, params: Sequence[torch.Tensor], biases: bool) -> bool:
    """Whether oneDNN has the layer: of float32 numbers, with biases, without a projection."""
    return (
        x.dtype is torch.float32
        and biases
        and torch.backends.mkldnn.is_available()
        and params[1].shape[0] == 4 * params[1].shape[1]
    )


def _layers(
    x: torch.Tensor,
    state: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What ``torch.lstm`` computes, with its arguments."""
    if batch_first:
        x = x.transpose(0, 1)
    directions = 2 if bidirectional else 1
    each = len(params) // (layers * directions)
    hiddens, cells = [], []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            own = params[number * each : (number + 1) * each]
            before = (state[0][number], state[1][number])
            output, (hidden, cell) = _layer(x, before, own, biases, direction == 1)
            outputs.append(output)
            hiddens.append(hidden)
            cells.append(cell)
        x = outputs[0] if directions == 1 else torch.cat(outputs, 2)
        if dropout and train and layer < layers - 1:
            x = F.dropout(x, dropout, train)
    if batch_first:
        x = x.transpose(0, 1)
    return x, torch.stack(hiddens), torch.stack(cells)


def _layer(
    x: torch.Tensor, state: State, params: Sequence[torch.Tensor], biases: bool, reverse: bool
) -> tuple[torch.Tensor, State]:
    """One layer in one direction: outputs and the state after the last step."""
    if _in_onednn(x, params, biases):
        output, hidden, cells, _ = onednn_lstm(x, list(params), *state, reverse)
        return output, (hidden, cells)
    of_input, of_output = params[:2]
    bias = params[2] + params[3] if biases else None
    gates = F.linear(x, of_input, bias)
    projection = params[-1] if len(params) % 2 else None
    output, cells, *_ = lstm(gates, of_output, projection, *state, reverse)
    return output, (output[0 if reverse else -1], cells)
