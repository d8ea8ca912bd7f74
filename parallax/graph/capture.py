"""Capture a whole training step (forward, backward, clipping, update) as one graph.

The step's own Python runs once, on tensors without storage, while every aten operation is
recorded; all state is lifted to inputs. The user's objects are left as they were found.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from parallax.errors import ParallaxError
from parallax.graph.analysis.carried import read_by_step, used_gradients
from parallax.graph.analysis.updates import kept, updates
from parallax.graph.collected import Before, Collected
from parallax.graph.common.guards import ScalarGuard
from parallax.graph.common.interface import GraphInput
from parallax.graph.common.layouts import copy_before_views
from parallax.graph.common.recording import Recording
from parallax.graph.common.sizes import BatchSizes, Place, shapes_of
from parallax.graph.common.torch_internals import (
    autograd_notes,
    fake_mode,
    get_proxy_mode,
    swapped,
    trace,
)
from parallax.graph.common.user_code import user_calls, user_place
from parallax.graph.inputs import Inputs, StandIns
from parallax.graph.lending import Lender
from parallax.graph.objects.discovery import StepObjects
from parallax.graph.objects.draws import Draw, Draws, Streams
from parallax.graph.objects.iterators import untouched_iterators
from parallax.graph.objects.leftovers import take_out
from parallax.graph.objects.outside import NO_NUMBERS, Numbers, standing_for
from parallax.graph.objects.snapshot import Snapshot
from parallax.graph.passes.cleanup import clean, remove_dead
from parallax.graph.passes.early_looks import look_early
from parallax.graph.passes.gradient_order import advance_gradients
from parallax.graph.passes.lent import (
    NOTHING_LENT,
    Lent,
    gradients_of,
    put_in_order,
)
from parallax.graph.passes.losses import write_softmax_gradients_once
from parallax.graph.passes.products import join_products
from parallax.graph.passes.squeezed import squeeze_alike
from parallax.graph.passes.stacks import stack_in_order
from parallax.graph.refusals import (
    adds_to_earlier,
    counts_in_python,
    no_update,
    not_captured,
    refuse_unknown_state,
)
from parallax.graph.stand_ins.default_device import as_script_has_it
from parallax.graph.stand_ins.said import Said
from parallax.graph.stand_ins.unread import left_unread
from parallax.graph.step_graph import StepGraph
from parallax.graph.surroundings import prepared
from parallax.graph.symbols.assertions import Assertions, EndsError, UndecidedError, decided
from parallax.graph.symbols.scalars import ScalarEnv

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
    lent: Lent = NOTHING_LENT,
    common: Collection[str] = (),
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
        lent: variables that are to have gradients of zero where they have none.
        common: parts of the batch that have the same values on all workers.

    Returns:
        The step as one graph, with gradients marked by ``parallax::gradient``.

    Raises:
        CaptureError: the step cannot be recorded; names the user's line.
        DataDependentError: control flow depends on values of tensors.
        ModelError: the step uses no gradient, or carries them from one call to the next.
    """
    objects.look_again()
    places = devices or {}, varying or {}
    given = args, kwargs, *places, streams or Streams(), lent, numbers
    asked = _Asked(step, objects, *given, common)
    return decided(
        lambda assertions: objects.conversions.captured(
            lambda: _capture_with_gradients(replace(asked, assertions=assertions))
        ),
        objects.guesses.ways.add,
    )


@dataclass(frozen=True)
class _Asked:
    """What one capture is of: as :func:`capture` says, and what earlier ones have found.

    Args:
        lent: variables that are to have gradients of zero where they have none.
        free: Python's numbers that are inputs, besides floats of the batch.
        assertions: branches of which one way raises.
        drawn: random numbers that are inputs.
        sentinels: variables that have a gradient of an earlier call, to see who reads it.
    """

    step: Callable[..., Any]
    objects: StepObjects
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    devices: Mapping[str, torch.device]
    varying: Mapping[Place, int]
    streams: Streams
    lent: Lent
    free: Numbers
    common: Collection[str] = ()
    assertions: Assertions = field(default_factory=dict)
    drawn: tuple[Draw, ...] = ()
    sentinels: frozenset[str] = frozenset()


