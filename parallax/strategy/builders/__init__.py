"""Builders turn what is known of a step into a strategy; one file each, found by name."""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint, entry_points

from parallax.errors import ConfigError
from parallax.graph.analysis.variables import Variable
from parallax.strategy.builders.all_reduce import AllReduce, Replicated
from parallax.strategy.builders.auto import Auto
from parallax.strategy.builders.base import ClusterFacts, GraphFacts, StrategyBuilder
from parallax.strategy.builders.encoded import Encoded
from parallax.strategy.builders.factors import Poseidon, ProjectAdam
from parallax.strategy.builders.horovod import Horovod
from parallax.strategy.builders.hybrid import Hybrid
from parallax.strategy.builders.paper import ParallaxPaper
from parallax.strategy.builders.parameter_server import (
    BalancedPS,
    BytePS,
    ParameterServer,
    PartitionedPS,
)
from parallax.strategy.builders.partitions import RandomAxis, UnevenPS
from parallax.strategy.builders.zero import ZeRO

__all__ = [
    "BUILDERS",
    "ENTRY_POINTS",
    "ClusterFacts",
    "Encoded",
    "GraphFacts",
    "StrategyBuilder",
    "Variable",
    "builder_names",
    "canonical_name",
    "described_builders",
    "find_builder",
]

ENTRY_POINTS = "parallax.builders"
"""The group of entry points by which other packages offer builders."""

BUILDERS: dict[str, type[StrategyBuilder]] = {
    builder.name: builder
    for builder in (
        *(Hybrid, ParameterServer, Replicated, Auto),
        *(AllReduce, Horovod, BytePS, BalancedPS, PartitionedPS, ParallaxPaper),
        *(Poseidon, ProjectAdam, ZeRO, UnevenPS, RandomAxis),
    )
}


def builder_names() -> tuple[str, ...]:
    """Names of all builders, those of other installed packages included."""
    return (*BUILDERS, *(name for name in _offered() if name not in BUILDERS))


def canonical_name(name: str) -> str | None:
    """How a builder's name is written, for one in any case of letters; None if there is none."""
    known = {one.lower(): one for one in builder_names()}
    return known.get(name.lower())


def described_builders() -> dict[str, str]:
    """What each builder does, by name: the first line of its class's description."""
    found = {name: _first_line(builder) for name, builder in BUILDERS.items()}
    found.update({n: point.value for n, point in _offered().items() if n not in BUILDERS})
    return found


def _first_line(builder: type[StrategyBuilder]) -> str:
    return (builder.__doc__ or "").strip().split("\n")[0]


def find_builder(name: str) -> StrategyBuilder:
    """The builder of a name, in any case of letters.

    Raises:
        ConfigError: there is none (names the nearest), or another package's cannot be loaded.
    """
    known = canonical_name(name)
    if known is None:
        raise ConfigError(f"There is no strategy builder {name!r}.", hint=suggestion(name))
    offered = _offered().get(known)
    if known in BUILDERS:
        if offered is not None:
            raise ConfigError(
                f"The strategy builder {known!r} is one of parallax's own, and {offered.value} "
                f"(entry point of group {ENTRY_POINTS!r}) has the same name.",
                hint="give the other package's builder another name.",
            )
        return BUILDERS[known]()
    assert offered is not None
    return _load(offered)


def suggestion(name: str) -> str:
    """What to do about an unknown name."""
    names = builder_names()
    lower = {one.lower(): one for one in names}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.4)
    meant = f"did you mean {lower[near[0]]!r}? " if near else ""
    return f"{meant}There are {', '.join(names)}; or pass a StrategyBuilder, or a strategy's file."


def _offered() -> dict[str, EntryPoint]:
    """Entry points of other packages by name."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def _load(point: EntryPoint) -> StrategyBuilder:
    where = f"{point.value} (entry point {point.name!r} of group {ENTRY_POINTS!r})"
    try:
        found = point.load()
    except Exception as error:
        raise ConfigError(
            f"The strategy builder {where} cannot be imported: {type(error).__name__}: {error}.",
            hint="repair or remove the package that offers it.",
        ) from error
    if not (isinstance(found, type) and issubclass(found, StrategyBuilder)):
        raise ConfigError(
            f"{where} is no strategy builder.",
            hint="an entry point names a class that derives from parallax.StrategyBuilder.",
        )
    return found()
