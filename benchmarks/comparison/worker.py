"""One worker of a comparison: builds systems that share processes, and measures when asked.

    python -m benchmarks.comparison.worker TASK.json

runs under torchrun's environment variables on each host of a virtual cluster.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import parallax
from benchmarks.comparison.limits import bytes_that_must_cross
from benchmarks.comparison.spans import TURN, idle_seconds
from benchmarks.comparison.values import Begin, Play, Ready, Task, Tell, Told, Trial, Turn
from benchmarks.dialogue import Asker
from benchmarks.namespaces import link_bytes
from benchmarks.peers.systems import COMPUTATION, SYSTEMS
from benchmarks.workloads import Batch, Step, Training, batches, find

BATCHES = 8
TRIAL_STEPS = 4

Question = Ready | Begin | Play | Tell


def main(path: str) -> None:
    task = msgspec.json.decode(Path(path).read_bytes(), type=Task)
    asker = Asker() if os.environ["RANK"] == "0" else None
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if task.packages:
        sys.path.append(task.packages)
    # The driver ends workers that take too long.
    dist.init_process_group("gloo", timeout=timedelta(days=1))
    training = find(task.workload, task.quick)
    data = batches(training, BATCHES, seed=1000 + dist.get_rank())
    built: dict[str, Step] = {}
    steps: dict[str, Callable[[], torch.Tensor]] = {}
    while (question := _question(asker)) is not None:
        answer: bool | list[Trial] | Turn | dict[str, Told]
        if isinstance(question, Ready):
            answer = True
        elif isinstance(question, Begin):
            answer = []
            for name in task.systems:
                # Before the next is built: the first step of some gives most of a table's memory
                # back.
                built[name], steps[name], trial = _trial(name, training, data)
                answer.append(trial)
        elif isinstance(question, Play):
            answer = _turn(question, steps[question.system])
            # What it left under way is not to travel in the turn of another.
            finish = getattr(built[question.system], "finish", None)
            if finish is not None:
                finish()
        else:
            answer = {name: _told(step, question.alone) for name, step in built.items()}
        if asker is not None:
            asker.answer(answer)
    # Without this process's exit handlers: some systems leave threads that would wait for others.
    sys.stderr.flush()
    os._exit(0)


def _question(asker: Asker | None) -> Question | None:
    """What worker 0 is asked, all are."""
    told: list[Any] = [asker.question(Question) if asker is not None else None]
    dist.broadcast_object_list(told, src=0)
    question: Question | None = told[0]
    return question


def _trial(
    name: str, training: Training, data: list[Batch]
) -> tuple[Step, Callable[[], torch.Tensor], Trial]:
    """A system, what runs its next step, and how its first steps went."""
    empty = _largest(_own_bytes())
    step = SYSTEMS[name].build(training)
    run = _forever(step, data)
    # parallax seeds its workers like this, and sampling inside a step shall be the same for all.
    torch.manual_seed(dist.get_rank())
    losses = []
    seconds = []
    for _ in range(TRIAL_STEPS):
        dist.barrier()
        begin = time.perf_counter()
        loss = run().detach().clone().double()
        seconds.append(time.perf_counter() - begin)
        dist.all_reduce(loss)
        losses.append(float(loss) / dist.get_world_size())
    held = _largest(_own_bytes())
    # Linux counts in units of 1,024 bytes.
    peak = _largest(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    cross = 0.0
    if name == COMPUTATION:
        model = training.model(True)
        hosts, host = _hosts()
        cross = bytes_that_must_cross(training, model, data[0], host, hosts)
    trial = Trial(losses, _largest(min(seconds[-2:])), int(empty), int(held), int(peak), cross)
    return step, run, trial


def _turn(question: Play, step: Callable[[], torch.Tensor]) -> Turn:
    dist.barrier()
    # What a step leaves to the next is then under way at both ends of what is measured.
    step()
    before = link_bytes()
    dist.barrier()
    cpu = time.process_time()
    begin = time.perf_counter()
    with _traced(question.traced) as trace:
        for _ in range(question.steps):
            step()
    dist.barrier()
    seconds = (time.perf_counter() - begin) / question.steps
    cpu_seconds = _mean(time.process_time() - cpu) / question.steps
    sent, most = _per_host(before, question.steps)
    idle = _mean(idle_seconds(trace.events())) / question.steps if trace else 0.0
    return Turn(question.system, question.round, seconds, cpu_seconds, sent, most, idle)


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


def _told(step: Step, alone: float) -> Told:
    """What a system says of itself; most say nothing."""
    told = getattr(step, "told", "")
    runner = getattr(step, "__self__", None)
    # Without a look at parallax's class, which would be loaded for it in another system's process.
    if runner is None or not isinstance(runner, parallax.Runner):
        return Told(0.0, told, "")
    expected = runner.expected_time(alone) if alone else None
    strategy = ""
    if runner.strategy is not None:
        choices = runner.strategy.variables.items()
        decided = {name: msgspec.structs.replace(choice, why="") for name, choice in choices}
        strategy = hashlib.sha256(msgspec.json.encode(decided)).hexdigest()[:16]
    return Told(0.0 if expected is None else expected.step, told, strategy)


def _forever(step: Step, data: list[Batch]) -> Callable[[], torch.Tensor]:
    """What runs the next step; a system that reads batches ahead has its own way over them."""
    over: Callable[[Iterable[Batch]], Iterator[Batch]] = getattr(step, "over", iter)
    coming = over(itertools.cycle(data))

    def run() -> torch.Tensor:
        return step(*next(coming))

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


def _own_bytes() -> int:
    """Resident, and not of a file or shared memory."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * resource.getpagesize()


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
