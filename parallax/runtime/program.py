"""One captured (and rewritten) step, bound to the state it reads and writes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from parallax.errors import ParallaxError
from parallax.graph.common.interface import COMPUTED, HostCall
from parallax.graph.objects.draws import drawn
from parallax.graph.step_graph import StepGraph
from parallax.graph.symbols.assertions import LeftOutError
from parallax.graph.symbols.endings import Ending
from parallax.graph.symbols.guesses import WrongGuessError, wrong_guess
from parallax.ops.specs import LateSpec, ResourceSpec
from parallax.rewrite.ahead import IdsGraph, ids_graph
from parallax.rewrite.fixed_sizes import with_sizes
from parallax.rewrite.region_graphs import Region
from parallax.rewrite.regions import cut
from parallax.runtime.failures import failure_of
from parallax.runtime.late import LateUpdates
from parallax.runtime.recorded import Recorder
from parallax.runtime.shapes import ByShape
from parallax.runtime.state.state_table import StateTable

R = TypeVar("R", bound=torch.nn.Module)


class Program:
    """Runs one graph: gathers its inputs, puts back new state, makes the host's calls."""

    def __init__(
        self,
        step: StepGraph,
        state: StateTable,
        resources: Sequence[Any] = (),
        digest: int = 0,
        specs: Sequence[ResourceSpec] = (),
        order: int = 0,
        kept: int = 0,
    ) -> None:
        """
        Args:
            step: the graph; its first inputs are ``resources``, then what ``step.inputs`` says.
            state: where state inputs are read and new state is put.
            resources: objects of the runtime (row exchanges, buckets) that the graph uses.
            digest: hash of everything that all workers must be running alike.
            specs: descriptions of ``resources``.
            order: hash of the order in which they are used.
            kept: hash of what the step leaves for the next one, of this worker's own.
        """
        self.step = step
        self.digest = digest
        self.order = order
        self.kept = kept
        self._specs = list(specs)
        self._state = state
        self._resources = list(resources)
        self.late = next((one for one in resources if isinstance(one, LateUpdates)), None)
        """Updates that a step can leave to the one that follows."""
        self._drawn: list[float | int] = []
        """Random numbers for the step that is next, if they are drawn already."""
        self._undraw: Callable[[], None] = _nothing
        """Puts back the generators that they came from."""
        self._draws = {draw.name: place for place, draw in enumerate(step.draws)}
        self._run: Callable[..., Any] = step.graph_module.forward
        self._recorder: Recorder | None = None
        self._by_shape: ByShape | None = None
        self._bind()

    @property
    def late_variables(self) -> int:
        """How many variables' updates it can leave to the next step."""
        specs = [spec for spec in self._specs if isinstance(spec, LateSpec)]
        return len({name for spec in specs for names in spec.names for name in names})

    def _bind(self) -> None:
        state = self._state
        readers: dict[str, Callable[[str], Callable[[], Any]]] = {
            "shard": state.view_reader,
            "outside": self.step.outside.__getitem__,
            "drawn": self._drawn_reader,
        }
        self._readers = [
            readers.get(item.kind, state.reader)(item.name)
            for item in self.step.inputs
            if item.kind != "batch"
        ]
        self._batch = [i.index for i in self.step.inputs if i.kind == "batch"]
        own = zip(self.step.inputs, self.step.own_placeholders(), strict=True)
        self._shaped = [
            (state.reader(item.name), node.meta["val"].shape)
            for item, node in own
            if item.kind == "state" and self._may_change_shape(item.name)
        ]
        """State of which others may put one of another shape, which the graph does not fit."""

    def _drawn_reader(self, name: str) -> Callable[[], Any]:
        place = self._draws[name]
        return lambda: self._drawn[place]

    def _may_change_shape(self, name: str) -> bool:
        leaf = self._state.leaves[name]
        may = leaf.kind == "tensor" or (leaf.kind == "buffer" and name in self.step.new_leaves)
        return may and name not in self._state.layouts

    @functools.cached_property
    def device(self) -> torch.device:
        """Where it computes: on a CUDA device if any of its inputs is on one."""
        devices = [
            value.device
            for node in self.step.placeholders()
            if isinstance(value := node.meta.get("val"), torch.Tensor)
        ]
        on_cuda = (device for device in devices if device.type == "cuda")
        return next(on_cuda, torch.device("cpu"))

    def cut(self, made: Callable[[Region], R], recorder: Recorder | None = None) -> list[R]:
        """Run the graph in regions from now on, each by what ``made`` makes of it: a module.

        Args:
            made: see above.
            recorder: what records regions, if it does; then they hold all that is to be recorded.
        """
        self._recorder = recorder
        self._run, result = self._cut(self.step, made)
        return result

    def cut_by_shape(self, made: Callable[[Region], R], recorder: Recorder) -> None:
        """From now on, run the graph in regions for batches of shapes that come often."""
        sizes = self.step.sizes
        assert sizes is not None
        self._recorder = recorder

        def make(values: tuple[int, ...]) -> Callable[..., Any] | None:
            if not recorder.has_room:
                return None
            return self._cut(with_sizes(self.step, sizes.symbols(values)), made)[0]

        self._by_shape = ByShape(sizes, make)

    def _cut(
        self, step: StepGraph, made: Callable[[Region], R]
    ) -> tuple[Callable[..., Any], list[R]]:
        if self._recorder is None:
            module, regions = cut(step, self._specs)
        else:
            refused = self._recorder.refused
            module, regions = cut(step, self._specs, self.device.type, refused)
        result = [made(region) for region in regions]
        for region, one in zip(regions, result, strict=True):
            setattr(module, region.name, one)
        module.recompile()
        return module.forward, result

    def guards_hold(self, flat: Sequence[Any]) -> bool:
        """Whether every branch on a number would be decided as at capture, with a flat batch; what
        the step made then is not there yet, and what it reads has the shape that it had."""
        if any(name in self._state.leaves for name in self.step.created):
            return False
        if not self._shapes_hold():
            return False
        if not self.step.draws:
            return self._decides_alike(flat)
        self._drawn, self._undraw = drawn(self.step.draws)
        if self._decides_alike(flat):
            return True
        self._undraw()
        self._drawn = []
        return False

    def _decides_alike(self, flat: Sequence[Any]) -> bool:
        return all(
            guard.holds(
                {
                    name: self._value(name) if index is None else flat[index]
                    for name, index in guard.inputs.items()
                }
            )
            for guard in self.step.guards
        )

    def _shapes_hold(self) -> bool:
        try:
            return all(read().shape == shape for read, shape in self._shaped)
        except (LookupError, AttributeError, TypeError):  # there is none now
            return False

    def _value(self, name: str) -> Any:
        if name in self._draws:
            return self._drawn[self._draws[name]]
        outside = self.step.outside.get(name)
        return self._state.value(name) if outside is None else outside()

    def rebind(self) -> bool:
        """After the user's objects were replaced; False if state that it reads is gone."""
        names = (i.name for i in self.step.inputs if i.kind in ("state", "number", "shard"))
        if not all(name in self._state.leaves for name in names):
            return False
        self._bind()
        return True

    def run(self, batch: Sequence[Any], again: bool = False) -> Any:
        """One step on the flat ``batch``; returns what the user's step returns.

        Args:
            batch: see above.
            again: another program has begun the step.

        Raises:
            StepError: an operation failed.
            WrongGuessError: another program has to run; this one has left all as it was.
        """
        for call in self.step.calls:
            if call.before and not again:
                _call(call, ())
        if self.step.draws and not self._drawn:
            self._drawn, self._undraw = drawn(self.step.draws)
        generators = self._generators() if self.step.decisions else []
        self.step.looked.clear()
        inputs = self._resources + [read() for read in self._readers]
        self._drawn = []
        inputs += self._inputs_of(batch)
        run = None if self._by_shape is None else self._by_shape.form(batch)
        try:
            with torch.no_grad():
                results = (run or self._run)(*inputs)
        except LeftOutError as end:
            return self._end(end.ending, end.results)
        except Exception as error:
            raised = self._raised(error)
            if isinstance(raised, WrongGuessError):
                for tensor, before in raised.restored:
                    tensor.copy_(before)
                for put, state in generators:
                    put(state)
                self._undraw()
            if raised is error:
                raise
            raise raised from error
        del inputs
        return self._put_back(self._own(results))

    def _raised(self, error: Exception) -> Exception:
        """What an error within the graph is for whoever runs it."""
        if isinstance(error, WrongGuessError):
            return error
        wrong = None if isinstance(error, ParallaxError) else wrong_guess(self.step.looked)
        return wrong or failure_of(error, self.step.graph) or error

    def _generators(self) -> list[tuple[Callable[[torch.Tensor], Any], torch.Tensor]]:
        """PyTorch's generators that a step may draw from: what puts each back, and its state."""
        found: list[Any] = [torch.default_generator]
        if self.device.type == "cuda":
            found.append(torch.cuda.default_generators[self.device.index or 0])
        return [(one.set_state, one.get_state()) for one in found]

    def _own(self, results: Sequence[Any]) -> Sequence[Any]:
        return results if self._recorder is None else self._recorder.owned(results)

    def _inputs_of(self, batch: Sequence[Any]) -> list[Any]:
        """What the graph reads of a flat batch."""
        own = [batch[index] for index in self._batch]
        # With sizes that vary it was captured as if all lay in order.
        return own if self.step.sizes is None else [_in_order(item) for item in own]

    @functools.cached_property
    def _ids(self) -> IdsGraph | None:
        return ids_graph(self.step, self._specs)

    @property
    def knows_ids(self) -> bool:
        """Whether an exchange looks up by what follows from the batch alone."""
        return self._ids is not None

    def ids(self, batch: Sequence[Any]) -> Mapping[Any, Any]:
        """By exchange, what it looks up by in a step on the flat ``batch``, as far as that follows
        from the batch alone; it need not be the present step."""
        if self._ids is None:
            return {}
        exchanges = [self._resources[number] for number in self._ids.exchanges]
        return dict(zip(exchanges, self._ids(self._inputs_of(batch)), strict=True))

    def _end(self, ending: Ending, results: Sequence[Any]) -> Any:
        """Leave the rest of the step out, and what it would have changed."""
        results = self._own(results)
        numbers = self._put_numbers(ending, results)
        for write in ending.writes:
            write(numbers)
        made = sum(call.before for call in self.step.calls)
        for call in ending.calls[made:]:
            _call(call, results)
        return _returned(ending, results)

    def _put_numbers(self, step: StepGraph | Ending, results: Sequence[Any]) -> dict[str, Any]:
        """Put numbers where they are read in the next step; those that are written elsewhere."""
        numbers: dict[str, Any] = {}
        for output, value in zip(step.outputs, results, strict=True):
            if output.kind == "outside":
                self.step.outside[output.name].put(value)
            elif output.kind == "write":
                numbers[output.name] = value
        for name, number in step.left.items():
            self.step.outside[name].put(number)
        return numbers

    def _put_back(self, results: Sequence[Any]) -> Any:
        step = self.step
        numbers = self._put_numbers(step, results)
        state = dict(step.constants)
        for output, value in zip(step.outputs, results, strict=True):
            if output.kind == "state":
                state[output.name] = value
        created = False
        for name, place in step.new_leaves.items():  # in the order in which the step made them
            created |= name not in self._state.leaves
            self._state.put(name, state[name], place)
        for write in step.writes:
            write(numbers)
        if created:
            self._state.refresh()
        for call in step.calls:
            if not call.before:
                _call(call, results)
        return _returned(step, results)


def _nothing() -> None:
    pass


def _returned(step: StepGraph | Ending, results: Sequence[Any]) -> Any:
    pairs = zip(step.outputs, results, strict=True)
    values = iter([value for output, value in pairs if output.kind == "return"])
    flat = [next(values) if item is COMPUTED else item for item in step.return_constants]
    return pytree.tree_unflatten(flat, step.return_spec)


def _in_order(item: Any) -> Any:
    is_strided = isinstance(item, torch.Tensor) and item.layout is torch.strided
    return item.contiguous() if is_strided else item


def _call(call: HostCall, results: Sequence[Any]) -> None:
    flat = list(call.constants)
    for position, index in call.outputs:
        flat[position] = results[index]
    args, kwargs = pytree.tree_unflatten(flat, call.spec)
    call.function(*args, **kwargs)
