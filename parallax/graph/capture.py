"""Capture a whole training step (forward, backward, clipping, update) as one graph.

The step's own Python runs once, on tensors without storage, while every aten operation is
recorded; all state is lifted to inputs. The user's objects are left as they were found.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from parallax.errors import CaptureError, ModelError, ParallaxError, UnsupportedError
from parallax.graph.aliases import memory_of
from parallax.graph.assertions import Assertions, EndsError, UndecidedError, decided
from parallax.graph.carried import read_by_step, used_gradients
from parallax.graph.cleanup import clean, remove_dead
from parallax.graph.collected import Before, Collected
from parallax.graph.default_device import as_script_has_it
from parallax.graph.discovery import StepObjects
from parallax.graph.draws import Draw, Draws, Streams
from parallax.graph.early_looks import look_early
from parallax.graph.endings import ending
from parallax.graph.entries import entries
from parallax.graph.gradient_order import advance_gradients
from parallax.graph.guards import ScalarGuard
from parallax.graph.iterators import untouched_iterators
from parallax.graph.layouts import copy_before_views
from parallax.graph.leftovers import take_out
from parallax.graph.losses import write_softmax_gradients_once
from parallax.graph.made import positions
from parallax.graph.operations import written_inputs
from parallax.graph.outside import NO_NUMBERS, Numbers, standing_for
from parallax.graph.products import join_products
from parallax.graph.recording import Recording
from parallax.graph.said import Said
from parallax.graph.scalars import ScalarEnv, is_number
from parallax.graph.sizes import BatchSizes, Place, shapes_of
from parallax.graph.snapshot import Snapshot
from parallax.graph.stacks import stack_in_order
from parallax.graph.state import Leaf, leaves
from parallax.graph.step_graph import GraphInput, StepGraph
from parallax.graph.surroundings import prepared
from parallax.graph.torch_internals import (
    FakeTensorMode,
    fake_like,
    fake_mode,
    get_proxy_mode,
    swapped,
    trace,
)
from parallax.graph.unread import left_unread
from parallax.graph.user_code import source_line, user_line, user_place

logger = logging.getLogger("parallax")


def capture(
    step: Callable[..., Any],
    objects: StepObjects,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    devices: Mapping[str, torch.device] | None = None,
    varying: Mapping[Place, int] | None = None,
    numbers: Numbers = NO_NUMBERS,
    streams: Streams | None = None,
) -> StepGraph:
    """Capture ``step(*args, **kwargs)``.

    Args:
        step: the training step, written for one device.
        objects: what the step reaches; every tensor in it becomes an input of the graph.
        args, kwargs: one batch. Tensors and floats are inputs, anything else is a constant.
        devices: where parameters that have no storage yet will live, by name.
        varying: sizes of the batch that are to be symbols; equal numbers are equal sizes.
        numbers: those that are inputs too.
        streams: where the step draws random numbers from that are not PyTorch's.

    Returns:
        The step as one graph, with gradients marked by ``parallax::gradient``.

    Raises:
        CaptureError: the step cannot be recorded; names the user's line.
        DataDependentError: control flow depends on values of tensors.
        ModelError: the step has no backward, or carries gradients from one call to the next.
    """
    objects.look_again()
    given = (step, objects, args, kwargs, devices or {}, varying or {}, streams or Streams())
    return decided(
        lambda assertions: objects.conversions.captured(
            lambda: _capture_with_gradients(
                functools.partial(_capture_once, *given, assertions, (), numbers)
            )
        ),
        objects.guesses.ways.add,
    )


def _capture_with_gradients(
    once: Callable[[frozenset[str]], tuple[StepGraph, list[str]]],
) -> StepGraph:
    """Capture, by a function that puts gradients of some variables in their places before."""
    graph, carried = once(frozenset())
    if carried:
        # The step may clear them in a way that capture cannot see (p.grad = None): look again
        # with a gradient in place, and refuse only if the step really reads it.
        _, still = once(frozenset(carried))
        if still:
            raise ModelError(
                "The step adds to gradients that the previous call left: "
                + ", ".join(repr(name) for name in still[:5])
                + (" and others" if len(still) > 5 else "")
                + " are not cleared.",
                hint="call optimizer.zero_grad() in the step, before backward or after "
                "optimizer.step(); to accumulate over micro-batches, loop over them in the step.",
            )
        used = used_gradients(graph.graph)
        if unused := [name for name in carried if name not in used]:
            graph.notes.append(
                f"the step leaves gradients of {', '.join(unused[:3])} "
                f"{'and others ' if len(unused) > 3 else ''}that it does not use: they are not kept"
            )
    return graph


def _capture_once(
    step: Callable[..., Any],
    objects: StepObjects,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    devices: Mapping[str, torch.device],
    varying: Mapping[Place, int],
    streams: Streams,
    assertions: Assertions,
    drawn: tuple[Draw, ...],
    free: Numbers,
    sentinels: frozenset[str],
) -> tuple[StepGraph, list[str]]:
    for root in objects.attributes.values():
        root.holder.note_computed()
    state = leaves(objects)
    tensors = [leaf for leaf in state.values() if isinstance(leaf.value, torch.Tensor)]
    numbers = [leaf for leaf in state.values() if not isinstance(leaf.value, torch.Tensor)]
    batch, batch_spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    python = {i for i, item in enumerate(batch) if isinstance(item, float)} | free.batch
    lifted = [i for i, item in enumerate(batch) if isinstance(item, torch.Tensor) or i in python]

    real_values: dict[str, Any] = {leaf.name: leaf.value for leaf in numbers}
    env = ScalarEnv(real_values, assertions, objects.conversions, objects.guesses)
    mode = fake_mode(env)
    fakes = [fake_like(mode, leaf.value, _device(leaf, devices)) for leaf in tensors]
    real_values.update((_batch_name(i), batch[i]) for i in lifted)
    env.of_batch.update(_batch_name(i) for i in lifted if i not in python)
    env.each_workers_own = frozenset(map(_batch_name, lifted))
    env.settled.update(
        leaf.name
        for leaf in tensors
        if leaf.kind in ("buffer", "tensor") and not is_number(leaf.value)
    )
    env.of_batch.update(env.settled)
    # While they are swapped, it is the stand-ins that hold the real values.
    real_values.update((leaf.name, fake) for leaf, fake in zip(tensors, fakes, strict=True))
    scalars = [leaf.value for leaf in numbers] + [site.value for site in free.outside]
    scalars += [draw.value for draw in drawn]
    number_fakes = [_number_tensor(mode, value) for value in scalars]
    sizes = BatchSizes(env, varying, shapes_of(batch))
    batch_fakes = [_batch_tensor(mode, batch[i], sizes, i) for i in lifted]
    real_values.update((site.name, site.value) for site in free.outside)
    real_values.update((draw.name, draw.value) for draw in drawn)
    reals = [leaf.value for leaf in tensors]
    inputs = tuple(
        [GraphInput("state", leaf.name) for leaf in tensors]
        + [GraphInput("number", leaf.name, number=True) for leaf in numbers]
        + [GraphInput("outside", site.name, number=True) for site in free.outside]
        + [GraphInput("drawn", draw.name, number=True) for draw in drawn]
        + [GraphInput("batch", _batch_name(i), i, i in python) for i in lifted]
    )

    snapshot = Snapshot(objects)
    recording = Recording()
    said = Said(recording)
    left = Collected()
    tracked: list[Mapping[torch.Tensor, Any]] = []

    def traced_step(*flat: Any) -> list[Any]:
        proxy_mode = get_proxy_mode()
        if proxy_mode is not None:
            env.attach(proxy_mode.tracer)
            tracked.append(proxy_mode.tracer.tensor_tracker)
            _note_places(proxy_mode.tracer)
            _name_placeholders(proxy_mode.tracer.graph, inputs)
        items = flat[len(flat) - len(lifted) :]
        symbols = [item.item() for item in flat[len(tensors) : len(flat) - len(lifted)]]
        for leaf, symbol in zip(numbers, symbols, strict=False):
            leaf.put(symbol)
        before = Before(leaves(objects), positions(objects), entries(objects))
        values = list(batch)
        for index, item in zip(lifted, items, strict=True):
            values[index] = item.item() if index in python else item
        call_args, call_kwargs = pytree.tree_unflatten(values, batch_spec)
        outside = symbols[len(numbers) : len(symbols) - len(drawn)]
        others = [site.value for site in free.others]
        with (
            left_unread(values),
            standing_for(free.outside, outside),
            untouched_iterators(objects),
            draws.recorded(symbols[len(symbols) - len(drawn) :]),
            as_script_has_it(),
            said.kept(),
        ):
            result = step(*call_args, **call_kwargs)
            left.collect_outside(free.outside, outside, free.others, others)
        left.collect_result(result)
        left.collect_state(objects, snapshot, before)
        left.collect_calls(recording)
        left.note_rates(objects, recording)
        said.check([*left.return_constants, *(site.value for site in left.places)])
        if not sentinels:
            left.collect_carried(before, recording)
        return left.flat

    draws = Draws(objects, streams, drawn)
    try:
        with (
            swapped(reals, fakes),
            prepared(objects, tensors, recording, sentinels, mode),
            mode,
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", message="Sparse invariant checks")
            module = trace(traced_step, [*reals, *number_fakes, *batch_fakes])
            guards = _guards(env, inputs)
            env.release()
    except ParallaxError:
        raise
    except Exception as error:
        raise _capture_error(error, step) from error
    finally:
        undone = snapshot.restore(left.kept)
        draws.put_back()
        for fake in (*fakes, *batch_fakes):
            fake.grad = None
        known = (*fakes, *number_fakes, *batch_fakes, *left.flat, *recording.tensors())
        emptied = take_out([one for some in tracked for one in some], known)
    given = (step, objects, args, kwargs, devices, varying, streams)
    again = functools.partial(_capture_once, *given, assertions)
    if left.counted:
        more = free.with_counted(left.counted)
        try:
            return again(drawn, more, sentinels)
        except UndecidedError:  # of a branch, whatever the number is
            raise
        except EndsError as end:
            # Numbers that are counted on this way alone are no inputs of the other one.
            early = [site for site in left.counted if site.name in end.ending.counted_before]
            if len(early) == len(left.counted):
                raise
            if early:
                return again(drawn, free.with_counted(early), sentinels)
        except Exception:  # what becomes of the number may be more than a symbol can be
            logger.debug("numbers that the step changes are no inputs", exc_info=True)
    if snapshot.counters:  # which are state, as is known now
        objects.counters.update(snapshot.counters)
        return again(drawn, free, sentinels)
    if left.refusal is not None:
        raise left.refusal
    if snapshot.counted:
        raise UnsupportedError(
            f"An optimizer counts in a Python number, which would stay as it is: "
            f"{', '.join(snapshot.counted)}.",
            hint="keep the count in the state of a parameter, or in a group: "
            "self.state[p]['step'] += 1, group['step'] += 1.",
        )
    if draws.found and not drawn:
        try:
            return again(tuple(draws.found), free, sentinels)
        except (EndsError, UndecidedError):
            raise
        except Exception:  # they may choose more than a symbol can
            logger.debug("random numbers are no inputs", exc_info=True)
    if undone:
        recording.notes.append(
            "the step changes Python values, which happens at capture only and is undone: "
            + ", ".join(undone[:5])
            + (" and more" if len(undone) > 5 else "")
            + "; return what you need from the step and count outside of it"
        )
    if emptied:
        recording.notes.append(
            "the step keeps tensors where parallax does not look, which are None after it: "
            f"{', '.join(emptied[:5])}; keep them in an object of your own, or return them"
        )
    if draws.told:
        recording.notes.append(
            f"the step draws from {', '.join(draws.told)}, which runs at capture only; draw "
            "outside of it, and pass what is drawn"
        )
    if env.before_branch:
        ends = ending(module.graph, env.before_branch, left, recording.notes)
        if ends is not None:
            raise EndsError(ends)
    recording.notes += [note for note in env.notes if note not in recording.notes]
    if not recording.marked:
        raise _no_backward(objects)
    graph = StepGraph(
        graph_module=module,
        inputs=inputs,
        outputs=tuple(left.outputs),
        return_spec=left.return_spec,
        return_constants=left.return_constants,
        new_leaves=left.new_leaves,
        created=left.created,
        constants=left.constants,
        calls=left.calls,
        guards=guards,
        draws=drawn,
        outside={site.name: site.source for site in free.outside},
        left=left.left,
        writes=tuple(left.writes),
        places=tuple(left.places),
        sizes=sizes if varying else None,
        decisions=env.decisions,
        looked=env.looked,
        differentiated=recording.differentiated,
        notes=recording.notes,
    )
    clean(graph)
    if env.decisions:
        look_early(graph, state)
        remove_dead(graph.graph)
    if not used_gradients(graph.graph):
        raise ModelError(
            "The step computes gradients and uses none: no parameter would ever change.",
            hint="call optimizer.step() in the step, after backward; runner.run() is the whole "
            "training step, and leaves no parameter.grad behind.",
        )
    if not sentinels:  # which are such tensors
        _refuse_unknown_state(graph)
    stack_in_order(graph.graph)
    copy_before_views(graph.graph)
    join_products(graph.graph)
    advance_gradients(graph.graph)
    write_softmax_gradients_once(graph.graph)
    module.recompile()
    return graph, read_by_step(module, recording.left) if sentinels else left.carried


def _refuse_unknown_state(step: StepGraph) -> None:
    """Whatever the graph changes must be state that was found, or the step's own."""
    for node in step.graph.nodes:
        for source in written_inputs(node):
            if memory_of(source).op == "get_attr":
                raise UnsupportedError(
                    "The step changes a tensor where parallax does not look for state, so it would "
                    "not be the workers' common one, nor saved.",
                    hint="register it as a buffer, or keep it in an attribute of a model, an "
                    "optimizer or an object, in a dict or a list that the step reaches; not in a "
                    "deque, a class or a function.",
                    where=source_line(*place) if (place := node.meta.get("user_place")) else None,
                )


