"""Regions that a device has recorded, and repeats without the processor: CUDA graphs.

A recording reads and writes the memory that it was made with. The state of the run stays where it
is, and is changed there; everything else a region takes is copied to where the recording expects
it, but for what an earlier recording has left, which has its place. What a recording gives is
overwritten when it is repeated, so what outlives a step has to be copied (:meth:`Recorder.owned`).
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

from parallax.rewrite.region_graphs import Region
from parallax.runtime.failures import failed_operation

WARM_UP = 2
"""Runs of a region before it is recorded: libraries prepare themselves in the first."""
MOST_RECORDINGS = 8
"""Of a region, as its memory or its settings changed, after which it is run as it is."""
ROOM = 8
"""Which part of the memory recordings may keep before shapes that come often get no more."""
_OWN_THREAD = "thread_local"
"""Other threads, those of NCCL, may talk to the device while one records."""
MOST_MOVES = 2
"""Of an input, after which it is copied to where a recording expects it."""

logger = logging.getLogger("parallax")

Run = Callable[..., Sequence[Any]]


class Device(Protocol):
    """What can record; ``memory`` is how many bytes it has."""

    memory: int

    def record(self, run: Callable[[], Sequence[Any]]) -> tuple[Callable[[], None], Sequence[Any]]:
        """Record what ``run`` lets the device do, without doing it.

        Returns:
            What repeats it, and the results, which have values once it was repeated.
        """
        ...


class CudaDevice:
    """A CUDA device. What it records shares memory for what does not leave a recording."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self.memory = torch.cuda.get_device_properties(device).total_memory

    def record(self, run: Callable[[], Sequence[Any]]) -> tuple[Callable[[], None], Sequence[Any]]:
        """See :class:`Device`.

        Raises:
            RuntimeError: what ``run`` does waits for the device, or its memory is used up.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            try:
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=_OWN_THREAD):
                    results = run()
            except BaseException:
                self._recover()
                raise
        return graph.replay, results

    def _recover(self) -> None:
        """After a recording that failed PyTorch's allocator would still put memory aside for it,
        and the generator of random numbers count for it: that ends with one that succeeds."""
        with contextlib.suppress(Exception):  # what newer versions do themselves
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        self._pool = None
        with contextlib.suppress(Exception):
            one = torch.zeros(1, device=self._device)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=_OWN_THREAD):
                one.add_(1)


class Recorder:
    """Records regions on a device, and knows the memory that recordings write to."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.refused: set[Any] = set()
        """Operations that could not be recorded: programs are cut at them."""
        self._memory: dict[int, int] = {}
        """By where it begins, how many bytes recordings keep there."""

    @property
    def has_room(self) -> bool:
        """Whether there is memory for more recordings than those of one shape."""
        return sum(self._memory.values()) * ROOM < self.device.memory

    def keep(self, results: Sequence[Any]) -> None:
        """Note the results of a recording, which has them until :meth:`drop`."""
        self._memory.update(_places(results))

    def drop(self, results: Sequence[Any]) -> None:
        """The recording is no more."""
        for place in _places(results):
            self._memory.pop(place, None)

    def has(self, value: torch.Tensor) -> bool:
        """Whether a tensor is in memory that a recording writes to."""
        if value.layout is not torch.strided:
            return False
        return value.untyped_storage().data_ptr() in self._memory

    def owned(self, values: Sequence[Any]) -> list[Any]:
        """The same values, copied where the next step would overwrite them."""
        copies: dict[int, torch.Tensor] = {}
        result = []
        for value in values:
            if isinstance(value, torch.Tensor) and self.has(value):
                value = copies.setdefault(id(value), value.clone())
            result.append(value)
        return result


def _places(results: Sequence[Any]) -> dict[int, int]:
    storages = (one.untyped_storage() for one in results if isinstance(one, torch.Tensor))
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


@dataclass(frozen=True)
class _Form:
    """What a recording relies on: inputs that are where they were, copies that are laid out alike,
    numbers that are the same, and what else kernels are chosen by."""

    places: tuple[tuple[int, int], ...]
    layouts: tuple[tuple[int, torch.Size, tuple[int, ...]], ...]
    constants: tuple[tuple[int, Any], ...]
    settings: tuple[Any, ...]

    @classmethod
    def of(cls, inputs: Sequence[Any], copied: Sequence[int], constants: frozenset[int]) -> _Form:
        tensors = [place for place, one in enumerate(inputs) if isinstance(one, torch.Tensor)]
        return cls(
            tuple((place, inputs[place].data_ptr()) for place in tensors if place not in copied),
            tuple((place, inputs[place].shape, inputs[place].stride()) for place in copied),
            tuple((place, inputs[place]) for place in constants),
            _settings(),
        )

    def moved(self, inputs: Sequence[Any]) -> set[int]:
        """Which inputs are not where they were."""
        return {place for place, pointer in self.places if inputs[place].data_ptr() != pointer}

    def fits(self, inputs: Sequence[Any]) -> bool:
        return (
            all(inputs[place].data_ptr() == pointer for place, pointer in self.places)
            and all(
                inputs[place].shape == shape and inputs[place].stride() == stride
                for place, shape, stride in self.layouts
            )
            and all(inputs[place] == value for place, value in self.constants)
            and _settings() == self.settings
        )


