"""The private names of torch that capture rests on, each wrapped once.

Everything else in the package uses documented torch. Works with torch 2.11 to 2.14.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch._decomp import decompositions
from torch._dispatch.python import no_python_dispatcher
from torch._dynamo import config as dynamo_config
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    free_unbacked_symbols,
)
from torch.torch_version import TorchVersion
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.functions import Mod, PythonMod
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from parallax.graph.common.layouts import as_laid_out
from parallax.graph.common.replaced import replaced
from parallax.ops.batch_norms import kind_of_statistics

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "GuardOnDataDependentSymNode",
    "ShapeEnv",
    "autograd_notes",
    "evaluate",
    "expression",
    "fake_like",
    "fake_mode",
    "free_unbacked_symbols",
    "get_proxy_mode",
    "gradients_through",
    "is_equation",
    "is_mapped",
    "new_size",
    "node_of",
    "outside_tracing",
    "products_of_any_size",
    "raw_ptr_ranges",
    "replace_tensor",
    "swapped",
    "trace",
    "without_dynamo",
    "without_failures_in_log",
    "without_fused_rnn",
]


def autograd_notes() -> dict[str, Any]:
    """What PyTorch's autograd does with an operation of now.

    ``autograd`` says whether it is part of a backward pass, is not differentiated, may be, or is
    by a function that has its own backward pass; ``forward`` names an operation that may be, by its
    number; and ``backward_of`` that one, for what is computed of its gradient, with what it is.
    ``recomputed`` is what a checkpoint runs once more, within the backward pass.
    """
    within = torch._C._current_graph_task_id() != -1
    callers = _callers() if within or not torch.is_grad_enabled() else []
    if within and callers[-1:] != ["checkpoint"]:
        made_by: Any = torch._C._current_autograd_node()
        notes = {} if made_by is None else {"backward_of": (made_by._sequence_nr(), made_by.name())}
        return {"autograd": "backward", **notes}
    again = {"recomputed": True} if within else {}
    if not torch.is_grad_enabled():
        return {"autograd": "function" if "function" in callers else "off", **again}
    number: int = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
    return {"autograd": "on", "forward": number, **again}


_RUNS: dict[CodeType, str] = {
    torch.autograd.graph._engine_run_backward.__code__: "engine",
    torch.autograd.Function.apply.__func__.__code__: "function",  # type: ignore[attr-defined]
}


def _callers() -> list[str]:
    """What of autograd runs an operation, innermost first: functions with backward passes of their
    own, up to the engine, or to a checkpoint that runs its function for the engine."""
    within = torch._C._current_graph_task_id() != -1
    found = []
    frame = sys._getframe(2)
    while frame is not None and "engine" not in found:
        if (name := _RUNS.get(frame.f_code)) is not None:
            found.append(name)
        elif within and frame.f_code.co_filename == checkpoint.__file__:
            return [*found, "checkpoint"]
        frame = frame.f_back  # type: ignore[assignment]
    return found


class _CaptureMode(FakeTensorMode):
    """Adds what torch cannot describe.

    Rows added to, or read from, a dense tensor by COO ids; sparse gradients of bags; CTC's loss,
    whose backward pass is handed a tensor that the longest target gives its size, here as long as
    one can be; the conjugate of a number; BatchNorm of one row or none, which is normalised with
    the rows of other workers.
    Says of results how they are laid out, where torch is mistaken.
    """

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ADD_ROWS and len(args) > 1 and _is_rows(args[1]) and not _is_rows(args[0]):
            return args[0]
        if func is torch.ops.aten.add.Tensor and all(map(_is_rows, args[:2])) and not kwargs:
            return _both_rows(*args[:2])  # of which torch cannot tell how many, if masks choose
        if func is torch.ops.aten._conj.default and isinstance(args[0], complex):
            return torch.scalar_tensor(args[0].conjugate(), dtype=torch.complex128)
        if func is torch.ops.aten.alias.default and _is_rows(args[0]):
            (rows,) = args  # whose storage torch 2.14 looks for
            return _rows_like(rows, rows._values(), rows.is_coalesced())
        if func is torch.ops.aten._ctc_loss.Tensor:
            scores, targets = args[:2]
            steps, batch = scores.shape[:2]
            return scores.new_empty(batch), scores.new_empty(
                (batch, steps, 2 * targets.shape[-1] + 1)
            )
        if func is torch.ops.aten._ctc_loss_backward.Tensor:
            return torch.empty_like(args[1])
        if func is torch.ops.aten._embedding_bag_backward.default and args[9]:
            gradient, ids, features = args[0], args[1], args[0].shape[1]
            values = gradient.new_empty((ids.shape[0], features))  # none, to torch, of weighted ids
            return torch.sparse_coo_tensor(
                ids.unsqueeze(0), values, (args[6], features), check_invariants=False
            )
        if func in _MEANS_BACKWARD and _has_no_elements(args[1]):
            return args[1].new_empty(args[1].shape)  # torch's description divides by their number
        if func in _BATCH_NORMS and _is_short(values := args[func is _BATCH_NORMS[1]]):
            of_channel = values.new_empty(values.shape[1], dtype=kind_of_statistics(values.dtype))
            return values.new_empty(values.shape), of_channel, of_channel.clone()
        if func is torch.ops.aten.sparse_mask.default and not _is_rows(args[0]):
            dense, mask = args
            count = mask._indices().shape[1]
            return _rows_like(mask, dense.new_empty((count, *dense.shape[1:])), True)
        return as_laid_out(func, args, super().dispatch(func, types, args, kwargs))


_ADD_ROWS = (torch.ops.aten.add_.Tensor, torch.ops.aten.sub_.Tensor)


_MEANS_BACKWARD = (
    torch.ops.aten.mse_loss_backward.default,
    torch.ops.aten.smooth_l1_loss_backward.default,
    torch.ops.aten.huber_loss_backward.default,
)


# Of none, and of the variance of one value, torch's descriptions divide by zero.
_BATCH_NORMS = (
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.native_batch_norm_backward.default,
)


def _has_no_elements(tensor: torch.Tensor) -> bool:
    count = tensor.numel()
    return isinstance(count, int) and count == 0


def _is_short(batch: torch.Tensor) -> bool:
    count = batch.numel()
    return isinstance(count, int) and count <= batch.shape[1]


def _both_rows(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Rows behind others, of the same table."""
    ids = torch.cat([rows._indices(), others._indices()], 1)
    values = torch.cat([rows._values(), others._values()])
    return torch.sparse_coo_tensor(ids, values, rows.shape, check_invariants=False)


