"""What each worker does when: computing, waiting, and the messages under way meanwhile."""

from __future__ import annotations

import atexit
import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from parallax.runtime.comm.world import World

logger = logging.getLogger("parallax")

Kind = Literal["step", "computing", "waiting", "message"]


class Event(msgspec.Struct, frozen=True, array_like=True):
    """Something that took a while.

    Args:
        kind: a step, a time of computing or waiting in it, or a message from its start to its end.
        name: what a message is for.
        start, end: in seconds, of the clock that workers have set alike.
        bytes: of a message, that this worker sent.
    """

    kind: Kind
    name: str
    start: float
    end: float
    bytes: float = 0.0

    @property
    def span(self) -> tuple[float, float]:
        return self.start, self.end


@dataclass
class Recorder:
    """Notes what one worker does, from now on."""

    zero: float
    events: list[Event] = field(default_factory=list)

    def add(self, kind: Kind, name: str, start: float, end: float, size: float = 0.0) -> None:
        """Note something; times are those of ``time.perf_counter``."""
        self.events.append(Event(kind, name, start - self.zero, end - self.zero, size))

    def message(self, purpose: str, size: float, work: Any) -> None:
        """Note a collective that just started when it will have ended."""
        started = time.perf_counter()

        def ended(_: Any) -> None:
            self.add("message", purpose, started, time.perf_counter(), size)

        work.get_future().add_done_callback(ended)


@dataclass(frozen=True)
class Shares:
    """Of one worker's steps, on average, in seconds.

    Args:
        step: of a step.
        computing: of it, not spent waiting.
        waiting: of it, spent waiting for messages: communication that nothing hides.
        communicating: while at least one message is under way.
    """

    step: float
    computing: float
    waiting: float
    communicating: float


class Profile:
    """The steps that :meth:`Runner.profile` recorded; filled when the last of them has run.

    ``print`` shows, by worker, how long a step takes and what share of it is computing, waiting and
    communicating; ``shares`` has the same in seconds.
    """

    def __init__(self, steps: int, path: str | Path) -> None:
        self.steps = steps
        self.path = Path(path)
        self.shares: tuple[Shares, ...] = ()
        """By worker."""

    def __str__(self) -> str:
        if not self.shares:
            return f"{self.steps} steps are to be recorded"
        lines = [f"{self.steps} steps, written to {self.path}; of a step on average:"]
        for worker, one in enumerate(self.shares):
            part = {
                name: f"{getattr(one, name) / one.step:.0%}"
                for name in ("computing", "waiting", "communicating")
            }
            lines.append(
                f"worker {worker}: {one.step * 1e3:,.1f} ms: {part['computing']} computing, "
                f"{part['waiting']} waiting; messages under way for {part['communicating']}"
            )
        return "\n".join(lines)

    __repr__ = __str__


class Profiler:
    """Records the next steps of a worker; all workers make one at the same time."""

    def __init__(self, profile: Profile, world: World) -> None:
        self.profile = profile
        self._world = world
        self._left = profile.steps
        self._began = 0.0
        self._recorder = Recorder(_same_moment(world))
        world.traffic.recorder = self._recorder
        if world.rank == 0:
            atexit.register(self._unfinished)

    def before(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()

    def after(self) -> bool:
        """It ended; whether it was the last."""
        number = self.profile.steps - self._left
        self._recorder.add("step", f"step {number}", self._began, time.perf_counter())
        self._left -= 1
        if self._left:
            return False
        self._world.traffic.recorder = None
        atexit.unregister(self._unfinished)
        self._finish()
        return True

    def _unfinished(self) -> None:
        steps = self.profile.steps
        logger.warning(
            "profile(%d) recorded %d steps when the script ended, so there is no %s: record fewer, "
            "or run more",
            steps,
            steps - self._left,
            self.profile.path,
        )

    def _finish(self) -> None:
        own = msgspec.json.encode(sorted(self._recorder.events, key=lambda event: event.start))
        texts = self._world.texts("trace", own.decode())
        found = [msgspec.json.decode(text, type=list[Event]) for text in texts]
        self.profile.shares = tuple(shares(events) for events in found)
        if self._world.rank == 0:
            self.profile.path.parent.mkdir(parents=True, exist_ok=True)
            self.profile.path.write_text(json.dumps(chrome_trace(found)), encoding="utf-8")


def _same_moment(world: World) -> float:
    """A moment that is nearly the same on all workers, on this one's clock."""
    own, all_ = torch.zeros(1, device=world.device), torch.zeros(world.size, device=world.device)
    for _ in range(2):  # after the first all have come
        world.all_gather(all_, own, "trace").wait()
    return time.perf_counter()


def shares(events: Sequence[Event]) -> Shares:
    """How one worker's steps were spent."""
    steps = [event for event in events if event.kind == "step"]
    count = max(len(steps), 1)
    total = sum(end - start for start, end in (step.span for step in steps))
    waiting = _within(steps, (e.span for e in events if e.kind == "waiting"))
    communicating = _within(steps, (e.span for e in events if e.kind == "message"))
    return Shares(total / count, (total - waiting) / count, waiting / count, communicating / count)


def _within(steps: Sequence[Event], spans: Iterable[tuple[float, float]]) -> float:
    """Seconds of the steps that at least one span covers."""
    covered = 0.0
    joined = _joined(spans)
    for step in steps:
        for start, end in joined:
            covered += max(0.0, min(end, step.end) - max(start, step.start))
    return covered


def _joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    result: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def chrome_trace(by_worker: Sequence[Sequence[Event]]) -> dict[str, Any]:
    """The trace as Perfetto and Chrome's ``about:tracing`` read it: a process for each worker,
    with a line for its steps, one for computing and waiting, and lines for messages."""
    found: list[dict[str, Any]] = []
    for worker, events in enumerate(by_worker):
        found.append(_name(worker, 0, "process_name", f"worker {worker}"))
        for line, name in enumerate(("steps", "computing and waiting")):
            found.append(_name(worker, line, "thread_name", name))
        free: list[float] = []
        for event in sorted([*events, *_computing(events)], key=lambda event: event.start):
            line = 0 if event.kind == "step" else 1
            if event.kind == "message":
                line = 2 + _free_line(free, event)
                if line == 1 + len(free):
                    found.append(_name(worker, line, "thread_name", f"messages {line - 1}"))
            found.append(_complete(worker, line, event))
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def _computing(events: Sequence[Event]) -> list[Event]:
    """Between waits."""
    result = []
    waits = _joined(event.span for event in events if event.kind == "waiting")
    for step in events:
        if step.kind != "step":
            continue
        at = step.start
        for start, end in [*(w for w in waits if step.start <= w[0] < step.end), (step.end, 0.0)]:
            if start > at:
                result.append(Event("computing", "computing", at, start))
            at = end
    return result


def _free_line(free: list[float], event: Event) -> int:
    """The first line on which nothing is under way when an event starts."""
    for line, end in enumerate(free):
        if end <= event.start:
            free[line] = event.end
            return line
    free.append(event.end)
    return len(free) - 1


def _complete(worker: int, line: int, event: Event) -> dict[str, Any]:
    made = {
        "name": event.name,
        "ph": "X",
        "ts": event.start * 1e6,
        "dur": (event.end - event.start) * 1e6,
        "pid": worker,
        "tid": line,
    }
    if event.kind == "message":
        made["args"] = {"bytes sent": event.bytes}
    return made


def _name(worker: int, line: int, what: str, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": worker, "tid": line, "args": {"name": name}}
