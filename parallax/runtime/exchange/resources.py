"""The runtime object of each description that a rewritten graph asks for."""

from __future__ import annotations

from typing import Any

from parallax.ops.checks import ChecksSpec
from parallax.ops.factors import FactorsSpec
from parallax.ops.specs import (
    BagsSpec,
    BatchNormsSpec,
    BucketsSpec,
    CombineSpec,
    OwnSpec,
    PullSpec,
    ResourceSpec,
    RowIdsSpec,
    RowsSpec,
)
from parallax.ops.statistics import StatisticsSpec
from parallax.ops.totals import TotalsSpec
from parallax.ops.values import GatherSpec
from parallax.ops.whole_batch import WholeBatchSpec
from parallax.runtime.comm.control import StepControl
from parallax.runtime.comm.world import World
from parallax.runtime.encoded.pool import EncodedBuckets
from parallax.runtime.exchange.bags import BagExchange
from parallax.runtime.exchange.batch_norms import BatchNorms
from parallax.runtime.exchange.checks import Checks
from parallax.runtime.exchange.combine import Combiner
from parallax.runtime.exchange.dense import Buckets
from parallax.runtime.exchange.factors import FactorExchange
from parallax.runtime.exchange.row_ids import RowIdCheck
from parallax.runtime.exchange.rows import RowExchange
from parallax.runtime.exchange.rows_by_host import HostRowExchange
from parallax.runtime.exchange.statistics import BatchStatistics
from parallax.runtime.exchange.totals import BatchTotals
from parallax.runtime.exchange.values import ValueGather, ValuePull
from parallax.runtime.exchange.whole_batch import WholeBatch


class ResourcePool:
    """Makes runtime objects; graphs that ask for equal ones (a new batch shape) share them."""

    def __init__(self, world: World, control: StepControl) -> None:
        self._world = world
        self._control = control
        self._made: dict[tuple[int, ResourceSpec], Any] = {}
        self.encoded = EncodedBuckets(world, control)

    def get(self, position: int, spec: ResourceSpec) -> Any:
        """The object for ``spec`` at a position among its graph's resources."""
        key = (position, spec)
        if key not in self._made:
            self._made[key] = self._make(position, spec)
        return self._made[key]

    def _make(self, position: int, spec: ResourceSpec) -> Any:
        if isinstance(spec, FactorsSpec):
            return FactorExchange(spec, self._world, self._control)
        if isinstance(spec, GatherSpec):
            return ValueGather(spec, self._world)
        if isinstance(spec, TotalsSpec):
            return BatchTotals(spec, self._world, self._control)
        if isinstance(spec, StatisticsSpec):
            return BatchStatistics(spec, self._world)
        if isinstance(spec, WholeBatchSpec):
            return WholeBatch(spec, self._world)
        if isinstance(spec, ChecksSpec):
            return Checks(spec, self._world, self._control)
        if isinstance(spec, OwnSpec):
            return spec.make(self._world, self._control)
        if isinstance(spec, RowsSpec):
            kind = HostRowExchange if spec.by_host else RowExchange
            return kind(spec, self._world, self._control)
        if isinstance(spec, BagsSpec):
            return BagExchange(spec, self._world, self._control)
        if isinstance(spec, BucketsSpec):
            return Buckets(spec, self._world, self._control, self.encoded, position)
        if isinstance(spec, PullSpec):
            return ValuePull(spec, self._world)
        if isinstance(spec, BatchNormsSpec):
            return BatchNorms(spec, self._world)
        if isinstance(spec, RowIdsSpec):
            return RowIdCheck(spec, self._control)
        assert isinstance(spec, CombineSpec)  # a LateSpec's object belongs to one program
        return Combiner(spec, self._world)

    def exchanges(self) -> list[RowExchange | BagExchange]:
        """All exchanges of rows and bags, for what they measure."""
        return [made for made in self._made.values() if isinstance(made, RowExchange | BagExchange)]
