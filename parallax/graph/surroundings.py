"""What surrounds the step while it is captured: replaced functions, watches on side effects."""

from __future__ import annotations

import builtins
import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from parallax.graph.common.recording import BY_VALUES, Call, Recording
from parallax.graph.common.replaced import replaced
from parallax.graph.common.torch_internals import (
    FakeTensorMode,
    additions_of_any_size,
    products_of_any_size,
    without_dynamo,
    without_failures_in_log,
    without_fused_rnn,
)
from parallax.graph.common.user_code import is_internal, user_line
from parallax.graph.gradient_marks import mark_assigned, mark_backward, mark_returned
from parallax.graph.lending import Lender
from parallax.graph.objects.discovery import StepObjects
from parallax.graph.objects.state import Leaf
from parallax.graph.stand_ins.covariances import covariances_by_rows
from parallax.graph.stand_ins.diagonals import diagonals_of_any_size
from parallax.graph.stand_ins.foreach import without_foreach
from parallax.graph.stand_ins.label_counts import label_counts_by_rows
from parallax.graph.stand_ins.packed import packed_sequences
from parallax.graph.stand_ins.recurrent import whole_layers
from parallax.graph.stand_ins.scaled import scalers_recorded
from parallax.graph.stand_ins.tensor_methods import data_by_copies, deep_copies
from parallax.graph.symbols.indexing import indexing_by_symbols
from parallax.graph.symbols.symbolic_math import symbolic_math


@contextlib.contextmanager
def prepared(
    objects: StepObjects,
    tensors: Sequence[Leaf],
    recording: Recording,
    sentinels: frozenset[str],
    lender: Lender,
    mode: FakeTensorMode,
) -> Iterator[None]:
    """All of it.

    Args:
        objects: what the step reaches.
        tensors: the state.
        recording: of what the step does.
        sentinels: variables that are given a gradient of an earlier call.
        lender: does what only other workers' steps do.
        mode: that stand-ins are in.
    """
    with contextlib.ExitStack() as stack:
        handles: list[Any] = []
        stack.callback(lambda: [handle.remove() for handle in handles])
        handles += mark_backward(tensors, recording, sentinels, mode)
        for optimizer in objects.optimizers.values():
            stack.enter_context(_one_at_a_time(optimizer))
            if hasattr(optimizer, "_optimizer_step_post_hooks"):  # its class called super()
                handles += lender.watch(optimizer)
        for name, scheduler in objects.schedulers.items():
            note = functools.partial(_note_schedule, lender, name)
            scheduler.step = _recorder(scheduler, recording, note)  # type: ignore[method-assign]
            scheduler.get_last_lr = _reader(scheduler, recording)  # type: ignore[method-assign]
        stack.enter_context(mark_returned(tensors, recording, lender))
        stack.enter_context(mark_assigned(tensors, recording))
        stack.enter_context(_watch_zero_grad(recording, lender))
        stack.enter_context(lender.clipping())
        stack.enter_context(_watch_files(recording))
        stack.enter_context(_watch_clock(recording))
        stack.enter_context(without_failures_in_log())
        stack.enter_context(scalers_recorded(recording))
        stack.enter_context(data_by_copies([leaf.value for leaf in tensors]))
        stack.enter_context(deep_copies())
        stack.enter_context(covariances_by_rows())
        stack.enter_context(label_counts_by_rows())
        stack.enter_context(diagonals_of_any_size())
        stack.enter_context(indexing_by_symbols())
        stack.enter_context(_random_state_as_ops())
        stack.enter_context(_sparse_padding_by_mask())
        stack.enter_context(_plain_batch_norms())
        stack.enter_context(packed_sequences())
        stack.enter_context(_lengths_as_tensors())
        stack.enter_context(_unchecked_distributions())
        stack.enter_context(without_dynamo())
        stack.enter_context(without_foreach())
        stack.enter_context(products_of_any_size())
        stack.enter_context(additions_of_any_size())
        stack.enter_context(symbolic_math())
        stack.enter_context(objects.conversions.made())
        stack.enter_context(without_fused_rnn())
        stack.enter_context(whole_layers())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_without_anomaly_detection(recording))
        yield


