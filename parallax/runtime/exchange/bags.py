"""Exchange of bags: owners sum the rows of a bag, and its gradient returns once.

A bag of n rows of b bytes travels as b bytes instead of nb. A table lives on one worker, or row i
on the owner at place i mod P, each of which then sends its part of every bag. Where a batch looks
up fewer distinct rows than that, these travel and are summed where they are wanted: each lookup, in
each step, on each worker, takes what is less. A step costs one message of ids and bag sizes, and
per dtype one of values in each direction. Bytes sent per worker and step, for n ids in B
bags, of u distinct rows: (N-1)/N (4n + 4B) for ids and sizes, (N-1)/N bB for bags served to others
and as much for gradients, of tables with one owner each; P times the latter two and the sizes where
rows are dealt to P owners; (N-1)/N (4u + 2bu) where distinct rows travel.

Values of one link follow one another in a message: by worker, then by family, then by lookup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from parallax.ops.specs import BagsSpec
from parallax.runtime.comm.control import AskedIds, Step, StepControl
from parallax.runtime.comm.pending import Pending
from parallax.runtime.comm.world import World
from parallax.runtime.exchange.ahead import IdsAhead
from parallax.runtime.exchange.bag_requests import Asked, BagRequests, Family, Offsets, families
from parallax.runtime.exchange.bag_service import BagService, Served
from parallax.runtime.exchange.row_ids import id_dtype
from parallax.runtime.exchange.rows import hand_on


class _Side:
    """A family, what this worker asks for and what it serves."""

    def __init__(self, family: Family, rank: int, device: torch.device) -> None:
        self.family = family
        self.requests = BagRequests(family, rank, device)
        self.service = BagService(family, rank, device)


@dataclass
class _Message:
    """Values of one dtype under way."""

    received: torch.Tensor
    pending: Pending
    keep: torch.Tensor


@dataclass
class _Wanted:
    """What this worker looks up in a step, and the message that asks for it."""

    by_family: list[Asked]
    message: AskedIds


@dataclass
class BagRequest:
    """One step's bags: what this worker asked for and what it serves."""

    asked: list[Asked]
    """By family."""
    served: list[Served]
    """By family."""
    messages: dict[torch.dtype, _Message] = field(default_factory=dict)
    most: int = 0
    """Bytes of the largest message of rows of late, of all workers."""


@dataclass
class SentBags:
    """Gradients under way."""

    request: BagRequest
    lookups: list[list[int]]
    """By family, those that have gradients."""
    messages: dict[torch.dtype, _Message]


