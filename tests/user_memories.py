"""Hidden states and memories that a step keeps for the next one, as people do: see user_steps."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from user_cases import CASES, STEPS, Built, case, numbers, stepping

WIDTH, HIDDEN = 3, 4
MEMORY = None


class States(NamedTuple):
    """What an LSTM carries."""

    h: torch.Tensor
    c: torch.Tensor


class Tagger(nn.Module):
    """An LSTM that may keep its states in itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.LSTM(WIDTH, HIDDEN, batch_first=True), nn.Linear(HIDDEN, 1)
        self.hidden: Any = None

    def forward(self, x: torch.Tensor, states: Any) -> tuple[torch.Tensor, Any]:
        outputs, states = self.layers(x, states)
        return self.out(outputs), states


def _detached(states: Any) -> Any:
    if states is None or isinstance(states, torch.Tensor):
        return None if states is None else states.detach()
    return tuple(_detached(one) for one in states)


def _training(rows: int, get: Callable[[Any], Any], put: Callable[[Any, Any], None]) -> Built:
    """Truncated backpropagation through time, with the states in a place of their own."""
    model = Tagger().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    place = SimpleNamespace(hidden=None, inner={"deep": {"hidden": None}}, model=model)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        outputs, states = model(x, _detached(get(place)))
        loss = F.mse_loss(outputs, x.sum(2, keepdim=True))
        loss.backward()
        optimizer.step()
        put(place, states)
        return loss

    return [model], step, [(numbers(rows, 5, WIDTH),) for _ in range(STEPS + 1)]


def _to_attribute(place: Any, states: Any) -> None:
    place.hidden = states


def _to_list(place: Any, states: Any) -> None:
    place.hidden = [one.detach() for one in states]


def _to_named(place: Any, states: Any) -> None:
    place.hidden = States(*states)


def _to_module(place: Any, states: Any) -> None:
    place.model.hidden = states  # with its gradients, which the next step cuts off


def _to_entry(place: Any, states: Any) -> None:
    place.inner["deep"]["hidden"] = states


def _to_new_dict(place: Any, states: Any) -> None:
    place.hidden = {"h": states[0], "both": [states, 5]}


PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    "attribute": (lambda place: place.hidden, _to_attribute),
    "list": (lambda place: place.hidden, _to_list),
    "named tuple": (lambda place: place.hidden, _to_named),
    "module": (lambda place: place.model.hidden, _to_module),
    "entry": (lambda place: place.inner["deep"]["hidden"], _to_entry),
    "new dict": (lambda place: place.hidden and place.hidden["both"][0], _to_new_dict),
}
for _name, (_get, _put) in PLACES.items():

    def _case(rows: int, get: Any = _get, put: Any = _put) -> Built:
        return _training(rows, get, put)

    CASES[f"states in a {_name}"] = _case


@case
def states_in_a_global_and_a_cell(rows: int) -> Built:
    global MEMORY
    MEMORY = None
    cell: Any = None

    def get(_: Any) -> Any:
        return MEMORY if MEMORY is None else (MEMORY, cell)

    def put(_: Any, states: Any) -> None:
        global MEMORY
        nonlocal cell
        MEMORY, cell = states[0], states[1].detach()

    return _training(rows, get, put)


class _Averaging(torch.optim.Optimizer):
    """Keeps what it did last in attributes of its own, which it makes when it needs them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.last: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters]
        if self.last is not None:
            gradients = [g + 0.5 * old for g, old in zip(gradients, self.last, strict=True)]
            gradients = [g - 0.1 * old for g, old in zip(gradients, self.pair[1], strict=True)]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(self.param_groups[0]["lr"] * gradient)
        self.last, self.pair = tuple(gradients), ("first", gradients[:])


@case
def attributes_that_an_optimizer_makes(rows: int) -> Built:
    model = nn.Linear(4, 3).double()
    return stepping(rows, model, _Averaging(model.parameters()))


@case
def memories_that_grow(rows: int) -> Built:
    """Transformer-XL's: a list of what each layer computed, of more and more steps up to some."""
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)).double()
    optimizer = torch.optim.Adam(layers.parameters(), 0.01)
    keeper = SimpleNamespace(memories=[])

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        new, value = [], x
        for number, layer in enumerate(layers):
            past = keeper.memories[number] if keeper.memories else x[:, :0]
            context = torch.cat([past, value], 1)
            new.append(context[:, -6:].detach())
            weights = torch.softmax(value @ context.transpose(1, 2), 2)
            value = value + torch.tanh(layer(weights @ context))
        keeper.memories = new
        loss = value.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return [layers], step, [(numbers(rows, 4, WIDTH),) for _ in range(STEPS + 1)]


@case
def two_names_of_one_tensor(rows: int) -> Built:
    model = nn.Linear(WIDTH, WIDTH).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    zeros = torch.zeros(rows, WIDTH, dtype=torch.float64)
    kept = SimpleNamespace(last=None, before=None, first=None)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        last = zeros[: len(x)] if kept.last is None else kept.last
        before = zeros[: len(x)] if kept.before is None else kept.before
        outputs = model(x + 0.5 * last - 0.2 * before)
        if kept.first is None:
            kept.first = kept.last = outputs.detach()
        else:
            kept.before, kept.last = kept.last, outputs.detach()
        loss = outputs.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return [model], step, [(numbers(rows, WIDTH),) for _ in range(STEPS + 2)]


@case
def an_adversary_that_is_looked_at(rows: int) -> Built:
    """Inputs moved by the sign of their gradient, kept in an attribute to be looked at."""
    model = nn.Linear(WIDTH, WIDTH).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept = SimpleNamespace(moved=None)

    def step(x: torch.Tensor) -> torch.Tensor:
        kept.moved = torch.zeros_like(x, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x + kept.moved).square().mean(), kept.moved)
        loss = model(x + 0.1 * gradient.sign()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return [model], step, [(numbers(rows, WIDTH),) for _ in range(STEPS)]
