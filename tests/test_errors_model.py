"""Models, parameters and optimizers that cannot be distributed (RELIABILITY.md 56-65, 72-80)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from errors_help import alone, linear, raised, rows
from torch import nn

from parallax.errors import (
    ModelError,
    ParallaxError,
    RowIdError,
    UnsupportedError,
    VariableError,
)


class Holding(nn.Module):
    """A linear model with one more parameter."""

    def __init__(self, extra: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.extra = nn.Parameter(extra, requires_grad=extra.is_floating_point())


def runner_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
    def step(x: torch.Tensor) -> None:
        model.zero_grad()
        model(x).sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    return alone(step, model=model)


def shared_memory() -> Any:
    model, memory = nn.Module(), torch.zeros(10)
    model.left = nn.Parameter(memory[:6])
    model.right = nn.Parameter(memory[4:])
    return runner_of(model)


def on_two_devices() -> Any:
    from parallax.graph.objects.checks import _check_devices
    from parallax.graph.objects.state import Leaf

    class Elsewhere:
        device = torch.device("cuda:1")

    def leaf(name: str, value: Any) -> Leaf:
        return Leaf(name, "parameter", value, lambda v: None, lambda: value)

    _check_devices([leaf("left", torch.zeros(1)), leaf("right", Elsewhere())])


def without_storage() -> Any:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2, device="meta"))
    return runner_of(model, torch.optim.SGD(model.parameters(), 0.1)).run(rows())


def hooked(register: Callable[[nn.Parameter], Any]) -> Any:
    model, optimizer = linear()
    register(model.weight)
    return runner_of(model, optimizer)


def two_optimizers() -> Any:
    model, first = linear()
    second = torch.optim.Adam([model.bias], 0.1)
    return runner_of(model, first, second)


def lazy() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return runner_of(nn.LazyLinear(2))


def wrapped() -> Any:
    class Pretended(nn.parallel.DistributedDataParallel):
        """The class alone; a real one wants a process group."""

        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self.module = module

    return runner_of(Pretended(linear()[0]))


def quantised() -> Any:
    return runner_of(Holding(torch.zeros(2).to(torch.float8_e4m3fn)))


def by_frequency() -> Any:
    table = nn.Embedding(5, 3, scale_grad_by_freq=True)
    return runner_of(table, torch.optim.SGD(table.parameters(), 0.1)).run(torch.tensor([1, 2]))


def functional_max_norm() -> Any:
    table = nn.Embedding(5, 3)
    optimizer = torch.optim.SGD(table.parameters(), 0.1)

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.embedding(ids, table.weight, max_norm=1.0).sum().backward()
        optimizer.step()

    return alone(step).run(torch.tensor([1, 2]))


REFUSED: dict[str, tuple[Callable[[], Any], type[ParallaxError], tuple[str, ...]]] = {
    "complex": (
        lambda: runner_of(Holding(torch.zeros(2, dtype=torch.complex64))),
        VariableError,
        ("'extra' is complex (torch.complex64)", "torch.view_as_complex()"),
    ),
    "float8": (quantised, VariableError, ("'extra'", "float8_e4m3fn", "train float16")),
    "lazy": (lazy, ModelError, ("'weight' is lazy", "run the model once on a batch")),
    "meta": (
        without_storage,
        UnsupportedError,
        ("'1.weight' has no storage (it is on the meta device)", "parallax.deferred()"),
    ),
    "overlap": (
        shared_memory,
        VariableError,
        ("'left' and 'right' are views of the same memory", "clone() one of them"),
    ),
    "devices": (
        on_two_devices,
        VariableError,
        ("several devices: 'left' on cpu, 'right' on cuda:1", "move the model to it"),
    ),
    "hook": (
        lambda: hooked(lambda p: p.register_hook(lambda g: g * 2)),
        UnsupportedError,
        ("'weight' has gradient hooks", "parameter.grad in the step after backward()"),
    ),
    "accumulate hook": (
        lambda: hooked(lambda p: p.register_post_accumulate_grad_hook(lambda p: None)),
        UnsupportedError,
        ("'weight' has gradient hooks",),
    ),
    "max_norm": (
        lambda: runner_of(nn.Sequential(nn.Embedding(5, 3, max_norm=1.0))),
        UnsupportedError,
        ("'model.0' has max_norm", "clip rows after optimizer.step()"),
    ),
    "max_norm of a bag": (
        lambda: runner_of(nn.EmbeddingBag(5, 3, max_norm=1.0)),
        UnsupportedError,
        ("'model' has max_norm",),
    ),
    "max_norm as a function": (functional_max_norm, UnsupportedError, ("max_norm", "clip rows")),
    "scale_grad_by_freq": (
        by_frequency,
        UnsupportedError,
        ("'weight' scales gradients by frequency", "scale_grad_by_freq=False"),
    ),
    "DistributedDataParallel": (
        wrapped,
        UnsupportedError,
        ("'model' is wrapped in DistributedDataParallel", "pass the plain module"),
    ),
    "two optimizers": (
        two_optimizers,
        UnsupportedError,
        ("update 'bias'", "give each parameter to one optimizer"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_distributed_is_refused_by_name(name: str) -> None:
    case, kind, fragments = REFUSED[name]
    error = raised(case, kind, *fragments)
    assert error.exit_code == 4


def test_tied_parameters_are_one_variable_with_two_names() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    runner = runner_of(model, torch.optim.SGD(model.parameters(), 0.1))
    runner.run(rows())
    assert "0.weight = 1.weight" in str(runner.plan)
    assert [row.variable.name for row in runner.plan.rows] == ["0.weight", "0.bias", "1.bias"]


def test_unused_parameters_are_listed_and_left_alone() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1)
    before = model["unused"].weight.detach().clone()

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model["used"](x).sum().backward()
        optimizer.step()

    runner = alone(step)
    runner.run(rows())
    assert torch.equal(model["unused"].weight, before)
    why = {row.variable.name: row.choice.why for row in runner.plan.rows}
    assert why["unused.weight"] == "receives no gradient in this step"


# -- What changes after the first step --------------------------------------------------------


def trained() -> tuple[Any, nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(linear()[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    runner = runner_of(model, optimizer)
    runner.run(rows())
    return runner, model, optimizer


def test_parameters_added_later_are_refused_and_nothing_changes() -> None:
    runner, model, optimizer = trained()
    model.append(nn.Linear(2, 2))
    optimizer.add_param_group({"params": list(model[1].parameters())})
    before = model[0].weight.detach().clone()
    for _ in range(2):
        raised(
            lambda: runner.run(rows()),
            VariableError,
            "'1.weight' was added; '1.bias' was added",
            "build the whole model before the first runner.run()",
        )
    assert torch.equal(model[0].weight, before)


def test_a_parameter_replaced_later_is_refused() -> None:
    runner, model, _ = trained()
    model[0].weight = nn.Parameter(torch.zeros(2, 3))
    raised(
        lambda: runner.run(rows()),
        VariableError,
        "'0.weight' was replaced by another tensor",
        "change parameters in place",
    )


def test_parameters_removed_later_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    runner = runner_of(model, torch.optim.SGD(model[0].parameters(), 0.1))
    runner.run(rows())
    del model[1]
    raised(lambda: runner.run(rows()), VariableError, "'1.weight' is gone; '1.bias' is gone")


def test_a_module_added_later_is_used() -> None:
    runner, model, _ = trained()
    model.append(nn.ReLU())
    calls = []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    runner.run(rows())
    assert "relu" in str(runner.graph)


@pytest.mark.parametrize("at_first", [True, False])
def test_the_frozen_set_may_change(at_first: bool) -> None:
    model, optimizer = linear()
    model.bias.requires_grad_(at_first)
    runner = runner_of(model, optimizer)
    for trains in (at_first, not at_first, at_first):
        model.bias.requires_grad_(trains)
        before = model.bias.detach().clone()
        runner.run(rows())
        assert torch.equal(model.bias, before) is not trains


# -- Rows that a table does not have ------------------------------------------------------------


class Words(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "bag":
            self.table: nn.Module = nn.EmbeddingBag(5, 3, mode="sum")
        else:
            self.table = nn.Embedding(5, 3, sparse=kind == "lazy")
        if kind == "frozen":
            self.table.requires_grad_(False)
        self.out = nn.Linear(3, 5)
        if kind == "tied":
            self.out.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.kind == "index":
            return self.out(self.table.weight[ids[:, 0]])
        if self.kind == "computed":
            return self.out(self.table((ids - 1).flip(0)).sum(1))
        found = self.table(ids)
        return self.out(found if self.kind == "bag" else found.sum(1))


@pytest.mark.parametrize(
    "kind", ["embedding", "lazy", "bag", "tied", "frozen", "index", "computed"]
)
@pytest.mark.parametrize("bad", [7, -6])
def test_a_row_that_a_table_does_not_have_is_named(kind: str, bad: int) -> None:
    model = Words(kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    runner = runner_of(model, optimizer)
    good = torch.tensor([[1, 2], [3, 4]])
    runner.run(good)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = bad - 1 if kind == "computed" else bad
    raised(
        lambda: runner.run(torch.tensor([[1, 2], [bad, 4]])),
        RowIdError,
        f"looks up row {found} of table 'table.weight', which has rows 0 to 4",
        "check the vocabulary",
    )
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    runner.run(good)  # and training can go on
    assert not torch.equal(model.out.bias, before["out.bias"])


def test_negative_indices_count_from_the_end_as_in_torch() -> None:
    torch.manual_seed(0)
    model = Words("index")
    expected = model.table.weight.detach().clone()
    runner = runner_of(model, torch.optim.SGD(model.table.parameters(), 0.1))
    runner.run(torch.tensor([[-1, 0]]))
    changed = (model.table.weight != expected).any(1)
    assert changed.tolist() == [False, False, False, False, True]
