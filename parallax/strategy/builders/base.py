"""What a builder is: from what is known of a step and of a cluster to a strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from parallax.cluster.network import Network
from parallax.graph.analysis.variables import Variable
from parallax.strategy.data import Strategy, VariableStrategy, described, everyone, fingerprint
from parallax.strategy.timeline import Speed, StepTime


@dataclass(frozen=True)
class GraphFacts:
    """What is known of a captured step; builders read it and change nothing.

    Args:
        variables: by name, in the order of the model: each with its ``shape``, ``dtype``,
            ``bytes``, ``rows``, ``slots``, ``factors``, and for those that are looked up with
            ``sparse``, ``bags`` and the measured ``sparsity``.
        predict: the time of a step by a strategy whose messages parallax arranges, with what
            computation hides; None where links and device were not measured. Takes as long as to
            rewrite the graph.
    """

    variables: Mapping[str, Variable]
    predict: Callable[[Strategy], StepTime] | None = None

    @classmethod
    def of(
        cls,
        variables: Iterable[Variable],
        predict: Callable[[Strategy], StepTime] | None = None,
    ) -> GraphFacts:
        """The facts of these variables."""
        by_name = {variable.name: variable for variable in variables}
        return cls(MappingProxyType(by_name), predict)

    @property
    def trainable(self) -> Mapping[str, Variable]:
        """Variables that receive a gradient: those about which there is something to decide."""
        return {name: one for name, one in self.variables.items() if one.trainable}

    @property
    def fingerprint(self) -> str:
        """What ties a strategy to this model."""
        return fingerprint(self.variables.values())


@dataclass(frozen=True)
class ClusterFacts:
    """What is known of the workers.

    Args:
        workers: how many there are.
        network: measured or computed links; None with one worker.
        hosts: by worker, the number of its host; all on one if empty.
        speed: of the workers' devices, measured; None as ``network`` is.
        average_dense: the mean (else the sum) of the workers' gradients of dense variables is asked
            for.
        average_sparse: the same for sparse variables.
        device: what they compute on, ``cpu`` or ``cuda``.
    """

    workers: int
    network: Network | None = None
    hosts: tuple[int, ...] = ()
    speed: Speed | None = None
    average_dense: bool = True
    average_sparse: bool = True
    device: str = "cpu"

    @property
    def everyone(self) -> tuple[int, ...]:
        """All workers, by number."""
        return everyone(self.workers)


class StrategyBuilder(ABC):
    """Decides how every variable is synchronised; one per file, found by its name.

    A builder runs on the chief, once, after the first batch was captured and the links were
    measured; what it returns is verified and sent to all. It should read what it is given and
    nothing else, so that the same model on the same cluster gets the same strategy.
    """

    name: ClassVar[str] = ""
    """What it is called in ``Config(strategy=...)`` and in the plan; else the class's name."""

    arranges_messages: bool = False
    """It sets ``hierarchy``, ``group``, ``late_turn``, ``pieces`` and ``pull_group`` itself, and
    ``reduction`` of variables with owners. Else parallax does: by the network, and by the order in
    which the graph computes."""

    @abstractmethod
    def build(self, graph: GraphFacts, cluster: ClusterFacts) -> Strategy:
        """The strategy for this step on this cluster; :meth:`strategy` makes one of choices."""

    @property
    def title(self) -> str:
        """Its name, for people."""
        return self.name or type(self).__name__

    @staticmethod
    def strategy(
        graph: GraphFacts, cluster: ClusterFacts, chosen: Mapping[str, VariableStrategy]
    ) -> Strategy:
        """A strategy of choices by variable, in the order of the model.

        Args:
            graph, cluster: what ``build`` was given.
            chosen: for every variable that receives a gradient. The others need none.
        """
        untouched = VariableStrategy("none", why="receives no gradient in this step")
        return Strategy(
            graph.fingerprint,
            cluster.workers,
            {
                name: chosen[name] if variable.trainable else untouched
                for name, variable in graph.variables.items()
            },
            described(graph.variables.values()),
        )
