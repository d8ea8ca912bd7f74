"""Factors of gradients: sent as soon as both are known, multiplied when those of all came."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from parallax.ops.factors import SIZES, WORDS, FactorEntry, FactorsSpec
from parallax.runtime.comm.control import INTEGERS, StepControl
from parallax.runtime.comm.pending import Pending
from parallax.runtime.comm.world import World
from parallax.runtime.compute.products import Product, has_onednn, onednn_is_faster

Pair = Sequence[torch.Tensor]
"""U and V of one worker, with a row for each of its samples; or its gradient alone."""


NEVER, EITHER, RATHER = range(3)
"""Whether a worker cannot multiply in oneDNN, could as well, or would rather."""


class FactorExchange:
    """The runtime of one :class:`FactorsSpec`.

    Bytes sent per worker and step for K samples and a gradient [M, M'] on N workers:
    (N-1) K (M+M') values to all; K (M+M') to an owner, by all others.

    What sizes the factors of each worker have is told before the first of them is sent, in one
    message with the control words, which travels while the model computes. So are the weights of
    the batches: factors travel as they are, and are weighted by who multiplies them; and in which
    library each worker multiplies faster, since all must use the same. Images travel channel by
    channel, however they lie in memory.
    """

    def __init__(self, spec: FactorsSpec, world: World, control: StepControl) -> None:
        self.spec = spec
        self.world = world
        self.control = control
        count = 1 + max(entry.message for entry in spec.entries)
        self._messages: list[list[tuple[int, FactorEntry]]] = [[] for _ in range(count)]
        for index, entry in enumerate(spec.entries):
            self._messages[entry.message].append((index, entry))
        self._telling: Pending | None = None
        self._told = torch.empty(0)
        self._words: list[list[int]] = []
        """What each worker told: control words, then by entry in which library it would multiply,
        then the sizes of every entry's factors."""
        self._preferred = [self._preference(entry) for entry in spec.entries]
        told = [entry.told for entry in spec.entries]
        self._places = list(itertools.accumulate(told, initial=INTEGERS + len(told)))
        """Where in these words an entry's sizes begin, and the last entry's end."""
        self._sent: dict[int, tuple[Pending, torch.Tensor, list[Pair]]] = {}
        """By message: how far it is, what it brings, and this worker's own factors."""
        self._results: dict[int, torch.Tensor] = {}
        self._checked = True

    # -- Starting -----------------------------------------------------------------------------

    def start(self, number: int, values: Any) -> None:
        """Send one message, see :func:`parallax.ops.resources.start`.

        Args:
            number: the message.
            values: U and V of each of its gradients; of ``SIZES``, their sizes.
        """

        def begin() -> None:
            if number == SIZES:
                self._tell(values)
            else:
                self._send(number, values)

        if self.spec.turns:
            # The first turn is that of the sizes.
            turn = self.spec.turns[number + 1]
            self.control.turns.take(self.spec.phase, turn, begin)
        else:
            begin()

    def _tell(self, sizes: Sequence[int]) -> None:
        self._forget()
        size = self.world.size
        own = [0] * len(sizes) if self.control.is_empty else list(sizes)
        words = [*self.control.integers(""), *self._preferred, *own]
        message = torch.tensor(words, device=self.world.device)
        self._told = message.new_empty(size * len(message))
        even = [len(message)] * size
        self._telling = self.world.all_to_all(
            self._told, message.repeat(size), even, even, "factors: sizes", "dense"
        )

    def _forget(self) -> None:
        """Let messages end that a step left under way when it failed."""
        if self._telling is not None:
            self._telling.wait()
        for pending, _, _ in self._sent.values():
            pending.wait()
        self._sent.clear()
        self._words, self._checked = [], False

    def _preference(self, entry: FactorEntry) -> int:
        """Whether this worker multiplies an entry's factors faster in oneDNN."""
        rows, columns = entry.shape[0], math.prod(entry.shape[1:])
        inner = self.world.size * entry.operations // max(2 * rows * columns, 1)
        plain = self.world.device.type == "cpu" and _multiplied_as(entry.dtype) is torch.float32
        if not (plain and entry.is_of_matrices and inner and has_onednn()):
            return NEVER
        faster = onednn_is_faster(Product(rows, inner, columns, True, False, False))
        return RATHER if faster else EITHER

    def _in_onednn(self, index: int) -> bool:
        """What most workers prefer, if all can."""
        told = [words[INTEGERS + index] for words in self._words]
        return min(told) != NEVER and 2 * told.count(RATHER) > len(told)

    def _shapes(self, worker: int, index: int) -> list[list[int]]:
        """Of one entry's factors on one worker."""
        first, last = self._places[index : index + 2]
        return self.spec.entries[index].shapes(self._words[worker][first:last])

    def _send(self, number: int, pairs: list[Pair]) -> None:
        if self._telling is not None:
            self._telling.wait()
            self._telling = None
            self._words = self._told.view(self.world.size, -1).tolist()
            self.control.check_same_step(self._words)
        world, message = self.world, self._messages[number]
        if self.control.is_empty:
            pairs = [
                [factors[0].new_empty(shape) for shape in self._shapes(world.rank, index)]
                for (index, _), factors in zip(message, pairs, strict=True)
            ]
        flat = [[factor.reshape(-1) for factor in pair] for pair in pairs]
        sent: list[torch.Tensor] = []
        sent_counts, received_counts = [], []
        for worker in range(world.size):
            parts: list[torch.Tensor] = []
            if worker != world.rank:
                for (_, entry), factors in zip(message, flat, strict=True):
                    if entry.owner in (None, worker):
                        parts += factors
            sent += parts
            sent_counts.append(sum(len(part) for part in parts))
            received_counts.append(
                sum(
                    math.prod(shape)
                    for index, _ in self._mine(number)
                    for shape in self._shapes(worker, index)
                )
                if worker != world.rank
                else 0
            )
        dtype = message[0][1].dtype
        received = torch.empty(sum(received_counts), dtype=dtype, device=world.device)
        buffer = torch.cat(sent) if sent else torch.empty(0, dtype=dtype, device=world.device)
        elements = max(
            sum(math.prod(s) for index, _ in message for s in self._shapes(worker, index))
            for worker in range(world.size)
        )
        most = elements * (world.size - 1) * dtype.itemsize
        pending = world.all_to_all(
            received, buffer, received_counts, sent_counts, "factors", "dense", most=most
        )
        self._sent[number] = (pending, received, pairs)

    def _mine(self, number: int) -> list[tuple[int, FactorEntry]]:
        """The entries of a message that this worker receives."""
        mine = (None, self.world.rank)
        return [(index, e) for index, e in self._messages[number] if e.owner in mine]

    # -- Finishing ----------------------------------------------------------------------------

    def finish(self, number: int) -> list[Any]:
        """The aggregated gradients of a message, see :func:`parallax.ops.resources.finish`: each as
        a tensor, or as its stacked factors where the update multiplies them.

        For ``WORDS``, none: only what is wrong with the step is told once more.

        Raises:
            DisagreementError, RowIdError, BatchError: as :meth:`StepControl.check_integers`.
        """
        if number == WORDS:
            self.control.exchange_counts([[]] * self.world.size, "", "factors: sizes")
            return []
        pending, received, own = self._sent.pop(number)
        pending.wait()
        if not self._checked:
            self._checked = True
            self.control.check_integers([words[:INTEGERS] for words in self._words])
        factors = self._factors(number, received, own)
        return [
            self._product(index, entry, factors[index])
            if index in factors
            else torch.empty(0, *entry.shape[1:], dtype=entry.dtype, device=self.world.device)
            for index, entry in self._messages[number]
        ]

    def _factors(
        self, number: int, received: torch.Tensor, own: list[Pair]
    ) -> dict[int, list[Pair]]:
        """By entry, the factors of every worker."""
        places = {index: place for place, (index, _) in enumerate(self._messages[number])}
        mine = self._mine(number)
        result: dict[int, list[Pair]] = {index: [] for index, _ in mine}
        offset = 0
        for worker in range(self.world.size):
            for index, _ in mine:
                if worker == self.world.rank:
                    result[index].append(own[places[index]])
                    continue
                pair = []
                for shape in self._shapes(worker, index):
                    count = math.prod(shape)
                    pair.append(received[offset : offset + count].view(shape))
                    offset += count
                result[index].append(pair)
        return result

    def _product(self, index: int, entry: FactorEntry, pairs: list[Pair]) -> Any:
        """The gradient of all workers, or U and V, each weighted by its batch if the mean is
        wanted."""
        dtype = _multiplied_as(entry.dtype)
        joined: dict[tuple[torch.Size, ...], list[list[torch.Tensor]]] = {}
        whole: list[torch.Tensor] = []
        for words, (first, *second) in zip(self._words, pairs, strict=True):
            share = words[1] / self.control.total if entry.average else 1
            weighted = first.to(dtype) * share if entry.average else first.to(dtype)
            if not second and entry.multiplied:
                whole.append(weighted)
            elif len(weighted):
                # A gradient that is no product is one of itself and the identity.
                right = second or [weighted]
                left = weighted if second else torch.eye(len(weighted), dtype=dtype).to(weighted)
                key = (left.shape[1:], right[0].shape[1:])
                joined.setdefault(key, []).append([left, right[0].to(dtype)])
        stacked = [
            tuple(torch.cat(parts) for parts in zip(*group, strict=True))
            for group in joined.values()
        ]
        if not entry.multiplied:
            return stacked[0]
        return self._sum(index, entry, stacked, whole, dtype)

    def _sum(
        self,
        index: int,
        entry: FactorEntry,
        stacked: Sequence[Sequence[torch.Tensor]],
        whole: Sequence[torch.Tensor],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """The sum of products, and of gradients that came whole."""
        if index not in self._results:
            self._results[index] = torch.empty(entry.shape, dtype=dtype, device=self.world.device)
        out = self._results[index]
        terms, onednn = [*whole], self._in_onednn(index)
        for left, right in stacked:
            place = torch.empty_like(out) if terms else out
            terms.append(entry.product(left, right, place, onednn))
        result = terms[0]
        for term in terms[1:]:
            result = result + term
        return result.to(entry.dtype)


def _multiplied_as(dtype: torch.dtype) -> torch.dtype:
    """Half types are multiplied in float32's precision, as they are summed."""
    return torch.float32 if dtype.itemsize < 4 else dtype