def _device(leaf: Leaf, devices: Mapping[str, torch.device]) -> torch.device:
    own: torch.device = leaf.value.device
    if own.type != "meta":
        return own
    of_variable = devices.get(leaf.variable or "", torch.device("cpu"))
    return devices.get(leaf.name, of_variable)


def _number_tensor(mode: FakeTensorMode, value: float | int) -> torch.Tensor:
    dtype = torch.float64 if isinstance(value, float) else torch.int64
    with mode:
        return torch.empty((), dtype=dtype)


def _batch_tensor(
    mode: FakeTensorMode, value: torch.Tensor | float, sizes: BatchSizes, index: int
) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return _number_tensor(mode, value)
    fake = sizes.tensor(mode, index, value)
    if fake is None:
        fake = fake_like(mode, value.detach(), value.device)
    return fake.requires_grad_(value.requires_grad)


def _note_places(tracer: Any) -> None:
    """Let every node remember the user's line that made it, for messages."""
    create = tracer.create_node

    def create_node(*args: Any, **kwargs: Any) -> torch.fx.Node:
        node: torch.fx.Node = create(*args, **kwargs)
        node.meta["user_place"] = user_place()
        return node

    tracer.create_node = create_node


def _name_placeholders(graph: torch.fx.Graph, inputs: Sequence[GraphInput]) -> None:
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    for node, item in zip(nodes, inputs, strict=True):
        node.meta["given" if item.kind == "batch" and not item.number else "leaf"] = item.name


def _batch_name(index: int) -> str:
    return f"batch{index}"


def _guards(env: ScalarEnv, inputs: Sequence[GraphInput]) -> tuple[ScalarGuard, ...]:
    places = {item.name: item.index for item in inputs if item.kind == "batch"}
    return tuple(
        ScalarGuard(
            one.expression,
            one.symbols,
            one.program,
            {name: places.get(name) for name in one.names},
            one.value,
            not env.of_batch.isdisjoint(one.names),
        )
        for one in env.pending
    )


def _no_backward(objects: StepObjects) -> ModelError:
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


def _capture_error(error: Exception, step: Callable[..., Any]) -> CaptureError:
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