def _rows_like(like: torch.Tensor, values: torch.Tensor, coalesced: bool) -> torch.Tensor:
    """Values at the ids of ``like``."""
    ids = like._indices()
    return torch.sparse_coo_tensor(
        ids, values, like.shape, is_coalesced=coalesced, check_invariants=False
    )


def _is_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo


def fake_mode(env: ShapeEnv) -> FakeTensorMode:
    """A mode that knows no values at all.

    torch folds arithmetic on small constants while tracing, and takes a symbolic number for NaN
    when it does; without constants, everything stays an operation of the graph.
    """
    mode = _CaptureMode(shape_env=env, allow_non_fake_inputs=True)
    converter: Any = mode.fake_tensor_converter
    convert = converter.from_real_tensor

    def without_constant(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("make_constant", None)
        return convert(*args, **kwargs)

    converter.from_real_tensor = without_constant
    return mode


def new_size(env: ShapeEnv, name: str, value: int) -> tuple[Any, torch.SymInt]:
    """A symbol for a size that is ``value`` now, at least 2; and the size itself."""
    symbol = env.create_symbol(value, ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC)
    size: Any = env.create_symintnode(symbol, hint=value, source=ConstantSource(name))
    return symbol, size


_KNOWS_SIZES = TorchVersion(torch.__version__) >= "2.13"
"""Whether torch multiplies tensors of three dimensions without asking for sizes as numbers."""


@contextlib.contextmanager
def products_of_any_size() -> Iterator[None]:
    """Let such tensors have sizes that vary, as with torch 2.13: by its own description of the
    product in Python, which 2.11 and 2.12 have, and do not use here."""
    if _KNOWS_SIZES:
        yield
        return
    library: Any = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            library.impl("matmul", _product, "CompositeImplicitAutograd", allow_override=True)
        yield
    finally:
        library._destroy()


def additions_of_any_size() -> contextlib.AbstractContextManager[None]:
    """Let what is added to products of batches of matrices be expanded where sizes vary, as the
    description of the operation itself cannot: masks of attention are."""
    module: Any = torch
    original = module.baddbmm

    def baddbmm(x: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **named: Any) -> Any:
        if isinstance(x, FakeTensor) and any(isinstance(size, torch.SymInt) for size in x.shape):
            x = x.expand(left.shape[0], left.shape[1], right.shape[2])
        return original(x, left, right, **named)

    return replaced((module, "baddbmm", baddbmm))


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = decompositions.matmul(left, right)
    return result


def trace(function: Callable[..., Any], arguments: Sequence[Any]) -> torch.fx.GraphModule:
    """Record every aten operation of ``function(*arguments)``, backward included."""
    tracer: Any = make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)
    limit = proxy_tensor.CONSTANT_NUMEL_LIMIT
    proxy_tensor.CONSTANT_NUMEL_LIMIT = -1  # no folding here either, see fake_mode
    try:
        graph: torch.fx.GraphModule = tracer(*arguments)
    finally:
        proxy_tensor.CONSTANT_NUMEL_LIMIT = limit
    return graph


