"""Refuse, before anything is changed, what parallax does not distribute."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from parallax.errors import BatchError, ModelError, UnsupportedError, VariableError
from parallax.graph.common.torch_internals import raw_ptr_ranges
from parallax.graph.common.user_code import line_of
from parallax.graph.objects.discovery import StepObjects
from parallax.graph.objects.holders import Attributes
from parallax.graph.objects.state import Leaf, leaves, parameter_names

_TRAINABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_QUASI = (torch.optim.LBFGS,)


def check_state(objects: StepObjects) -> None:
    """Check models and optimizers.

    Raises:
        ModelError: there is nothing to train, or a parameter is not initialised.
        VariableError: a parameter's dtype, device or storage cannot be distributed.
        UnsupportedError: an optimizer or module works in a way that cannot be captured.
    """
    for root, model in objects.models.items():
        for path, module in model.named_modules():
            _check_module(f"{root}.{path}" if path else root, module)
    state = leaves(objects)
    parameters = [leaf for leaf in state.values() if leaf.kind == "parameter"]
    if not any(leaf.value.requires_grad for leaf in parameters):
        raise ModelError(
            "There is nothing to train: no parameter that the step reaches requires a gradient.",
            hint="unfreeze some parameters (parameter.requires_grad_(True)), or pass the model: "
            "parallax.get_runner(step, model=model).",
        )
    for leaf in parameters:
        _check_parameter(leaf)
    _check_devices(parameters)
    _check_storage(parameters)
    _check_optimizers(objects)


def mark_dealt(value: torch.Tensor) -> None:
    """Note that a tensor without storage is one of which each worker keeps its rows."""
    value._parallax_dealt = True  # type: ignore[attr-defined]


def check_not_dealt(state: Mapping[str, Leaf], own: Container[str]) -> None:
    """Check that all values are here, or with this runner.

    Args:
        state: all leaves.
        own: those that this runner has dealt to the workers.

    Raises:
        UnsupportedError: another runner has dealt one.
    """
    for leaf in state.values():
        if hasattr(leaf.value, "_parallax_dealt") and leaf.name not in own:
            raise UnsupportedError(
                f"Another runner has dealt {leaf.name!r} to the workers, so this one has no values "
                "of it.",
                hint="train by one runner whose step does both, or give the other runner "
                'Config(run_option="AR"), which deals nothing; a new model can take '
                "runner.state_dict() of the other.",
            )


def _check_module(name: str, module: torch.nn.Module) -> None:
    if getattr(module, "max_norm", None) is not None and isinstance(
        module, torch.nn.Embedding | torch.nn.EmbeddingBag
    ):
        raise max_norm_error(f"The embedding {name!r}")
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        raise UnsupportedError(
            f"{name!r} is wrapped in DistributedDataParallel.",
            hint="pass the plain module: parallax distributes it itself.",
        )


def max_norm_error(what: str, node: torch.fx.Node | None = None) -> UnsupportedError:
    """Why a lookup with max_norm is refused, at the user's line that made ``node``."""
    return UnsupportedError(
        f"{what[0].upper()}{what[1:]} has max_norm, which rewrites the rows that a batch looks up "
        "during the forward pass: every worker would rewrite others.",
        hint="drop max_norm and normalise the looked-up rows instead, "
        "torch.nn.functional.normalize(embedding(ids), dim=-1) * max_norm; or clip rows after "
        "optimizer.step().",
        where=line_of(node),
    )


def _check_parameter(leaf: Leaf) -> None:
    value = leaf.value
    if torch.nn.parameter.is_lazy(value):
        raise ModelError(
            f"The parameter {leaf.name!r} is lazy: it has no shape yet.",
            hint="run the model once on a batch before parallax.get_runner().",
        )
    if value.dtype.is_complex:
        raise VariableError(
            f"The parameter {leaf.name!r} is complex ({value.dtype}).",
            hint="keep it as a real parameter with a last dimension of 2 and use "
            "torch.view_as_complex() in the model.",
        )
    if value.requires_grad and value.dtype not in _TRAINABLE:
        raise VariableError(
            f"The parameter {leaf.name!r} has dtype {value.dtype}, which is not trained.",
            hint="train float16, bfloat16, float32 or float64 parameters.",
        )
    if value.layout is not torch.strided:
        raise VariableError(f"The parameter {leaf.name!r} is a sparse tensor.")
    hooks = [value._backward_hooks, value._post_accumulate_grad_hooks]
    if any(hooks):
        raise UnsupportedError(
            f"The parameter {leaf.name!r} has gradient hooks, which would see local gradients.",
            hint="remove them and work on parameter.grad in the step after backward(), where "
            "gradients are those of all workers.",
        )


