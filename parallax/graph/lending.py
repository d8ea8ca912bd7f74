"""What only other workers' steps do, done while a worker's own step is captured.

Where a step's Python decides by values of the batch (``if mask.any():``, ``if not len(boxes):
return``), one worker may leave out backward passes, optimizers' steps and schedulers' that others
have. On one device with all batches there is one step that has them, to which the batches without
them add nothing. So they are done between the same acts of this worker's own step, with gradients
of zero.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from parallax.graph.common.hashes import hash_of
from parallax.graph.common.recording import BY_VALUES, Act, Recording
from parallax.graph.common.user_code import line_in, places_of, user_calls
from parallax.graph.objects.discovery import StepObjects
from parallax.graph.objects.state import Leaf
from parallax.graph.passes.lent import Lent
from parallax.ops import marks

_GRAD: Any = torch._C.TensorBase.grad
_CLIPS = ("clip_grad_norm_", "clip_grad_value_")


class Lender:
    """Notes a step's acts while it is captured, and does those of other workers between them."""

    def __init__(
        self, objects: StepObjects, tensors: Sequence[Leaf], recording: Recording, lent: Lent
    ) -> None:
        """
        Args:
            objects: what the step reaches.
            tensors: the state.
            recording: of what the step does.
            lent: what others have.
        """
        self._objects = objects
        self._tensors = tensors
        self._recording = recording
        self._lent = lent
        self._due = deque(lent.acts)
        """The acts of all workers that are still to come."""
        self._lending = False
        self._within = 0
        """Steps of optimizers that run: one may call another's."""

    def watch(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        """Note the optimizer's steps.

        Returns:
            What ends it: each has ``remove()``.
        """
        name = _name(self._objects.optimizers, optimizer)

        def before(*_: Any) -> None:
            if not self._within:
                self.before("step", name)
            self._within += 1

        def after(*_: Any) -> None:
            self._within -= 1
            self._recording.stepped.add(id(optimizer))

        hooks = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        return [hook(function) for hook, function in zip(hooks, (before, after), strict=True)]

    def before(self, kind: str, name: str = "") -> None:
        """Do what others do before this act of the step, and note it."""
        if self._lending:
            return
        calls = user_calls()
        lines = tuple(line_in(code, instruction) for code, instruction in reversed(calls))
        act = Act(kind, name, hash_of(places_of(calls)), lines)
        if act in self._due:
            self._do_until(act)
        self._recording.acts.append(act)

    def before_clearing(self, cleared: Any, set_to_none: bool = True) -> None:
        """The same for an optimizer or a model whose gradients are cleared."""
        kind = "clear" if set_to_none else "zero"
        if name := _name(self._objects.optimizers, cleared):
            self.before(kind, name)
        elif name := _name(self._objects.models, cleared):
            self.before(f"{kind} model", name)

    @contextlib.contextmanager
    def clipping(self) -> Iterator[None]:
        """Note where the step clips gradients by PyTorch's functions, which it may have imported
        by name."""
        with contextlib.ExitStack() as stack:
            for name in _CLIPS:
                stack.enter_context(_instead(name, functools.partial(self._clip, name)))
            yield

    def _clip(self, kind: str, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        alone = isinstance(parameters, torch.Tensor)
        clipped = [parameters] if alone else list(parameters)
        names = {id(leaf.value): leaf.name for leaf in self._tensors}
        found = [names.get(id(one)) for one in clipped]
        if None in found or not all(map(_is_plain, (*args, *kwargs.values()))):
            self.before(kind + BY_VALUES, json.dumps(found))
        else:
            self.before(kind, json.dumps([found, args, kwargs]))
        return original(clipped, *args, **kwargs)

    def finish(self) -> None:
        """Do what others do behind the step's last act."""
        self._do_until(None)

    def _do_until(self, own: Act | None) -> None:
        while self._due and (act := self._due.popleft()) != own:
            self._recording.acts.append(act)
            self._lending = True
            try:
                self._do(act)
            finally:
                self._lending = False

    def _do(self, act: Act) -> None:
        kind, _, of_model = act.kind.partition(" ")
        optimizers, models = self._objects.optimizers, self._objects.models
        if kind == "backward":
            self._pass_without_loss()
        elif kind == "step":
            optimizers[act.name].step()
        elif kind in ("clear", "zero"):
            owner = models[act.name] if of_model else optimizers[act.name]
            owner.zero_grad(set_to_none=kind == "clear")
        elif act.kind in _CLIPS:
            names, args, kwargs = json.loads(act.name)
            known = {leaf.name: leaf.value for leaf in self._tensors}
            getattr(torch.nn.utils, act.kind)([known[name] for name in names], *args, **kwargs)
        elif act.kind == "schedule":
            self._objects.schedulers[act.name].step()

    # -- Backward passes ----------------------------------------------------------------------

    def start(self) -> None:
        """A backward pass begins."""
        self.before("backward")
        recording = self._recording
        recording.had = {leaf.name for leaf in self._tensors if self._has_gradient(leaf)}
        recording.passes += 1

    def _has_gradient(self, leaf: Leaf) -> bool:
        return leaf.value.grad is not None and id(leaf.value) not in self._recording.zeroed

    def lookups(self) -> torch.Tensor | None:
        """Lookups of nothing, of the tables that only others have a gradient of in this pass."""
        return self._lent.lookups(self._tensors, self._recording.last_pass)

    def end(self) -> None:
        """A backward pass ends."""
        number = self._recording.last_pass
        lent = self._lent.passes.get(number, {})
        for leaf in self._tensors:
            if leaf.name in lent and not self._has(leaf.name, number):
                self._give(leaf)
            if self._has(leaf.name, number):
                self._recording.zeroed.discard(id(leaf.value))

    def _has(self, name: str, number: int) -> bool:
        return number in self._recording.gradients.get(name, ())

    def _give(self, leaf: Leaf) -> None:
        """Let a variable have a gradient of zero, or add that to the one it has."""
        with torch.no_grad():
            gradient = self._lent.gradient(leaf.value)
            if leaf.value.grad is not None:
                gradient = leaf.value.grad + gradient
            self._recording.mark(leaf.name)
            _GRAD.__set__(leaf.value, marks.gradient(gradient, leaf.name))

    def _pass_without_loss(self) -> None:
        """A backward pass that this worker has no loss for."""
        number = self._recording.passes
        for leaf in self._tensors:
            if self._lent.passes.get(number, {}).get(leaf.name):  # others had cleared it
                _GRAD.__set__(leaf.value, None)
        with torch.enable_grad():
            nothing = self._lent.lookups(self._tensors, number)
        if nothing is not None:
            nothing.backward()
            return
        self.start()
        self.end()


@contextlib.contextmanager
def _instead(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let a function of ``torch.nn.utils``, which is wrapped by one without gradients, be another
    that is given it."""
    wrapper = getattr(torch.nn.utils, name)
    original = wrapper.__wrapped__
    (cell,) = (one for one in wrapper.__closure__ if one.cell_contents is original)
    cell.cell_contents = functools.partial(function, original)
    try:
        yield
    finally:
        cell.cell_contents = original


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _name(objects: Mapping[str, Any], wanted: Any) -> str:
    """Of an object, or nothing."""
    return next((name for name, one in objects.items() if one is wanted), "")
