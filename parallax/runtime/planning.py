"""``parallax plan``: a script runs in this process up to its first step, which is planned, not run.

The script believes that it is worker 0 of the cluster that is planned for: its share of the data
has the right size, and :func:`parallax.get_runner` gives it a runner that captures the step, looks
at the first batch, decides, and ends the script. Nobody else is there to be asked or waited for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch

from parallax.cluster.network import Network
from parallax.cluster.planned import PlannedCluster
from parallax.config import Config
from parallax.errors import LaunchError
from parallax.graph.objects.discovery import StepObjects
from parallax.runtime.comm.weighing import number_of_rows
from parallax.runtime.comm.world import World
from parallax.runtime.plan import Plan
from parallax.runtime.predictions.speed import measure_speed
from parallax.runtime.preparation import Preparation
from parallax.runtime.runner import Runner
from parallax.strategy.data import Strategy

__all__ = ["PlanMade", "Planning", "current_planning", "start_planning", "stop_planning"]


class PlanMade(SystemExit):
    """Ends the script, of which all is known that there was to find out. It is no error."""

    def __init__(self) -> None:
        super().__init__(0)


class Planning:
    """One script that is planned.

    Args:
        cluster: what for.
        strategy: in place of what the script's own settings ask for, see :class:`Config`.
    """

    def __init__(self, cluster: PlannedCluster, strategy: Any = None) -> None:
        self.cluster = cluster
        self.strategy = strategy
        self.runners = 0
        """How many the script has made."""
        self.plan: Plan | None = None
        self.batch_rows = 0
        self._left = False

    def report(self) -> str:
        """The plan and what it rests on, for people."""
        cluster = self.cluster
        lines = [
            str(self.plan),
            f"planned for {_count(cluster.workers, 'worker')} on "
            f"{_count(len(cluster.counts), 'host')} of {cluster.source}, from a first batch of "
            f"{_count(self.batch_rows, 'row')} a worker; no step was run",
        ]
        if cluster.assumed:
            lines.append(
                "assumed, as the file does not say it: "
                + "; ".join(cluster.assumed)
                + " (`parallax probe` measures)"
            )
        return "\n".join(lines)

    def leave(self) -> NoReturn:
        """Ends the script: at first as ``sys.exit`` does, and by force if it goes on after that."""
        if self._left:
            print(self.report())
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        self._left = True
        raise PlanMade


_planning: Planning | None = None


def start_planning(cluster: PlannedCluster, strategy: Any = None) -> Planning:
    """From now on this process plans: sets the variables of worker 0, and what runners do."""
    global _planning
    os.environ.update(cluster.variables)
    _planning = Planning(cluster, strategy)
    return _planning


def stop_planning() -> None:
    """Takes :func:`start_planning` back, but for variables that the process had before."""
    global _planning
    if _planning is not None:
        for name in _planning.cluster.variables:
            os.environ.pop(name, None)
    _planning = None


def current_planning() -> Planning:
    """What this process plans.

    Raises:
        LaunchError: it only has the variables of one that does.
    """
    if _planning is None:
        raise LaunchError(
            "This process was started by a script of which `parallax plan` makes a plan, and is "
            "asked to train.",
            hint="let the script make its runner in its own process, before it starts others.",
        )
    return _planning


class PlanningRunner(Runner):
    """A runner of worker 0 whose first step is planned."""

    def __init__(self, step: Any, objects: StepObjects, config: Config, planning: Planning) -> None:
        self._planning = planning
        planning.runners += 1
        if planning.strategy is not None:
            config = replace(config, run_option=None, strategy=planning.strategy)
        cluster = planning.cluster
        preparation = partial(_Planned, network=cluster.network)
        super().__init__(
            step, objects, config, _LoneWorld(cluster.workers), preparation=preparation
        )

    def run(self, *batch: Any, **named: Any) -> Any:
        """Plans the step; does not return.

        Raises:
            ModelError: the step cannot be captured or distributed.
            DataError: the batch cannot be the first.
        """
        planning = self._planning
        if planning.plan is None:
            self._signatures.read(batch, named)
            _, analysis = self._preparation.analyzed(batch, named)
            self._preparation.rewritten(analysis)
            flat = torch.utils._pytree.tree_leaves((batch, named))
            planning.batch_rows = number_of_rows(flat) or 1
            planning.plan = self.plan
        planning.leave()

    def state_dict(self) -> dict[str, Any]:
        """The state before the first step; what a script would save after it is not made."""
        if self._planning.plan is not None:
            self._planning.leave()
        return super().state_dict()


class _Planned(Preparation):
    """Takes the network from the resource file, and has nobody to compare with."""

    def __init__(self, *usual: Any, network: Network) -> None:
        super().__init__(*usual)
        self._network = network

    def _compare(self, description: str, flat: list[Any], parts: Sequence[str]) -> None:
        self._warn_of_batch_norms()
        self.choice.network = self._network
        self.choice.speed = measure_speed(self._world)

    def _tell(self, strategy: Strategy) -> None:
        """Nothing: the plan that is printed says more."""

    def _write(self, name: str, text: Callable[[], str]) -> None:
        """Nothing: only where a step is run are its stages written as files."""


class _LoneWorld(World):
    """Worker 0 of many, none of which are there; what all would say, it says for them."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size, torch.device("cpu"))

    def texts(self, topic: str, text: str) -> list[str]:
        """This worker's text alone."""
        return [text]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
