"""Synchronisers by name: what each needs and supports, what it sends, and its rewriting pass.

Verification, the cost model and the rewriting look here, so that a synchroniser is one file. Those
of parallax are loaded from ``rewrite/synchronizers`` when they are first asked for; a package adds
its own by :func:`register`, before ``get_runner`` and on every worker.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from parallax.errors import StrategyError
from parallax.graph.analysis.variables import Variable
from parallax.strategy.data import PartitionName, ReductionName, VariableStrategy

MessageKind = Literal["ids", "rows", "gathered", "summed", "owned", "factors", "words"]
"""What one message carries: ids; rows one way; rows of gradients, or gradients, to all; a sum of
dense gradients; dense values to or from their owners; factors; or next to nothing."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a strategy.

    Args:
        variable: that it is about; empty when it is about the strategy itself.
        field: of the decision.
        problem: what is wrong.
        remedy: what the field may be instead.
    """

    variable: str
    field: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        about = f"{self.variable!r}: " if self.variable else ""
        return f"{about}{self.problem} ({self.field}: {self.remedy})"


Formula = Callable[[Variable, VariableStrategy, int, int], float]
"""Bytes per worker and step: of a variable, as it is synchronised, by workers, on hosts."""
Part = Callable[[MessageKind, Variable, VariableStrategy, int], float]
"""What part of a variable's bytes in a step one message carries: of a kind, by workers."""
Operations = Callable[[Variable, int], float]
"""Multiplications and additions, for a variable and so many workers."""
Check = Callable[[VariableStrategy, Variable, int], list[tuple[str, str, str]]]
"""Field, problem and remedy of each thing that is wrong with a decision, for so many workers."""


def _fair(kind: MessageKind, variable: Variable, choice: VariableStrategy, workers: int) -> float:
    """All of a step's bytes in one message."""
    return 1.0


def _no_operations(variable: Variable, workers: int) -> float:
    return 0.0


def _nothing(choice: VariableStrategy, variable: Variable, workers: int) -> list[Any]:
    return []


@dataclass(frozen=True)
class Synchronizer:
    """One way to synchronise a variable.

    Args:
        name: as strategies have it.
        sent: bytes that a worker sends per step, on average over workers.
        rewrite: the pass that puts it into a worker's graph, called once if any variable of a
            strategy is synchronised so; several synchronisers may share one. Called with a
            :class:`parallax.rewrite.context.Rewriting`.
        across: bytes of them that go to other hosts; as many as other hosts have workers if None.
        part: of the bytes, that one message carries.
        computes: multiplications and additions of a worker's step beside those of one device.
        calls: small operations that its exchange takes for each variable.
        messages: of a step, by kind, in the order in which they wait for one another; the first
            of dense gradients is what they travel in.
        dense: it aggregates the whole gradient of a variable, sparse or not.
        sparse: it needs a variable of which rows are looked up.
        factors: it needs a variable whose gradient is a matrix product.
        sharded: a worker updates its shard of a variable only.
        whole: of a sharded variable's values, every worker keeps all; its slots are shards.
        partitions: that it supports.
        axes: it partitions, or cuts in pieces, along any axis, not only along rows.
        bags: it needs a variable that is read in bags, and handles all of these together.
        some: rows may be dealt to some workers only, in any order.
        by_host: it may work inside each host first.
        pieces: it may send a gradient in pieces.
        reductions: how it may be said to sum gradients, and in which order of workers, but as the
            backend does; those with owners bring values back so.
        encodes: it sums encoded gradients.
        casts: its rows may travel as another dtype.
        merges: its gradients travel in buckets together.
        in_turn: its messages of gradients start in the order of the strategy's groups, whatever
            order a worker's graph makes them in.
        check: what else can be wrong.
    """

    name: str
    sent: Formula
    rewrite: Callable[[Any], None] | None = None
    across: Formula | None = None
    part: Part = _fair
    computes: Operations = _no_operations
    calls: int = 0
    messages: tuple[MessageKind, ...] = ("gathered",)
    dense: bool = False
    sparse: bool = False
    factors: bool = False
    sharded: bool = False
    whole: bool = False
    partitions: tuple[PartitionName, ...] = ("whole",)
    axes: bool = False
    bags: bool = False
    some: bool = False
    by_host: bool = False
    pieces: bool = False
    reductions: tuple[ReductionName, ...] = ()
    encodes: bool = False
    casts: bool = False
    merges: bool = False
    in_turn: bool = False
    check: Check = _nothing


def _none_sent(variable: Variable, choice: VariableStrategy, workers: int, hosts: int) -> float:
    return 0.0


def _is_not_trained(choice: VariableStrategy, variable: Variable, workers: int) -> list[Any]:
    if not variable.trainable:
        return []
    remedy = "choose how its gradient is synchronised"
    return [("synchronizer", "it receives a gradient but is not synchronised", remedy)]


NONE = Synchronizer("none", _none_sent, check=_is_not_trained)
"""Of a variable that receives no gradient."""

_HOME = "parallax.rewrite.synchronizers"
_MODULES = (
    *("rows", "allgather", "bags", "scatter", "allreduce", "broadcast", "owner"),
    *("factors", "factor_push"),
)
"""Files of ``rewrite/synchronizers``; their rewriting passes run in this order."""

_known: dict[str, Synchronizer] = {}


def synchronizers() -> Mapping[str, Synchronizer]:
    """All synchronisers by name, in the order in which their passes run."""
    if not _known:
        found = [importlib.import_module(f"{_HOME}.{name}").SYNCHRONIZER for name in _MODULES]
        _known.update({one.name: one for one in (NONE, *found)})
    return _known


def register(synchronizer: Synchronizer) -> None:
    """Make a synchroniser known to strategies.

    Raises:
        StrategyError: another one has its name.
    """
    synchronizers()
    if _known.setdefault(synchronizer.name, synchronizer) is not synchronizer:
        raise StrategyError(
            f"There is a synchroniser {synchronizer.name!r} already.", hint="give it another name."
        )


def synchronizer(name: str) -> Synchronizer:
    """The synchroniser of a name.

    Raises:
        StrategyError: there is none.
    """
    found = synchronizers().get(name)
    if found is None:
        raise StrategyError(
            f"There is no synchroniser {name!r}.", hint=f"use one of {', '.join(synchronizers())}."
        )
    return found


def facts(choice: VariableStrategy) -> Synchronizer:
    """Of the synchroniser that was chosen."""
    return synchronizer(choice.synchronizer)


def names_where(condition: Callable[[Synchronizer], bool]) -> Sequence[str]:
    """Names of the synchronisers of which a condition holds."""
    return [name for name, one in synchronizers().items() if condition(one)]
