"""What a worker asks for to make its bags, and what becomes of the answers and of gradients.

All lookups of a family are handled in the same few operations, whatever their number: their ids
lie one after the other, and what belongs to one lookup, or to one owner, is a part of the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from parallax.ops.specs import BagFeature, BagsSpec, TableSpec
from parallax.runtime.exchange.grouping import (
    Grouped,
    Memo,
    group,
    numbered,
    spread,
    starts_of,
    sum_rows,
)
from parallax.runtime.exchange.row_ids import bad_row

MANY_MORE = 0.5
"""Where a batch has so many more distinct rows than bags, as a share of these ..."""
PATIENCE = 15
"""... they are not counted for so many steps; for fewer steps where they are not so many more."""


class Family:
    """Lookups whose values are rows of one dtype and width: they are handled together.

    A *link* joins a lookup to a worker that owns rows of its table: one where a table lives whole,
    one for each owner where its rows are dealt out. Links are in the order of lookups, and of
    owners for each.
    """

    def __init__(self, spec: BagsSpec, numbers: Sequence[int], workers: int) -> None:
        """
        Args:
            spec: of the exchange.
            numbers: its lookups that belong to the family.
            workers: how many there are.
        """
        self.numbers = sorted(numbers, key=lambda number: spec.features[number].table)
        self.features: list[BagFeature] = [spec.features[number] for number in self.numbers]
        self.tables: list[TableSpec] = [spec.tables[feature.table] for feature in self.features]
        first = self.tables[0]
        self.dtype, self.width, self.average = first.dtype, first.width, first.average
        self.owners = [
            list(table.owners or range(workers)) if table.owner is None else [table.owner]
            for table in self.tables
        ]
        self.dealt = [table.owner is None for table in self.tables]
        self.ways = [len(owners) for owners in self.owners]
        """By lookup, how many owners its rows have: row i lives on the one at place i mod n."""
        self.links = [(i, owner) for i, owners in enumerate(self.owners) for owner in owners]
        self.links_of: list[range] = []
        for owners in self.owners:
            start = self.links_of[-1].stop if self.links_of else 0
            self.links_of.append(range(start, start + len(owners)))
        self.links_to = [
            [k for k, (_, owner) in enumerate(self.links) if owner == worker]
            for worker in range(workers)
        ]
        """By worker, the links that end there."""

    def rows_of_owner(self, lookup: int) -> int:
        """At most so many rows of a lookup's table live on one owner."""
        table = self.tables[lookup]
        return table.rows // self.ways[lookup] + 1 if self.dealt[lookup] else table.rows


def families(spec: BagsSpec, workers: int) -> list[Family]:
    """The lookups of an exchange by what they have in common."""
    found: dict[tuple[torch.dtype, int, bool], list[int]] = {}
    for number, feature in enumerate(spec.features):
        table = spec.tables[feature.table]
        found.setdefault((table.dtype, table.width, table.average), []).append(number)
    return [Family(spec, numbers, workers) for numbers in found.values()]


Offsets = torch.Tensor | int
"""Where bags begin, as ``torch.nn.EmbeddingBag`` takes it; or how many ids each bag has."""

Part = tuple[torch.Tensor, torch.Tensor | None]
"""Local rows of one owner, and how many each bag has of them; without, each row of them is wanted
by itself."""


@dataclass
class _Ids:
    """Some lookups' ids and bag sizes, lookup by lookup."""

    lookups: list[int]
    ids: torch.Tensor
    counts: list[int]
    """By lookup, how many ids."""
    sizes: torch.Tensor
    bags: list[int]
    """By lookup, how many bags."""

    def only(self, lookups: list[int]) -> _Ids:
        """Those of some of the lookups."""
        if lookups == self.lookups:
            return self
        places = [self.lookups.index(lookup) for lookup in lookups]
        ids, sizes = self.ids.split(self.counts), self.sizes.split(self.bags)
        return _Ids(
            lookups,
            _joined([ids[place] for place in places], self.ids),
            [self.counts[place] for place in places],
            _joined([sizes[place] for place in places], self.sizes),
            [self.bags[place] for place in places],
        )

    def bag_of(self) -> torch.Tensor:
        """By id, its bag's number."""
        return numbered(self.sizes, len(self.ids))


def _joined(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts) if parts else like[:0]


