"""A GRU layer over all its time steps, in one direction, as one operation of a graph.

As the LSTM layers of :mod:`parallax.ops.recurrent`: the steps are taken one after another, the
products that need not wait are left to the graph, and a captured graph holds for sequences of
every length. Sequences are [time, batch, features]; gates lie in PyTorch's order: reset, update,
new (Cho et al. 2014, with the reset gate after the product, as PyTorch and cuDNN have it).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from parallax.ops.steps import before, operations, or_zeros, order, product

aten: Any = torch.ops.aten


@torch.library.custom_op("parallax::gru", mutates_args=())
def gru(
    gates: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    hidden: torch.Tensor,
    reverse: bool,
    *,
    onednn: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The steps of a layer, of any type and on any device.

    Args:
        gates: what the inputs add to the gates, with their bias, [time, batch, 3 hidden].
        weight: of the last output, [3 hidden, hidden].
        bias: added to its product, [3 hidden].
        hidden: the output before the first step, [batch, hidden].
        reverse: take the last step first.
        onednn: let oneDNN compute the products, of float32 numbers on the CPU.

    Returns:
        Outputs [time, batch, hidden]; for the gradient, the open gates [time, batch, 3 hidden], and
        what the last output adds to the new gate before it is reset, [time, batch, hidden].
    """
    steps, size = gates.shape[0], hidden.shape[1]
    gates = gates.contiguous()
    opened = gates.new_empty(gates.shape)
    output = gates.new_empty((*gates.shape[:2], size))
    inner = gates.new_empty(output.shape)
    from_output = product(weight, onednn)
    added = None if bias is None else bias.expand(hidden.shape[0], -1).contiguous()
    for step in order(steps, reverse):
        own = from_output(hidden, added)
        both = torch.add(
            gates[step, :, : 2 * size], own[:, : 2 * size], out=opened[step, :, : 2 * size]
        ).sigmoid_()
        reset, update = both.split(size, 1)
        inner[step] = own[:, 2 * size :]
        new = opened[step, :, 2 * size :]
        torch.addcmul(gates[step, :, 2 * size :], reset, inner[step], out=new).tanh_()
        hidden = torch.sub(hidden, new, out=output[step]).mul_(update).add_(new)
    return output, opened, inner


@gru.register_fake
def _(
    gates: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    hidden: torch.Tensor,
    *rest: Any,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    output = gates.new_empty((*gates.shape[:2], hidden.shape[1]))
    return output, gates.new_empty(gates.shape), gates.new_empty(output.shape)


@torch.library.custom_op("parallax::gru_backward", mutates_args=())
def gru_backward(
    gradient: torch.Tensor,
    output: torch.Tensor,
    opened: torch.Tensor,
    inner: torch.Tensor,
    weight: torch.Tensor,
    hidden: torch.Tensor,
    reverse: bool,
    *,
    onednn: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of :func:`gru` along its chain of steps.

    Args:
        gradient: of the outputs, [time, batch, hidden].

    Returns:
        Gradients of ``gates``, of the products of ``weight`` and the last outputs (as large), and
        of ``hidden``.
    """
    steps, size = opened.shape[0], hidden.shape[1]
    reset, update, new = opened.split(size, 2)
    # What the gradients of each step are multiplied by is known for all steps at once.
    of_gates = opened.new_empty(opened.shape)
    of_products = opened.new_empty(opened.shape)
    parts = of_gates.split(size, 2)
    aten.sigmoid_backward(inner, reset, grad_input=parts[0])
    aten.sigmoid_backward(before(output, hidden, reverse) - new, update, grad_input=parts[1])
    aten.tanh_backward(1 - update, new, grad_input=parts[2])
    to_output = product(weight.t(), onednn)
    gradient = gradient.contiguous()
    backward = order(steps, reverse)[::-1]
    own = gradient[backward[0]]
    for place, step in enumerate(backward):
        of_gates[step, :, size:].unflatten(1, (2, size)).mul_(own.unsqueeze(1))
        parts[0][step].mul_(parts[2][step])
        products = of_products[step]
        products[:, : 2 * size] = of_gates[step, :, : 2 * size]
        torch.mul(parts[2][step], reset[step], out=products[:, 2 * size :])
        kept = own * update[step]
        for earlier in backward[place + 1 : place + 2]:
            kept += gradient[earlier]
        own = to_output(products, kept)
    return of_gates, of_products, own


@gru_backward.register_fake
def _(
    gradient: torch.Tensor,
    output: torch.Tensor,
    opened: torch.Tensor,
    inner: torch.Tensor,
    weight: torch.Tensor,
    hidden: torch.Tensor,
    *rest: Any,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gates = opened.new_empty(opened.shape), opened.new_empty(opened.shape)
    return *gates, hidden.new_empty(hidden.shape)


def _keep(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[torch.Tensor, ...],
) -> None:
    _, weight, bias, hidden, reverse = inputs
    ctx.reverse, ctx.biased = reverse, bias is not None
    ctx.onednn = keyword_only_inputs["onednn"]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, weight, hidden)


def _gradients(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
    output, opened, inner, weight, hidden = ctx.saved_tensors
    of_gates, of_products, of_hidden = gru_backward(
        or_zeros(gradients[0], output),
        output,
        opened,
        inner,
        weight,
        hidden,
        ctx.reverse,
        onednn=ctx.onednn,
    )
    given = before(output, hidden, ctx.reverse)
    of_weight = of_products.flatten(0, 1).t() @ given.flatten(0, 1)
    of_bias = of_products.sum((0, 1)) if ctx.biased else None
    return of_gates, of_weight, of_bias, of_hidden, None


gru.register_autograd(_gradients, setup_context=_keep)

GRU: Any = torch.ops.parallax.gru.default
GRU_BACKWARD: Any = torch.ops.parallax.gru_backward.default


@register_flop_formula(torch.ops.parallax.gru)
def _gru_operations(
    gates: list[int], weight: list[int], *rest: Any, out_shape: Any = None, **settings: Any
) -> int:
    return operations(gates, weight)


@register_flop_formula(torch.ops.parallax.gru_backward)
def _gru_backward_operations(
    gradient: list[int],
    output: list[int],
    opened: list[int],
    inner: list[int],
    weight: list[int],
    *rest: Any,
    out_shape: Any = None,
    **settings: Any,
) -> int:
    return operations(gradient, weight)
