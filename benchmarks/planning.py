"""What planning takes as variables and hosts become many.

    python -m benchmarks.planning
    python -m benchmarks.planning --variables 10000 --hosts 1024

A model of linear layers and small tables is planned for a cluster as ``parallax plan`` does it,
each size in a process of its own: the step is captured and analysed, a strategy chosen and checked,
and the graph of one worker rewritten. Times are of this process on its processor, so that others on
the machine count little. Planning is analysis, choice and check; a step is captured and a worker's
graph rewritten whoever planned it.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import parallax
from parallax.cluster.planned import plan_cluster
from parallax.cluster.spec import ClusterSpec, Host
from parallax.runtime import captures, choosing, preparation
from parallax.runtime.planning import PlanMade, start_planning

STAGES = {
    "capture": captures,
    "analyze": preparation,
    **dict.fromkeys(("choose_strategy", "verify"), choosing),
    "rewrite": preparation,
}
"""By function, the module that calls it."""
PLANNING = ("analyze", "choose_strategy", "verify")
TABLE_EVERY = 10


@dataclass
class Found:
    """Seconds of each stage, and what the process needed of memory beside the model, in MB."""

    variables: int
    hosts: int
    seconds: dict[str, float] = field(default_factory=dict)
    memory: float = 0.0


class Clock:
    """Adds up what functions of a module take."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)

    def watch(self, module: Any, name: str) -> None:
        """From now on, what a function takes is counted."""
        setattr(module, name, self._timed(name, getattr(module, name)))

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return function(*args, **named)
            finally:
                self.seconds[name] += time.process_time() - began

        return timed


def layers(variables: int) -> nn.ModuleList:
    """Linear layers of two variables each, and now and then a table."""
    made = nn.ModuleList()
    count = 0
    while count < variables:
        if len(made) % TABLE_EVERY == 0:
            made.append(nn.Embedding(50, 8))
            count += 1
        else:
            made.append(nn.Linear(8, 8))
            count += 2
    return made


def plan(variables: int, hosts: int, builder: str) -> Found:
    """Plan one size."""
    torch.set_num_threads(1)
    clock = Clock()
    for name, module in STAGES.items():
        clock.watch(module, name)
    spec = ClusterSpec(tuple(Host(f"10.0.{n // 256}.{n % 256}", cpus=1) for n in range(hosts)))
    planning = start_planning(plan_cluster(spec, 1), builder)
    model = layers(variables)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        for layer in model:
            x = x + layer(ids) if isinstance(layer, nn.Embedding) else layer(x)
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(PlanMade):
        parallax.get_runner(step).run(torch.randint(0, 50, (16,)), torch.randn(16, 8))
    assert planning.plan is not None
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return Found(len(list(model.parameters())), hosts, clock.seconds, used / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variables", type=int, nargs="+", default=[500, 1000, 3000, 10_000])
    parser.add_argument("--hosts", type=int, nargs="+", default=[16, 1024])
    parser.add_argument("--strategy", default="auto")
    options = parser.parse_args()
    table = Table(title=f"Planning by {options.strategy}: processor seconds")
    for title in ("variables", "hosts", *STAGES, "planning", "memory MB"):
        table.add_column(title, justify="right")
    for variables in options.variables:
        for hosts in options.hosts:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found = pool.apply(plan, (variables, hosts, options.strategy))
            planned = sum(found.seconds[name] for name in PLANNING)
            shown = [*(found.seconds[name] for name in STAGES), planned]
            table.add_row(
                f"{found.variables:,}",
                f"{found.hosts:,}",
                *(f"{seconds:.2f}" for seconds in shown),
                f"{found.memory:,.0f}",
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
