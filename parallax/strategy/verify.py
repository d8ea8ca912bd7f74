"""Check a strategy against the variables and workers that it is for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from parallax.errors import StrategyError, UnsupportedError
from parallax.graph.analysis.variables import Variable
from parallax.strategy.data import Strategy, VariableStrategy, described, everyone, fingerprint
from parallax.strategy.encoders import encoder_problems
from parallax.strategy.registry import (
    Finding,
    Synchronizer,
    facts,
    names_where,
    synchronizer,
    synchronizers,
)

Problem = tuple[str, str, str]
"""Field, what is wrong, and what it may be instead."""

TRAVEL_TOGETHER = (
    *("synchronizer", "average", "hierarchy", "reduction", "order"),
    *("encoder", "encoder_options"),
)
"""Fields that are equal in a group."""
SHARDED_ALIKE = ("synchronizer", "partition", "owners", "axis", "shards")
"""Fields that are equal of variables whose updates are combined, if one is sharded."""


def verify(
    strategy: Strategy,
    variables: Sequence[Variable],
    workers: int,
    two_levels: bool = True,
    device: str = "cpu",
) -> None:
    """Check that a strategy fits; arguments as for :func:`findings`.

    Raises:
        StrategyError: it is for another model or number of workers, or contradicts itself; lists
            every finding.
    """
    found = findings(strategy, variables, workers, two_levels, device)
    if found:
        raise StrategyError(
            "The strategy does not fit:" + "".join(f"\n  {one}" for one in found),
            hint="change the fields in parentheses as it says there, or let a builder make it.",
        )


def findings(
    strategy: Strategy,
    variables: Sequence[Variable],
    workers: int,
    two_levels: bool = True,
    device: str = "cpu",
) -> list[Finding]:
    """Everything that is wrong with a strategy.

    Args:
        strategy: what to check.
        variables: of the model that it is for.
        workers: how many there are.
        two_levels: they are on several hosts of equally many workers, more than one each.
        device: what they compute on, ``cpu`` or ``cuda``.
    """
    known = {variable.name: variable for variable in variables}
    found = list(_of_the_whole(strategy, known, workers))
    for name, choice in strategy.variables.items():
        if name not in known:
            continue
        if choice.synchronizer not in synchronizers():
            problem = f"synchronizer {choice.synchronizer!r} is unknown"
            remedy = f"use one of {', '.join(synchronizers())}"
            found.append(Finding(name, "synchronizer", problem, remedy))
            continue
        found += [
            Finding(name, *problem)
            for problem in problems_of(choice, known[name], workers, two_levels, device)
        ]
    return [*found, *_of_groups(strategy, known), *_of_joined(strategy, known)]


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


def _of_the_whole(
    strategy: Strategy, known: dict[str, Variable], workers: int
) -> Iterator[Finding]:
    if strategy.replicas != workers:
        problem = f"it is for {strategy.replicas} workers, there are {workers}"
        yield Finding("", "replicas", problem, "make it anew for these workers")
    missing = [name for name in known if name not in strategy.variables]
    unknown = [name for name in strategy.variables if name not in known]
    for name in missing:
        yield Finding("", "variables", f"no decision for {name!r}", "add one")
    for name in unknown:
        yield Finding("", "variables", f"no variable {name!r}", "remove its decision")
    if not (missing or unknown) and strategy.fingerprint != fingerprint(list(known.values())):
        problem = _another_model(strategy, list(known.values()))
        yield Finding("", "fingerprint", problem, "make it anew for this model")


def problems_of(
    choice: VariableStrategy,
    variable: Variable,
    workers: int,
    two_levels: bool = True,
    device: str = "cpu",
) -> list[Problem]:
    """What is wrong with the decision about one variable, whatever the others'; as above.

    Returns:
        For each, the field, the problem and the remedy.
    """
    one = facts(choice)
    return [
        *_of_kind(one, variable),
        *_of_owners(one, choice, variable, workers),
        *_of_shards(one, choice, variable),
        *_of_messages(one, choice, two_levels),
        *_of_reduction(one, choice, workers),
        *encoder_problems(one, choice, variable),
        *_of_time(choice),
        *_of_memory(one, choice, device),
        *one.check(choice, variable, workers),
    ]


def _of_kind(one: Synchronizer, variable: Variable) -> Iterator[Problem]:
    """Whether a synchroniser is one for such a variable."""
    field = "synchronizer"
    if one.name != "none" and not variable.trainable:
        yield field, f"it receives no gradient, which {one.name} would synchronise", "use none"
    if one.sparse and not variable.sparse:
        reason = variable.dense_reason
        why = f"; it is dense: {reason}" if reason else ""
        yield field, f"{one.name} is for sparse variables{why}", f"use {_names(dense=True)}"
    if one.dense and variable.lazy:
        problem = f"{one.name} cannot sum sparse gradients (sparse=True)"
        yield field, problem, f"use {_names(sparse=True)}"
    if one.factors and not variable.factors:
        problem = f"{one.name} sends factors, but its gradient is not a product of two"
        yield field, problem, f"use {_names(dense=True, factors=False)}"
    if one.sharded and variable.shard_obstacle:
        problem = f"its update cannot be sharded: {variable.shard_obstacle}"
        yield field, problem, f"use {_names(sharded=False, sparse=variable.sparse)}"


def _names(**wanted: bool) -> str:
    """Synchronisers with these facts."""
    return " or ".join(
        names_where(
            lambda one: (
                one.name != "none"
                and all(getattr(one, fact) is value for fact, value in wanted.items())
            )
        )
    )


def _of_owners(
    one: Synchronizer, choice: VariableStrategy, variable: Variable, workers: int
) -> Iterator[Problem]:
    """Whether shards are where they can be."""
    owners = choice.owners
    all_own = owners is everyone(workers) or owners == everyone(workers)
    if owners and not all_own and (min(owners) < 0 or max(owners) >= workers):
        problem = f"owners {owners} are not all among {workers} workers"
        yield "owners", problem, f"workers are numbered from 0 to {workers - 1}"
    if not all_own and len(set(owners)) != len(owners):
        yield "owners", "an owner is named twice", "name each once"
    if owners and not one.sharded:
        yield "owners", f"{one.name} has no owners", "leave it empty"
    if not owners and one.sharded:
        yield "owners", "it has no owner", "name the workers that hold its shards"
    if choice.partition not in one.partitions:
        allowed = " or ".join(map(repr, one.partitions))
        problem = f"{one.name} cannot use partition {choice.partition!r}"
        yield "partition", problem, f"use {allowed}"
    elif (
        choice.partition == "cyclic"
        and not all_own
        and not (one.some and choice.hierarchy == "flat")
    ):
        how = ", inside hosts first," if one.some else ""
        problem = f"rows{how} are dealt over all workers in order"
        yield "owners", problem, f"name all workers from 0 to {workers - 1}"
    elif choice.partition == "whole" and len(owners) > 1:
        yield "owners", f"a whole variable has one owner, not {len(owners)}", "name one worker"


def _of_shards(
    one: Synchronizer, choice: VariableStrategy, variable: Variable
) -> Iterator[Problem]:
    """Whether it can be cut so: among owners, or in pieces."""
    in_blocks = choice.partition == "block" and one.sharded
    parts = len(choice.owners) if in_blocks else choice.pieces
    field = "owners" if in_blocks else "pieces"
    shape = variable.shape
    if not 0 <= choice.axis < max(len(shape), 1):
        problem = f"axis {choice.axis} is missing: its shape is {shape}"
        yield "axis", problem, f"use 0 to {max(len(shape) - 1, 0)}"
        return
    size = shape[choice.axis] if shape else 1
    if parts > max(size, 1) or choice.pieces < 1:
        problem = f"it has {size} rows along axis {choice.axis}, which cannot be cut in {parts}"
        yield field, problem, f"use 1 to {max(size, 1)}" if field == "pieces" else "name fewer"
    if choice.axis and (not one.axes or (parts == 1 and not in_blocks)):
        problem = f"{one.name} is not partitioned along axis {choice.axis}"
        yield "axis", problem, "use 0, or partition 'block' or pieces where that is supported"
    elif choice.axis and in_blocks and not variable.elementwise:
        problem = f"its update works row by row, and cannot be cut along axis {choice.axis}"
        yield "axis", problem, "use 0"
    if not choice.shards:
        return
    if not in_blocks and (choice.pieces == 1 or not one.pieces):
        yield "shards", "sizes are for partition 'block' and for pieces", "leave it empty"
    elif len(choice.shards) != parts:
        problem = f"there are {len(choice.shards)} sizes for {parts} {field}"
        yield "shards", problem, "give one for each"
    if min(choice.shards) < 1 or sum(choice.shards) != size:
        problem = f"shards {choice.shards} do not make up the {size} along axis {choice.axis}"
        yield "shards", problem, "give sizes of at least 1 with this sum"


def _of_messages(
    one: Synchronizer, choice: VariableStrategy, two_levels: bool
) -> Iterator[Problem]:
    """Whether it can travel so."""
    if choice.hierarchy == "hosts":
        if not one.by_host:
            names = " and ".join(names_where(lambda one: one.by_host))
            problem = f"hierarchy 'hosts' is for {names}, not for {one.name}"
            yield "hierarchy", problem, "use 'flat'"
        elif not two_levels:
            problem = (
                "hierarchy 'hosts' needs several hosts of equally many workers, more than one each"
            )
            yield "hierarchy", problem, "use 'flat'"
    if choice.pieces != 1 and (not one.pieces or choice.hierarchy != "flat"):
        yield "pieces", "only gradients of flat allreduce travel in pieces", "use 1"
    for field in ("group", "late_turn", "pull_group"):
        if getattr(choice, field) < 0:
            yield field, f"{field} {getattr(choice, field)} is negative", "use 0 or more"


def _of_reduction(one: Synchronizer, choice: VariableStrategy, workers: int) -> Iterator[Problem]:
    """Whether it can be summed so."""
    if choice.reduction != "auto":
        if choice.reduction not in one.reductions:
            names = names_where(lambda one: choice.reduction in one.reductions)
            problem = f"reduction {choice.reduction!r} is for {' and '.join(names)}"
            yield "reduction", f"{problem}, not for {one.name}", "use 'auto'"
        for field, only in (("hierarchy", "flat"), ("encoder", "none")):
            if getattr(choice, field) != only:
                problem = f"reduction {choice.reduction!r} cannot be used with {field}"
                problem += f" {getattr(choice, field)!r}, which sums in a way of its own"
                yield "reduction", problem, f"use 'auto', or {field} {only!r}"
    if not choice.order:
        return
    if choice.reduction == "auto":
        yield "order", "order is for reductions 'ring', 'tree' and 'halving'", "leave it empty"
    missing = sorted(set(range(workers)) - set(choice.order))
    if missing:
        problem = f"order misses worker {', '.join(map(str, missing[:5]))}"
        yield "order", problem, f"name all workers from 0 to {workers - 1}"
    elif len(choice.order) != workers or max(choice.order) >= workers or min(choice.order) < 0:
        problem = f"order {choice.order} is no order of {workers} workers"
        yield "order", problem, f"name each worker from 0 to {workers - 1} once"


def _of_memory(one: Synchronizer, choice: VariableStrategy, device: str) -> Iterator[Problem]:
    """Whether shards can be kept there."""
    if choice.memory == "host" and not one.sharded:
        yield "memory", f"{one.name} has no shards that the host could keep", "use 'device'"
    elif choice.memory == "host" and device != "cpu":
        problem = f"workers compute on {device}, and their updates on shards do too"
        yield "memory", problem, "use 'device'"


def _of_time(choice: VariableStrategy) -> Iterator[Problem]:
    """Whether steps follow one another so."""
    if choice.staleness:
        yield "staleness", f"staleness {choice.staleness} is not supported", "use 0"


def _of_groups(strategy: Strategy, known: dict[str, Variable]) -> Iterator[Finding]:
    """Whether what travels together can: it is summed in one buffer."""
    first: dict[int, str] = {}
    for name, choice in strategy.variables.items():
        if choice.group < 1 or name not in known:
            continue
        other = first.setdefault(choice.group, name)
        mate = strategy.variables[other]
        differing = [f for f in TRAVEL_TOGETHER if getattr(mate, f) != getattr(choice, f)]
        if known[name].dtype != known[other].dtype:
            differing.insert(0, "dtype")
        if differing:
            problem = f"group {choice.group} mixes it with {other!r}, of another {differing[0]}"
            yield Finding(name, "group", problem, "use another number, or 0 for no group")


def _of_joined(strategy: Strategy, known: dict[str, Variable]) -> Iterator[Finding]:
    """Whether variables whose updates are one are sharded alike."""
    chosen = strategy.variables
    for name, choice in chosen.items():
        if name not in known or choice.synchronizer not in synchronizers():
            continue
        for other in known[name].joined if facts(choice).sharded else ():
            mate = chosen.get(other, choice)
            differing = [f for f in SHARDED_ALIKE if getattr(mate, f) != getattr(choice, f)]
            if differing:
                problem = f"its update is combined with {other!r}, of another {differing[0]}"
                yield Finding(
                    name, differing[0], problem, f"use the one of {other!r}, or allreduce"
                )


def check_still_fits(strategy: Strategy, variables: Mapping[str, Variable]) -> None:
    """Check that a graph which was captured later can be rewritten by the same strategy.

    Raises:
        UnsupportedError: the update of a variable cannot be sharded any more, or it is frozen while
            each worker has a part of it.
    """
    for name, made in strategy.variables.items():
        if name not in variables and facts(made).sharded and strategy.replicas > 1:
            raise UnsupportedError(
                f"{name!r} was frozen after the first step, when its rows had been dealt to the "
                "workers.",
                hint="set the learning rate of its group to zero instead, freeze it before the "
                'first step, or use parallax.Config(run_option="AR"), which replicates all '
                "variables.",
            )
    for name, variable in variables.items():
        decided = strategy.variables.get(name)
        choice = "none" if decided is None else decided.synchronizer
        one = synchronizer(choice)
        if variable.trainable and (
            (one.sharded and variable.shard_obstacle) or (one.sparse and not variable.sparse)
        ):
            reason = variable.shard_obstacle or variable.dense_reason
            raise UnsupportedError(
                f"The update of {name!r} was sharded, but from this step on it cannot be: "
                f"{reason}.",
                hint='use parallax.Config(run_option="AR"), which replicates all variables.',
            )


__all__ = ["Finding", "check_still_fits", "findings", "problems_of", "verify"]
