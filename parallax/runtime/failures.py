"""Which of the user's lines an operation of the graph came from that failed as it ran."""

from __future__ import annotations

import linecache
import re
import types

import torch

from parallax.errors import BatchError, ParallaxError, StepError
from parallax.graph.common.user_code import line_of

_GENERATED = "<eval_with_key>"
_ASSIGNED = re.compile(r"\s*(\w+)(?:: [^=]+)? = ")


def failure_of(error: Exception, graph: torch.fx.Graph) -> ParallaxError | None:
    """What a user is told of an error of torch's in a running graph.

    Returns:
        None if it is none of those that a batch or a model causes.
    """
    if isinstance(error, BatchError) and error.where is None:
        place = _node(error.__traceback__, graph, "parallax")
        where = None if place is None else line_of(place)
        return None if where is None else BatchError(error.problem, hint=error.hint, where=where)
    kinds = RuntimeError | IndexError | ValueError | TypeError
    if not isinstance(error, kinds) or isinstance(error, torch.OutOfMemoryError):
        return None
    node = _node(error.__traceback__, graph, "aten")
    if node is None:
        return None
    text = str(error).strip().splitlines()
    reason = text[0] if text else ""
    return StepError(
        f"An operation of the step failed: {type(error).__name__}: {reason}",
        hint="see that the step runs with this batch on one device: dtypes of the batch and of "
        "the model, and values such as labels and ids.",
        where=line_of(node),
    )


def failed_operation(error: BaseException, graph: torch.fx.Graph) -> torch._ops.OpOverload | None:
    """The operation of PyTorch's that a running graph failed at; None if it was something else."""
    name = _name(error.__traceback__)
    for node in graph.nodes:
        if node.name == name and isinstance(node.target, torch._ops.OpOverload):
            return node.target
    return None


def _name(trace: types.TracebackType | None) -> str | None:
    """Of the node that ran: the generated line assigns to it."""
    name = None
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_filename.startswith(_GENERATED):
            line = linecache.getline(frame.f_code.co_filename, trace.tb_lineno, frame.f_globals)
            if (found := _ASSIGNED.match(line)) is not None:
                name = found[1]
        trace = trace.tb_next
    return name


def _node(
    trace: types.TracebackType | None, graph: torch.fx.Graph, namespace: str
) -> torch.fx.Node | None:
    """The node that ran, if it is an operation of the namespace. One that rewriting made is taken
    for the last before it that the step made."""
    name = _name(trace)
    last = None
    for node in graph.nodes:
        if "user_place" in node.meta:
            last = node
        if node.name == name:  # what exchanges raise speaks for itself
            return last if getattr(node.target, "namespace", "") == namespace else None
    return None