@dataclass
class _Traced:
    """One run of the step's Python, on what stands for its inputs."""

    inputs: Inputs
    env: ScalarEnv
    sizes: BatchSizes
    snapshot: Snapshot
    draws: Draws
    rows: Sequence[int | torch.SymInt]
    """How many rows the batch's tensors have."""
    recording: Recording = field(default_factory=Recording)
    left: Collected = field(default_factory=Collected)
    module: torch.fx.GraphModule | None = None
    guards: tuple[ScalarGuard, ...] = ()
    undone: Sequence[str] = ()
    """Python values that the step changed, which are as they were."""
    emptied: Sequence[str] = ()
    """Places that parallax does not look at, where the step put tensors."""

    def note(self) -> None:
        """Note for the user what the capture has done away with."""
        notes = self.recording.notes
        if self.undone:
            notes.append(
                "the step changes Python values, which happens at capture only and is undone: "
                + ", ".join(self.undone[:5])
                + (" and more" if len(self.undone) > 5 else "")
                + "; return what you need from the step and count outside of it"
            )
        if self.emptied:
            notes.append(
                "the step keeps tensors where parallax does not look, which are None after it: "
                f"{', '.join(self.emptied[:5])}; keep them in an object of your own, or return them"
            )
        if self.draws.told:
            notes.append(
                f"the step draws from {', '.join(self.draws.told)}, which runs at capture only; "
                "draw outside of it, and pass what is drawn"
            )


def _capture_with_gradients(asked: _Asked) -> StepGraph:
    """Capture, and see whether the step reads gradients that an earlier call has left."""
    graph, carried = _capture_once(asked)
    if carried:
        # The step may clear them in a way that capture cannot see (p.grad = None): look again
        # with a gradient in place, and refuse only if the step really reads it.
        _, still = _capture_once(replace(asked, sentinels=frozenset(carried)))
        if still:
            raise adds_to_earlier(still)
        used = used_gradients(graph.graph)
        if unused := [name for name in carried if name not in used]:
            graph.notes.append(
                f"the step leaves gradients of {', '.join(unused[:3])} "
                f"{'and others ' if len(unused) > 3 else ''}that it does not use: they are not kept"
            )
    return graph


def _capture_once(asked: _Asked) -> tuple[StepGraph, list[str]]:
    """The step's graph, and the variables whose gradients of earlier calls it may read."""
    traced = _trace(asked)
    better = _with_more_inputs(asked, traced)
    if better is not None:
        return better
    recording, left, env, module = traced.recording, traced.left, traced.env, traced.module
    assert module is not None
    traced.note()
    if env.before_branch:
        ends = left.ending(module.graph, env.before_branch, recording.notes)
        if ends is not None:
            raise EndsError(ends)
    recording.notes += [note for note in env.notes if note not in recording.notes]
    graph = _step_graph(asked, traced, module)
    _tidy(graph, traced, asked.lent, is_whole=not asked.sentinels)
    graph.gradients = gradients_of(graph, recording.gradients)
    graph.updates = updates(graph, traced.inputs.leaves)
    graph.kept = kept(graph, traced.inputs.leaves)
    graph.is_lent = asked.lent.is_any
    return graph, read_by_step(module, recording.left) if asked.sentinels else left.carried


