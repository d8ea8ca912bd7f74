"""One worker's captured step beside the eager one, paired in one run.

    python -m benchmarks.step_overhead
    python -m benchmarks.step_overhead --system replayed --system compiled --system torch.compile
    python -m benchmarks.step_overhead --device cuda --steps 20 --system recorded

Equal copies of each model, each in a process of its own, take turns: the eager step, and the step
as parallax captures it, replayed, compiled by Inductor, or ``settled``: as the default is after
some minutes, with each region compiled where that was measured to be faster; on a CUDA device also
``recorded``, as the default is from the fourth step on. Or the step of a model that
``torch.compile`` compiled, whose optimizer stays eager, on CUDA also with its own recordings
(``reduce-overhead``). The price of the beginning is measured as well: the first runs, less as many
steady steps, are capture, analysis, rewriting (a second time for an optimizer that makes its slots
in its first step) and compiling. With an empty ``TORCHINDUCTOR_CACHE_DIR`` that is a first
compilation, else compiled code is read from there.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.utils._pytree import tree_map_only

import parallax
from benchmarks.dialogue import Asked, Asker
from benchmarks.models import GPT, Workload, lm, mlp, resnet18, words
from benchmarks.pairing import pair_turns
from benchmarks.peers.ours import settled
from benchmarks.workloads import find, make_step


def gpt() -> Workload:
    """The small GPT of ``benchmarks.compare``."""
    training = find("gpt", quick=False)
    model = training.model(False)
    optimizer = training.optimizer(model.parameters())
    return Workload(model, optimizer, make_step(training, model, model, optimizer), training.batch)


def dlrm() -> Workload:
    """The DLRM of ``benchmarks.compare``, whose tables have sparse gradients in the eager step."""
    training = find("dlrm", quick=False)
    model = training.model(True)
    optimizer = training.optimizer(model.parameters())
    return Workload(model, optimizer, make_step(training, model, model, optimizer), training.batch)


def large_gpt(kind: torch.dtype = torch.float32) -> Workload:
    """A GPT with the sizes of GPT-2's smallest, for a device: 8 texts of 512 words.

    Args:
        kind: what is computed in; by autocast if it is not float32.
    """
    vocab, length, batch = 32_000, 512, 8
    model = GPT(layers=12, width=768, heads=12, vocab=vocab, length=length)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step(words: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(words.device.type, kind, enabled=kind is not torch.float32):
            loss = F.cross_entropy(model(words).flatten(0, 1), following.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return Workload(model, optimizer, step, lambda: words(vocab, batch, length))


CASES: dict[str, Callable[[], Workload]] = {
    "lm": lm,
    "resnet18": resnet18,
    "mlp40": mlp,
    "gpt": gpt,
}
LARGE: dict[str, Callable[[], Workload]] = {
    "resnet18-large": functools.partial(resnet18, small=False, classes=1000, batch=128),
    "gpt-large": large_gpt,
    "gpt-large-bf16": functools.partial(large_gpt, torch.bfloat16),
    "dlrm": dlrm,
}
"""For a CUDA device; a turn is an eighth of the others' steps."""
COMPILE = {"replayed": "none", "recorded": "auto", "compiled": "inductor", "settled": "auto"}
"""By system, what the settings say."""
EAGER = "eager"
TORCH = {"torch.compile": None, "reduce-overhead": "reduce-overhead"}
"""By system, torch.compile's mode."""
SYSTEMS = (*COMPILE, *TORCH)
FIRST_RUNS = 6
MEGA = 1e6
LIMIT = 600.0  # seconds for an answer


class Play(msgspec.Struct, frozen=True, tag=True):
    """A question: run so many steps; the answer is the seconds that they took."""

    steps: int


