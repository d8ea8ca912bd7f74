"""An LSTM layer over all its time steps, in one direction, as one operation of a graph.

PyTorch runs such a layer on the CPU as one call of oneDNN, twice as fast as step after step, but
that call cannot be captured: it keeps a workspace whose size only oneDNN knows. An operation of
our own can say so. Where oneDNN has no such layer (other types than float32, projected outputs),
a second operation takes the steps one after another, with the products of all steps that do not
wait for each other left to the graph. Either way the number of steps is free: a captured graph
holds for sequences of every length.

Sequences are [time, batch, features], as the layers of PyTorch have them by default; gates lie in
PyTorch's order: input, forget, cell, output.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from parallax.ops.steps import before, operations, or_zeros, order, product

aten: Any = torch.ops.aten

_LSTM = 2
"""oneDNN's layer by its number in PyTorch."""


@torch.library.custom_op("parallax::onednn_lstm", mutates_args=())
def onednn_lstm(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    hidden: torch.Tensor,
    cells: torch.Tensor,
    reverse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A float32 layer on the CPU.

    Args:
        x: [time, batch, features].
        weights: of the input [4 hidden, features] and of the last output [4 hidden, hidden], and
            the two biases [4 hidden].
        hidden, cells: the state before the first step, [batch, hidden].
        reverse: take the last step first.

    Returns:
        Outputs [time, batch, hidden], the two parts of the last state, and oneDNN's workspace.
    """
    given = (x, *weights, hidden, cells)
    with torch.enable_grad():  # else there is no workspace
        output, last, last_cells, workspace = aten.mkldnn_rnn_layer(
            *[tensor.detach().contiguous() for tensor in given],
            reverse,
            [],
            _LSTM,
            hidden.shape[1],
            1,
            True,
            False,
            False,
            True,
        )
    return output, last.reshape(hidden.shape), last_cells.reshape(cells.shape), workspace


@onednn_lstm.register_fake
def _(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    hidden: torch.Tensor,
    cells: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    # How large the workspace is only oneDNN knows, and nobody else looks at it.
    workspace = x.new_empty(0, dtype=torch.uint8)
    output = x.new_empty((*x.shape[:2], hidden.shape[1]))
    return output, x.new_empty(hidden.shape), x.new_empty(cells.shape), workspace


@torch.library.custom_op("parallax::onednn_lstm_backward", mutates_args=())
def onednn_lstm_backward(
    gradient: torch.Tensor,
    last_gradient: torch.Tensor,
    last_cells_gradient: torch.Tensor,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    hidden: torch.Tensor,
    cells: torch.Tensor,
    output: torch.Tensor,
    last: torch.Tensor,
    last_cells: torch.Tensor,
    workspace: torch.Tensor,
    reverse: bool,
) -> list[torch.Tensor]:
    """Gradients of :func:`onednn_lstm`: of the input, the two weights, either bias, the state."""
    found = aten.mkldnn_rnn_layer_backward(
        x.contiguous(),
        *weights,
        hidden.contiguous(),
        cells.contiguous(),
        output,
        last,
        last_cells,
        gradient.contiguous(),
        last_gradient.contiguous(),
        last_cells_gradient.contiguous(),
        reverse,
        _LSTM,
        hidden.shape[1],
        1,
        True,
        True,
        False,
        [],
        False,
        workspace,
    )
    of_x, of_input, of_output, of_bias, _, of_hidden, of_cells = found
    return [
        of_x,
        of_input,
        of_output,
        of_bias,
        of_hidden.reshape(hidden.shape),
        of_cells.reshape(cells.shape),
    ]


@onednn_lstm_backward.register_fake
def _(
    gradient: torch.Tensor,
    last_gradient: torch.Tensor,
    last_cells_gradient: torch.Tensor,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    hidden: torch.Tensor,
    cells: torch.Tensor,
    *rest: Any,
) -> list[torch.Tensor]:
    like = (x, weights[0], weights[1], weights[2], hidden, cells)
    return [one.new_empty(one.shape) for one in like]


def _keep_fused(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weights, hidden, cells, reverse = inputs
    ctx.reverse = reverse
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, *weights, hidden, cells, *output)


def _fused_gradients(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
    x, *weights, hidden, cells, output, last, last_cells, workspace = ctx.saved_tensors
    of_x, of_input, of_output, of_bias, of_hidden, of_cells = onednn_lstm_backward(
        or_zeros(gradients[0], output),
        or_zeros(gradients[1], last),
        or_zeros(gradients[2], last_cells),
        x,
        weights,
        hidden,
        cells,
        output,
        last,
        last_cells,
        workspace,
        ctx.reverse,
    )
    # Both biases have this gradient, and what changes the one in place must not change the other.
    of_weights = [of_input, of_output, of_bias, of_bias.clone()]
    return of_x, of_weights, of_hidden, of_cells, None


onednn_lstm.register_autograd(_fused_gradients, setup_context=_keep_fused)


@torch.library.custom_op("parallax::lstm", mutates_args=())
def lstm(
    gates: torch.Tensor,
    weight: torch.Tensor,
    projection: torch.Tensor | None,
    hidden: torch.Tensor,
    cells: torch.Tensor,
    reverse: bool,
    *,
    onednn: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The steps of a layer, of any type and on any device.

    Args:
        gates: what the inputs add to the gates, biases included, [time, batch, 4 hidden].
        weight: of the last output, [4 hidden, output].
        projection: makes outputs of the hidden features, [output, hidden]; None leaves them.
        hidden: the output before the first step, [batch, output].
        cells: the same of the cells, [batch, hidden].
        reverse: take the last step first.
        onednn: let oneDNN compute the products, of float32 numbers on the CPU.

    Returns:
        Outputs [time, batch, output] and the last cells; for the gradient, the open gates
        [time, batch, 4 hidden], all cells [time, batch, hidden] and their tanh, and the hidden
        features before their projection, the same (empty without one).
    """
    steps, size = gates.shape[0], cells.shape[1]
    gates = gates.contiguous()
    opened = gates.new_empty(gates.shape)
    all_cells = gates.new_empty((*gates.shape[:2], size))
    tanh = gates.new_empty(all_cells.shape)
    features = gates.new_empty(all_cells.shape)
    output = features
    from_output = product(weight, onednn)
    if projection is not None:
        output = gates.new_empty((*gates.shape[:2], projection.shape[0]))
        project = product(projection, onednn)
    for step in order(steps, reverse):
        closed = from_output(hidden, gates[step])
        entered, kept, new, shown = opened[step].split(size, 1)
        torch.sigmoid(closed[:, : 2 * size], out=opened[step, :, : 2 * size])
        torch.tanh(closed[:, 2 * size : 3 * size], out=new)
        torch.sigmoid(closed[:, 3 * size :], out=shown)
        cells = torch.mul(kept, cells, out=all_cells[step]).addcmul_(entered, new)
        torch.tanh(cells, out=tanh[step])
        hidden = torch.mul(tanh[step], shown, out=features[step])
        if projection is not None:
            hidden = output[step].copy_(project(hidden, None))
    if projection is None:
        features = gates.new_empty(0)
    return output, cells.clone(), opened, all_cells, tanh, features


@lstm.register_fake
def _(
    gates: torch.Tensor,
    weight: torch.Tensor,
    projection: torch.Tensor | None,
    hidden: torch.Tensor,
    cells: torch.Tensor,
    *rest: Any,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    sequence = gates.shape[:2]
    all_cells = gates.new_empty((*sequence, cells.shape[1]))
    features = gates.new_empty(0 if projection is None else all_cells.shape)
    output = gates.new_empty((*sequence, hidden.shape[1]))
    last = cells.new_empty(cells.shape)
    tanh = gates.new_empty(all_cells.shape)
    return output, last, gates.new_empty(gates.shape), all_cells, tanh, features


@torch.library.custom_op("parallax::lstm_backward", mutates_args=())
def lstm_backward(
    gradient: torch.Tensor,
    last_cells_gradient: torch.Tensor,
    opened: torch.Tensor,
    all_cells: torch.Tensor,
    tanh: torch.Tensor,
    weight: torch.Tensor,
    projection: torch.Tensor | None,
    cells: torch.Tensor,
    reverse: bool,
    *,
    onednn: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of :func:`lstm` along its chain of steps.

    Args:
        gradient: of the outputs, [time, batch, output].
        last_cells_gradient: of the cells after the last step, [batch, hidden].

    Returns:
        Gradients of ``gates``, of ``hidden``, of ``cells``, and of each step's output with what
        later steps add to it, [time, batch, output] (empty without a projection).
    """
    steps, size = opened.shape[0], cells.shape[1]
    entered, kept, new, shown = opened.split(size, 2)
    cells_before = before(all_cells, cells, reverse)
    # What the gradients of each step are multiplied by is known for all steps at once: the slopes
    # of sigmoid and tanh at what they gave, by what it met.
    of_gates = opened.new_empty(opened.shape)
    parts = of_gates.split(size, 2)
    aten.sigmoid_backward(new, entered, grad_input=parts[0])
    aten.sigmoid_backward(cells_before, kept, grad_input=parts[1])
    aten.tanh_backward(entered, new, grad_input=parts[2])
    aten.sigmoid_backward(tanh, shown, grad_input=parts[3])
    through = aten.tanh_backward(shown, tanh)
    of_cells = last_cells_gradient
    to_output = product(weight.t(), onednn)
    gradient = gradient.contiguous()
    of_outputs = gradient.new_empty(0 if projection is None else gradient.shape)
    if projection is not None:
        to_features = product(projection.t(), onednn)
    backward = order(steps, reverse)[::-1]
    own = gradient[backward[0]]
    for place, step in enumerate(backward):
        if projection is not None:
            own = to_features(of_outputs[step].copy_(own), None)
        of_cells = torch.addcmul(of_cells, own, through[step])
        gates = of_gates[step]
        gates[:, 3 * size :].mul_(own)
        gates.view(-1, 4, size)[:, :3].mul_(of_cells.unsqueeze(1))
        of_cells = of_cells * kept[step]
        earlier = backward[place + 1 : place + 2]
        own = to_output(gates, gradient[earlier[0]] if earlier else None)
    return of_gates, own, of_cells, of_outputs


@lstm_backward.register_fake
def _(
    gradient: torch.Tensor,
    last_cells_gradient: torch.Tensor,
    opened: torch.Tensor,
    all_cells: torch.Tensor,
    tanh: torch.Tensor,
    weight: torch.Tensor,
    projection: torch.Tensor | None,
    cells: torch.Tensor,
    *rest: Any,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    of_hidden = gradient.new_empty((cells.shape[0], weight.shape[1]))
    of_outputs = gradient.new_empty(0 if projection is None else gradient.shape)
    return opened.new_empty(opened.shape), of_hidden, cells.new_empty(cells.shape), of_outputs


def _keep(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[torch.Tensor, ...],
) -> None:
    _, weight, projection, hidden, cells, reverse = inputs
    ctx.reverse, ctx.projected = reverse, projection is not None
    ctx.onednn = keyword_only_inputs["onednn"]
    ctx.set_materialize_grads(False)
    kept = (weight, hidden, cells) + ((projection,) if ctx.projected else ())
    ctx.save_for_backward(*output, *kept)


def _gradients(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
    output, last, *kept, features, weight, hidden, cells = ctx.saved_tensors[:9]
    projection = ctx.saved_tensors[9] if ctx.projected else None
    of_gates, of_hidden, of_cells, of_outputs = lstm_backward(
        or_zeros(gradients[0], output),
        or_zeros(gradients[1], last),
        *kept,
        weight,
        projection,
        cells,
        ctx.reverse,
        onednn=ctx.onednn,
    )
    given = before(output, hidden, ctx.reverse)
    of_weight = of_gates.flatten(0, 1).t() @ given.flatten(0, 1)
    of_projection = None
    if projection is not None:
        of_projection = of_outputs.flatten(0, 1).t() @ features.flatten(0, 1)
    return of_gates, of_weight, of_projection, of_hidden, of_cells, None


lstm.register_autograd(_gradients, setup_context=_keep)

LSTM: Any = torch.ops.parallax.lstm.default
LSTM_BACKWARD: Any = torch.ops.parallax.lstm_backward.default


@register_flop_formula(torch.ops.parallax.lstm)
def _lstm_operations(
    gates: list[int],
    weight: list[int],
    projection: list[int] | None,
    *rest: Any,
    out_shape: Any = None,
    **settings: Any,
) -> int:
    return operations(gates, weight, projection)


@register_flop_formula(torch.ops.parallax.lstm_backward)
def _lstm_backward_operations(
    gradient: list[int],
    last_cells_gradient: list[int],
    opened: list[int],
    all_cells: list[int],
    tanh: list[int],
    weight: list[int],
    projection: list[int] | None,
    *rest: Any,
    out_shape: Any = None,
    **settings: Any,
) -> int:
    return operations(opened, weight, projection)


@register_flop_formula(torch.ops.parallax.onednn_lstm)
def _onednn_lstm_operations(
    x: list[int], weights: list[list[int]], *rest: Any, out_shape: Any = None
) -> int:
    return 2 * x[0] * x[1] * (math.prod(weights[0]) + math.prod(weights[1]))


@register_flop_formula(torch.ops.parallax.onednn_lstm_backward)
def _onednn_lstm_backward_operations(
    gradient: list[int],
    last_gradient: list[int],
    last_cells_gradient: list[int],
    x: list[int],
    weights: list[list[int]],
    *rest: Any,
    out_shape: Any = None,
) -> int:
    return 4 * x[0] * x[1] * (math.prod(weights[0]) + math.prod(weights[1]))
