"""One worker of a comparison: builds systems, lets them take turns, and measures.

    python -m benchmarks.comparison.worker TASK.json

runs under torchrun's environment variables on each host of a virtual cluster.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

import parallax
from benchmarks.comparison.limits import bytes_that_must_cross
from benchmarks.comparison.spans import TURN, idle_seconds
from benchmarks.comparison.values import Task, Trial, Turn
from benchmarks.namespaces import link_bytes
from benchmarks.peers.systems import CAPTURED, COMPUTATION, SYSTEMS
from benchmarks.workloads import Batch, Step, Training, batches, find

BATCHES = 8
TRIAL_STEPS = 4
WARMUP_STEPS = 3


def main(path: str) -> None:
    task = msgspec.json.decode(Path(path).read_bytes(), type=Task)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if task.packages:
        sys.path.append(task.packages)
    # The driver ends workers that take too long.
    dist.init_process_group("gloo", timeout=timedelta(hours=1))
    training = find(task.workload, task.quick)
    data = batches(training, BATCHES, seed=1000 + dist.get_rank())
    answer: Trial | list[Turn]
    if task.kind == "trial":
        answer = _trial(task, training, data)
    else:
        answer = _rounds(task, training, data)
    if dist.get_rank() == 0:
        Path(task.answer).write_bytes(msgspec.json.encode(answer))
    dist.barrier()
    # Without this process's exit handlers: some systems leave threads that would wait for others.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _trial(task: Task, training: Training, data: list[Batch]) -> Trial:
    (contestant,) = task.contestants
    system = SYSTEMS[contestant.name]
    empty = _largest(_resident_bytes())
    step = system.build(training)
    # parallax seeds its workers like this, and sampling inside a step shall be the same for all.
    torch.manual_seed(dist.get_rank())
    losses = []
    seconds = []
    for number in range(TRIAL_STEPS):
        dist.barrier()
        begin = time.perf_counter()
        loss = step(*data[number]).detach().clone().double()
        seconds.append(time.perf_counter() - begin)
        dist.all_reduce(loss)
        losses.append(float(loss) / dist.get_world_size())
    held = _largest(_resident_bytes())
    # Linux counts in units of 1,024 bytes.
    peak = _largest(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    cross = 0.0
    if contestant.name == COMPUTATION:
        model = training.model(True)
        hosts, host = _hosts()
        cross = bytes_that_must_cross(training, model, data[0], host, hosts)
    return Trial(losses, _largest(min(seconds[-2:])), int(empty), int(held), int(peak), cross)


def _rounds(task: Task, training: Training, data: list[Batch]) -> list[Turn]:
    built: dict[str, Step] = {}
    steps = {}
    for contestant in task.contestants:
        name = contestant.name
        built[name] = SYSTEMS[name].build(training)
        steps[name] = _forever(built[name], data)
        # Before the next is built: the first step of some gives most of a table's memory back.
        for _ in range(WARMUP_STEPS if contestant.steps > 1 else 2):
            steps[name]()
    turns = []
    for number in range(task.rounds):
        playing = [c for c in task.contestants if number < c.rounds]
        if not playing:  # all are slow, and have played their few rounds
            break
        # Each in turn goes first: whoever follows finds the caches as another left them.
        first = number % len(playing)
        for contestant in playing[first:] + playing[:first]:
            step = steps[contestant.name]
            dist.barrier()
            before = link_bytes()
            dist.barrier()
            cpu = time.process_time()
            begin = time.perf_counter()
            with _traced(task.traced) as trace:
                for _ in range(contestant.steps):
                    step()
            dist.barrier()
            seconds = (time.perf_counter() - begin) / contestant.steps
            cpu_seconds = _mean(time.process_time() - cpu) / contestant.steps
            sent, most = _per_host(before, contestant.steps)
            idle = _mean(idle_seconds(trace.events())) / contestant.steps if trace else 0.0
            figures = (seconds, cpu_seconds, sent, most)
            turns.append(Turn(contestant.name, number, *figures, idle_seconds=idle))
    expected = _predicted(built, turns)
    return [
        msgspec.structs.replace(
            turn,
            predicted_seconds=expected.get(turn.system, 0.0),
            told=getattr(built[turn.system], "told", ""),
            strategy=_strategy(built[turn.system]),
        )
        for turn in turns
    ]


@contextlib.contextmanager
def _traced(wanted: bool) -> Iterator[torch.profiler.profile | None]:
    """Record what a turn does, if that is wanted."""
    if not wanted:
        yield None
        return
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=activities) as trace,
        torch.profiler.record_function(TURN),
    ):
        yield trace


def _predicted(built: Mapping[str, Step], turns: Sequence[Turn]) -> dict[str, float]:
    """What runners of parallax expect a step to take, by system."""
    by_system: dict[str, list[float]] = {}
    for turn in turns:
        by_system.setdefault(turn.system, []).append(turn.seconds)
    alone = by_system.get(CAPTURED) or by_system.get(COMPUTATION)
    found = {}
    for name, step in built.items():
        runner = getattr(step, "__self__", None)
        if alone and isinstance(runner, parallax.Runner):
            time_of_step = runner.expected_time(statistics.median(alone))
            if time_of_step is not None:
                found[name] = time_of_step.step
    return found


def _strategy(step: Step) -> str:
    """A hash of what a runner decided, whatever its reasons; empty for others."""
    runner = getattr(step, "__self__", None)
    if not isinstance(runner, parallax.Runner) or runner.strategy is None:
        return ""
    choices = runner.strategy.variables.items()
    decided = {name: msgspec.structs.replace(choice, why="") for name, choice in choices}
    return hashlib.sha256(msgspec.json.encode(decided)).hexdigest()[:16]


def _forever(step: Step, data: list[Batch]) -> Callable[[], None]:
    number = 0

    def run() -> None:
        nonlocal number
        step(*data[number % len(data)])
        number += 1

    return run


def _per_host(before: tuple[int, int], steps: int) -> tuple[float, float]:
    """Bytes per step: sent by the average host, and the most of any host and direction."""
    received, sent = (now - then for now, then in zip(link_bytes(), before, strict=True))
    mine = torch.tensor([received, sent], dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    # Workers of one host read the same counters, at nearly the same time.
    table = torch.stack(everyone) / steps
    return float(table[:, 1].mean()), float(table.max())


def _hosts() -> tuple[int, int]:
    """How many hosts there are, and this worker's."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    return dist.get_world_size() // local, dist.get_rank() // local


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _mean(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _largest(value: float) -> float:
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


if __name__ == "__main__":
    main(sys.argv[1])
