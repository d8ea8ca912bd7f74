"""AllReduce for dense variables, row servers for sparse ones (Parallax paper, section 5.3)."""

from __future__ import annotations

from collections.abc import Sequence

from parallax.config import Config
from parallax.graph.variables import Variable
from parallax.strategy.builders import common
from parallax.strategy.data import Strategy, fingerprint


def build(variables: Sequence[Variable], workers: int, config: Config) -> Strategy:
    """The strategy of ``run_option="HYBRID"``."""
    chosen = {}
    for variable in variables:
        if not variable.trainable:
            chosen[variable.name] = common.untouched(variable)
        elif variable.sparse:
            chosen[variable.name] = common.sparse(variable, workers, config)
        else:
            chosen[variable.name] = common.allreduce(variable, config)
    return Strategy(fingerprint(variables), workers, chosen)