def _check_devices(parameters: list[Leaf]) -> None:
    by_device: dict[torch.device, str] = {}
    for leaf in parameters:
        if leaf.value.device.type != "meta":
            by_device.setdefault(leaf.value.device, leaf.name)
    if len(by_device) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in by_device.items())
        raise VariableError(
            f"Parameters are on several devices: {places}.",
            hint="one worker drives one device; move the model to it.",
        )


def _check_storage(parameters: list[Leaf]) -> None:
    ranges = sorted(
        (found, leaf.name)
        for leaf in parameters
        if (found := raw_ptr_ranges(leaf.value)) is not None
    )
    for (first, left), (second, right) in itertools.pairwise(ranges):
        if second[0] < first[1]:
            raise VariableError(
                f"The parameters {left!r} and {right!r} are views of the same memory, so an update "
                "of one would change the other.",
                hint="tie them by using one Parameter in both places, or clone() one of them.",
            )


def _check_optimizers(objects: StepObjects) -> None:
    names = parameter_names(objects)
    owner: dict[int, str] = {}
    for root, optimizer in objects.optimizers.items():
        if isinstance(optimizer, _QUASI):
            raise UnsupportedError(
                f"The optimizer {root!r} is {type(optimizer).__name__}, which calls the model "
                "several times in one step, depending on the loss.",
                hint="use an optimizer that steps once per gradient, such as Adam or SGD.",
            )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                other = owner.setdefault(id(parameter), root)
                if other != root and not _calls(objects.optimizers[other], optimizer):
                    name = names.get(id(parameter), "a parameter")
                    raise UnsupportedError(
                        f"Two optimizers, {other!r} and {root!r}, update {name!r}.",
                        hint="give each parameter to one optimizer.",
                    )


def _calls(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    """Whether one of two optimizers holds the other, and updates by it (SAM, Lookahead)."""
    return any(
        value is inner
        for outer, inner in ((one, other), (other, one))
        for _, value in Attributes(outer).items()
    )


def check_unchanged(before: Mapping[str, Leaf], now: Mapping[str, Leaf]) -> None:
    """Check that the step still trains the parameters that the plan was made for.

    Raises:
        VariableError: names parameters that came, went or were replaced.
    """
    old = {n: x.value for n, x in before.items() if x.kind == "parameter"}
    new = {n: x.value for n, x in now.items() if x.kind == "parameter"}
    problems = [f"{name!r} was added" for name in new if name not in old]
    problems += [f"{name!r} is gone" for name in old if name not in new]
    problems += [
        f"{name!r} was replaced by another tensor"
        for name in new
        if name in old and old[name] is not new[name]
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise VariableError(
            "The parameters changed after the first step: " + "; ".join(problems[:5]) + more + ".",
            hint="build the whole model before the first runner.run(), change parameters in place, "
            "and make a new runner for another model.",
        )


def check_batch(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check the tensors of a batch.

    Raises:
        BatchError: a tensor is sparse, or computed with gradients outside the step.
    """
    for index, item in enumerate(pytree.tree_leaves((args, dict(kwargs)))):
        if not isinstance(item, torch.Tensor):
            continue
        if item.layout is not torch.strided:
            raise BatchError(
                f"Tensor {index} of the batch is sparse ({item.layout}).",
                hint="pass its indices and values, and build the sparse tensor in the step.",
            )
        if item.grad_fn is not None:
            raise BatchError(
                f"Tensor {index} of the batch was computed with gradients outside the step.",
                hint="move that computation into the step, or detach() it.",
            )


def batch_norms(
    objects: StepObjects, kind: type[torch.nn.Module] = torch.nn.modules.batchnorm._BatchNorm
) -> list[str]:
    """Names of modules in training that normalise over the batch, which workers divide."""
    return [
        f"{root}.{path}" if path else root
        for root, model in objects.models.items()
        for path, module in model.named_modules()
        if isinstance(module, kind) and module.training
    ]