def _trace(asked: _Asked) -> _Traced:
    """Run the step's Python once.

    Raises:
        CaptureError: it, or what it calls, does not run on what stands for its inputs.
    """
    objects = asked.objects
    for root in objects.attributes.values():
        root.holder.note_computed()
    inputs = Inputs.of(objects, asked.args, asked.kwargs, asked.free, asked.drawn, asked.common)
    values = inputs.values()
    env = ScalarEnv(values, asked.assertions, objects.conversions, objects.guesses)
    inputs.tell(env)
    mode = fake_mode(env)
    sizes = BatchSizes(env, asked.varying, shapes_of(inputs.batch))
    fakes = StandIns.of(inputs, mode, sizes, asked.devices)
    # While they are swapped, it is the stand-ins that hold the real values.
    values.update(zip((leaf.name for leaf in inputs.tensors), fakes.tensors, strict=True))
    reals = [leaf.value for leaf in inputs.tensors]
    draws = Draws(objects, asked.streams, asked.drawn)
    given = zip(inputs.lifted, fakes.batch, strict=True)
    common = inputs.common_places
    rows = [one.shape[0] for i, one in given if one.dim() and i not in common]
    traced = _Traced(inputs, env, sizes, Snapshot(objects), draws, rows)
    recording, left = traced.recording, traced.left
    lender = Lender(objects, inputs.tensors, recording, asked.lent)
    tracked: list[Mapping[torch.Tensor, Any]] = []

    def traced_step(*flat: Any) -> list[Any]:
        proxy_mode = get_proxy_mode()
        if proxy_mode is not None:
            env.attach(proxy_mode.tracer)
            tracked.append(proxy_mode.tracer.tensor_tracker)
            _note_places(proxy_mode.tracer, recording)
            _name_placeholders(proxy_mode.tracer.graph, inputs.signature)
        return _run_step(asked, traced, lender, flat)

    try:
        with (
            swapped(reals, fakes.tensors),
            prepared(objects, inputs.tensors, recording, asked.sentinels, lender, mode),
            mode,
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", message="Sparse invariant checks")
            traced.module = trace(traced_step, [*reals, *fakes.numbers, *fakes.batch])
            traced.guards = _guards(env, inputs.signature)
            env.release()
    except ParallaxError:
        raise
    except Exception as error:
        raise not_captured(error, asked.step) from error
    finally:
        traced.undone = traced.snapshot.restore(left.kept)
        draws.put_back()
        for fake in (*fakes.tensors, *fakes.batch):
            fake.grad = None
        known = (*fakes.all, *left.flat, *recording.tensors())
        traced.emptied = take_out([one for some in tracked for one in some], known)
    return traced


def _run_step(asked: _Asked, traced: _Traced, lender: Lender, flat: Sequence[Any]) -> list[Any]:
    """Call the step while it is traced, and collect what it leaves."""
    objects, free, left = asked.objects, asked.free, traced.left
    said = Said(traced.recording)
    given = traced.inputs.given(flat)
    before = Before.of(objects)
    others = [site.value for site in free.others]
    with (
        left_unread(pytree.tree_leaves((given.args, given.kwargs))),
        standing_for(free.outside, given.outside),
        untouched_iterators(objects),
        traced.draws.recorded(given.drawn),
        as_script_has_it(),
        said.kept(),
    ):
        result = asked.step(*given.args, **given.kwargs)
        lender.finish()
        left.collect_outside(free.outside, given.outside, free.others, others)
    left.collect_result(result)
    left.collect_state(objects, traced.snapshot, before)
    left.collect_calls(traced.recording)
    left.note_rates(objects, traced.recording)
    said.check([*left.return_constants, *(site.value for site in left.places)])
    if not asked.sentinels:
        left.collect_carried(before, traced.recording)
    return left.flat


def _with_more_inputs(asked: _Asked, traced: _Traced) -> tuple[StepGraph, list[str]] | None:
    """Another capture, for which numbers are inputs that the step has turned out to change or to
    draw; None if there are none, or they are more than a symbol can be.

    Raises:
        UnsupportedError: the step changes a number that cannot be an input.
    """
    left, snapshot = traced.left, traced.snapshot
    if left.counted:
        try:
            return _capture_once(replace(asked, free=asked.free.with_counted(left.counted)))
        except UndecidedError:  # of a branch, whatever the number is
            raise
        except EndsError as end:
            # Numbers that are counted on this way alone are no inputs of the other one.
            early = [site for site in left.counted if site.name in end.ending.counted_before]
            if len(early) == len(left.counted):
                raise
            if early:
                return _capture_once(replace(asked, free=asked.free.with_counted(early)))
        except Exception:  # what becomes of the number may be more than a symbol can be
            logger.debug("numbers that the step changes are no inputs", exc_info=True)
    if snapshot.counters:  # which are state, as is known now
        asked.objects.counters.update(snapshot.counters)
        return _capture_once(asked)
    if snapshot.counted:
        raise counts_in_python(snapshot.counted)
    if traced.draws.found and not asked.drawn:
        try:
            return _capture_once(replace(asked, drawn=tuple(traced.draws.found)))
        except (EndsError, UndecidedError):
            raise
        except Exception:  # they may choose more than a symbol can
            logger.debug("random numbers are no inputs", exc_info=True)
    return None


def _step_graph(asked: _Asked, traced: _Traced, module: torch.fx.GraphModule) -> StepGraph:
    """What was traced, as it is."""
    left, env, recording = traced.left, traced.env, traced.recording
    return StepGraph(
        graph_module=module,
        inputs=traced.inputs.signature,
        outputs=tuple(left.outputs),
        return_spec=left.return_spec,
        return_constants=left.return_constants,
        new_leaves=left.new_leaves,
        created=left.created,
        constants=left.constants,
        calls=left.calls,
        guards=traced.guards,
        draws=asked.drawn,
        outside={site.name: site.source for site in asked.free.outside},
        left=left.left,
        writes=tuple(left.writes),
        places=tuple(left.places),
        sizes=traced.sizes if asked.varying else None,
        rows=tuple(traced.rows),
        common=traced.inputs.common_places,
        decisions=env.decisions,
        looked=env.looked,
        differentiated=recording.differentiated,
        notes=recording.notes,
        acts=tuple(recording.acts),
    )


def _tidy(step: StepGraph, traced: _Traced, lent: Lent, is_whole: bool) -> None:
    """Run the passes that every captured graph has.

    Args:
        step: as it was traced.
        traced: it.
        lent: variables that have gradients of zero.
        is_whole: nothing stands for state besides these.

    Raises:
        ModelError: no gradient is used.
        UnsupportedError: it changes tensors that are no state.
    """
    clean(step)
    if step.sizes is not None:
        squeeze_alike(step.graph)
    if step.decisions:
        look_early(step, traced.inputs.leaves)
        remove_dead(step.graph)
    if traced.recording.gradients and not used_gradients(step.graph):
        raise no_update()
    if is_whole:
        refuse_unknown_state(step.graph)
    stack_in_order(step.graph)
    copy_before_views(step.graph)
    join_products(step.graph)
    advance_gradients(step.graph)
    write_softmax_gradients_once(step.graph)
    put_in_order(step, lent)
    step.graph_module.recompile()


def _note_places(tracer: Any, recording: Recording) -> None:
    """Let every node remember the user's line that made it, for messages, the backward pass, and
    what PyTorch's autograd was asked to do then."""
    create = tracer.create_node

    def create_node(*args: Any, **kwargs: Any) -> torch.fx.Node:
        node: torch.fx.Node = create(*args, **kwargs)
        node.meta.update(
            user_place=user_place(),
            user_calls=user_calls(),
            backward_pass=recording.last_pass,
            **autograd_notes(),
        )
        return node

    tracer.create_node = create_node


def _name_placeholders(graph: torch.fx.Graph, inputs: Sequence[GraphInput]) -> None:
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    for node, item in zip(nodes, inputs, strict=True):
        node.meta["given" if item.kind == "batch" and not item.number else "leaf"] = item.name


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