class Peak(msgspec.Struct, frozen=True, tag=True):
    """A question: the answer is the most bytes that this process has taken, on CUDA of the
    device's memory."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_overhead",
        description="Time a captured step against the eager step.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    cases = (*CASES, *LARGE)
    add("--case", choices=cases, action="append", help="may be given repeatedly; all small ones")
    add("--system", choices=SYSTEMS, action="append", help="the same; replayed")
    add("--rounds", type=int, default=30, help="measured rounds, after two that are not")
    add("--steps", type=int, default=2, help="steps of a variant in its turn")
    add("--threads", type=int, default=1, help="torch's threads")
    add("--at-once", action="store_true", help="let all processes begin together")
    add("--device", default="cpu", help="what computes; with cuda, its first device")
    add("--asked", choices=(EAGER, *SYSTEMS), help=argparse.SUPPRESS)  # be the process of this one
    args = parser.parse_args(arguments)
    if args.asked:
        torch.set_num_threads(args.threads)
        warnings.filterwarnings("ignore", message="LSTM with projections is not supported")
        (case,) = args.case
        _answer({**CASES, **LARGE}[case], args.asked, torch.device(args.device))
        return

    table = Table(
        title="A step of one worker",
        caption=f"medians of {args.rounds} rounds of {args.steps} steps; torch "
        f"{torch.__version__}, {_hardware(args)}",
        title_justify="left",
        caption_justify="left",
    )
    for heading in ("model", "system"):
        table.add_column(heading)
    for heading in ("eager ms", "ms", "ratio", "quartiles", "eager MB", "MB", "begin s"):
        table.add_column(heading, justify="right")
    cases, systems = args.case or [*CASES], args.system or SYSTEMS[:1]
    with contextlib.ExitStack() as stack:
        begun = [_begin(stack, name, systems, args) for name in cases] if args.at_once else []
        for number, name in enumerate(cases):
            with contextlib.ExitStack() as own:
                found = begun[number] if begun else _begin(own, name, systems, args)
                for row in _rows(name, found, args):
                    table.add_row(name, *row)
    Console().print(table)


@dataclass
class _Begun:
    """The processes of a model, by system, and how long the first runs of each took."""

    asked: dict[str, Asked]
    first: dict[str, float]


def _begin(
    stack: contextlib.ExitStack, case: str, systems: Sequence[str], args: argparse.Namespace
) -> _Begun:
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    begun = _Begun({}, {})
    for system in (EAGER, *systems):
        begun.asked[system] = asked = _start(case, system, args, directory)
        stack.callback(asked.close)
        if not args.at_once:
            begun.first[system] = asked.answer(float, LIMIT)
    return begun


def _hardware(args: argparse.Namespace) -> str:
    if args.device == "cpu":
        return f"{args.threads} of {os.cpu_count()} cores"
    return torch.cuda.get_device_name(args.device)


def _rows(case: str, begun: _Begun, args: argparse.Namespace) -> list[list[str]]:
    asked, first = begun.asked, begun.first
    for system in asked.keys() - first.keys():
        first[system] = asked[system].answer(float, LIMIT)
    steps = max(1, args.steps // 8) if case in LARGE else args.steps

    def turn(system: str) -> float:
        return asked[system].ask(Play(steps), float, LIMIT) / steps

    result = pair_turns(list(asked), turn, rounds=args.rounds, warmup=2)
    peaks = {one: asked[one].ask(Peak(), int, LIMIT) for one in asked}
    rows = []
    for system in [one for one in asked if one != EAGER]:
        low, high = result.ratio_range(system, EAGER)
        rows.append(
            [
                system,
                f"{result.median(EAGER) * 1e3:.2f}",
                f"{result.median(system) * 1e3:.2f}",
                f"{result.ratio(system, EAGER):.3f}",
                f"{low:.3f} - {high:.3f}",
                f"{peaks[EAGER] / MEGA:,.0f}",
                f"{peaks[system] / MEGA:,.0f}",
                f"{first[system] - FIRST_RUNS * result.median(system):.2f}",
            ]
        )
    return rows


def _start(case: str, system: str, args: argparse.Namespace, directory: Path) -> Asked:
    """The process of a system, which answers how long its first runs took."""
    command = [sys.executable, "-m", "benchmarks.step_overhead", "--case", case]
    command += ["--asked", system, "--threads", f"{args.threads}", "--device", args.device]
    log = directory / f"{system}.log"
    pipe = subprocess.PIPE
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said)
    return Asked([process], [log])


def _answer(build: Callable[[], Workload], system: str, device: torch.device) -> None:
    asker = Asker()
    torch.manual_seed(0)
    workload = build()
    workload.model.to(device)
    batch = tree_map_only(torch.Tensor, lambda part: part.to(device), workload.batch())
    run = _runner(system, workload)
    question: Play | Peak | None = Play(FIRST_RUNS)
    while question is not None:
        if isinstance(question, Play):
            started = time.perf_counter()
            for _ in range(question.steps):
                run(*batch)
            if device.type == "cuda":
                torch.cuda.synchronize()
            asker.answer(time.perf_counter() - started)
        else:
            asker.answer(_peak(device))
        question = asker.question(Play | Peak)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in units of 1,024 bytes


def _runner(system: str, workload: Workload) -> Callable[..., object]:
    if system == EAGER:
        return workload.step
    if system in TORCH:
        # Module.compile() leaves modules of torch.nn itself, such as Sequential, as they are.
        compiled = torch.compile(copy.copy(workload.model), mode=TORCH[system])
        workload.model.forward = lambda *inputs: compiled(*inputs)  # type: ignore[method-assign]
        return workload.step
    config = parallax.Config(workers=1, seed=0, compile=COMPILE[system])
    run = parallax.get_runner(workload.step, config=config).run
    return settled(run) if system == "settled" else run


if __name__ == "__main__":
    main()
