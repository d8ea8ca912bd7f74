"""Packed sequences (``nn.utils.rnn``) as they are captured.

How many rows a packed tensor has, and how many of each time step, are values of the batch. Rows
keep PyTorch's order, and their number is a size that is only known when the step runs, as that of
a selection by a mask. Recurrent layers read them from a padded tensor, whose steps beyond the end
of a sequence reach no result: what comes out at its last step is looked up, cells stay as they are
from there on, and the layer that reads backward has each sequence reversed within its length.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import PackedSequence

from parallax.errors import UnsupportedError
from parallax.graph.common.replaced import replaced
from parallax.graph.common.torch_internals import get_proxy_mode, node_of
from parallax.graph.common.user_code import user_line
from parallax.graph.stand_ins.recurrent import LAYERS, Layer, Params, State, lstm_steps, stacked
from parallax.ops.lengths import checked_lengths, if_full

Size = Any
"""An int, or a symbol of one."""


def _numbers(end: Size) -> torch.Tensor:
    return torch.arange(end, device="cpu")


@dataclass(frozen=True)
class Packing:
    """Where the rows of a packed tensor lie in a padded one.

    Args:
        steps, batch: of the padded tensor.
        lengths: of the sequences, [batch], on the CPU.
        counts: how many sequences reach each step, [steps], on the CPU ("batch_sizes").
        time, sequence: of each packed row, its step and its sequence, [rows].
    """

    steps: Size
    batch: Size
    lengths: torch.Tensor
    counts: torch.Tensor
    time: torch.Tensor
    sequence: torch.Tensor

    @classmethod
    def of_lengths(cls, lengths: torch.Tensor, steps: Size) -> Packing:
        """Of padded sequences; how many rows there are is known when the lengths are."""
        reached = _numbers(steps).unsqueeze(1) < lengths
        time, sequence = reached.nonzero().unbind(1)
        return cls(steps, lengths.shape[0], lengths, reached.sum(1), time, sequence)

    @classmethod
    def of_counts(cls, counts: torch.Tensor, rows: Size, batch: Size) -> Packing:
        """Of sequences that were packed before the step."""
        lengths = (counts.unsqueeze(1) > _numbers(batch)).sum(0)
        steps = counts.shape[0]
        time = torch.repeat_interleave(_numbers(steps), counts, output_size=rows)
        first = counts.cumsum(0) - counts
        sequence = _numbers(rows) - first.index_select(0, time)
        return cls(steps, batch, lengths, counts, time, sequence)

    def places(self, device: torch.device, reverse: bool = False) -> torch.Tensor:
        """Where each row lies in [steps * batch] rows; or where, if its sequence is reversed."""
        time = self.time
        if reverse:
            time = self.lengths.index_select(0, self.sequence) - 1 - time
        places: torch.Tensor = time * self.batch + self.sequence
        return places.to(device)

    def padded(self, rows: torch.Tensor, places: torch.Tensor, value: float = 0.0) -> torch.Tensor:
        """[steps, batch, ...] of [rows, ...]."""
        blank = rows.new_full((self.steps * self.batch, *rows.shape[1:]), value)
        filled = blank.index_copy(0, places, rows)
        return filled.view(self.steps, self.batch, *rows.shape[1:])

    def ended(self, device: torch.device) -> torch.Tensor:
        """Which steps are beyond the end of a sequence, [steps, batch, 1]."""
        return (_numbers(self.steps).view(-1, 1, 1) >= self.lengths.unsqueeze(1)).to(device)

    def at_end(self, padded: torch.Tensor) -> torch.Tensor:
        """[batch, ...] of each sequence's last step."""
        last = (self.lengths - 1) * self.batch + _numbers(self.batch)
        return padded.flatten(0, 1).index_select(0, last.to(padded.device))


class _Packings:
    """Those that one capture met."""

    def __init__(self) -> None:
        self._by_counts: dict[int, Packing] = {}
        self._by_computation: dict[Any, Packing] = {}

    def of_padded(self, lengths: torch.Tensor, steps: Size) -> Packing:
        """The same one for the same lengths, so that rows of both are known to be as many."""
        computed = _computation(lengths)
        key = None if computed is None else (computed, str(steps))
        found = self._by_computation.get(key)
        if found is None:
            checked = checked_lengths(lengths, steps)
            found = Packing.of_lengths(checked, steps)
            if key is not None:
                self._by_computation[key] = found
        self._by_counts[id(found.counts)] = found
        return found

    def of_sequence(self, packed: PackedSequence) -> Packing:
        found = self._by_counts.get(id(packed.batch_sizes))
        if found is None:
            if packed.sorted_indices is None:
                raise UnsupportedError(
                    "The batch has a packed sequence that does not say how many sequences it has.",
                    hint="pack it with enforce_sorted=False, or pass the padded tensor and the "
                    "lengths to the step and call pack_padded_sequence there.",
                    where=user_line(),
                )
            found = Packing.of_counts(
                packed.batch_sizes, packed.data.shape[0], packed.sorted_indices.shape[0]
            )
            self._by_counts[id(packed.batch_sizes)] = found
        return found