@dataclass
class _Distinct:
    """The distinct rows of some lookups, which travel in place of bags."""

    given: _Ids
    grouped: Grouped
    rows: torch.Tensor
    """Their numbers at their owners, link by link."""
    counts: list[int]
    """By link of these lookups, how many."""

    @property
    def lookups(self) -> list[int]:
        return self.given.lookups


@dataclass
class Asked:
    """One step's lookups of a family."""

    given: _Ids
    distinct: _Distinct
    """Of the lookups for which these are less than bags."""
    parts: list[Part]
    """By link."""
    values: list[int]
    """By link, how many rows of values travel between its owner and this worker."""


class BagRequests:
    """One worker's side of a family's exchange."""

    def __init__(self, family: Family, rank: int, device: torch.device) -> None:
        self.family = family
        self.rank = rank
        self.device = device
        self._patience = [0] * len(family.numbers)
        """By lookup, for how many steps to ask for bags without a look at distinct rows."""
        lookups = range(len(family.numbers))
        spans = [family.rows_of_owner(i) for i in lookups for _ in family.owners[i]]
        self._bases = [0, *itertools.accumulate(spans)]
        """By link, the key of its owner's first row; what no key reaches last."""
        self._memo = Memo()

    # -- Pull -----------------------------------------------------------------------------

    def ask(self, inputs: Sequence[tuple[torch.Tensor, Offsets]]) -> tuple[Asked, str]:
        """What to ask the owners for, and what is wrong with the ids, if anything."""
        given, problem = self._read(inputs)
        distinct = self._fewer_rows(given)
        parts: list[Part] = [(given.ids[:0], None)] * len(self.family.links)
        rows = iter(distinct.rows.split(distinct.counts))
        for lookup in distinct.lookups:
            for link in self.family.links_of[lookup]:
                parts[link] = (next(rows), None)
        rest = sorted(set(given.lookups) - set(distinct.lookups))
        dealt = [lookup for lookup in rest if self.family.dealt[lookup]]
        if dealt:
            self._deal(given.only(dealt), parts)
        ids, sizes = given.ids.split(given.counts), given.sizes.split(given.bags)
        for lookup in rest:
            if not self.family.dealt[lookup]:
                parts[self.family.links_of[lookup][0]] = (ids[lookup], sizes[lookup])
        values = [rows.shape[0] if lengths is None else lengths.shape[0] for rows, lengths in parts]
        return Asked(given, distinct, parts, values), problem

    def _read(self, inputs: Sequence[tuple[torch.Tensor, Offsets]]) -> tuple[_Ids, str]:
        flat, regular = [], []
        for (ids, offsets), feature in zip(inputs, self.family.features, strict=True):
            ids = ids.reshape(-1)
            if isinstance(offsets, int):
                regular.append(offsets)
            elif feature.last_offset:
                # Ids behind the last bag belong to none.
                ids = ids[: max(int(offsets[-1]), 0)]
            elif not offsets.shape[0]:
                ids = ids[:0]
            flat.append(ids)
        counts = [ids.shape[0] for ids in flat]
        lookups = list(range(len(flat)))
        joined = torch.cat(flat).long()
        if len(regular) == len(flat):
            bags = [count // size for count, size in zip(counts, regular, strict=True)]
            sizes = self._repeated("sizes", regular, bags)
        else:
            sizes, bags, problem = self._sizes([given for _, given in inputs], counts)
            if problem:
                none = [0] * len(lookups)
                return _Ids(lookups, joined[:0], none, torch.zeros_like(sizes), bags), problem
        last = self._repeated("last", [table.rows - 1 for table in self.family.tables], counts)
        problem = ""
        # Of a number that is negative, or larger than the last one, either term has a sign.
        if len(joined) and int((last - joined).bitwise_or_(joined).min()) < 0:
            problem = self._bad_id(joined.split(counts))
            joined = joined.clamp(min=0).minimum(last)
        return _Ids(lookups, joined, counts, sizes, bags), problem

    def _repeated(self, name: str, values: list[int], counts: list[int]) -> torch.Tensor:
        """As :func:`spread`, for what most steps have in common."""
        return self._memo.get(name, (values, counts), lambda: spread(values, counts, self.device))

    def _sizes(
        self, offsets: Sequence[Offsets], counts: list[int]
    ) -> tuple[torch.Tensor, list[int], str]:
        """Bag sizes from offsets, how many by lookup, and what is wrong with them."""
        starts = []
        for given, count, feature in zip(offsets, counts, self.family.features, strict=True):
            if isinstance(given, int):
                given = torch.arange(0, count, given, device=self.device)
            starts.append(given[:-1] if feature.last_offset else given)
        bags = [begins.shape[0] for begins in starts]
        before = [0, *itertools.accumulate(counts)]
        total = before.pop()
        begins = torch.cat(starts).long() + self._repeated("before", before, bags)
        sizes = torch.cat([begins, begins.new_tensor([total])]).diff()
        return sizes, bags, self._bad_offsets(begins, sizes, before, bags)

    def _bad_offsets(
        self, begins: torch.Tensor, sizes: torch.Tensor, before: list[int], bags: list[int]
    ) -> str:
        """What is wrong with offsets: a lookup's first bag begins with its first id."""
        used = [lookup for lookup, count in enumerate(bags) if count]
        places = [0, *itertools.accumulate(bags)]
        # Of whole numbers also where there is none: no lookup of this worker has a bag.
        first = begins[begins.new_tensor([places[lookup] for lookup in used])]
        wanted = begins.new_tensor([before[lookup] for lookup in used])
        if torch.equal(first, wanted) and bool((sizes >= 0).all()):
            return ""
        wrong = (first != wanted).tolist()
        for lookup, late in zip(used, wrong, strict=True):
            own = sizes[places[lookup] : places[lookup + 1]]
            if late or bool((own < 0).any()):
                break
        return (
            f"Worker {self.rank} looks up bags of table {self.family.tables[lookup].name!r} by "
            "offsets that do not begin with 0, decrease, or exceed the number of ids. Nothing was "
            "updated in this step."
        )

    def _bad_id(self, ids: Sequence[torch.Tensor]) -> str:
        for table, own in zip(self.family.tables, ids, strict=True):
            if own.numel():
                low, high = (int(bound) for bound in torch.aminmax(own))
                if low < 0 or high >= table.rows:
                    return bad_row(self.rank, table.name, table.rows, low if low < 0 else high)
        return ""

    def _fewer_rows(self, given: _Ids) -> _Distinct:
        """The lookups of this batch that have fewer distinct rows than bags to send."""
        family = self.family
        most = [bags * ways for bags, ways in zip(given.bags, family.ways, strict=True)]
        looked_at = []
        for lookup, count in enumerate(given.counts):
            if self._patience[lookup] and count > most[lookup]:
                self._patience[lookup] -= 1
            else:
                looked_at.append(lookup)
        found = self._distinct(given.only(looked_at))
        numbers = iter(found.counts)
        chosen = []
        for lookup in looked_at:
            count = sum(next(numbers) for _ in family.owners[lookup])
            # Without sizes to send besides.
            if count <= most[lookup]:
                chosen.append(lookup)
            else:
                excess = (count - most[lookup]) / max(most[lookup], 1)
                self._patience[lookup] = round(PATIENCE * min(excess / MANY_MORE, 1.0))
        return found if chosen == looked_at else self._distinct(given.only(chosen))

    def _distinct(self, given: _Ids) -> _Distinct:
        family, lookups = self.family, given.lookups
        first = [self._bases[family.links_of[lookup].start] for lookup in lookups]
        firsts = self._repeated(f"keys of {len(lookups)}", first, given.counts)
        rows = given.ids
        if any(family.dealt[lookup] for lookup in lookups):
            # The key of an owner's rows begins where those of the owners before it end.
            spans = [family.rows_of_owner(i) if family.dealt[i] else 0 for i in lookups]
            span = self._repeated(f"spans of {len(lookups)}", spans, given.counts)
            ways = self._ways_of(given)
            rows = given.ids // ways
            firsts = firsts + span * (given.ids % ways)
        grouped = group(rows + firsts, self._bases[-1])
        edges = [self._bases[link] for lookup in lookups for link in family.links_of[lookup]]
        edges.append(self._bases[-1])
        bounds = self._memo.get(
            f"edges of {len(lookups)}", edges, lambda: torch.tensor(edges, device=self.device)
        )
        cuts = torch.searchsorted(grouped.keys, bounds).tolist()
        counts = [end - start for start, end in itertools.pairwise(cuts)]
        distinct = rows.index_select(0, grouped.first())
        return _Distinct(given, grouped, distinct, counts)

    def _ways_of(self, given: _Ids) -> torch.Tensor:
        """By id, how many owners its table's rows have."""
        ways = [self.family.ways[lookup] for lookup in given.lookups]
        return self._repeated(f"ways of {len(ways)}", ways, given.counts)

    def _deal(self, given: _Ids, parts: list[Part]) -> None:
        """Fill in the parts of bags of tables whose rows are dealt out."""
        ways = [self.family.ways[lookup] for lookup in given.lookups]
        ways_of = self._ways_of(given)
        owners = given.ids % ways_of
        *first, total = [0, *itertools.accumulate(ways)]
        links = spread(first, given.counts, self.device) + owners
        order = group(links, total).order
        # Lengths lie lookup by lookup, for each owner by owner.
        bags = [count for count, n in zip(given.bags, ways, strict=True) for _ in range(n)]
        others = [(n - 1) * count for count, n in zip(given.bags, ways, strict=True)]
        before = [0, *itertools.accumulate(others)][:-1]
        skipped = spread(before, given.counts, self.device)
        places = given.bag_of() + skipped + owners * spread(given.bags, given.counts, self.device)
        lengths = torch.bincount(places, minlength=sum(bags))
        counts = torch.bincount(links, minlength=total).tolist()
        rows = (given.ids // ways_of).index_select(0, order).split(counts)
        found = iter(zip(rows, lengths.split(bags), strict=True))
        for lookup in given.lookups:
            for link in self.family.links_of[lookup]:
                parts[link] = next(found)

    def bags(self, asked: Asked, arrived: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """By lookup, its bags.

        Args:
            asked: what was asked for.
            arrived: by link, the values that its owner sent: [values, width].
        """
        result: dict[int, torch.Tensor] = {}
        for lookup, links in enumerate(self.family.links_of):
            value = arrived[links.start]
            for link in links[1:]:
                if asked.parts[link][1] is not None:
                    value.add_(arrived[link])
            result[lookup] = value
        distinct = asked.distinct
        if distinct.lookups:
            given = distinct.given
            links_of = [self.family.links_of[lookup] for lookup in distinct.lookups]
            rows = torch.cat([arrived[link] for links in links_of for link in links])
            sums = sum_rows(rows, distinct.grouped.positions(), starts_of(given.sizes))
            for lookup, value in zip(distinct.lookups, sums.split(given.bags), strict=True):
                result[lookup] = value
        self._divide(asked.given, result)
        return list(result.values())

    def _divide(self, given: _Ids, values: dict[int, torch.Tensor]) -> None:
        """Turn sums of bags into their means, or gradients of means into those of sums.

        Args:
            given: all lookups.
            values: by lookup; those of means are replaced.
        """
        means = [lookup for lookup in values if self.family.features[lookup].mean]
        if not means:
            return
        own = given.only(means)
        joined = torch.cat([values[lookup] for lookup in means])
        joined.div_(own.sizes.clamp(min=1).unsqueeze(1))
        values.update(zip(means, joined.split(own.bags), strict=True))

    # -- Push -----------------------------------------------------------------------------

    def gradients(
        self, asked: Asked, lookups: list[int], gradients: Sequence[torch.Tensor], scale: float
    ) -> dict[int, torch.Tensor]:
        """By link, the gradient of what its owner sent: [values, width].

        Args:
            asked: what was asked for.
            lookups: those that have gradients, ascending.
            gradients: of their bags.
            scale: what they are multiplied by.
        """
        values = dict(zip(lookups, gradients, strict=True))
        self._divide(asked.given, values)
        result: dict[int, torch.Tensor] = {}
        chosen = [lookup for lookup in asked.distinct.lookups if lookup in values]
        if chosen:
            distinct = asked.distinct
            if chosen != distinct.lookups:
                distinct = self._distinct(asked.given.only(chosen))
            given = distinct.given
            bags = self._memo.get("bags", given.bags, given.bag_of, [given.sizes])
            joined = torch.cat([values.pop(lookup) for lookup in chosen])
            sums = distinct.grouped.sums(joined, bags)
            if scale != 1:
                sums.mul_(scale)
            parts = iter(sums.split(distinct.counts))
            for lookup in chosen:
                for link in self.family.links_of[lookup]:
                    result[link] = next(parts)
        rest = list(values.values())
        if rest and scale != 1:
            rest = list(torch._foreach_mul(rest, scale))
        for lookup, value in zip(values, rest, strict=True):
            for link in self.family.links_of[lookup]:
                result[link] = value
        return result
