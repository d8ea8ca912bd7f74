"""parallax beside other systems, on a virtual cluster, interleaved in one run.

    python -m benchmarks.compare --hosts 4 --rate 1gbit --workload lm-50k --workload dlrm

For each workload every system is first tried by itself (but with ``--no-trials``), which gives its
peak memory and its losses and keeps those out that fail or hang. Then all take turns, as far as
memory permits; ratios are medians of the rounds' ratios. Systems that do not fit together come in
several groups, each with parallax HYBRID in it. What is parallax shares processes; each other
system has its own, and all but the one whose turn it is wait.

Each worker computes with one thread. It needs root and what `benchmarks.virtual_cluster` needs.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.comparison import report
from benchmarks.comparison.arguments import parser_for
from benchmarks.comparison.drawing import draw
from benchmarks.comparison.launch import Launcher
from benchmarks.comparison.report import Comparison
from benchmarks.comparison.rounds import Contestant, Played, households, play
from benchmarks.comparison.values import Begin, Task, Trial, Turn
from benchmarks.dialogue import SilentError
from benchmarks.namespaces import rate_bits
from benchmarks.peers.systems import CAPTURED, COMPUTATION, HYBRID, SYSTEMS, WHOLE
from benchmarks.virtual_cluster import VirtualCluster, VirtualClusterError
from benchmarks.workloads import PAPER, WORKLOADS, Training, find

MEMORY_SHARE = 0.6  # of what is available
FAR = 1.5
"""A trial that took so many times HYBRID's tells enough."""
SLOW_SECONDS = 3.0  # per step: such systems play few rounds
SLOW_ROUNDS = 3
TURN_SECONDS = 1.0
MOST_STEPS = 10


@dataclass(frozen=True)
class Options:
    """What one run measures.

    Args:
        workers_per_host: worker processes on each host.
        rounds: turns of each system.
        systems: by name, HYBRID among them; without COMPUTATION there is no limit.
        quick: with tiny models.
        packages: directory with TorchRec; empty without it.
        memory: bytes for all workers together.
        trials: try each system by itself; else all take turns at once, of whatever memory.
        traced: record turns by PyTorch's profiler.
        near: only systems whose trial took less than ``FAR`` times HYBRID's take turns.
    """

    workers_per_host: int
    rounds: int
    systems: tuple[str, ...]
    quick: bool
    packages: str
    memory: float
    trials: bool = True
    traced: bool = False
    near: bool = False


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    options = Options(
        args.workers_per_host,
        args.rounds,
        # Ratios and the limit are in terms of the first two, predictions of the third.
        tuple(dict.fromkeys([HYBRID, COMPUTATION, CAPTURED, *(args.system or WHOLE)])),
        args.quick,
        str(Path(args.packages).resolve()) if args.packages else "",
        args.memory * 1e9 if args.memory else memory_budget(),
        trials=not args.no_trials,
    )
    console = Console(width=None if sys.stdout.isatty() else 150)

    def show(results: list[Comparison]) -> None:
        console.print(report.table(results[-1]))
        if args.markdown:
            text = "\n".join(report.markdown(result) for result in results)
            Path(args.markdown).write_text(text)

    plan = [(workload, options) for workload in args.workload or WORKLOADS]
    if (results := run_all(args, plan, console, show)) is None:
        return 2
    if args.plot and (why := draw(results, Path(args.plot))):
        console.print(why)
    return 0


def run_all(
    args: argparse.Namespace,
    plan: Sequence[tuple[str, Options]],
    console: Console,
    show: Callable[[list[Comparison]], object] = lambda results: None,
) -> list[Comparison] | None:
    """Compare each workload on one virtual cluster, as the command line has it.

    Args:
        args: see :func:`benchmarks.comparison.arguments.parser_for`.
        plan: workloads by name, each with what is measured of it.
        show: called with all results so far after each workload.

    Returns:
        What was measured; None where there can be no virtual cluster, as then standard error says.
    """
    results: list[Comparison] = []
    rate = None if args.rate == "none" else args.rate
    try:
        with VirtualCluster(args.hosts, rate, sshd=False) as cluster:
            launcher = Launcher(cluster, args.workers_per_host, args.limit)
            for workload, options in plan:
                results.append(run(launcher, workload, options, console))
                show(results)
                if args.json:
                    report.write_json(results, Path(args.json))
    except VirtualClusterError as error:
        print(error, file=sys.stderr)
        return None
    return results


def run(launcher: Launcher, workload: str, options: Options, console: Console) -> Comparison:
    """Try each system by itself, then let all take turns."""
    training = find(workload, options.quick)
    names = _names(training, options, console)
    task = Task(workload, options.quick, [], options.packages)
    trials: dict[str, Trial | str] = {}
    for name in names if options.trials else ():
        started = launcher.start(msgspec.structs.replace(task, systems=[name]))
        with contextlib.closing(started) as asked:
            try:
                (trials[name],) = asked.ask(Begin(), list[Trial], launcher.limit)
            except SilentError as error:
                _must_play(workload, name, str(error))
                trials[name] = str(error)
        console.print(f"{workload}: tried {name}: {_in_words(trials[name])}", style="dim")
    fit = {name: trial for name, trial in trials.items() if isinstance(trial, Trial)}
    workers = len(launcher.cluster.hosts) * options.workers_per_host
    playing = _near(fit) if options.near else fit
    groups = []
    failed: dict[str, str] = {}

    def contestant(name: str, began: Trial) -> Contestant:
        return _contestant(name, fit.get(name, began), options, launcher.limit)

    for group in _groups(playing, workers, options.memory) if options.trials else [names]:
        console.print(f"{workload}: {', '.join(group)} take turns", style="dim")
        played = play(launcher, task, group, contestant, options.traced)
        for name, why in played.failed.items():
            _must_play(workload, name, why)
        groups.append(played.turns)
        failed |= played.failed
        for name in group:
            if name not in trials:
                trials[name] = _without_memory(played, name)
    return _put_together(launcher, workload, options, names, trials, groups, failed)


