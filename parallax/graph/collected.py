"""What a step leaves while it is captured: its results, new values of its state, calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from parallax.errors import UnsupportedError
from parallax.graph.analysis.carried import is_cleared
from parallax.graph.common.interface import COMPUTED, GraphOutput, HostCall, Written
from parallax.graph.common.recording import Recording
from parallax.graph.objects.discovery import StepObjects
from parallax.graph.objects.entries import Entry, entries, is_new, is_plain
from parallax.graph.objects.made import Made, Positions, positions
from parallax.graph.objects.outside import changed
from parallax.graph.objects.sites import Site
from parallax.graph.objects.snapshot import Place, Snapshot
from parallax.graph.objects.state import Leaf, leaves
from parallax.graph.objects.writes import writes
from parallax.graph.symbols.endings import Ending, leaves_all

_RESULTS = ("return", "write", "outside", "call", "said")
"""What a way may leave that ends a step: no tensors that are state."""


@dataclass(frozen=True)
class Before:
    """The state before the step, with what the capture has put in its places."""

    leaves: Mapping[str, Leaf]
    positions: Positions
    entries: Mapping[str, Entry]
    frozen: frozenset[str]
    """Parameters without gradients."""
    groups: Mapping[str, int]
    """How many groups of parameters each optimizer has."""

    @classmethod
    def of(cls, objects: StepObjects) -> Before:
        """The state that is there now."""
        known = leaves(objects)
        frozen = {
            name
            for name, leaf in known.items()
            if leaf.kind == "parameter" and not leaf.value.requires_grad
        }
        groups = {name: len(one.param_groups) for name, one in objects.optimizers.items()}
        return cls(known, positions(objects), entries(objects), frozenset(frozen), groups)


@dataclass
class Collected:
    """Flat outputs of the graph, and the Python values around them."""

    flat: list[Any] = field(default_factory=list)
    outputs: list[GraphOutput] = field(default_factory=list)
    return_spec: Any = None
    return_constants: tuple[Any, ...] = ()
    new_leaves: dict[str, Callable[[Any], None]] = field(default_factory=dict)
    created: frozenset[str] = frozenset()
    constants: dict[str, Any] = field(default_factory=dict)
    calls: tuple[HostCall, ...] = ()
    carried: list[str] = field(default_factory=list)
    left: dict[str, float] = field(default_factory=dict)
    counted: list[Site] = field(default_factory=list)
    """Where the step changed numbers that were no inputs."""
    kept: set[Place] = field(default_factory=set)
    """Places whose contents are state, or are set after each step."""
    writes: list[Written] = field(default_factory=list)
    places: list[Site] = field(default_factory=list)
    """Where the step sets values that are not numbers of its own."""

    def ending(
        self, graph: torch.fx.Graph, before: Collection[str], notes: Sequence[str]
    ) -> Ending | None:
        """How the step ends, if it changes no tensors that are state after a branch.

        Args:
            graph: of the way, as it was traced.
            before: names of its nodes before the branch.
            notes: for the user.
        """
        changes_state = self.new_leaves or self.constants
        if changes_state or any(output.kind not in _RESULTS for output in self.outputs):
            return None
        if not leaves_all(graph, before):
            return None
        return Ending(
            graph,
            frozenset(before),
            tuple(self.outputs),
            self.return_spec,
            self.return_constants,
            self.calls,
            dict(self.left),
            tuple(self.writes),
            tuple(notes),
        )

    def collect_result(self, result: Any) -> None:
        """What the step returned."""
        flat, self.return_spec = pytree.tree_flatten(result)
        constants = []
        for item in flat:
            if _is_computed(item):
                self._add(item.detach() if isinstance(item, torch.Tensor) else item, "return")
                constants.append(COMPUTED)
            else:
                constants.append(item)
        self.return_constants = tuple(constants)

    def _add(self, value: Any, kind: Any, name: str = "") -> None:
        self.flat.append(value)
        self.outputs.append(GraphOutput(kind, name))

    def collect_state(self, objects: StepObjects, snapshot: Snapshot, before: Before) -> None:
        """New values of what models, optimizers and holders hold.

        Raises:
            UnsupportedError: a parameter is another tensor, or an optimizer has other groups.
        """
        snapshot.hold_new()
        for name, optimizer in objects.optimizers.items():
            if len(optimizer.param_groups) != before.groups[name]:
                raise UnsupportedError(
                    f"The step adds a group of parameters to {name!r}, or removes one.",
                    hint="do it once between steps; the next one is captured for the new groups.",
                )
        after = leaves(objects)
        made = Made(objects, snapshot, before.positions, before.leaves, after)
        self.kept = made.kept
        for name, entry in entries(objects).items():
            if is_plain(entry.form) and not entry.is_read:
                objects.plain[name] = entry
            if is_new(entry, before.entries, name):
                self.new_leaves[name], self.constants[name] = entry.put, entry.form
        for name, leaf in after.items():
            old = before.leaves.get(name)
            put = made.puts.get(name)
            if old is None or old.value is not leaf.value:
                was_trained = old is not None and old.kind == "parameter"
                if leaf.kind == "parameter" and (was_trained or not leaf.held):
                    leaf.put(leaf.value)  # refuses
                put = put if leaf.held else leaf.put
            if put is None:
                continue
            self.new_leaves[name] = put
            value = leaf.value
            if isinstance(value, torch.Tensor):
                self._add(value.detach() if value.requires_grad else value, "state", name)
            elif _is_computed(value):
                self._add(value, "state", name)
            else:
                self.constants[name] = value
        self._collect_writes(objects, snapshot, made)
        self._collect_frozen(after, before.frozen)
        self.created = frozenset(self.new_leaves.keys() - before.leaves.keys())

    def _collect_writes(self, objects: StepObjects, snapshot: Snapshot, made: Made) -> None:
        """Python values that the step has set."""
        for name, put in made.number_puts.items():
            self._add(made.numbers[name], "write", name)
            self.writes.append(functools.partial(_put_number, put, name))
        for write in writes(objects, snapshot, made):
            for name, number in write.numbers.items():
                self._add(number, "write", name)
            self.writes.append(write.put)
            self.kept.add(write.key)
            if write.place is not None:
                self.places.append(write.place)

    def _collect_frozen(self, after: Mapping[str, Leaf], before: Collection[str]) -> None:
        """Which parameters the step has frozen or unfrozen."""
        for name, leaf in after.items():
            in_model = leaf.kind == "parameter" and not leaf.held
            if in_model and (name in before) == leaf.value.requires_grad:
                self.writes.append(functools.partial(_freeze, leaf.value, name not in before))

    def collect_calls(self, recording: Recording) -> None:
        """Calls that the host makes.

        Raises:
            UnsupportedError: one comes before the update, with a value of the step.
        """
        calls = []
        for call in recording.calls:
            kind = "said" if call.is_said else "call"
            values, spec = pytree.tree_flatten((call.args, call.kwargs))
            outputs = []
            for position, item in enumerate(values):
                if _is_computed(item):
                    outputs.append((position, len(self.flat)))
                    self._add(item, kind)
            if call.before and outputs:
                raise UnsupportedError(
                    "A scheduler is stepped with a value of this step before optimizer.step().",
                    hint="call scheduler.step(metric) after optimizer.step().",
                )
            fixed = tuple(None if _is_computed(item) else item for item in values)
            calls.append(HostCall(call.function, call.before, spec, fixed, tuple(outputs)))
        self.calls = tuple(calls)

    def note_rates(self, objects: StepObjects, recording: Recording) -> None:
        """Note learning rates that the step returns, if it steps their scheduler as well: that is
        done when the graph has run."""
        pairs = zip(self.flat, self.outputs, strict=True)
        returned = {id(value) for value, output in pairs if output.kind == "return"}
        stepped = {
            id(scheduler.optimizer)
            for call in recording.calls
            if (scheduler := getattr(call.function, "__self__", None)) is not None
            and hasattr(scheduler, "optimizer")
        }
        for name, optimizer in objects.optimizers.items():
            rates = [group.get("lr") for group in optimizer.param_groups]
            if id(optimizer) in stepped and _is_said_late(recording, optimizer, rates):
                recording.notes.append(
                    f"the step says a learning rate of {name} as it was before the scheduler's "
                    "step within it: say it before that, or read it outside"
                )
            if id(optimizer) in stepped and any(id(rate) in returned for rate in rates):
                recording.notes.append(
                    f"the step returns a learning rate of {name} as it was before the scheduler's "
                    "step within it: read it outside, after runner.run()"
                )

    def collect_outside(
        self, inputs: Sequence[Site], symbols: Sequence[Any], others: Sequence[Site], values: Any
    ) -> None:
        """Numbers that the step left elsewhere.

        Args:
            inputs, symbols: those that are inputs of the graph, and what stood there.
            others, values: those that are not, and what they were.
        """
        self.counted = changed(others, values)
        for site in changed(inputs, symbols):
            if _is_computed(site.value):
                self._add(site.value, "outside", site.name)
            else:
                self.left[site.name] = site.value

    def collect_carried(self, before: Before, recording: Recording) -> None:
        """Gradients that are neither cleared nor from this step alone."""
        for name, leaf in before.leaves.items():
            if leaf.kind != "parameter" or leaf.value.grad is None:
                continue
            if id(leaf.value) not in recording.cleared and not is_cleared(leaf.value.grad):
                self.carried.append(name)


def _freeze(parameter: torch.Tensor, frozen: bool, _: Mapping[str, Any]) -> None:
    parameter.requires_grad_(not frozen)


def _put_number(put: Callable[[Any], None], name: str, numbers: Mapping[str, Any]) -> None:
    put(numbers[name])


def _is_said_late(recording: Recording, optimizer: Any, rates: Sequence[Any]) -> bool:
    """Whether rates are printed or logged after their scheduler's step."""
    known = {id(rate) for rate in rates}
    is_stepped = False
    for call in recording.calls:
        scheduler = getattr(call.function, "__self__", None)
        is_stepped |= getattr(scheduler, "optimizer", None) is optimizer
        values = pytree.tree_leaves(call.args) if call.is_said and is_stepped else ()
        if any(id(value) in known for value in values):
            return True
    return False


def _is_computed(value: Any) -> bool:
    return isinstance(value, torch.Tensor | torch.SymFloat | torch.SymInt | torch.SymBool)