def _computation(tensor: torch.Tensor) -> Any:
    """What a tensor was computed by, equal for what must have equal values; None if unknown."""
    mode = get_proxy_mode()
    node = None if mode is None else node_of(mode.tracer, tensor)
    return None if node is None else _described(node)


def _described(node: torch.fx.Node) -> Any:
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or (schema is not None and schema.is_mutable):
        return node.name
    described = torch.fx.map_arg((node.args, node.kwargs), _described)
    return str(node.target), repr(described)


@contextlib.contextmanager
def packed_sequences() -> Iterator[None]:
    """Let a step pack, pad, and give recurrent layers packed sequences."""
    packings = _Packings()

    def pack(padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
        if batch_first:
            padded = padded.transpose(0, 1)
        found = packings.of_padded(lengths, padded.shape[0])
        places = found.places(padded.device)
        return padded.flatten(0, 1).index_select(0, places), found.counts

    def pad(
        rows: torch.Tensor, counts: torch.Tensor, batch_first: bool, value: float, steps: Size
    ) -> Any:
        # What the caller was asked for, which PyTorch has turned into a number by now.
        caller = sys._getframe(1).f_locals
        found = packings.of_sequence(caller["sequence"])
        places = found.places(rows.device)
        if caller["total_length"] is None:
            places = if_full(places, found.lengths, steps)
        padded = found.padded(rows, places, value)
        if (missing := steps - found.steps) != 0:
            beyond = padded.new_full((missing, *padded.shape[1:]), value)
            padded = torch.cat([padded, beyond])
        return padded.transpose(0, 1) if batch_first else padded, found.lengths

    def forward(original: Callable[..., Any]) -> Callable[..., Any]:
        def of_packed(self: Any, input: Any, hx: Any = None) -> Any:
            if not isinstance(input, PackedSequence):
                return original(self, input, hx)
            return _recurrent(self, input, hx, packings.of_sequence(input))

        return of_packed

    kinds = (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN)
    with replaced(
        (torch._VF, "_pack_padded_sequence", pack),
        (torch._VF, "_pad_packed_sequence", pad),
        *((kind, "forward", forward(kind.forward)) for kind in kinds),
    ):
        yield


def _recurrent(module: Any, packed: PackedSequence, hx: Any, packing: Packing) -> Any:
    """What a recurrent module's ``forward`` gives for a packed sequence."""
    module._update_flat_weights()
    rows = packed.data
    if hx is None:
        places = module.num_layers * (2 if module.bidirectional else 1)
        widths = [module.proj_size or module.hidden_size]
        if module.mode == "LSTM":
            widths.append(module.hidden_size)
        states: State = tuple(rows.new_zeros(places, packing.batch, width) for width in widths)
    else:
        hx = module.permute_hidden(hx, packed.sorted_indices)
        states = (hx,) if isinstance(hx, torch.Tensor) else tuple(hx)
    own = _frozen_lstm(packing) if module.mode == "LSTM" else LAYERS[module.mode.lower()]
    with torch.autocast(rows.device.type, enabled=False):  # which leaves packed rows their dtype
        rows, states = stacked(
            functools.partial(_layer, packing, own),
            rows,
            tuple(state.to(rows.dtype) for state in states),
            [weight.to(rows.dtype) for weight in module._flat_weights],
            module.bias,
            module.num_layers,
            module.dropout,
            module.training,
            module.bidirectional,
            False,
        )
    result = PackedSequence(
        rows, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices
    )
    ends = states if module.mode == "LSTM" else states[0]
    return result, module.permute_hidden(ends, packed.unsorted_indices)


def _layer(
    packing: Packing,
    layer: Layer,
    rows: torch.Tensor,
    state: State,
    params: Params,
    biases: bool,
    reverse: bool,
) -> tuple[torch.Tensor, State]:
    places = packing.places(rows.device, reverse)
    outputs, ends = layer(packing.padded(rows, places), state, params, biases, False)
    # Only the cells are kept at the end by the layer itself, since it gives none of the others.
    last = packing.at_end(outputs)
    return outputs.flatten(0, 1).index_select(0, places), (last, *ends[1:])


def _frozen_lstm(packing: Packing) -> Layer:
    """An LSTM layer in which the cells stay as they are from the end of a sequence on."""

    def layer(
        x: torch.Tensor, state: State, params: Params, biases: bool, reverse: bool
    ) -> tuple[torch.Tensor, State]:
        size = state[1].shape[1]
        gates = F.linear(x, params[0], params[2] + params[3] if biases else None)
        entered, kept, others = gates.split([size, size, 2 * size], 2)
        ended = packing.ended(x.device)
        closed = entered.masked_fill(ended, -math.inf)
        opened = kept.masked_fill(ended, math.inf)
        return lstm_steps(torch.cat([closed, opened, others], 2), state, params, reverse)

    return layer