def _must_play(workload: str, name: str, failure: str) -> None:
    if name in (HYBRID, COMPUTATION):
        raise VirtualClusterError(
            f"{workload}: {name}, with which all is compared, {failure}",
            "give it more time (--limit), or a machine with more free cores and memory",
        )


def _without_memory(played: Played, name: str) -> Trial | str:
    """How a system began that had no trial by itself: what memory it took is not known."""
    if name not in played.trials:
        return played.failed[name]
    return msgspec.structs.replace(played.trials[name], peak_bytes=0)


def _near(fit: Mapping[str, Trial]) -> dict[str, Trial]:
    most = FAR * fit[HYBRID].seconds
    return {n: t for n, t in fit.items() if n in (HYBRID, COMPUTATION) or t.seconds < most}


def _put_together(
    launcher: Launcher,
    workload: str,
    options: Options,
    names: Sequence[str],
    trials: dict[str, Trial | str],
    groups: list[list[Turn]],
    failed: Mapping[str, str],
) -> Comparison:
    rows = report.compare(names, trials, groups, failed)
    result = Comparison(
        workload,
        len(launcher.cluster.hosts),
        options.workers_per_host,
        launcher.cluster.rate,
        rows,
        turns=groups,
    )
    if COMPUTATION not in names:
        return result
    alone = next(row for row in rows if row.system == COMPUTATION)
    trial = trials[COMPUTATION]
    assert isinstance(trial, Trial)
    (turns, *_) = [group for group in groups if COMPUTATION in {turn.system for turn in group}]
    rate = launcher.cluster.rate
    wire = 0.0 if rate is None else trial.cross_bytes * 8 / rate_bits(rate)
    return msgspec.structs.replace(
        result,
        computation=alone.seconds,
        cross_bytes=trial.cross_bytes,
        wire=wire,
        share=report.reached(turns, wire),
        captured_share=report.reached(turns, wire, CAPTURED),
    )


def _names(training: Training, options: Options, console: Console) -> list[str]:
    names = [name for name in options.systems if SYSTEMS[name].fits(training)]
    if not options.packages and any(name.startswith("torchrec") for name in names):
        how = "pip install --no-deps --target DIR -r benchmarks/peers/torchrec.txt"
        console.print(f"without TorchRec: {how}, then --packages DIR", style="dim")
        names = [name for name in names if not name.startswith("torchrec")]
    return names


def _contestant(name: str, trial: Trial, options: Options, limit: float) -> Contestant:
    steps = max(1, min(MOST_STEPS, round(TURN_SECONDS / trial.seconds)))
    rounds = SLOW_ROUNDS if trial.seconds > SLOW_SECONDS else options.rounds
    # At most three times as slow as in the trial.
    return Contestant(name, steps, min(rounds, options.rounds), limit + 3 * trial.seconds * steps)


def _groups(fit: dict[str, Trial], workers: int, memory: float) -> list[list[str]]:
    """Systems that fit into memory together, HYBRID in each group."""
    groups: list[list[str]] = []
    for name in [name for name in fit if name != HYBRID]:
        if not groups or _together(fit, [*groups[-1], name]) * workers > memory:
            groups.append([HYBRID])
        groups[-1].append(name)
    return groups


def _together(fit: dict[str, Trial], names: Sequence[str]) -> int:
    """Bytes of a worker's processes for all of these while one of them is at its peak."""
    trials = [fit[name] for name in names]
    empty = max(trial.empty_bytes for trial in trials) * len(households(names))
    held = sum(trial.held_bytes - trial.empty_bytes for trial in trials)
    return empty + held + max(trial.peak_bytes - trial.held_bytes for trial in trials)


def memory_budget() -> float:
    """Bytes that all workers together may use."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 * MEMORY_SHARE
    raise SystemExit("/proc/meminfo does not tell what is available; use --memory")


def _in_words(trial: Trial | str) -> str:
    if isinstance(trial, str):
        return trial
    losses = ", ".join(f"{loss:.6f}" for loss in trial.losses)
    peak = trial.peak_bytes / report.MEGA
    return f"{trial.seconds * 1e3:,.0f} ms, peak {peak:,.0f} MB, losses {losses}"


def _parser() -> argparse.ArgumentParser:
    parser = parser_for(
        "compare", "Time training steps of parallax and of other systems on a virtual cluster."
    )
    add = parser.add_argument
    add(
        "--workload",
        action="append",
        choices=[*WORKLOADS, *PAPER],
        help="one or several (default: all)",
    )
    add("--system", action="append", choices=SYSTEMS, help="one or several (default: whole ones)")
    add("--memory", type=float, help="GB for all workers together (default: most of what is free)")
    add("--no-trials", action="store_true", help="all take turns at once, in whatever memory")
    add("--packages", default="", help="directory with TorchRec, see benchmarks/peers/torchrec.txt")
    add("--markdown", help="write the tables to this file")
    add("--plot", help="draw them to this file, if matplotlib is installed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