@contextlib.contextmanager
def _without_anomaly_detection(recording: Recording) -> Iterator[None]:
    """Leave it out, also where the step itself turns it on."""

    def enable(mode: bool, check_nan: bool = True) -> None:
        if mode:
            recording.notes.append("anomaly detection (autograd) does not look into captured steps")

    enable(torch.is_anomaly_enabled())
    with (
        torch.autograd.set_detect_anomaly(False),
        replaced((torch, "set_anomaly_enabled", enable)),
    ):
        yield


@contextlib.contextmanager
def _one_at_a_time(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Update parameter by parameter; equal updates are grouped again after rewriting. Groups get
    back what they had with all other state."""
    # Its class need not have called super().
    defaults: dict[str, Any] = getattr(optimizer, "defaults", {})
    saved = dict(defaults)
    for group in (*optimizer.param_groups, defaults):
        if "foreach" in group:
            group["foreach"] = False
        if group.get("fused"):
            group["fused"] = False
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        defaults.update(saved)


def _note_schedule(lender: Lender, name: str, has_values: bool) -> None:
    lender.before("schedule" + (BY_VALUES if has_values else ""), name)


def _recorder(
    scheduler: Any, recording: Recording, note: Callable[[bool], None]
) -> Callable[..., None]:
    bound = type(scheduler).step.__get__(scheduler)

    def step(*args: Any, **kwargs: Any) -> None:
        note(bool(args or kwargs))
        before = id(scheduler.optimizer) not in recording.stepped
        recording.calls.append(Call(bound, before, args, kwargs))

    return step


def _reader(scheduler: Any, recording: Recording) -> Callable[..., Any]:
    """``get_last_lr``, which is of before a step of the scheduler that the step has made: that is
    taken when the graph has run."""
    original = type(scheduler).get_last_lr.__get__(scheduler)

    def get_last_lr() -> Any:
        if any(getattr(call.function, "__self__", None) is scheduler for call in recording.calls):
            recording.notes.append(
                "get_last_lr() after the scheduler's step in the training step gives the rate of "
                f"before it: read it first, or outside ({user_line()})"
            )
        return original()

    return get_last_lr


@contextlib.contextmanager
def _watch_zero_grad(recording: Recording, lender: Lender) -> Iterator[None]:
    classes: tuple[Any, ...] = (torch.optim.Optimizer, torch.nn.Module)
    originals = [cls.zero_grad for cls in classes]

    def watching(original: Any, parameters: Callable[[Any], list[torch.Tensor]]) -> Any:
        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
            lender.before_clearing(self, *args, **kwargs)
            cleared = [id(p) for p in parameters(self)]
            recording.cleared.update(cleared)
            recording.zeroed.update(cleared)
            return original(self, *args, **kwargs)

        return zero_grad

    try:
        classes[0].zero_grad = watching(
            originals[0], lambda o: [p for g in o.param_groups for p in g["params"]]
        )
        classes[1].zero_grad = watching(originals[1], lambda m: list(m.parameters()))
        yield
    finally:
        for cls, original in zip(classes, originals, strict=True):
            cls.zero_grad = original


def _watch_files(recording: Recording) -> contextlib.AbstractContextManager[None]:
    """Notice that a step opens files, which it does while it is captured."""
    original = builtins.open

    def watching_open(*args: Any, **kwargs: Any) -> Any:
        if not is_internal(sys._getframe(1).f_code.co_filename):
            recording.notes.append(f"open runs at capture only ({user_line()})")
        return original(*args, **kwargs)

    return replaced((builtins, "open", watching_open))


def _watch_clock(recording: Recording) -> contextlib.AbstractContextManager[None]:
    """Notice that a step reads the time, which is that of the capture."""

    thread = threading.get_ident()

    def watching(original: Callable[[], float]) -> Callable[[], float]:
        def read() -> float:
            is_users = not is_internal(sys._getframe(1).f_code.co_filename)
            if is_users and threading.get_ident() == thread:
                recording.notes.append(
                    f"the step reads the clock, which happens at capture only ({user_line()})"
                )
            return original()

        return read

    return replaced(*((time, name, watching(getattr(time, name))) for name in _CLOCKS))


_CLOCKS = ("time", "perf_counter", "monotonic", "process_time")


@contextlib.contextmanager
def _plain_batch_norms() -> Iterator[None]:
    """Record ``SyncBatchNorm`` as BatchNorm; rewriting lets both normalise over all workers."""
    plain = torch.nn.modules.batchnorm._BatchNorm.forward
    with replaced((torch.nn.SyncBatchNorm, "forward", plain)):
        yield


def any_number_of_rows() -> contextlib.AbstractContextManager[None]:
    """Let BatchNorm take batches of one row, or none, while a step is captured in which the rows of
    all workers are normalised together. PyTorch refuses the one, and forgets to normalise none. It
    is PyTorch's own operation on all devices, which rewriting replaces."""
    module: Any = torch
    original = module.batch_norm

    def batch_norm(x: torch.Tensor, *settings: Any) -> torch.Tensor:
        training = settings[4]
        if not training:
            return original(x, *settings)  # type: ignore[no-any-return]
        normalized: torch.Tensor = torch.ops.aten.native_batch_norm(x, *settings[:-1])[0]
        return normalized

    functions = torch.nn.functional
    return replaced(
        (module, "batch_norm", batch_norm), (functions, "_verify_batch_size", lambda size: None)
    )


@contextlib.contextmanager
def _lengths_as_tensors() -> Iterator[None]:
    """Give CTC's loss its lengths in tensors: with tuples it looks at values of the targets."""
    module: Any = torch
    original = module.ctc_loss

    def ctc_loss(scores: Any, targets: Any, inputs: Any, wanted: Any, *others: Any) -> torch.Tensor:
        lengths = [
            torch.tensor(each) if isinstance(each, tuple | list) else each
            for each in (inputs, wanted)
        ]
        loss: torch.Tensor = original(scores, targets, *lengths, *others)
        return loss

    with replaced((module, "ctc_loss", ctc_loss)):
        yield


@contextlib.contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """Leave out what ``torch.distributions`` asks of values, as under ``python -O``."""
    kind = torch.distributions.Distribution
    checked = kind._validate_args
    kind.set_default_validate_args(False)
    try:
        yield
    finally:
        kind.set_default_validate_args(checked)


@contextlib.contextmanager
def _sparse_padding_by_mask() -> Iterator[None]:
    """Leave the padding row out of a sparse gradient by a zero instead of a selection.

    The selection has a size that depends on the ids, which a graph of fixed shapes cannot have. A
    row whose gradients are all zero stays as it is under every lazy optimizer.
    """
    module: Any = torch
    original = module.embedding

    def embedding(
        weight: torch.Tensor,
        ids: torch.Tensor,
        padding_idx: int = -1,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> torch.Tensor:
        masked = sparse and padding_idx >= 0
        rows: torch.Tensor = original(
            weight, ids, -1 if masked else padding_idx, scale_grad_by_freq, sparse
        )
        if not masked:
            return rows
        return torch.where((ids == padding_idx).unsqueeze(-1), rows.detach(), rows)

    module.embedding = embedding
    try:
        yield
    finally:
        module.embedding = original


@contextlib.contextmanager
def _random_state_as_ops() -> Iterator[None]:
    """Record saving and restoring of the generator, so that checkpointing replays its masks."""

    def get_state() -> torch.Tensor:
        state: torch.Tensor = torch.ops.parallax.rng_state()
        return state

    def set_state(state: torch.Tensor) -> None:
        torch.ops.parallax.set_rng_state(state)

    modules: tuple[Any, ...] = (torch, torch.random)
    saved = [(module.get_rng_state, module.set_rng_state) for module in modules]
    try:
        for module in modules:
            module.get_rng_state, module.set_rng_state = get_state, set_state
        yield
    finally:
        for module, (get, put) in zip(modules, saved, strict=True):
            module.get_rng_state, module.set_rng_state = get, put
