"""Tables 1 and 4 of the Parallax paper, in shape: on a virtual cluster, with small models.

    python -m benchmarks.paper_tables --rate 100mbit

Table 1 sets parameter servers (PS) beside collective communication (AR) for dense and for sparse
models; Table 4 adds to PS one technique after the other. All are trained by parallax, which can do
each alone; they take turns, and ratios are medians of the rounds' ratios.
The paper's figures stand beside: 8 machines of 6 GPUs each, InfiniBand, TensorFlow and Horovod.

It needs root and what `benchmarks.virtual_cluster` needs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.compare import Options, run_all
from benchmarks.comparison import report
from benchmarks.comparison.arguments import parser_for
from benchmarks.comparison.limits import lookups_of_step
from benchmarks.comparison.report import Comparison
from benchmarks.comparison.values import Turn
from benchmarks.peers.systems import COMPUTATION, HYBRID
from benchmarks.virtual_cluster import VirtualClusterError
from benchmarks.workloads import Batch, find

PS, AR = "parallax-ps-flat", "parallax-ar-flat"
CASES = {
    "BASE": "parallax-ps-unplaced",
    "+HYB": "parallax-hybrid-flat-unplaced",
    "+LA": "parallax-hybrid-rows-unplaced",
    "+OPAU": "parallax-hybrid-rows-pulled",
    "+OPSW": "parallax-hybrid-rows",
    "+DH": "parallax-hybrid-hosts",
}
"""Of table 4: each has what the one before has; DH sums dense gradients inside hosts first."""


@dataclass(frozen=True)
class Model:
    """A model of the tables.

    Args:
        name: in the tables.
        workload: what is trained.
        unit: what its throughput counts.
        published: millions of parameters: dense, sparse, and those of the sparse that one worker
            touches in a step; None where the paper has not measured the model.
        ps, ar: the paper's throughputs in table 1, thousands of units per second.
        cases: those in table 4; empty if the paper has not measured it.
        sparse: it is in our table 4.
    """

    name: str
    workload: str
    unit: str
    published: tuple[float, float, float] | None = None
    ps: float = 0.0
    ar: float = 0.0
    cases: tuple[float, ...] = ()
    sparse: bool = False


MODELS = {
    model.workload.removeprefix("paper-"): model
    for model in (
        Model("ResNet", "paper-resnet", "images", (26, 0, 0), 6.0, 8.1),
        Model("VGG", "paper-vgg", "images"),
        Model(
            *("LM", "paper-lm", "words", (9, 814, 6.5), 101.2, 39.0, (101, 112, 251, 259, 276)),
            sparse=True,
        ),
        Model("LM, bfloat16", "paper-lm-bf16", "words", sparse=True),
        Model(
            *("NMT", "paper-nmt", "words", (94, 75, 7), 86.8, 67.2, (87, 117, 188, 188, 191)),
            sparse=True,
        ),
    )
}

NOTES = """\
The paper's ResNet is ResNet-50, and it has no VGG but Inception-v3 as its second dense model
(PS 3.9k, AR 5.8k: 0.67). parallax always places operations where fewer bytes cross; before +OPAU
aggregated gradients are sent to all workers as well, and before +OPSW rows travel whole.
Why figures differ:

- PS / AR depends on how much of a step is communication, so on models and links. Of a dense
  gradient a ring of all workers carries about twice its size out of each host, servers carry that
  for each worker of the host. Of rows AR carries each worker's to every other: that grows with the
  number of workers, of which the paper had 48.
- +HYB saves what dense gradients cost more in BASE, where workers also wait for the busiest owner,
  and for new values after the update, which nothing hides. It saves the more, the more of a model
  is dense and of a step is communication.
- +LA merges rows that several workers of a host look up. Workers merge repeated words of their own
  batch before they send anything, also in BASE, so that only what both of two workers look up is
  left to save. The paper's hosts had six workers each.
- +OPAU saves the aggregated gradients' way to all workers, where the paper's system multiplied
  them. Here all gradients of the LM are clipped together. That costs the more, the more workers
  there are; what a GPU's workers hide, links of 100 Mbit/s do not.
- +OPSW moves casts and slices to the owners. The paper's LM has slices; ours has neither but under
  bfloat16 autocast, where pulled rows take half the bytes (pushed ones are sums of float32).