def node_of(tracer: Any, tensor: torch.Tensor) -> torch.fx.Node | None:
    """The node that computed, or changed last, a tensor of the step that is being traced."""
    slot: Any = get_proxy_slot(tensor, tracer, None)
    return None if slot is None else slot.proxy.node


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for those of all calls that ``torch.vmap`` makes at once."""
    return torch._C._functorch.is_batchedtensor(tensor)


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the same description on ``device``, without storage."""
    with mode:
        if tensor.layout is torch.sparse_coo:
            return torch.empty(
                tensor.shape, dtype=tensor.dtype, device=device, layout=torch.sparse_coo
            )
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def _swap(left: torch.Tensor, right: torch.Tensor) -> None:
    left.__class__, right.__class__ = right.__class__, left.__class__
    left_items, right_items = dict(left.__dict__), dict(right.__dict__)
    left.__dict__.clear()
    left.__dict__.update(right_items)
    right.__dict__.clear()
    right.__dict__.update(left_items)
    torch._C._swap_tensor_impl(left, right)


def replace_tensor(target: torch.Tensor, source: torch.Tensor) -> None:
    """Make the object ``target`` hold what ``source`` holds, wherever it is referenced."""
    _swap(target, source)


@contextlib.contextmanager
def swapped(real: Sequence[torch.Tensor], fakes: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let the Python objects ``real`` be ``fakes`` for a while.

    Whoever holds a reference (modules, optimizers, closures, lists) sees the fake ones: that is
    why the user's step can be captured unmodified, and nothing of its size is copied.
    """
    done: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for left, right in zip(real, fakes, strict=True):
            _swap(left, right)
            done.append((left, right))
        yield
    finally:
        for left, right in reversed(done):
            _swap(left, right)


@contextlib.contextmanager
def without_fused_rnn() -> Iterator[None]:
    """Trace recurrent layers step by step: a fused one keeps a workspace that a tensor without
    storage cannot give it."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@contextlib.contextmanager
def gradients_through(
    see: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor | None],
    see_further: Callable[[torch.Tensor], None],
    start: Callable[[], None],
    begin: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    end: Callable[[], None],
) -> Iterator[None]:
    """Let ``see(input, gradient)`` replace what ``torch.autograd.grad`` gives for each input, and
    ``begin(output, gradient)`` what a backward pass begins with; call ``start()`` before it, and
    ``end()`` where it ends.

    Gradients that are differentiated further (``create_graph``) stay as they are, and
    ``see_further(input)`` is called. Those of a batch of output gradients stay, too, and those that
    a backward pass computes on its way (a ``Function`` that recomputes).
    """
    module: Any = torch.autograd
    run = module._engine_run_backward
    running = 0

    def seen(
        outputs: Any,
        gradients: Any,
        retain: Any,
        further: bool,
        inputs: Any = (),
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        nonlocal running
        if not running:
            start()
        is_batch = any(map(torch._C._functorch.is_legacy_batchedtensor, gradients))
        if not (running or further or is_batch):
            pairs = [begin(*pair) for pair in zip(outputs, gradients, strict=True)]
            outputs, gradients = zip(*pairs, strict=True)
        running += 1
        try:
            found = run(outputs, gradients, retain, further, inputs, *args, **kwargs)
        finally:
            running -= 1
        if not running:
            end()
        if further and not running:
            for one in inputs:
                see_further(one)
        if running or further or kwargs.get("accumulate_grad") or is_batch:
            return found
        return tuple(see(one, gradient) for one, gradient in zip(inputs, found, strict=True))

    module._engine_run_backward = seen
    try:
        yield
    finally:
        module._engine_run_backward = run


@contextlib.contextmanager
def without_dynamo() -> Iterator[None]:
    """Record what the user has compiled by ``torch.compile`` as the Python that it was."""
    with dynamo_config.patch(error_on_nested_fx_trace=False):
        yield


def without_failures_in_log() -> contextlib.AbstractContextManager[None]:
    """Keep what an operation says of sizes it refuses out of torch's log: the step is captured for
    fewer sizes then, or the error tells."""

    return _without_records(FakeTensorMode.__module__, "failed while attempting to run meta")


@contextlib.contextmanager
def _without_records(logger: str, start: str) -> Iterator[None]:
    """Leave out what a logger says that starts like this; what it is about is raised as well."""

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(start)

    log = logging.getLogger(logger)
    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


@contextlib.contextmanager
def outside_tracing() -> Iterator[None]:
    """Compute real values while a trace is under way, in the midst of an operation's shapes too."""
    in_shapes = torch._C._meta_in_tls_dispatch_include()
    torch._C._set_meta_in_tls_dispatch_include(False)
    try:
        with _disable_current_modes(), no_python_dispatcher():
            yield
    finally:
        torch._C._set_meta_in_tls_dispatch_include(in_shapes)


def evaluate(expression: Any, values: dict[Any, float | int]) -> Any:
    """The value of a symbolic expression with Python's own arithmetic."""
    with _without_records(sympy_interp.__module__, "failed while executing"):
        return sympy_interp(PythonReferenceAnalysis, values, expression)


def is_equation(expression: Any) -> bool:
    """Whether a condition says that two numbers are equal, other than that one divides another."""
    import sympy

    return isinstance(expression, sympy.Eq) and not expression.has(Mod, PythonMod)


def expression(symbolic: Any, values: Mapping[Any, torch.fx.Node]) -> int | torch.fx.Node:
    """The nodes that compute a symbolic expression, put where the graph is being written."""
    if not symbolic.free_symbols:
        return int(symbolic)
    proxies = {
        symbol: torch.fx.Proxy(node, torch.fx.proxy.GraphAppendingTracer(node.graph))
        for symbol, node in values.items()
    }
    result: torch.fx.Node = sympy_interp(PythonReferenceAnalysis, proxies, symbolic).node
    return result


def raw_ptr_ranges(tensor: torch.Tensor) -> tuple[int, int] | None:
    """First and one-past-last byte address a tensor can touch; None without storage."""
    if tensor.device.type == "meta" or tensor.numel() == 0 or isinstance(tensor, FakeTensor):
        return None
    start = tensor.data_ptr()
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start, start + (last + 1) * tensor.element_size()