class Recorded:
    """A region as the graph calls it: run at first, then recorded and repeated.

    Args (of a call):
        inputs: as the region's module, with numbers for ``region.numbers``.
    """

    def __init__(self, region: Region, run: Run, recorder: Recorder, device: torch.device) -> None:
        """
        Args:
            region: what it is a form of.
            run: what it does; numbers are tensors, but for the region's constants.
            recorder: shared by all regions of a worker.
            device: on which numbers are given to it.
        """
        self._region = region
        self._run = run
        self._recorder = recorder
        self._device = device
        self._numbers = sorted(region.numbers - region.constants)
        self._given = torch.zeros(len(self._numbers), dtype=torch.float64)
        self._on_device = torch.zeros(len(self._numbers), dtype=torch.float64, device=device)
        self._as_tensors = self._on_device.unbind()
        self._runs = 0
        self._recordings = 0
        self._form: _Form | None = None
        self._static: list[Any] = []
        """The inputs of the recording."""
        self._moves: Counter[int] = Counter()
        """How often an input was found in other memory."""
        self._copied: list[int] = []
        self._copied_back: list[int] = []
        self._repeat: Callable[[], None] | None = None
        self._results: Sequence[Any] = ()
        self.reason = ""
        """Why it is run as it is."""

    def __del__(self) -> None:
        self._recorder.drop(self._results)

    @property
    def is_recorded(self) -> bool:
        """Whether it was recorded and will be repeated."""
        return self._repeat is not None

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        self._give_numbers(inputs)
        if self.reason:
            return self._run(*self._with_tensors(inputs))
        if self._form is None or not self._form.fits(inputs):
            self._runs += 1
            if self._runs <= WARM_UP or not self._record(inputs):
                return self._run(*self._with_tensors(inputs))
        assert self._repeat is not None
        for place in self._copied:
            self._static[place].copy_(inputs[place])
        self._repeat()
        for place in self._copied_back:
            inputs[place].copy_(self._static[place])
        return self._results

    # -- Numbers ------------------------------------------------------------------------------

    def _give_numbers(self, inputs: Sequence[Any]) -> None:
        if not self._numbers:
            return
        given = torch.tensor(
            [float(inputs[place]) for place in self._numbers], dtype=torch.float64, device="cpu"
        )
        if not torch.equal(given, self._given):
            # The memory of the processor is read at once, and the device not waited for.
            self._on_device.copy_(given, non_blocking=True)
            self._given = given

    def _with_tensors(self, inputs: Sequence[Any]) -> list[Any]:
        result = list(inputs)
        for place, tensor in zip(self._numbers, self._as_tensors, strict=True):
            result[place] = tensor
        return result

    # -- Recording ----------------------------------------------------------------------------

    def _record(self, inputs: Sequence[Any]) -> bool:
        """Record it for inputs like these; False if that cannot be done."""
        self._recordings += 1
        if self._recordings > MOST_RECORDINGS:
            self._give_up("its memory or its settings change again and again")
            return False
        if self._form is not None:
            self._moves.update(self._form.moved(inputs))
        static = self._with_tensors(inputs)
        copied = [
            place
            for place, value in enumerate(inputs)
            if isinstance(value, torch.Tensor) and not self._stays(place, value)
        ]
        if _share_what_changes(inputs, self._region.changed, copied):
            self._give_up("it changes memory that is part of two inputs")
            return False
        for place in copied:
            value = inputs[place]
            static[place] = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            )
            static[place].copy_(value)
        self._forget()
        try:
            repeat, results = self._recorder.device.record(lambda: self._run(*static))
        except Exception as error:  # whatever a library may raise: the region can be run as it is
            first = _first(error)
            self._give_up(f"{type(first).__name__}: {(str(first).splitlines() or [''])[0]}")
            operation = failed_operation(first, self._region.module.graph)
            if operation is not None:
                self._recorder.refused.add(operation)
            logger.debug("%s was not recorded", self._region.name, exc_info=True)
            return False
        self._repeat, self._results, self._static = repeat, results, static
        self._recorder.keep(results)
        self._copied = copied
        self._copied_back = [place for place in copied if place in self._region.changed]
        self._form = _Form.of(inputs, copied, self._region.constants)
        return True

    def _stays(self, place: int, value: torch.Tensor) -> bool:
        """Whether an input will be in the same memory in the next steps."""
        if self._moves[place] >= MOST_MOVES:
            return False
        on_processor = value.device.type == "cpu" and self._device.type != "cpu"
        return place in self._region.kept or on_processor or self._recorder.has(value)

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self._forget()

    def _forget(self) -> None:
        self._recorder.drop(self._results)
        self._repeat, self._form = None, None
        self._results, self._static = (), []


def _first(error: BaseException) -> BaseException:
    """What went wrong first: that ends a recording, and then its end goes wrong."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _settings() -> tuple[Any, ...]:
    """By what kernels are chosen, besides what they compute with."""
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
    )


def _share_what_changes(
    inputs: Sequence[Any], changed: frozenset[int], copied: Sequence[int]
) -> bool:
    """Whether memory that is changed is part of two inputs of which one is a copy."""
    return any(
        (one in changed or other in changed) and (one in copied or other in copied)
        for one, other in overlaps(inputs)
    )


def overlaps(inputs: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Which inputs have memory that the next one in memory begins in; buckets hold gradients side
    by side."""
    parts = []
    for place, tensor in enumerate(inputs):
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            first = tensor.data_ptr()
            parts.append((first, first + (last + 1) * tensor.itemsize, place))
    parts.sort()
    for (_, end, one), (start, _, other) in pairwise(parts):
        if end > start:
            yield one, other
