"""Why a step is no training step, or could not be captured, for the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Graph

from parallax.errors import CaptureError, ModelError, UnsupportedError
from parallax.graph.common.aliases import memory_of
from parallax.graph.common.operations import written_inputs
from parallax.graph.common.user_code import line_of, source_line, user_line
from parallax.graph.objects.discovery import StepObjects
from parallax.graph.objects.state import leaves


def no_backward(objects: StepObjects) -> ModelError:
    """No parameter has a gradient."""
    trainable = [
        leaf
        for leaf in leaves(objects).values()
        if leaf.kind == "parameter" and leaf.value.requires_grad
    ]
    if not trainable:
        return ModelError(
            "There is nothing to train: no parameter that the step reaches requires a gradient.",
            hint="unfreeze some parameters (parameter.requires_grad_(True)), or pass the model: "
            "parallax.get_runner(step, model=model).",
        )
    return ModelError(
        "The step ran without a backward pass: no parameter received a gradient.",
        hint="call loss.backward() in the step, or torch.autograd.grad without create_graph; put "
        "gradients of torch.func, or with create_graph, into parameter.grad.",
    )


def no_update() -> ModelError:
    """Gradients change nothing."""
    return ModelError(
        "The step computes gradients and uses none: no parameter would ever change.",
        hint="call optimizer.step() in the step, after backward; runner.run() is the whole "
        "training step, and leaves no parameter.grad behind.",
    )


def adds_to_earlier(names: Sequence[str]) -> ModelError:
    """Gradients of these variables are not cleared before they are added to."""
    return ModelError(
        "The step adds to gradients that the previous call left: "
        + ", ".join(repr(name) for name in names[:5])
        + (" and others" if len(names) > 5 else "")
        + " are not cleared.",
        hint="call optimizer.zero_grad() in the step, before backward or after "
        "optimizer.step(); to accumulate over micro-batches, loop over them in the step.",
    )


def counts_in_python(counted: Sequence[str]) -> UnsupportedError:
    """An optimizer counts where nothing is state."""
    return UnsupportedError(
        f"An optimizer counts in a Python number, which would stay as it is: {', '.join(counted)}.",
        hint="keep the count in the state of a parameter, or in a group: "
        "self.state[p]['step'] += 1, group['step'] += 1.",
    )


def refuse_unknown_state(graph: Graph) -> None:
    """Whatever the graph changes must be state that was found, or the step's own.

    Raises:
        UnsupportedError: it is not.
    """
    for node in graph.nodes:
        for source in written_inputs(node):
            if memory_of(source).op == "get_attr":
                raise UnsupportedError(
                    "The step changes a tensor where parallax does not look for state, so it would "
                    "not be the workers' common one, nor saved.",
                    hint="register it as a buffer, or keep it in an attribute of a model, an "
                    "optimizer or an object, in a dict or a list that the step reaches; not in a "
                    "deque, a class or a function.",
                    where=line_of(node),
                )


def not_captured(error: Exception, step: Callable[..., Any]) -> CaptureError:
    """What came out of the step's code, or of what it called, while it was captured."""
    where = user_line(error.__traceback__.tb_next if error.__traceback__ else None)
    text = str(error).strip().splitlines()
    reason = text[0] if text else type(error).__name__
    hint = (
        "the step runs once on tensors without values: keep numpy, .tolist() and file access out "
        "of it, and see that it runs on this batch on one device."
    )
    if where is None:  # the call itself failed: point at the step's own first line
        code = getattr(getattr(step, "__func__", step), "__code__", None)
        if code is not None:
            where = source_line(code.co_filename, code.co_firstlineno)
        if isinstance(error, TypeError):
            hint = "call runner.run() with the arguments that the step takes."
    return CaptureError(
        f"The step could not be captured: {type(error).__name__}: {reason}", hint=hint, where=where
    )
