"""Regions of a worker's graph, compiled by Inductor where that is faster than replaying them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch

from parallax.config import CompileMode
from parallax.rewrite.region_graphs import Region, with_constants
from parallax.runtime.comm.world import World
from parallax.runtime.compute import timing
from parallax.runtime.program import Program
from parallax.runtime.recorded import WARM_UP, CudaDevice, Recorded, Recorder, overlaps

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
    """What a compiled region relies on: shapes and strides, and numbers that are part of it."""

    tensors: tuple[tuple[int, torch.Size, tuple[int, ...]], ...]
    constants: tuple[tuple[int, Any], ...]

    @classmethod
    def of(cls, inputs: Sequence[Any], constants: Iterable[int]) -> _Layout:
        tensors = [(n, x) for n, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
        return cls(
            tuple((n, x.shape, x.stride()) for n, x in tensors),
            tuple((n, inputs[n]) for n in constants),
        )

    def fits(self, inputs: Sequence[Any]) -> bool:
        return all(
            inputs[n].shape == shape and inputs[n].stride() == stride
            for n, shape, stride in self.tensors
        ) and all(inputs[n] == value for n, value in self.constants)


class Compiler:
    """Decides when a worker's programs are cut into regions, and when these are compiled.

    ``"inductor"``: after their first run, and what is compiled stays. ``"auto"``: when the chief
    has computed for so long that it is likely to pay, on all workers in the same step, as they
    wait for each other; each region stays compiled where that was measured to be faster. On a CUDA
    device both cut a program after its first run, and record its regions, compiled or not.
    ``"none"``: never.
    """

    def __init__(self, mode: CompileMode, world: World) -> None:
        self._mode = mode
        self._world = world
        self._steps = 0
        self._compiles = mode == "inductor"
        self._recorders: dict[torch.device, Recorder] = {}
        self.compiled: WeakKeyDictionary[Program, WeakSet[CompiledRegion]] = WeakKeyDictionary()
        self._asked: WeakSet[Program] = WeakSet()
        self._refused: WeakKeyDictionary[Program, int] = WeakKeyDictionary()
        """By program, how many operations were refused when it was cut."""

    def after(self, program: Program, computed: float) -> None:
        """A program ran, and ``computed`` seconds were spent computing so far. All workers call
        this after every step."""
        if self._mode == "none":
            return
        self._steps += 1
        if not self._compiles and self._steps >= FIRST_LOOK and _is_power_of_two(self._steps):
            chiefs = self._world.texts("compile", str(computed))[0]
            self._compiles = float(chiefs) >= WORTH_SECONDS
        if program not in self.compiled or self._is_refused(program):
            recorder = self._recorder(program)
            if self._compiles or recorder is not None:
                self._cut(program, recorder)
        if self._compiles and program not in self._asked and not self._by_shape(program):
            self._asked.add(program)
            regions = self.compiled[program]
            if self._world.rank == 0:
                logger.info("compiling %d regions of the step, once", len(regions))
            for region in regions:
                region.compile_next()

    def _recorder(self, program: Program) -> Recorder | None:
        """What records the program's regions; None where nothing can, or what a step gives has to
        stay until the next one has begun."""
        device = program.device
        if device.type != "cuda" or program.late is not None:
            return None
        if device not in self._recorders:
            self._recorders[device] = Recorder(CudaDevice(device))
        return self._recorders[device]

    def _is_refused(self, program: Program) -> bool:
        """Whether an operation of the program could not be recorded, at which it is not cut yet."""
        recorder = self._recorders.get(program.device)
        if recorder is None or len(recorder.refused) == self._refused.get(program):
            return False
        self._refused[program] = len(recorder.refused)
        return any(region.not_recorded for region in self.compiled[program])

    def _by_shape(self, program: Program) -> bool:
        """Whether it is recorded for each shape that comes often: then it is not compiled, which
        takes too long for each of them."""
        return program.step.sizes is not None and self._recorder(program) is not None

    def _cut(self, program: Program, recorder: Recorder | None) -> None:
        keep, device = self._mode == "inductor", program.device
        regions: WeakSet[CompiledRegion] = WeakSet()  # those of shapes come and go

        def made(region: Region) -> CompiledRegion:
            one = CompiledRegion(region, device, keep, recorder)
            regions.add(one)
            return one

        if program.step.sizes is not None and recorder is not None:
            program.cut_by_shape(made, recorder)
        else:
            program.cut(made, recorder)
        self.compiled[program] = regions
        self._asked.discard(program)
        if recorder is not None:
            self._refused[program] = len(recorder.refused)

    def describe(self, program: Program | None) -> str:
        """What of a program is recorded and compiled and why the rest is not, in a line; empty if
        nothing."""
        regions = list(self.compiled.get(program, ())) if program is not None else []
        if not regions:
            return ""
        parts = [_recorded(regions)] if regions[0].records else []
        if program in self._asked:
            parts.append(_compiled(regions))
        return "; ".join(parts)


def _recorded(regions: Sequence[CompiledRegion]) -> str:
    ready = [region for region in regions if region.is_recorded]
    text = f"recorded: {len(ready)} of {len(regions)} regions"
    reasons = Counter(region.not_recorded for region in regions if region.not_recorded)
    return "; ".join([text, *(f"{count}: {reason}" for reason, count in reasons.items())])


def _compiled(regions: Sequence[CompiledRegion]) -> str:
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

    Once it is compiled, both forms take turns for some steps, and the faster stays. With a recorder
    either form is recorded, and repeated from then on.
    """

    def __init__(
        self,
        region: Region,
        device: torch.device,
        keep: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        """
        Args:
            region: what to run.
            device: what runs it.
            keep: once it is compiled it stays so, without a comparison.
            recorder: records it, if anything does.
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
        self._region = region
        self._device = device
        self._recorder = recorder
        self._replay: Callable[..., Any] = self._form(region.module.forward)
        self._compiled: Callable[..., Any] | None = None
        self._layout: _Layout | None = None
        self._wanted = False
        self._runs = 0

    def _form(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """What runs it, recorded if it can be."""
        if self._recorder is None:
            return run
        return Recorded(self._region, run, self._recorder, self._device)

    @property
    def records(self) -> bool:
        """Whether it is to be recorded."""
        return self._recorder is not None

    @property
    def is_recorded(self) -> bool:
        """Whether what runs it is recorded."""
        form = self._used
        return isinstance(form, Recorded) and form.is_recorded

    @property
    def not_recorded(self) -> str:
        """Why it could not be recorded, if it could not."""
        form = self._used
        return form.reason if isinstance(form, Recorded) else ""

    @property
    def _used(self) -> Callable[..., Any] | None:
        return self._compiled if self.state == "compiled" else self._replay

    def compile_next(self) -> None:
        """Compile it when it is called the next time, for what it is called with."""
        self._wanted = self.state == "replayed"

    def __call__(self, *inputs: Any) -> Any:
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

    def _compile(self, inputs: Sequence[Any]) -> None:
        region = self._region
        if any(overlaps(inputs)):
            self.reason = "two of its inputs share memory"
            return
        try:
            self._compiled = self._form(_inductor(region, inputs, self._device))
        except Exception as error:  # whatever a compiler may raise: the region can be replayed
            self.reason = f"Inductor failed: {type(error).__name__}: {str(error).splitlines()[0]}"
            logger.debug("%s was not compiled", self.name, exc_info=True)
            return
        self._layout = _Layout.of(inputs, region.constants)
        self.state, self.reason = "compiled" if self._keep else "tried", ""

    def _try(self, inputs: Sequence[Any]) -> Any:
        assert self._layout is not None
        assert self._compiled is not None
        if not self._layout.fits(inputs):
            return self._replay(*inputs)
        form = ("compiled", "replayed")[self._runs % 2]
        run = self._compiled if form == "compiled" else self._replay
        started = timing.seconds(self._device)
        result = run(*inputs)
        passed = timing.seconds(self._device) - started
        # The first run of compiled code loads it, and others may be recorded.
        if self._runs > 2 * WARM_UP * self.records:
            self.seconds[form] = min(self.seconds.get(form, passed), passed)
        self._runs += 1
        if self._runs > 2 * (TRIALS + (WARM_UP + 1) * self.records):
            self._decide()
        return result

    def _decide(self) -> None:
        if self.seconds["compiled"] < self.seconds["replayed"]:
            self.state = "compiled"
            self._replay = self._form(self._region.module.forward)  # without a recording's memory
            return
        self.state, self.reason = "replayed", "replaying it is faster"
        self._compiled = None


def _inductor(
    region: Region, inputs: Sequence[Any], device: torch.device
) -> Callable[..., Sequence[Any]]:
    """Compile for tensors of these shapes and strides; what was compiled once is read from disk."""
    from torch._inductor import config as inductor_config
    from torch._inductor import standalone_compile

    module = with_constants(region, inputs)
    places = [place for place in range(len(inputs)) if place not in region.constants]
    # Apart in memory, so that the compiler need not think of changes of one through another.
    examples: list[Any] = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        if isinstance(x, torch.Tensor)
        else torch.zeros((), dtype=torch.float64, device=device)
        for x in (inputs[place] for place in places)
    ]
    # Random numbers that are part of a region are to be PyTorch's.
    with torch.no_grad(), inductor_config.patch(fallback_random=True):
        compiled: Callable[..., Sequence[Any]] = standalone_compile(
            module, examples, dynamic_shapes="from_example_inputs", options={}
        )
    if not region.constants:
        return compiled
    return lambda *given: compiled(*(given[place] for place in places))
