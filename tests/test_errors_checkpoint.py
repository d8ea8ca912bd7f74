"""States that do not fit (rows 107-112)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bad_steps
import pytest
import torch
from errors_help import alone, raised
from torch import nn

from parallax.errors import CheckpointError

State = dict[str, Any]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.1)


def trained(make: Callable[[Any], torch.optim.Optimizer] = adam) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    optimizer = make(model.parameters())
    runner = alone(bad_steps.plain(model, optimizer))
    runner.run(torch.tensor([1, 2]))
    return runner, model


def without(state: State, *path: Any) -> None:
    for key in path[:-1]:
        state = state[key]
    del state[path[-1]]


def changed(state: State, value: Callable[[Any], Any], *path: Any) -> None:
    for key in path[:-1]:
        state = state[key]
    state[path[-1]] = value(state.get(path[-1]))


def to_sgd(state: State) -> None:
    runner, _ = trained(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
    state["optimizer"] = runner.state_dict()["optimizer"]


def several(state: State) -> None:
    without(state, "model", "1.bias")
    changed(state, lambda old: old[:2], "model", "0.weight")
    state["ema"] = {}


BAD: dict[str, tuple[Callable[[State], None], tuple[str, ...]]] = {
    "no model": (lambda s: without(s, "model"), ("missing 'model'",)),
    "no optimizer": (lambda s: without(s, "optimizer"), ("missing 'optimizer'",)),
    "extra": (lambda s: s.update(other={}), ("unexpected 'other'",)),
    "missing key": (lambda s: without(s, "model", "1.bias"), ("missing 'model.1.bias'",)),
    "extra key": (
        lambda s: changed(s, lambda _: torch.zeros(1), "model", "2.bias"),
        ("unexpected 'model.2.bias'",),
    ),
    "shape": (
        lambda s: changed(s, lambda old: old[:4], "model", "0.weight"),
        ("'model.0.weight' has shape (4, 3), expected (5, 3)",),
    ),
    "dtype": (
        lambda s: changed(s, lambda old: old.double(), "model", "0.weight"),
        ("'model.0.weight' is torch.float64, expected torch.float32",),
    ),
    "no tensor": (
        lambda s: changed(s, lambda old: old.tolist(), "model", "1.bias"),
        ("'model.1.bias' is a list, not a tensor",),
    ),
    "null": (
        lambda s: changed(s, lambda old: None, "model", "1.bias"),
        ("'model.1.bias' is a NoneType, not a tensor",),
    ),
    "no dict": (lambda s: s.update(model=3), ("model", "is a int, not a state dict")),
    "other optimizer": (to_sgd, ("state of another kind of optimizer", "it lacks", "betas")),
    "no optimizer state": (
        lambda s: s.update(optimizer={"state": {}}),
        ("'optimizer' is no optimizer state",),
    ),
    "groups": (
        lambda s: changed(s, lambda old: old * 2, "optimizer", "param_groups"),
        ("parameter groups of [3, 3] parameters, expected [3]",),
    ),
    "slot": (
        lambda s: without(s, "optimizer", "state", 0, "exp_avg"),
        ("missing 'optimizer.0.exp_avg'",),
    ),
    "slot of new run": (
        lambda s: without(s, "optimizer", "state", 1),
        ("missing 'optimizer.1'",),
    ),
    "slot shape": (
        lambda s: changed(s, lambda old: old[:1], "optimizer", "state", 0, "exp_avg"),
        ("'optimizer.0.exp_avg' has shape (1, 3), expected (5, 3)",),
    ),
    "several": (
        several,
        ("unexpected 'ema'", "missing 'model.1.bias'", "'model.0.weight' has shape (2, 3)"),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(name: str) -> None:
    edit, fragments = BAD[name]
    runner, _ = trained()
    before = runner.state_dict()
    given = runner.state_dict()
    for key in ("0.weight", "1.weight"):
        given["model"][key].zero_()
    edit(given)
    error = raised(
        lambda: runner.load_state_dict(given), CheckpointError, "does not fit this run", *fragments
    )
    assert "nothing was changed" in error.hint
    assert error.exit_code == 6
    assert bad_steps.same(before, runner.state_dict())


OTHER_SHAPES: dict[str, tuple[Callable[[State], Any], str]] = {
    "beside others": (
        lambda s: {**s, "epoch": 3, "scheduler": {"last_epoch": 3}},
        "{name: loaded[name] for name in ['model', 'optimizer']}",
    ),
    "under a key": (lambda s: {"state": s, "epoch": 3}, "loaded['state']"),
    "under two keys": (lambda s: {"run": {"state": s}, "epoch": 3}, "loaded['run']['state']"),
    "by other names": (
        lambda s: {"model_state_dict": s["model"], "optim": s["optimizer"], "epoch": 3},
        "{'model': loaded['model_state_dict'], 'optimizer': loaded['optim']}",
    ),
    "by one other name": (
        lambda s: {"net": s["model"], "optimizer": s["optimizer"]},
        "{'model': loaded['net'], 'optimizer': loaded['optimizer']}",
    ),
}


@pytest.mark.parametrize("name", OTHER_SHAPES)
def test_a_state_in_another_shape_is_refused_with_what_to_pass(name: str) -> None:
    shape, wanted = OTHER_SHAPES[name]
    runner, _ = trained()
    saved = runner.state_dict()
    runner.run(torch.tensor([1, 2]))
    loaded = shape(saved)
    error = raised(lambda: runner.load_state_dict(loaded), CheckpointError, "does not fit this run")
    assert f"pass {wanted}, where loaded is what was given; nothing was changed" in error.hint
    runner.load_state_dict(eval(wanted, {"loaded": loaded}))
    assert bad_steps.same(saved, runner.state_dict())


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        (lambda s: s["model"], "model.load_state_dict(loaded)"),
        (lambda s: {"model": s["model"], "epoch": 3}, "model.load_state_dict(loaded['model'])"),
        (lambda s: {"net": s["model"]}, "model.load_state_dict(loaded['net'])"),
    ],
)
def test_a_state_of_models_alone_is_loaded_by_these(
    shape: Callable[[State], Any], wanted: str
) -> None:
    runner, _ = trained()
    loaded = shape(runner.state_dict())
    error = raised(lambda: runner.load_state_dict(loaded), CheckpointError, "missing 'optimizer'")
    assert f"call {wanted} before the first step, on all workers" in error.hint


@pytest.mark.parametrize(
    "shape",
    [
        lambda s: {"state": s["optimizer"]},
        lambda s: {"first": s["model"], "second": s["model"], "optimizer": s["optimizer"]},
        lambda s: {1: "epoch", "two": s["optimizer"]["param_groups"]},
    ],
)
def test_what_is_not_known_gets_no_such_advice(shape: Callable[[State], Any]) -> None:
    runner, _ = trained()
    loaded = shape(runner.state_dict())
    error = raised(lambda: runner.load_state_dict(loaded), CheckpointError, "missing 'model'")
    assert "load the state of the same models and optimizers" in error.hint


def test_a_fresh_run_takes_no_state_with_other_slots() -> None:
    given, _ = trained(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    optimizer = adam(model.parameters())
    runner = alone(bad_steps.plain(model, optimizer))
    raised(
        lambda: runner.load_state_dict(given.state_dict()),
        CheckpointError,
        "another kind of optimizer",
    )


@pytest.mark.parametrize("given", ["checkpoint.pt", None, [1]])
def test_what_is_no_state_is_refused(given: Any) -> None:
    runner, _ = trained()
    raised(lambda: runner.load_state_dict(given), CheckpointError, "a dict of states", "torch.load")
