"""Builders that cut variables unevenly, or along any axis."""

from __future__ import annotations

import hashlib
import random

import msgspec

from parallax.graph.analysis.variables import Variable
from parallax.strategy.builders import common
from parallax.strategy.builders.base import ClusterFacts, GraphFacts, StrategyBuilder
from parallax.strategy.builders.parameter_server import OwnerBuilder
from parallax.strategy.data import Strategy, VariableStrategy


class UnevenPS(OwnerBuilder):
    """Each large dense variable in uneven shards that fill all owners up to the same bytes.

    AutoDist's partitions may have any size (Zhang's thesis, section 7.3.2). Variables are dealt out
    largest first: one of a mebibyte or more is cut in blocks of rows so that every owner comes as
    near to an even share as rows allow; smaller ones go whole to the owner with least.
    """

    name = "UnevenPS"

    def owned(
        self, variable: Variable, cluster: ClusterFacts, queue: common.OwnerQueue
    ) -> VariableStrategy:
        """Uneven blocks, or a whole owner."""
        if variable.bytes < common.WHOLE_BYTES or variable.rows < 2:
            return common.owned(variable, cluster, [queue.next(variable.bytes)])
        filled = queue.filled(variable.bytes, variable.rows)
        shards = {owner: rows for owner, rows in sorted(filled.items()) if rows}
        if len(shards) == 1:
            return common.owned(variable, cluster, shards)
        choice = common.owned(variable, cluster, shards, "dense, in shards that fill owners up")
        return msgspec.structs.replace(choice, shards=tuple(shards.values()))


class RandomAxis(StrategyBuilder):
    """AllReduce of dense gradients in parts along an axis drawn at random; AllGather for sparse.

    AutoDist's partitioned AllReduce: the number of parts is the smallest divisor, from 2 on, of the
    size along the axis. A part is a message of its own, so that several are under way at a time.
    The draw follows from the model's fingerprint.
    """

    name = "RandomAxis"
    arranges_messages = True

    def build(self, graph: GraphFacts, cluster: ClusterFacts) -> Strategy:
        """AllReduce in parts, or AllGather."""
        seed = hashlib.sha256(graph.fingerprint.encode()).digest()
        draw = random.Random(seed)
        chosen = common.replicas(graph, cluster)
        for name, variable in graph.trainable.items():
            if chosen[name].synchronizer == "allreduce":
                chosen[name] = self._cut(chosen[name], variable, draw)
        return self.strategy(graph, cluster, chosen)

    @staticmethod
    def _cut(choice: VariableStrategy, variable: Variable, draw: random.Random) -> VariableStrategy:
        axes = [axis for axis, size in enumerate(variable.shape) if size > 1]
        if not axes:
            return choice
        axis = draw.choice(axes)
        size = variable.shape[axis]
        pieces = next((n for n in range(2, MOST_PIECES + 1) if size % n == 0), 1)
        if pieces == 1:
            return choice
        why = f"{choice.why}, in {pieces} parts along axis {axis}"
        return msgspec.structs.replace(choice, axis=axis, pieces=pieces, why=why)


# A size without a divisor up to this stays in one piece: parts of few elements cost more than they
# bring.
MOST_PIECES = 16
