"""What can be compared, by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.workloads import Step, Training
from parallax.strategy.builders import builder_names

COMPUTATION = "computation"
CAPTURED = "captured"
HYBRID = "parallax-hybrid"


@dataclass(frozen=True)
class System:
    """One way to train.

    Args:
        name: in tables and on the command line.
        module: of ``benchmarks.peers``; imported where the system is used, as its packages may be
            missing elsewhere.
        option: passed to the module's ``build``.
        fits: whether the system can train it.
        lossy: the numbers are not those of one device.
        part: it is compared when asked for only: a variant of another, or slow to begin.
    """

    name: str
    module: str
    option: str
    fits: Callable[[Training], bool] = lambda training: True
    lossy: bool = False
    part: bool = False

    @property
    def household(self) -> str:
        """The systems that share processes: all of parallax, which keeps freed memory there; each
        other has its own, as it would have elsewhere."""
        return "parallax" if self.module == "ours" or self.name == CAPTURED else self.name

    def build(self, training: Training) -> Step:
        """A step of this system, on a model with the same first values on all workers."""
        module = importlib.import_module(f"benchmarks.peers.{self.module}")
        step: Step = module.build(training, self.option)
        return step


def _has_tables(training: Training) -> bool:
    return bool(training.tables)


def _torchrec_knows(training: Training) -> bool:
    return training.name == "dlrm" or training.name.startswith("lm-")


SYSTEMS = {
    system.name: system
    for system in (
        System(HYBRID, "ours", "HYBRID"),
        # With ids that travel while the step before computes.
        System("parallax-ahead", "ours", "HYBRID/ahead", fits=_has_tables),
        System("parallax-late", "ours", "HYBRID/late"),
        System("parallax-ps", "ours", "PS"),
        System("parallax-ar", "ours", "AR"),
        System("parallax-ar-late", "ours", "AR/late", part=True),
        *(
            System(f"parallax-{name.lower()}", "ours", name, part=True)
            for name in builder_names()
            if name not in ("HYBRID", "PS", "AR")
        ),
        # Tables in so many shards, or in as many as a search in the first steps finds best.
        *(
            System(
                f"parallax-partitions-{number}", "ours", f"HYBRID/partitions={number}", part=True
            )
            for number in (*range(1, 9), "search")
        ),
        # Every exchange at once, however large.
        System("parallax-hybrid-whole", "ours", "HYBRID/whole", part=True),
        System("parallax-ps-whole", "ours", "PS/whole", part=True),
        # Compiled by Inductor, which takes a minute or more first: all regions of the step, those
        # that are faster so, the model.
        System("parallax-compiled", "ours", "HYBRID/compiled", part=True),
        System("parallax-settled", "ours", "HYBRID/settled", part=True),
        System("ddp-compiled", "ddp", "compiled", part=True),
        # Two levels of exchange nowhere; for rows; for rows and dense gradients.
        System("parallax-ps-flat", "ours", "PS/flat", part=True),
        System("parallax-ar-flat", "ours", "AR/flat", part=True),
        System("parallax-hybrid-flat", "ours", "HYBRID/flat", part=True),
        System("parallax-hybrid-rows", "ours", "HYBRID/rows", part=True),
        System("parallax-hybrid-hosts", "ours", "HYBRID/hosts", part=True),
        # Operations on pulled rows, and on aggregated gradients, left to workers; the former only.
        System("parallax-ps-unplaced", "ours", "PS/flat/unplaced", part=True),
        System("parallax-hybrid-flat-unplaced", "ours", "HYBRID/flat/unplaced", part=True),
        System("parallax-hybrid-rows-unplaced", "ours", "HYBRID/rows/unplaced", part=True),
        System("parallax-hybrid-rows-pulled", "ours", "HYBRID/rows/pulled", part=True),
        # What a worker computes while the others do too, with nothing sent: no way of training.
        System(COMPUTATION, "alone", "eager", lossy=True),
        # The same with the step as parallax captures it, which predictions begin with.
        System(CAPTURED, "alone", "captured", lossy=True),
        System("ddp", "ddp", "dense"),
        System("ddp-sparse", "ddp", "sparse", fits=_has_tables),
        System("ddp-fp16", "ddp", "fp16", lossy=True),
        System("ddp-powersgd", "ddp", "powersgd", lossy=True),
        System("zero1", "ddp", "zero1"),
        System("fsdp2", "fsdp", ""),
        System("torchrec-row", "torchrec", "row", fits=_torchrec_knows),
        System("torchrec-table", "torchrec", "table", fits=_torchrec_knows),
        System(
            "torchrec-ahead",
            "torchrec",
            "table/ahead",
            fits=lambda training: training.name == "dlrm",
        ),
    )
}

WHOLE = tuple(name for name, system in SYSTEMS.items() if not system.part)