class BagExchange:
    """The runtime of one :class:`BagsSpec`."""

    def __init__(self, spec: BagsSpec, world: World, control: StepControl) -> None:
        self.spec = spec
        self.world = world
        self.control = control
        self.ids = [0] * len(spec.features)
        self.bags = [0] * len(spec.features)
        self.numbers = [0] * len(spec.features)
        """Ids and bag sizes sent, by lookup."""
        self.values = [0] * len(spec.features)
        """Rows or sums of rows received, by lookup."""
        self.steps = 0
        self._workers = range(world.size)
        self._sides = [
            _Side(family, world.rank, world.device) for family in families(spec, world.size)
        ]
        device = world.device
        self._nothing = [
            (
                torch.empty(0, dtype=torch.int64, device=device),
                torch.empty((0, table.width), dtype=table.dtype, device=device),
            )
            for table in spec.tables
        ]
        """By table, rows and gradients where no row was looked up."""
        self._dtypes: dict[torch.dtype, list[int]] = {}
        """By dtype, the families that travel together."""
        for place, side in enumerate(self._sides):
            self._dtypes.setdefault(side.family.dtype, []).append(place)
        self._kind = id_dtype(spec.tables)
        self._ahead: IdsAhead[_Wanted] = IdsAhead(self)
        self._places = {
            number: (place, lookup)
            for place, side in enumerate(self._sides)
            for lookup, number in enumerate(side.family.numbers)
        }
        """By lookup, its family and its place there."""
        self._words = 2 * max(
            sum(len(side.family.links_to[worker]) for side in self._sides)
            for worker in self._workers
        )
        """Before its ids, every worker is told as many counts: of ids and bag sizes, by link."""

    # -- Pull -----------------------------------------------------------------------------

    def pull(
        self,
        inputs: Sequence[tuple[torch.Tensor, Offsets]],
        shards: Sequence[torch.Tensor],
    ) -> BagRequest:
        """See :func:`parallax.ops.resources.pull_bags`."""
        step = self.control.step
        wanted = self._ahead.take(step) or self._ask(inputs, step)
        request = BagRequest(wanted.by_family, [])
        values, goes_on = self._hear(wanted.message, request, shards)
        for dtype, alike in self._dtypes.items():
            sent = [
                [part[worker].view(-1) for place in alike for part in values[place]]
                for worker in self._workers
            ]
            counts = [
                sum(self._elements(request, place, worker) for place in alike)
                for worker in self._workers
            ]
            request.messages[dtype] = self._start(sent, counts, dtype, "bags: pull", request.most)
        self._count(request)
        # While the sums are under way.
        for side, served in zip(self._sides, request.served, strict=True):
            side.service.prepare(served)
        self._ahead.send(step, goes_on, self._ask)
        return request

    def _elements(self, request: BagRequest, place: int, worker: int) -> int:
        """How much of a family's values this worker gets from another."""
        family, values = self._sides[place].family, request.asked[place].values
        return sum(values[link] for link in family.links_to[worker]) * family.width

    def _count(self, request: BagRequest) -> None:
        for side, asked in zip(self._sides, request.asked, strict=True):
            family = side.family
            for lookup, number in enumerate(family.numbers):
                self.ids[number] += asked.given.counts[lookup]
                self.bags[number] += asked.given.bags[lookup]
            for (lookup, _), (ids, sizes), values in zip(
                family.links, asked.parts, asked.values, strict=True
            ):
                number = family.numbers[lookup]
                self.values[number] += values
                self.numbers[number] += ids.shape[0] + (0 if sizes is None else values)
        self.steps += 1

    def _ask(self, inputs: Sequence[tuple[torch.Tensor, Offsets]], step: Step) -> _Wanted:
        """What a step looks up, and a message that tells the owners of it."""
        found, bad = [], ""
        for side in self._sides:
            asked, problem = side.requests.ask([inputs[f] for f in side.family.numbers])
            found.append(asked)
            bad = bad or problem
        counts: list[list[int]] = []
        parts: list[torch.Tensor] = []
        for worker in self._workers:
            row: list[int] = []
            for side, asked in zip(self._sides, found, strict=True):
                for link in side.family.links_to[worker]:
                    ids, sizes = asked.parts[link]
                    parts.append(ids)
                    row += (ids.shape[0], 0)
                    if sizes is not None:
                        parts.append(sizes)
                        row[-1] = sizes.shape[0]
            counts.append(row + [0] * (self._words - len(row)))
        sent = torch.cat(parts).to(self._kind)
        lengths = [sum(row) for row in counts]
        return _Wanted(found, self.control.ask(step, counts, sent, lengths, bad, "bags: ids"))

    def _hear(
        self, message: AskedIds, request: BagRequest, shards: Sequence[torch.Tensor]
    ) -> tuple[list[list[Sequence[torch.Tensor]]], bool]:
        """Learn from the others what is wanted.

        Returns:
            By family, served lookup and worker, the values to send: [values, width]; and whether
            all can go on to the next step.
        """
        heard = self.control.hear(message)
        request.most = heard.most
        own = 2 * sum(len(side.service.lookups) for side in self._sides)
        pieces = heard.ids.split([count for row in heard.counts for count in row[:own]])
        start, values = 0, []
        for side in self._sides:
            places = range(start, start + 2 * len(side.service.lookups), 2)
            start = places.stop
            served, sums = side.service.serve(
                [pieces[j::own] for j in places], [pieces[j + 1 :: own] for j in places], shards
            )
            request.served.append(served)
            values.append(sums)
        return values, heard.goes_on

    def _start(
        self,
        sent: list[list[torch.Tensor]],
        counts: list[int],
        dtype: torch.dtype,
        purpose: str,
        most: int,
    ) -> _Message:
        flat = [part for row in sent for part in row]
        message = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=self.world.device)
        received = torch.empty(sum(counts), dtype=dtype, device=self.world.device)
        totals = [sum(part.numel() for part in row) for row in sent]
        self.control.note_load(totals, counts, dtype, "rows")
        pending = self.world.all_to_all(received, message, counts, totals, purpose, most=most)
        return _Message(received, pending, message)

    def pulled(self, request: BagRequest) -> list[torch.Tensor]:
        """See :func:`parallax.ops.resources.pulled_bags`."""
        bags: dict[int, torch.Tensor] = {}
        for dtype, alike in self._dtypes.items():
            message = request.messages.pop(dtype)
            message.pending.wait()
            order = [
                (place, link)
                for worker in self._workers
                for place in alike
                for link in self._sides[place].family.links_to[worker]
            ]
            sizes = [
                request.asked[place].values[link] * self._sides[place].family.width
                for place, link in order
            ]
            pieces = dict(zip(order, message.received.split(sizes), strict=True))
            for place in alike:
                side = self._sides[place]
                arrived = [
                    pieces[place, link].view(-1, side.family.width)
                    for link in range(len(side.family.links))
                ]
                values = side.requests.bags(request.asked[place], arrived)
                bags.update(zip(side.family.numbers, values, strict=True))
        return [bags[number] for number in range(len(self.spec.features))]

    # -- Push -----------------------------------------------------------------------------

    def push(
        self, request: BagRequest, features: Sequence[int], gradients: Sequence[torch.Tensor]
    ) -> SentBags:
        """See :func:`parallax.ops.resources.push_bags`."""
        given: list[dict[int, torch.Tensor]] = [{} for _ in self._sides]
        for number, gradient in zip(features, gradients, strict=True):
            place, lookup = self._places[number]
            known = given[place].get(lookup)  # of an earlier backward pass through the same bags
            given[place][lookup] = gradient if known is None else known + gradient
        lookups = [sorted(own) for own in given]
        messages = {}
        for dtype, alike in self._dtypes.items():
            used = [place for place in alike if lookups[place]]
            if used:
                messages[dtype] = self._push(request, used, given, dtype)
        return SentBags(request, lookups, messages)

    def _push(
        self,
        request: BagRequest,
        alike: list[int],
        given: list[dict[int, torch.Tensor]],
        dtype: torch.dtype,
    ) -> _Message:
        sent: list[list[torch.Tensor]] = [[] for _ in self._workers]
        counts = [0] * self.world.size
        for place in alike:
            side, asked, served = self._sides[place], request.asked[place], request.served[place]
            family, lookups = side.family, sorted(given[place])
            by_link = self._weighted(side, asked, lookups, [given[place][i] for i in lookups])
            for worker, row in enumerate(sent):
                row += [by_link[k] for k in family.links_to[worker] if k in by_link]
            for slot, lookup in enumerate(side.service.lookups):
                if lookup in given[place]:
                    for worker, values in enumerate(served.values[slot]):
                        counts[worker] += values * family.width
        return self._start(sent, counts, dtype, "bags: push", request.most)

    def _weighted(
        self,
        side: _Side,
        asked: Asked,
        lookups: list[int],
        gradients: list[torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """By link, the flat gradient of what its owner sent, weighted for the mean."""
        family = side.family
        if self.control.is_empty:
            zeros = torch.zeros(
                max(asked.values) * family.width, dtype=family.dtype, device=self.world.device
            )
            return {
                link: zeros[: asked.values[link] * family.width]
                for lookup in lookups
                for link in family.links_of[lookup]
            }
        scale = self.control.weight / self.control.total if family.average else 1.0
        found = side.requests.gradients(asked, lookups, gradients, scale)
        return {link: value.reshape(-1) for link, value in found.items()}

    def receive(self, sent: SentBags, tables: Sequence[int]) -> list[Any]:
        """See :func:`parallax.ops.resources.receive_bags`."""
        found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for dtype, message in sent.messages.items():
            message.pending.wait()
            order = [
                (place, slot)
                for place in self._dtypes[dtype]
                for slot, lookup in enumerate(self._sides[place].service.lookups)
                if lookup in sent.lookups[place]
            ]
            sizes = [
                sent.request.served[place].values[slot][worker] * self._sides[place].family.width
                for worker in self._workers
                for place, slot in order
            ]
            pieces = message.received.split(sizes)
            for place in self._dtypes[dtype]:
                service = self._sides[place].service
                own = [(j, slot) for j, (of, slot) in enumerate(order) if of == place]
                values = [piece for j, _ in own for piece in pieces[j :: len(order)]]
                lookups = [service.lookups[slot] for _, slot in own]
                found.update(service.aggregate(sent.request.served[place], lookups, values))
        return [self._handed_on(table, found.get(table)) for table in tables]

    def _handed_on(self, table: int, found: tuple[torch.Tensor, torch.Tensor] | None) -> Any:
        spec = self.spec.tables[table]
        rank, size = self.world.rank, self.world.size
        if spec.owner is None:
            count = spec.dealt(rank, size)
        else:
            count = spec.rows if spec.owner == rank else 0
        ids, rows = found or self._nothing[table]
        return hand_on(spec, count, ids, rows.view(-1, *spec.row_shape))