"""


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 150, stderr=True)
    options = Options(
        args.workers_per_host,
        args.rounds,
        (),
        args.quick,
        "",
        # The models are small, and ratios want all of a model's systems in one group.
        math.inf,
        trials=False,
    )
    chosen = [MODELS[name] for name in args.model or MODELS]
    plan = [(model.workload, _of(options, model)) for model in chosen]
    if (results := run_all(args, plan, console)) is None:
        return 2
    try:
        text = tables(chosen, results, args.quick)
    except VirtualClusterError as error:
        print(error, file=sys.stderr)
        return 2
    print(text)
    if args.markdown:
        Path(args.markdown).write_text(text)
    return 0


def _of(options: Options, model: Model) -> Options:
    """What a model needs of the systems; the machinery wants the first two."""
    cases = CASES.values() if model.sparse else ()
    systems = (HYBRID, COMPUTATION, AR, PS, *cases)
    return replace(options, systems=systems)


def tables(models: Sequence[Model], results: Sequence[Comparison], quick: bool) -> str:
    """Both tables as Markdown.

    Raises:
        VirtualClusterError: a system failed that they need.
    """
    pairs = list(zip(models, results, strict=True))
    first = results[0]
    lines = [
        f"{first.hosts} hosts x {first.workers_per_host}, {first.rate or 'not shaped'}; parameters "
        "in millions: dense / sparse / touched by one worker in a step. In brackets: quartiles.",
        "",
        "| table 1 | parameters | PS | AR | PS / AR | paper: parameters | PS | AR | PS / AR |",
        "| --- " * 9 + "|",
    ]
    lines += [_table1(model, result, quick) for model, result in pairs]
    sparse = [pair for pair in pairs if pair[0].sparse]
    if sparse:
        lines += ["", f"| table 4 | {' | '.join(CASES)} |", "| --- " * (len(CASES) + 1) + "|"]
        for model, result in sparse:
            lines += _table4(model, result, quick)
    return "\n".join([*lines, "", NOTES])


def _table1(model: Model, result: Comparison, quick: bool) -> str:
    ours = " / ".join(f"{count:.3g}" for count in parameters(model.workload, quick))
    paper = ["-"] * 4
    if model.published is not None:
        counts = " / ".join(f"{count:g}" for count in model.published)
        paper = [counts, f"{model.ps}k", f"{model.ar}k", f"{model.ps / model.ar:.2f}"]
    cells = [
        model.name,
        ours,
        f"{throughput(result, PS, quick):,.0f} {model.unit}/s",
        f"{throughput(result, AR, quick):,.0f}",
        # A ratio of throughputs is the inverse one of times.
        _ratio(result, AR, PS),
        *paper,
    ]
    return f"| {' | '.join(cells)} |"


def _table4(model: Model, result: Comparison, quick: bool) -> list[str]:
    systems = list(CASES.values())
    rows = {row.system: row for row in result.rows}
    published = [f"{case:g}k" for case in model.cases]
    gains = [f"{case / model.cases[0]:.2f}" for case in model.cases]
    none = ["-"] * (len(systems) - len(model.cases))
    base = systems[0]
    made = {
        f"{model.unit}/s": [f"{throughput(result, name, quick):,.0f}" for name in systems],
        "of BASE": ["1.00", *(_ratio(result, base, name) for name in systems[1:])],
        "MB sent by a host": [f"{rows[name].sent_bytes / report.MEGA:.2f}" for name in systems],
    }
    if model.cases:
        made[f"paper, {model.unit}/s"] = [*published, *none]
        made["paper, of BASE"] = [*gains, *none]
    return [f"| {model.name}: {what} | {' | '.join(cells)} |" for what, cells in made.items()]


def parameters(workload: str, quick: bool) -> tuple[float, float, float]:
    """Millions of parameters: dense, in tables, and of these in rows that one batch looks up."""
    training = find(workload, quick)
    torch.manual_seed(0)
    model = training.model(True)
    whole = sum(value.numel() for value in model.parameters())
    sizes = {name: model.get_parameter(f"{name}.weight") for name in training.tables}
    sparse = sum(value.numel() for value in sizes.values())
    seen = lookups_of_step(training, model, training.batch()) if training.tables else {}
    touched = sum(len(one.ids) * sizes[name][0].numel() for name, one in seen.items())
    return (whole - sparse) / 1e6, sparse / 1e6, touched / 1e6


def throughput(result: Comparison, system: str, quick: bool) -> float:
    """Instances per second of all workers: words of the target, or images."""
    training = find(result.workload, quick)
    workers = result.hosts * result.workers_per_host
    seconds = statistics.median(t.seconds for t in _turns(result, system) if t.system == system)
    return instances(training.batch()) * workers / seconds


def instances(batch: Batch) -> int:
    """How many a local batch has: as many as it has targets."""
    return int(batch[1].numel())


def _ratio(result: Comparison, one: str, other: str) -> str:
    """Time of one in units of the other's, with quartiles."""
    paired = report.pair(_turns(result, one, other), one, other)
    low, high = paired.ratio_range(one, other)
    return f"{paired.ratio(one, other):.2f} ({low:.2f} - {high:.2f})"


def _turns(result: Comparison, *systems: str) -> list[Turn]:
    """Of the group that these systems are in."""
    for turns in result.turns:
        if {turn.system for turn in turns} >= set(systems):
            return turns
    failures = [f"{r.system}: {r.failure}" for r in result.rows if r.failure]
    raise VirtualClusterError(
        f"{result.workload}: {', '.join(systems)} did not take turns beside each other"
        + "".join(f"; {text}" for text in failures),
        "give more time (--limit), or use a machine with more free cores and memory",
    )


def _parser() -> argparse.ArgumentParser:
    parser = parser_for(
        "paper_tables",
        "Tables 1 and 4 of the Parallax paper, in shape, on a virtual cluster.",
        workers_per_host=2,
        rate="100mbit",
    )
    add = parser.add_argument
    add("--model", action="append", choices=MODELS, help="one or several (default: all)")
    add("--markdown", help="write the tables to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
