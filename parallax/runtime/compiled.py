"""Regions of a worker's graph, compiled by Inductor where that is faster than replaying them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch

from parallax.config import CompileMode
from parallax.rewrite.region_graphs import Region
from parallax.runtime.comm.world import World
from parallax.runtime.compute import timing
from parallax.runtime.program import Program

WORTH_SECONDS = 120.0
"""Seconds of computing after which compiling, which takes up to as long, is likely to pay."""
FIRST_LOOK = 64
"""Steps after which workers first look whether it does, and again whenever they are doubled."""
TRIALS = 5
"""Runs of each form of a region that are timed; the first of the compiled one is not."""

logger = logging.getLogger("parallax")

State = Literal["replayed", "tried", "compiled"]


@dataclass(frozen=True)
class _Layout:
    """What a compiled region relies on."""

    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, inputs: Sequence[torch.Tensor]) -> _Layout:
        return cls(tuple(x.shape for x in inputs), tuple(x.stride() for x in inputs))

    def fits(self, inputs: Sequence[torch.Tensor]) -> bool:
        return all(
            x.shape == shape and x.stride() == stride
            for x, shape, stride in zip(inputs, self.shapes, self.strides, strict=True)
        )


class Compiler:
    """Decides when a worker's programs are compiled.

    ``"inductor"``: after their first run, and what is compiled stays. ``"auto"``: when the chief
    has computed for so long that it is likely to pay, on all workers in the same step, as they
    wait for each other; each region stays compiled where that was measured to be faster.
    ``"none"``: never.
    """

    def __init__(self, mode: CompileMode, world: World) -> None:
        self._mode = mode
        self._world = world
        self._steps = 0
        self._compiles = mode == "inductor"
        self.compiled: WeakKeyDictionary[Program, list[CompiledRegion]] = WeakKeyDictionary()

    def after(self, program: Program, computed: float) -> None:
        """A program ran, and ``computed`` seconds were spent computing so far. All workers call
        this after every step."""
        if self._mode == "none":
            return
        self._steps += 1
        if not self._compiles and self._steps >= FIRST_LOOK and _is_power_of_two(self._steps):
            chiefs = self._world.texts("compile", str(computed))[0]
            self._compiles = float(chiefs) >= WORTH_SECONDS
        if self._compiles and program not in self.compiled:
            regions = program.cut(lambda region: CompiledRegion(region, self._mode == "inductor"))
            self.compiled[program] = regions
            if self._world.rank == 0:
                logger.info("compiling %d regions of the step, once", len(regions))
            for region in regions:
                region.compile_next()

    def describe(self, program: Program | None) -> str:
        """What of a program is compiled and why the rest is not, in a line; empty if nothing."""
        regions = self.compiled.get(program, []) if program is not None else []
        if not regions:
            return ""
        ready = [region for region in regions if region.state == "compiled"]
        text = f"compiled: {len(ready)} of {len(regions)} regions"
        timed = [region for region in ready if len(region.seconds) == 2]
        if timed:
            share = sum(region.seconds["compiled"] for region in timed) / sum(
                region.seconds["replayed"] for region in timed
            )
            text += f", in {share:.2f} of the time"
        reasons = Counter(region.reason for region in regions if region.reason)
        return "; ".join([text, *(f"{count}: {reason}" for reason, count in reasons.items())])


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


class CompiledRegion(torch.nn.Module):
    """One region as the graph calls it: replayed at first, compiled when asked to be.

    Once it is compiled, both forms take turns for some steps, and the faster stays.
    """

    def __init__(self, region: Region, keep: bool = False) -> None:
        """
        Args:
            region: what to run.
            keep: once it is compiled it stays so, without a comparison.
        """
        super().__init__()
        self.name = region.name
        self.operations = region.operations
        self.state: State = "replayed"
        self.reason = "not compiled yet"
        """Why it is replayed."""
        self.seconds: dict[str, float] = {}
        """Of a run, by form."""
        self._keep = keep
        self._replay: Callable[..., Any] = region.module.forward
        self._module = region.module
        self._compiled: Callable[..., Any] | None = None
        self._layout: _Layout | None = None
        self._wanted = False
        self._runs = 0

    def compile_next(self) -> None:
        """Compile it when it is called the next time, for what it is called with."""
        self._wanted = self.state == "replayed"

    def __call__(self, *inputs: torch.Tensor) -> Any:
        if self.state == "compiled":
            assert self._layout is not None
            assert self._compiled is not None
            return (self._compiled if self._layout.fits(inputs) else self._replay)(*inputs)
        if self._wanted:
            self._wanted = False
            self._compile(inputs)
        if self.state == "tried":
            return self._try(inputs)
        return self._replay(*inputs)

    def _compile(self, inputs: Sequence[torch.Tensor]) -> None:
        if _overlap(inputs):
            self.reason = "two of its inputs share memory"
            return
        try:
            self._compiled = _inductor(self._module, inputs)
        except Exception as error:  # whatever a compiler may raise: the region can be replayed
            self.reason = f"Inductor failed: {type(error).__name__}: {str(error).splitlines()[0]}"
            logger.debug("%s was not compiled", self.name, exc_info=True)
            return
        self._layout = _Layout.of(inputs)
        self.state, self.reason = "compiled" if self._keep else "tried", ""

    def _try(self, inputs: Sequence[torch.Tensor]) -> Any:
        assert self._layout is not None
        assert self._compiled is not None
        if not self._layout.fits(inputs):
            return self._replay(*inputs)
        form = ("compiled", "replayed")[self._runs % 2]
        run = self._compiled if form == "compiled" else self._replay
        device = inputs[0].device if inputs else None
        started = timing.seconds(device)
        result = run(*inputs)
        passed = timing.seconds(device) - started
        if self._runs > 0:  # the first run of compiled code loads it
            self.seconds[form] = min(self.seconds.get(form, passed), passed)
        self._runs += 1
        if self._runs > 2 * TRIALS:
            self._decide()
        return result

    def _decide(self) -> None:
        if self.seconds["compiled"] < self.seconds["replayed"]:
            self.state = "compiled"
            return
        self.state, self.reason = "replayed", "replaying it is faster"
        self._compiled = None


def _overlap(inputs: Sequence[torch.Tensor]) -> bool:
    """Whether parts of memory belong to two tensors; buckets hold gradients side by side."""
    parts = []
    for tensor in inputs:
        if tensor.numel():
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            parts.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize))
    parts.sort()
    return any(end > start for (_, end), (start, _) in pairwise(parts))


def _inductor(module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Compile for tensors of these shapes and strides; what was compiled once is read from disk."""
    from torch._inductor import standalone_compile

    # Apart in memory, so that the compiler need not think of changes of one through another.
    examples: list[Any] = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs
    ]
    with torch.no_grad():
        compiled: Callable[..., Any] = standalone_compile(
            module,
            examples,
            dynamic_shapes="from_example_inputs",
            options={},
        )
    return compiled
