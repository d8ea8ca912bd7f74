"""Check a strategy against the variables and workers that it is for."""

from __future__ import annotations

from collections.abc import Sequence

from parallax.errors import StrategyError
from parallax.graph.variables import Variable
from parallax.strategy.data import (
    BY_HOST,
    BY_ROWS,
    SHARDED,
    Strategy,
    VariableStrategy,
    described,
    fingerprint,
)

SYNCHRONIZERS = ("allreduce", "allgather", "rows", "bags", "owner", "none")
UNUSED = (
    *("axis", "shards", "reduction", "order", "encoder", "encoder_options"),
    *("memory", "staleness"),
)


def verify(
    strategy: Strategy, variables: Sequence[Variable], workers: int, two_levels: bool = True
) -> None:
    """Check that a strategy fits.

    Args:
        strategy: what to check.
        variables: of the model that it is for.
        workers: how many there are.
        two_levels: they are on several hosts of equally many workers, more than one each.

    Raises:
        StrategyError: it is for another model or number of workers, or contradicts itself; lists
            every problem by variable.
    """
    problems = []
    if strategy.replicas != workers:
        problems.append(f"it is for {strategy.replicas} workers, there are {workers}")
    known = {variable.name: variable for variable in variables}
    problems += [f"no decision for {name!r}" for name in known if name not in strategy.variables]
    problems += [f"no variable {name!r}" for name in strategy.variables if name not in known]
    if not problems and strategy.fingerprint != fingerprint(variables):
        problems.append(_another_model(strategy, variables))
    for name, choice in strategy.variables.items():
        if name in known:
            problems += [f"{name!r}: {text}" for text in _check(choice, known[name], workers)]
    by_host = [name for name, one in strategy.variables.items() if one.hierarchy == "hosts"]
    if by_host and not two_levels:
        problems.append(
            "hierarchy 'hosts' needs several hosts of equally many workers, more than one each "
            f"({', '.join(map(repr, by_host[:3]))}{', ...' if len(by_host) > 3 else ''})"
        )
    if problems:
        raise StrategyError("The strategy does not fit: " + "; ".join(problems) + ".")


def _another_model(strategy: Strategy, variables: Sequence[Variable]) -> str:
    """What differs between a model and the one that a strategy was made for."""
    here = described(variables)
    differing = [
        f"{name!r} is {text}, and was {strategy.model[name]}"
        for name, text in here.items()
        if strategy.model.get(name, text) != text
    ]
    text = "shapes or dtypes of the variables differ from those it was made for"
    if differing:
        return f"{text}: {'; '.join(differing)}"
    if strategy.model:
        return f"the fingerprint {strategy.fingerprint} is of variables in another order, or edited"
    return text


def _check(choice: VariableStrategy, variable: Variable, workers: int) -> list[str]:
    problems = _unused(choice)
    if choice.synchronizer not in SYNCHRONIZERS:
        names = ", ".join(SYNCHRONIZERS)
        problems.append(f"synchronizer {choice.synchronizer!r} is unknown; use one of {names}")
    if any(not 0 <= owner < workers for owner in choice.owners):
        problems.append(f"owners {choice.owners} are not all among {workers} workers")
    if len(set(choice.owners)) != len(choice.owners):
        problems.append("an owner is named twice")
    if choice.synchronizer in BY_ROWS and not variable.sparse:
        problems.append(f"{choice.synchronizer} is for sparse variables")
    if choice.synchronizer == "bags" and not variable.bags:
        problems.append("bags is for variables that are read in bags only")
    if choice.synchronizer == "allreduce" and variable.lazy:
        problems.append("allreduce cannot sum sparse gradients (sparse=True)")
    if choice.synchronizer in SHARDED:
        if variable.shard_obstacle:
            problems.append(f"its update cannot be sharded: {variable.shard_obstacle}")
        if not choice.owners:
            problems.append("it has no owner")
    elif choice.owners:
        problems.append(f"{choice.synchronizer} has no owners")
    if choice.synchronizer == "rows" and not _deals(choice, workers, whole=False):
        problems.append("row servers need partition 'cyclic' over all workers in order")
    if choice.synchronizer == "bags" and not _deals(choice, workers):
        problems.append(
            "bags need partition 'cyclic' over all workers in order, or 'whole' with one owner"
        )
    if choice.hierarchy == "hosts" and choice.synchronizer not in BY_HOST:
        problems.append(
            f"hierarchy 'hosts' is for {' and '.join(BY_HOST)}, not for {choice.synchronizer}"
        )
    if not 1 <= choice.pieces <= max(variable.rows, 1):
        problems.append(f"it has {variable.rows} rows, which cannot be cut in {choice.pieces}")
    if choice.pieces > 1 and (choice.synchronizer, choice.hierarchy) != ("allreduce", "flat"):
        problems.append("only gradients of flat allreduce travel in pieces")
    if choice.synchronizer == "none" and variable.trainable:
        problems.append("it receives a gradient but is not synchronised")
    return problems


def _unused(choice: VariableStrategy) -> list[str]:
    """Fields that nothing reads yet, where they are not as they have to be."""
    plain = VariableStrategy(choice.synchronizer)
    return [
        f"{field} {getattr(choice, field)!r} is not supported; use {getattr(plain, field)!r}"
        for field in UNUSED
        if getattr(choice, field) != getattr(plain, field)
    ]


def _deals(choice: VariableStrategy, workers: int, whole: bool = True) -> bool:
    if choice.partition == "cyclic":
        return choice.owners == tuple(range(workers))
    return whole and choice.partition == "whole" and len(choice.owners) == 1
