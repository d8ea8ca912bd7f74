"""Builders turn what is known of variables into a strategy; one file each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parallax.config import Config
from parallax.graph.variables import Variable
from parallax.strategy.builders import all_reduce, hybrid, parameter_server
from parallax.strategy.data import Strategy

Builder = Callable[[Sequence[Variable], int, Config], Strategy]

BUILDERS: dict[str, Builder] = {
    "HYBRID": hybrid.build,
    "PS": parameter_server.build,
    "AR": all_reduce.build,
}
