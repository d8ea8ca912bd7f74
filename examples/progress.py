"""Progress of a training loop: a bar on a terminal, else one line every few seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

SECONDS_BETWEEN_LINES = 3.0
# Parallax captures the step in the first run, and in the second if that is when an optimizer that
# makes its slots late (momentum, Adam) has them.
UNTIMED_STEPS = 2


class Progress:
    """Counts steps, measures throughput and shows both on one worker.

    Args:
        steps: how many steps the loop will run.
        unit: what a step consumes, such as ``"words"``.
        per_step: how many of them all workers together consume in a step.
        show: whether this worker prints; one of them is enough.

    The first ``UNTIMED_STEPS`` steps are left out of the throughput.
    """

    def __init__(self, steps: int, *, unit: str, per_step: int, show: bool) -> None:
        self.steps = steps
        self.unit = unit
        self.per_step = per_step
        self.loss = float("nan")
        self.first_step_seconds = float("nan")
        self._show = show
        self._done = 0
        self._begin = self._steady = self._shown = time.perf_counter()
        self._now = self._begin
        self._bar: Bar | None = None

    def __enter__(self) -> Progress:
        if self._show and sys.stdout.isatty():
            self._bar = Bar(
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}  loss {task.fields[loss]}"),
                TimeRemainingColumn(),
            )
            self._bar.add_task("", total=self.steps, rate="", loss="")
            self._bar.start()
        self._begin = self._steady = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def rate(self) -> float:
        """Units per second over all workers, once the step is captured."""
        timed = self._done - UNTIMED_STEPS
        return timed * self.per_step / (self._now - self._steady) if timed > 0 else float("nan")

    def step(self, loss: torch.Tensor) -> None:
        """Account for a step that has just run."""
        self._done += 1
        self._now = time.perf_counter()
        if self._done <= UNTIMED_STEPS:
            self._steady = self._now
        if self._done == 1:
            self.first_step_seconds = self._now - self._begin
        last = self._done == self.steps
        wait = 0.2 if self._bar is not None else SECONDS_BETWEEN_LINES
        # Reading a loss waits for the device, so it is done only where it is shown.
        if last or self._done == 1 or self._now - self._shown >= wait:
            self._shown = self._now
            self.loss = float(loss.detach())
            if self._show:
                self._print()

    def _print(self) -> None:
        rate = "" if self._done <= UNTIMED_STEPS else f"{self.rate:,.0f} {self.unit}/s"
        if self._bar is not None:
            task = self._bar.tasks[0].id
            self._bar.update(task, completed=self._done, rate=rate, loss=f"{self.loss:.4f}")
            return
        line = f"step {self._done:>{len(str(self.steps))}}/{self.steps}  loss {self.loss:.4f}"
        print(f"{line}  {rate}".rstrip(), flush=True)


def print_result(title: str, rows: dict[str, str]) -> None:
    """A small table of names and values, on standard output."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
