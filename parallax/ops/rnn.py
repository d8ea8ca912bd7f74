"""A layer of a plain recurrent network over all its time steps, as one operation of a graph.

See :mod:`parallax.ops.recurrent`. Sequences are [time, batch, features].
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from parallax.ops.steps import before, operations, or_zeros, order, product

aten: Any = torch.ops.aten


@torch.library.custom_op("parallax::rnn", mutates_args=())
def rnn(
    sums: torch.Tensor,
    weight: torch.Tensor,
    hidden: torch.Tensor,
    relu: bool,
    reverse: bool,
    *,
    onednn: bool = False,
) -> torch.Tensor:
    """The steps of a layer, of any type and on any device.

    Args:
        sums: what the inputs add, biases included, [time, batch, hidden].
        weight: of the last output, [hidden, hidden].
        hidden: the output before the first step, [batch, hidden].
        relu: outputs are the positive parts, else the tanh.
        reverse: take the last step first.
        onednn: let oneDNN compute the products, of float32 numbers on the CPU.

    Returns:
        Outputs [time, batch, hidden].
    """
    sums = sums.contiguous()
    output = sums.new_empty(sums.shape)
    from_output = product(weight, onednn)
    for step in order(sums.shape[0], reverse):
        own = from_output(hidden, sums[step])
        hidden = output[step]
        torch.clamp_min(own, 0, out=hidden) if relu else torch.tanh(own, out=hidden)
    return output


@rnn.register_fake
def _(sums: torch.Tensor, *rest: Any, **settings: Any) -> torch.Tensor:
    return sums.new_empty(sums.shape)


@torch.library.custom_op("parallax::rnn_backward", mutates_args=())
def rnn_backward(
    gradient: torch.Tensor,
    output: torch.Tensor,
    weight: torch.Tensor,
    relu: bool,
    reverse: bool,
    *,
    onednn: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of :func:`rnn` along its chain of steps.

    Args:
        gradient: of the outputs, [time, batch, hidden].

    Returns:
        Gradients of ``sums`` and of ``hidden``.
    """
    ones = torch.ones_like(output)
    of_sums = aten.threshold_backward(ones, output, 0) if relu else aten.tanh_backward(ones, output)
    to_output = product(weight.t(), onednn)
    gradient = gradient.contiguous()
    backward = order(output.shape[0], reverse)[::-1]
    own = gradient[backward[0]]
    for place, step in enumerate(backward):
        earlier = backward[place + 1 : place + 2]
        own = to_output(of_sums[step].mul_(own), gradient[earlier[0]] if earlier else None)
    return of_sums, own


@rnn_backward.register_fake
def _(
    gradient: torch.Tensor, output: torch.Tensor, *rest: Any, **settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return output.new_empty(output.shape), output.new_empty(output.shape[1:])


def _keep(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: torch.Tensor,
) -> None:
    _, weight, hidden, ctx.relu, ctx.reverse = inputs
    ctx.onednn = keyword_only_inputs["onednn"]
    ctx.save_for_backward(output, weight, hidden)


def _gradients(ctx: Any, gradient: torch.Tensor | None) -> tuple[Any, ...]:
    output, weight, hidden = ctx.saved_tensors
    of_sums, of_hidden = rnn_backward(
        or_zeros(gradient, output), output, weight, ctx.relu, ctx.reverse, onednn=ctx.onednn
    )
    given = before(output, hidden, ctx.reverse)
    of_weight = of_sums.flatten(0, 1).t() @ given.flatten(0, 1)
    return of_sums, of_weight, of_hidden, None, None


rnn.register_autograd(_gradients, setup_context=_keep)

RNN: Any = torch.ops.parallax.rnn.default
RNN_BACKWARD: Any = torch.ops.parallax.rnn_backward.default


@register_flop_formula(torch.ops.parallax.rnn)
def _rnn_operations(
    sums: list[int], weight: list[int], *rest: Any, out_shape: Any = None, **settings: Any
) -> int:
    return operations(sums, weight)


@register_flop_formula(torch.ops.parallax.rnn_backward)
def _rnn_backward_operations(
    gradient: list[int],
    output: list[int],
    weight: list[int],
    *rest: Any,
    out_shape: Any = None,
    **settings: Any,
) -> int:
    return operations(gradient, weight)
