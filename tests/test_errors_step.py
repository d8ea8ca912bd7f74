"""Steps that cannot be captured: what is wrong, where, and the way out (RELIABILITY.md 52-54)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from errors_help import alone, linear, marked_line, raised, rows
from torch import nn

from parallax.errors import (
    CaptureError,
    CheckError,
    ConfigError,
    DataDependentError,
    ModelError,
    ParallaxError,
    StepError,
    UnsupportedError,
)

BRANCH = "choose with torch.where or multiply by a mask"
ONE_GRAPH = "depends on the values of tensors"


def trained(body: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> Callable[[], Any]:
    """Run a step whose middle is ``body(model, outputs, loss)``."""

    def case() -> Any:
        model, optimizer = linear()

        def step(x: torch.Tensor) -> Any:
            optimizer.zero_grad()
            y = model(x)
            loss = y.sum()
            found = body(model, y, loss)
            loss.backward()
            optimizer.step()
            return found

        return alone(step, model=model).run(rows())

    return case


def branch(model: Any, y: Any, loss: torch.Tensor) -> Any:
    return 1 if loss > 0 else 2  # here


def loop(model: Any, y: torch.Tensor, loss: torch.Tensor) -> Any:
    while y.norm() > 1:  # here
        y = y / 2
    return y


def counts(model: Any, y: Any, loss: torch.Tensor) -> Any:
    return list(range(int(loss)))  # here


def truth(model: Any, y: torch.Tensor, loss: torch.Tensor) -> Any:
    assert (y > 1e6).all(), "outputs"  # here


def decides(model: Any, y: torch.Tensor, loss: torch.Tensor) -> Any:
    return bool(torch.isfinite(loss))  # here


def to_numpy(model: Any, y: torch.Tensor, loss: torch.Tensor) -> Any:
    return y.detach().numpy()  # here


def as_array(model: Any, y: torch.Tensor, loss: torch.Tensor) -> Any:
    return np.asarray(y.detach())  # here


def formats(model: Any, y: Any, loss: torch.Tensor) -> Any:
    return f"{loss.item():.3f}"  # here


def fails(model: Any, y: Any, loss: Any) -> Any:
    raise ValueError("no luck today")  # here


def wrong_call(model: Any, y: torch.Tensor, loss: Any) -> Any:
    return y.sum(colour="red")  # here


def sets_data(model: Any, y: Any, loss: Any) -> Any:
    model.weight.data = model.weight.data.half()  # here


def shares_data(model: Any, y: Any, loss: Any) -> Any:
    model.weight.data = model.weight.data.flatten()[:1].expand_as(model.weight)  # here


IN_THE_STEP: dict[str, tuple[Callable[..., Any], type[ParallaxError], tuple[str, ...]]] = {
    "if": (branch, DataDependentError, (ONE_GRAPH, BRANCH)),
    "while": (loop, DataDependentError, (ONE_GRAPH, BRANCH)),
    "int": (counts, DataDependentError, (ONE_GRAPH, "return numbers that texts, NumPy, range()")),
    "assert": (truth, CheckError, ("A check in the step failed: AssertionError: outputs.",)),
    "bool": (decides, DataDependentError, (ONE_GRAPH,)),
    "numpy": (to_numpy, CaptureError, (".numpy() is not supported", "keep numpy, .tolist()")),
    "asarray": (as_array, CaptureError, ("could not be captured", "keep numpy, .tolist()")),
    "f-string": (formats, CaptureError, ("formats a number", "format it outside the step")),
    "raises": (fails, CaptureError, ("ValueError: no luck today", "on one device")),
    "TypeError": (wrong_call, CaptureError, ("TypeError: sum() received", "on one device")),
    ".data": (sets_data, UnsupportedError, ("assigns to .data", "parameter.copy_(value)")),
    "shared .data": (shares_data, UnsupportedError, ("another variable's memory", "be lost")),
}


@pytest.mark.parametrize("name", IN_THE_STEP)
def test_a_step_that_is_no_graph_is_refused_at_its_line(name: str) -> None:
    body, kind, fragments = IN_THE_STEP[name]
    error = raised(trained(body), kind, *fragments, f"at {marked_line(body)}: ")
    assert error.hint
    assert error.exit_code == 4


def wrong_dtype(model: Any, y: torch.Tensor, loss: Any) -> Any:
    return model(y.detach().new_zeros(2, 3).double())  # here


def wrong_label(model: Any, y: torch.Tensor, loss: Any) -> Any:
    return nn.functional.cross_entropy(y, torch.full((len(y),), 7))  # here


def wrong_index(model: Any, y: torch.Tensor, loss: Any) -> Any:
    return y.detach()[torch.full((2,), 99)]  # here


FAILING = {
    wrong_dtype: "RuntimeError: mat1 and mat2 must have the same dtype",
    wrong_label: "IndexError: Target 7 is out of bounds",
    wrong_index: "IndexError: index 99 is out of bounds",
}


@pytest.mark.parametrize("body", FAILING)
def test_an_operation_that_fails_as_it_runs_is_told_by_its_line(body: Any) -> None:
    said = f"An operation of the step failed: {FAILING[body]}"
    error = raised(trained(body), StepError, said, f"at {marked_line(body)}: ", "on one device")
    assert isinstance(error.__cause__, RuntimeError | IndexError)


def takes_two(x: torch.Tensor, y: torch.Tensor) -> None:  # here
    nn.Linear(3, 2)(x).sum().backward()


def test_a_call_that_does_not_fit_the_step_points_at_the_step() -> None:
    model, _ = linear()
    raised(
        lambda: alone(takes_two, model=model).run(rows()),
        CaptureError,
        "takes_two() missing 1 required positional argument: 'y'",
        f"at {marked_line(takes_two)}: def takes_two(",
        "call runner.run() with the arguments that the step takes",
    )


def test_vector_loss() -> None:
    model, _ = linear()

    def step(x: torch.Tensor) -> None:
        model(x).backward()  # here

    place = marked_line(step)
    raised(lambda: alone(step).run(rows()), CaptureError, "scalar outputs", f"at {place}")


# -- What the step is, and what it trains ---------------------------------------------------


def nothing_found() -> Any:
    return alone(lambda x: x.sum())


def step_is_module() -> Any:
    return alone(linear()[0])


def step_yields() -> Any:
    def step(x: torch.Tensor) -> Any:
        yield linear()[0](x)

    return alone(step)


def step_waits() -> Any:
    async def step(x: torch.Tensor) -> Any:
        return linear()[0](x)

    return alone(step)


def no_backward() -> Any:
    model, _ = linear()
    return alone(lambda x: model(x).sum()).run(rows())


def all_frozen() -> Any:
    model, _ = linear()
    model.requires_grad_(False)
    return alone(lambda x: model(x).sum())


def no_parameters() -> Any:
    model = nn.ReLU()
    return alone(lambda x: model(x).sum())


def never_cleared() -> Any:
    model, optimizer = linear()

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    return alone(step).run(rows())


def one_not_cleared() -> Any:
    model, optimizer = linear()

    def step(x: torch.Tensor) -> None:
        model.weight.grad = None
        model(x).sum().backward()
        optimizer.step()

    return alone(step).run(rows())


def replaces_parameter() -> Any:
    model, optimizer = linear()

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        model.weight = nn.Parameter(torch.zeros(2, 3))

    return alone(step).run(rows())


def adds_group() -> Any:
    model, optimizer = linear()
    other = nn.Linear(3, 2)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (model(x) + other(x)).sum().backward()
        optimizer.step()
        optimizer.add_param_group({"params": other.parameters()})

    return alone(step).run(rows())


def with_optimizer(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[], Any]:
    def case() -> Any:
        model, _ = linear()
        optimizer = make(model.parameters())

        def step(x: torch.Tensor) -> Any:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x).sum()
                loss.backward()
                return loss

            return optimizer.step(closure)

        return alone(step).run(rows())

    return case


def scaled(enabled: bool) -> Any:
    model, optimizer = linear()
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return alone(step).run(rows())


STEPS: dict[str, tuple[Callable[[], Any], type[ParallaxError], tuple[str, ...]]] = {
    "number": (lambda: alone(3), ConfigError, ("must be a function", "found int")),
    "generator": (step_yields, ConfigError, ("step is a generator", "a plain function")),
    "coroutine": (step_waits, ConfigError, ("step is a coroutine", "a plain function")),
    "module": (step_is_module, ConfigError, ("found Linear", "parallax.get_runner(train_step)")),
    "wrong model": (
        lambda: alone(lambda x: x, model="net"),
        ConfigError,
        ("model must be of kind Module", "found str"),
    ),
    "wrong optimizer": (
        lambda: alone(lambda x: x, optimizer=[linear()[0]]),
        ConfigError,
        ("optimizer0 must be of kind Optimizer", "found Linear"),
    ),
    "no model": (nothing_found, ModelError, ("reaches no model", "model=model")),
    "no backward": (no_backward, ModelError, ("without a backward pass", "loss.backward()")),
    "all frozen": (all_frozen, ModelError, ("nothing to train", "requires_grad_(True)")),
    "no parameters": (no_parameters, ModelError, ("nothing to train", "model=model")),
    "never cleared": (
        never_cleared,
        ModelError,
        ("adds to gradients that the previous call left", "'weight'", "optimizer.zero_grad()"),
    ),
    "one not cleared": (one_not_cleared, ModelError, ("'bias' are not cleared",)),
    "replaced": (
        replaces_parameter,
        UnsupportedError,
        ("replaces the parameter 'weight'", "parameter.copy_(value)"),
    ),
    "group": (adds_group, UnsupportedError, ("adds a group of parameters to 'optimizer'", "once")),
    "LBFGS": (
        with_optimizer(torch.optim.LBFGS),
        UnsupportedError,
        ("'optimizer' is LBFGS", "such as Adam or SGD"),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_cannot_be_trained_is_refused(name: str) -> None:
    case, kind, fragments = STEPS[name]
    raised(case, kind, *fragments)


def test_a_disabled_scaler_and_closures_are_accepted() -> None:
    model, _ = linear()
    assert torch.equal(scaled(False), model(rows()).sum())
    found = with_optimizer(lambda p: torch.optim.SGD(p, 0.1))()
    assert torch.equal(found, model(rows()).sum())


def test_gradients_cleared_by_hand_are_accepted() -> None:
    model, optimizer = linear()

    def step(x: torch.Tensor) -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(x).sum().backward()
        optimizer.step()

    expected, _ = linear()
    alone(step).run(rows())
    alone_after = model.weight.detach().clone()
    assert torch.allclose(alone_after, expected.weight - 0.1 * rows().sum(0))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_leaving_the_step_leaves_everything_as_it_was(kind: type[BaseException]) -> None:
    model, optimizer = linear()
    before, rate = model.weight, optimizer.param_groups[0]["lr"]

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        raise kind

    runner = alone(step)
    with pytest.raises(kind):
        runner.run(rows())
    assert model.weight is before
    assert torch.equal(model.weight, linear()[0].weight)
    assert model.weight.grad is None
    assert optimizer.param_groups[0]["lr"] == rate
