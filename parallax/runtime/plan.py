"""What a person can look at: the plan as a table, the rewritten graph as text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from parallax.cluster.network import Network
from parallax.errors import ConfigError
from parallax.graph.analysis.variables import Variable
from parallax.graph.step_graph import StepGraph
from parallax.runtime.exchange.bags import BagExchange
from parallax.runtime.exchange.rows import RowExchange
from parallax.runtime.exchange.rows_by_host import HostRowExchange
from parallax.runtime.pace import Pace
from parallax.strategy.cost import bytes_across, bytes_per_step, communication_seconds
from parallax.strategy.data import Strategy, VariableStrategy
from parallax.strategy.timeline import StepTime

# How many runs of consecutive workers the plan names before it only counts them.
MAX_SPANS = 4


def measured(
    variables: Mapping[str, Variable], exchanges: Iterable[RowExchange | BagExchange]
) -> dict[str, Variable]:
    """The variables with what exchanges measured of their use."""
    result = dict(variables)
    for exchange in exchanges:
        if isinstance(exchange, BagExchange):
            result.update(_bags(result, exchange))
            continue
        for table, touched in zip(exchange.spec.tables, exchange.touched, strict=True):
            if exchange.steps and table.name in result:
                alpha = touched / exchange.steps
                result[table.name] = replace(result[table.name], sparsity=alpha)
        if isinstance(exchange, HostRowExchange) and exchange.steps:
            for table, rows in zip(exchange.spec.tables, exchange.host_rows, strict=True):
                result[table.name] = replace(result[table.name], host_rows=rows)
    return result


def _bags(variables: Mapping[str, Variable], exchange: BagExchange) -> dict[str, Variable]:
    if not exchange.steps:
        return {}
    counts: dict[str, list[float]] = {}
    for index, feature in enumerate(exchange.spec.features):
        total = counts.setdefault(exchange.spec.tables[feature.table].name, [0.0] * 4)
        measured = (exchange.ids, exchange.bags, exchange.values, exchange.numbers)
        for place, numbers in enumerate(measured):
            total[place] += numbers[index] / exchange.steps
    return {
        name: replace(
            variables[name],
            ids_per_step=ids,
            bags_per_step=bags,
            travelled=(values, numbers),
        )
        for name, (ids, bags, values, numbers) in counts.items()
        if name in variables
    }


@dataclass(frozen=True)
class PlanRow:
    """One variable's line of the plan.

    Args:
        variable: as it was measured.
        choice: how it is synchronised.
        bytes_per_step: that one worker sends, on average over workers.
        bytes_across: those of them that go to another host; 0 where hosts have one worker each.
    """

    variable: Variable
    choice: VariableStrategy
    bytes_per_step: float
    bytes_across: float = 0.0


class Plan:
    """How each variable is synchronised, and why. ``print(plan)`` shows the table."""

    def __init__(
        self,
        variables: Mapping[str, Variable],
        strategy: Strategy | None,
        workers: int,
        title: str,
        network: Network | None = None,
        pace: Pace | None = None,
        time: StepTime | None = None,
        compiled: str = "",
        ids_ahead: bool = False,
        late: int = 0,
    ) -> None:
        self.time = time
        self.compiled = compiled
        self.ids_ahead = ids_ahead
        self.late = late
        self.network = network
        self.pace = pace if pace is not None else Pace()
        self.strategy = strategy
        self.workers = workers
        self.title = title
        self.hosts = 1 if network is None else network.hosts
        self.rows: tuple[PlanRow, ...] = ()
        if strategy is not None:
            self.rows = tuple(
                PlanRow(
                    variable,
                    strategy.variables[name],
                    bytes_per_step(variable, strategy.variables[name], workers, self.hosts),
                    bytes_across(variable, strategy.variables[name], workers, self.hosts),
                )
                for name, variable in variables.items()
            )

    @property
    def bytes_per_step(self) -> float:
        """Bytes that one worker sends per step by the formulas, control words left out."""
        return sum(row.bytes_per_step for row in self.rows)

    @property
    def bytes_across(self) -> float:
        """Those of them that go to other hosts; 0 where hosts have one worker each."""
        return sum(row.bytes_across for row in self.rows)

    def table(self) -> Table:
        """The plan as a rich table.

        Raises:
            ConfigError: no step has run yet, so nothing is decided.
        """
        if self.strategy is None:
            raise ConfigError(
                "There is no plan yet.",
                hint="it is made by the first runner.run(), which sees how variables are used.",
            )
        total = f"{_bytes(self.bytes_per_step)} sent per worker and step"
        if self.hosts > 1:
            total += f", {_bytes(self.bytes_across)} of it to other hosts"
        table = Table(
            title=f"{self.title} on {self.workers} worker{'s'[: self.workers > 1]}, {total}",
            caption=self._caption(),
            title_justify="left",
            caption_justify="left",
        )
        for name in ("variable", "shape", "kind", "α", "synchroniser", "owners", "bytes/step"):
            table.add_column(name, justify="right" if name in ("α", "bytes/step") else "left")
        table.add_column("why")
        for row in self.rows:
            table.add_row(*self._cells(row))
        return table

    @property
    def communication_seconds(self) -> float:
        """Predicted time of a step's messages on the measured network, one after the other."""
        if self.network is None:
            return 0.0
        return communication_seconds(((r.variable, r.choice) for r in self.rows), self.network)

    def _caption(self) -> str | None:
        lines = [self._network_caption(), self.compiled]
        if self.ids_ahead:
            lines.append("ids of a step travel while the step before computes")
        if self.late:
            variables = "1 variable is" if self.late == 1 else f"{self.late} variables are"
            lines.append(f"{variables} updated in the step that follows, before it is used")
        return "\n".join(line for line in lines if line) or None

    def _network_caption(self) -> str:
        if self.network is None or self.workers == 1:
            return ""
        link = self.network.whole
        text = (
            f"network: {link.bandwidth / 1e6:,.0f} MB/s from each worker, "
            f"{link.latency * 1e3:.2f} ms; messages of a step, predicted: "
            f"{self.communication_seconds * 1e3:,.1f} ms"
        )
        if self.time is not None:
            text += (
                f"\npredicted: {self.time.step * 1e3:,.1f} ms a step, of it "
                f"{self.time.computation * 1e3:,.1f} ms computing "
                f"({'measured' if self.pace.times else 'estimated'}) and "
                f"{self.time.waiting * 1e3:,.1f} ms waiting"
            )
        if self.pace.times:
            text += (
                f"\nmeasured: {self.pace.step * 1e3:,.1f} ms a step, "
                f"{self.pace.waiting * 1e3:,.1f} ms of it waiting"
            )
        return text

    def _cells(self, row: PlanRow) -> list[str]:
        variable, choice = row.variable, row.choice
        alpha = "" if variable.sparsity is None else f"{variable.sparsity:.3g}"
        names = " = ".join((variable.name, *variable.aliases))
        owners = ""
        if choice.owners:
            split = {"whole": "", "cyclic": ", row mod", "block": ", blocks"}[choice.partition]
            owners = _workers(choice.owners, self.workers) + split
            owners += f" along axis {choice.axis}" * bool(choice.axis)
            owners += ", host memory" * (choice.memory == "host")
        synchronizer = choice.synchronizer + ", by host" * (choice.hierarchy == "hosts")
        if choice.reduction != "auto":
            synchronizer += f", {choice.reduction}"
        if choice.encoder != "none":
            synchronizer += f", {choice.encoder}"
        return [
            names,
            "×".join(map(str, variable.shape)) or "scalar",
            "sparse" if variable.sparse else "dense",
            alpha,
            synchronizer if self.workers > 1 else "local",
            owners if self.workers > 1 else "",
            _bytes(row.bytes_per_step),
            choice.why,
        ]

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=160).print(self.table())
        return out.getvalue().rstrip()

    __repr__ = __str__


def _workers(owners: Sequence[int], workers: int) -> str:
    """Some workers in a few characters, however many there are: ``0-7,16``."""
    if len(owners) == workers and workers > 1:
        return "all"
    spans: list[list[int]] = []
    for owner in owners:
        if spans and owner == spans[-1][1] + 1:
            spans[-1][1] = owner
        else:
            spans.append([owner, owner])
    shown = [str(one) if one == last else f"{one}-{last}" for one, last in spans[:MAX_SPANS]]
    if len(spans) > MAX_SPANS:
        shown.append(f"… ({len(owners)} workers)")
    return ",".join(shown)


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


class GraphView:
    """A graph for a person to read."""

    def __init__(self, step: StepGraph | None) -> None:
        self._step = step

    def __str__(self) -> str:
        if self._step is None:
            return "no step has run yet"
        return str(self._step.graph_module.code).strip()

    __repr__ = __str__

    def print(self) -> None:
        """Print the rewritten graph as Python."""
        print(str(self))
