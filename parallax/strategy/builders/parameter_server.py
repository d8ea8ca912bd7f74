"""Parameter servers on the workers: owners for all variables, rows of sparse ones."""

from __future__ import annotations

from abc import abstractmethod

from parallax.errors import ConfigError
from parallax.graph.analysis.variables import Variable
from parallax.strategy.builders import common
from parallax.strategy.builders.base import ClusterFacts, GraphFacts, StrategyBuilder
from parallax.strategy.data import Strategy, VariableStrategy


class OwnerBuilder(StrategyBuilder):
    """Row servers for sparse variables, and owners for dense ones, largest first."""

    def build(self, graph: GraphFacts, cluster: ClusterFacts) -> Strategy:
        """Rows or owners for each variable; what cannot be sharded is replicated."""
        chosen: dict[str, VariableStrategy] = {}
        queue = common.OwnerQueue(cluster.workers)
        for variable in queue.largest_first(graph.trainable.values()):
            choose = self.sparse if variable.sparse else self.dense
            chosen[variable.name] = choose(variable, cluster, queue)
        return self.strategy(graph, cluster, chosen)

    def sparse(
        self, variable: Variable, cluster: ClusterFacts, queue: common.OwnerQueue
    ) -> VariableStrategy:
        """How a sparse variable is synchronised: its rows are dealt to all."""
        return common.sparse(variable, cluster)

    def dense(
        self, variable: Variable, cluster: ClusterFacts, queue: common.OwnerQueue
    ) -> VariableStrategy:
        """How a dense variable is synchronised: by its owners, if its update can be sharded."""
        if variable.shard_obstacle:
            return common.replicated(variable, cluster)
        return self.owned(variable, cluster, queue)

    @abstractmethod
    def owned(
        self, variable: Variable, cluster: ClusterFacts, queue: common.OwnerQueue
    ) -> VariableStrategy:
        """The owners of a dense variable whose update can be sharded."""


class ParameterServer(OwnerBuilder):
    """Owners for all: large variables in a block for each worker (``run_option="PS"``).

    Dense variables of a mebibyte or more are split into blocks of rows over all workers; smaller
    ones go whole to the worker that owns the fewest bytes, largest first (the hand-made server of
    Zhang's thesis, section 7.6.2).
    """

    name = "PS"

    def owned(
        self, variable: Variable, cluster: ClusterFacts, queue: common.OwnerQueue
    ) -> VariableStrategy:
        """Blocks, or a whole owner."""
        if variable.bytes >= common.WHOLE_BYTES and variable.rows >= cluster.workers:
            why = "dense, split over all owners"
            return common.owned(variable, cluster, cluster.everyone, why)
        return common.owned(variable, cluster, [queue.next(variable.bytes)])


class BalancedPS(OwnerBuilder):
    """Each dense variable whole on the worker that owns the fewest bytes, largest first.

    The load-balanced server without partitioning (Zhang's thesis, section 7.6.2, TF-PS-LB): good
    where no variable is much larger than the others.
    """

    name = "BalancedPS"

    def owned(
        self, variable: Variable, cluster: ClusterFacts, queue: common.OwnerQueue
    ) -> VariableStrategy:
        """A whole owner."""
        return common.owned(variable, cluster, [queue.next(variable.bytes)])


class PartitionedPS(OwnerBuilder):
    """Each dense variable in as few even shards as divide its rows, on the owners with least.

    AutoDist's partitioned server: the number of shards is the smallest divisor of the rows from 2
    on. A variable without one up to the number of workers stays whole.
    """

    name = "PartitionedPS"

    def owned(
        self, variable: Variable, cluster: ClusterFacts, queue: common.OwnerQueue
    ) -> VariableStrategy:
        """Even blocks of rows."""
        counts = range(2, min(cluster.workers, variable.rows) + 1)
        count = next((n for n in counts if variable.rows % n == 0), 1)
        owners = queue.several(variable.bytes, count)
        return common.owned(variable, cluster, owners, f"dense, in {count} even shards")


class FixedParts(OwnerBuilder):
    """Each dense variable in parts of a fixed size, dealt to the owners with least.

    Parts of one variable on one owner are one block of its rows.

    Args:
        part_bytes: size of a part.

    Raises:
        ConfigError: that is not positive.
    """

    def __init__(self, part_bytes: int) -> None:
        if part_bytes < 1:
            raise ConfigError(f"part_bytes must be at least 1, found {part_bytes}.")
        self.part_bytes = part_bytes

    def owned(
        self, variable: Variable, cluster: ClusterFacts, queue: common.OwnerQueue
    ) -> VariableStrategy:
        """A block for each owner that has a part."""
        parts = max(1, -(-variable.bytes // self.part_bytes))
        most = min(cluster.workers, max(variable.rows, 1))
        owners = queue.several(variable.bytes, min(parts, most))
        why = f"dense, in {parts} part{'s'[: parts > 1]} of {self.part_bytes / 1e6:g} MB"
        return common.owned(variable, cluster, owners, why)


class BytePS(FixedParts):
    """Each dense variable in parts of 4 MB, dealt to the owners with least.

    As BytePS does it (Jiang et al., 2020; Zhang's thesis, table 7.1): gradients are cut in parts of
    4,096,000 bytes, which servers sum and give back.

    Args:
        part_bytes: size of a part.
    """

    name = "BytePS"

    def __init__(self, part_bytes: int = 4_096_000) -> None:
        super().__init__(part_bytes)
