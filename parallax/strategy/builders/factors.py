"""Builders that send the factors of a matrix product instead of the product."""

from __future__ import annotations

import msgspec

from parallax.graph.analysis.variables import Variable
from parallax.strategy.builders import common
from parallax.strategy.builders.base import ClusterFacts
from parallax.strategy.builders.parameter_server import FixedParts, OwnerBuilder
from parallax.strategy.data import VariableStrategy


class Poseidon(FixedParts):
    """Factors to all where these are fewer values than by servers; else servers, in parts of 2 MB.

    Poseidon's hybrid communication (Zhang's thesis, section 3.4, Algorithm 2): a matrix of M×N
    whose gradient is a product over K samples a worker goes by sufficient-factor broadcasting if
    2K(P₁-1)(M+N) ≤ 2MN(P₁+P₂-2)/P₂, for P₁ workers and P₂ servers, here the same P. All else is
    on servers in key-value chunks of 2 MB, dealt evenly, weights of convolutions too.
    """

    name = "Poseidon"

    def __init__(self) -> None:
        super().__init__(2_000_000)

    def dense(
        self, variable: Variable, cluster: ClusterFacts, queue: common.OwnerQueue
    ) -> VariableStrategy:
        """What Algorithm 2 says."""
        if not variable.factors or len(variable.shape) > 2:
            return super().dense(variable, cluster, queue)
        workers = cluster.workers
        by_factors = 2 * (workers - 1) * variable.factor_elements
        by_server = 2 * variable.elements * (2 * workers - 2) / workers
        values = f"{by_factors:,} values by factors, {by_server:,.0f} by servers"
        if by_factors <= by_server:
            return common.factors(variable, cluster, values)
        return msgspec.structs.replace(super().dense(variable, cluster, queue), why=values)


class ProjectAdam(OwnerBuilder):
    """Each dense variable whole on one owner, to which factors are sent where there are any.

    Microsoft's Project Adam (Chilimbi et al., 2014; Zhang's thesis, sections 3.3 and 3.5.4): what
    is pushed is small, and what is pulled is the whole matrix from one worker, which makes that
    worker busy where matrices differ in size.
    """

    name = "ProjectAdam"

    def owned(
        self, variable: Variable, cluster: ClusterFacts, queue: common.OwnerQueue
    ) -> VariableStrategy:
        """A whole owner, that is sent factors where there are any."""
        owner = queue.next(variable.bytes)
        if not variable.factors:
            return common.owned(variable, cluster, [owner])
        return VariableStrategy(
            "factor_push",
            owners=(owner,),
            average=common.averages(variable, cluster),
            why=f"a product over {variable.factor_rows} samples",
        )
