"""A recurrent layer over all its time steps, in one direction, by cuDNN on a CUDA device.

PyTorch's own call cannot be captured: it looks into the memory of the weights, which tensors
without storage do not have, and keeps a workspace whose size only cuDNN knows. An operation of our
own leaves both to the time when it runs. See :mod:`parallax.ops.recurrent` for the CPU; sequences
are [time, batch, features], and cuDNN has the gates in PyTorch's order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from parallax.ops.steps import or_zeros

aten: Any = torch.ops.aten

MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""cuDNN's layers by their numbers in PyTorch."""
_LSTM = MODES["lstm"]


@torch.library.custom_op("parallax::cudnn_layer", mutates_args=())
def cudnn_layer(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    hidden: torch.Tensor,
    cells: torch.Tensor | None,
    mode: int,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layer on a CUDA device.

    Args:
        x: [time, batch, features].
        weights: of the input and of the last output, the two biases if there are any, and the
            projection of an LSTM, in PyTorch's order.
        hidden, cells: the state before the first step, [batch, features]; cells of an LSTM alone.
        mode: one of :data:`MODES`.
        reverse: take the last step first.

    Returns:
        Outputs [time, batch, features], the two parts of the last state (no cells but of an LSTM),
        and for the gradient cuDNN's workspace and the weights as it has them.
    """
    if reverse:
        x = x.flip(0)
    mode, size, projected, *settings = _settings(weights, mode)
    # cuDNN wants all weights in one piece of memory, of which PyTorch makes them views: of these
    # tensors, while the variables, with counters of changes of their own, stay where they are.
    packed = [one.data for one in weights]
    layers, batch_first, bidirectional = 1, False, False
    buffer = aten._cudnn_rnn_flatten_weight(
        packed, len(packed), x.shape[2], mode, size, projected, layers, batch_first, bidirectional
    )
    output, last, last_cells, workspace, buffer = aten._cudnn_rnn(
        x.contiguous(),
        packed,
        len(packed),
        buffer,
        *_of_one_layer(hidden, cells),
        mode,
        size,
        projected,
        *settings,
        [],
        None,
    )
    last_cells = x.new_empty(0) if cells is None else last_cells.squeeze(0)
    output = output.flip(0) if reverse else output
    return output, last.squeeze(0), last_cells, workspace, buffer


def _of_one_layer(*states: torch.Tensor | None) -> list[torch.Tensor | None]:
    """States, or gradients of them, as cuDNN has those of several layers."""
    return [None if one is None else one.contiguous().unsqueeze(0) for one in states]


def _settings(weights: list[torch.Tensor], mode: int) -> tuple[Any, ...]:
    """What cuDNN's two calls are told alike: mode, sizes, one layer of one direction, training."""
    first_output = weights[1]
    gates = {_LSTM: 4, MODES["gru"]: 3}.get(mode, 1)
    size = first_output.shape[0] // gates
    projected = first_output.shape[1] if first_output.shape[1] != size else 0
    return mode, size, projected, 1, False, 0.0, True, False


@cudnn_layer.register_fake
def _(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    hidden: torch.Tensor,
    cells: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    output = x.new_empty((*x.shape[:2], hidden.shape[1]))
    last_cells = x.new_empty(0 if cells is None else cells.shape)
    # How large these are only cuDNN knows, and nobody else looks at them.
    workspace, buffer = x.new_empty(0, dtype=torch.uint8), x.new_empty(0)
    return output, x.new_empty(hidden.shape), last_cells, workspace, buffer


@torch.library.custom_op("parallax::cudnn_layer_backward", mutates_args=())
def cudnn_layer_backward(
    gradient: torch.Tensor,
    last_gradient: torch.Tensor,
    last_cells_gradient: torch.Tensor | None,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    hidden: torch.Tensor,
    cells: torch.Tensor | None,
    output: torch.Tensor,
    workspace: torch.Tensor,
    buffer: torch.Tensor,
    mode: int,
    reverse: bool,
) -> list[torch.Tensor]:
    """Gradients of :func:`cudnn_layer`: of the input, the state, and the weights in their order."""
    if reverse:
        x, output, gradient = x.flip(0), output.flip(0), gradient.flip(0)
    of_x, of_hidden, of_cells, of_weights = aten._cudnn_rnn_backward(
        x.contiguous(),
        weights,
        len(weights),
        buffer,
        *_of_one_layer(hidden, cells),
        output.contiguous(),
        gradient.contiguous(),
        *_of_one_layer(last_gradient, last_cells_gradient),
        *_settings(weights, mode),
        [],
        None,
        workspace.clone(),  # which cuDNN writes to, and a step may go backward twice
        [True, True, cells is not None, True],
    )
    state = [of_hidden.squeeze(0), *([] if cells is None else [of_cells.squeeze(0)])]
    # cuDNN writes all gradients of weights into one piece of memory.
    return [of_x.flip(0) if reverse else of_x, *state, *(one.clone() for one in of_weights)]


@cudnn_layer_backward.register_fake
def _(
    gradient: torch.Tensor,
    last_gradient: torch.Tensor,
    last_cells_gradient: torch.Tensor | None,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    hidden: torch.Tensor,
    cells: torch.Tensor | None,
    *rest: Any,
) -> list[torch.Tensor]:
    state = [hidden] if cells is None else [hidden, cells]
    return [one.new_empty(one.shape) for one in (x, *state, *weights)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weights, hidden, cells, ctx.mode, ctx.reverse = inputs
    outputs, last, last_cells, workspace, buffer = output
    ctx.has_cells = cells is not None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(workspace, buffer)
    own = [hidden, last] + ([cells, last_cells] if cells is not None else [])
    ctx.save_for_backward(x, outputs, workspace, buffer, *own, *weights)


def _gradients(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
    x, outputs, workspace, buffer, hidden, last, *rest = ctx.saved_tensors
    cells, last_cells, weights = (*rest[:2], rest[2:]) if ctx.has_cells else (None, None, rest)
    of_x, of_hidden, *others = cudnn_layer_backward(
        or_zeros(gradients[0], outputs),
        or_zeros(gradients[1], last),
        or_zeros(gradients[2], last_cells) if ctx.has_cells else None,
        x,
        weights,
        hidden,
        cells,
        outputs,
        workspace,
        buffer,
        ctx.mode,
        ctx.reverse,
    )
    of_cells = others.pop(0) if ctx.has_cells else None
    return of_x, others, of_hidden, of_cells, None, None


cudnn_layer.register_autograd(_gradients, setup_context=_keep)


@register_flop_formula(torch.ops.parallax.cudnn_layer)
def _cudnn_operations(
    x: list[int], weights: list[list[int]], *rest: Any, out_shape: Any = None
) -> int:
    return 2 * x[0] * x[1] * sum(math.prod(one) for one in weights if len(one) == 2)


@register_flop_formula(torch.ops.parallax.cudnn_layer_backward)
def _cudnn_backward_operations(
    gradient: list[int],
    last_gradient: list[int],
    last_cells_gradient: list[int] | None,
    x: list[int],
    weights: list[list[int]],
    *rest: Any,
    out_shape: Any = None,
) -> int:
    return 4 * x[0] * x[1] * sum(math.prod(one) for one in weights if len(one) == 2)
