"""What a step reaches is what its code names, and nothing that is only called alike."""

from __future__ import annotations

import torch

from parallax.graph.common.user_code import is_library_code
from parallax.graph.objects.discovery import discover
from parallax.graph.objects.outside import OutsideValues

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
other = torch.nn.Linear(2, 1)
other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
calls = 0


def step(x: torch.Tensor) -> torch.Tensor:
    """Named as the method that every optimizer has."""
    optimizer.zero_grad()
    loss = model(x).mean()
    loss.backward()
    optimizer.step()
    return loss


def other_step(x: torch.Tensor) -> torch.Tensor:
    global calls
    calls = 1
    losses = [other(part).mean() for part in x.chunk(2)]
    other_optimizer.zero_grad()
    sum(losses).backward()  # type: ignore[union-attr]
    other_optimizer.step()
    return losses[0]


def through_a_function(x: torch.Tensor) -> torch.Tensor:
    return step(x)


def test_a_method_is_not_a_global_of_the_same_name() -> None:
    """``other_optimizer.step`` is not the function ``step`` of the same file."""
    found = discover(other_step)
    assert list(found.models) == ["other"]
    assert list(found.optimizers) == ["other_optimizer"]


def test_globals_are_found_in_the_step_and_in_what_it_calls() -> None:
    for function in (step, through_a_function):
        found = discover(function)
        assert list(found.models) == ["model"]
        assert list(found.optimizers) == ["optimizer"]


class _Kept:
    """Keeps a scheduler in its class."""

    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    others = ({"scheduler": 1}, torch.optim.lr_scheduler.ExponentialLR(other_optimizer, 0.9))


def test_schedulers_in_attributes_of_classes_are_found() -> None:
    def step(x: torch.Tensor) -> None:
        model(x).mean().backward()
        optimizer.step()
        _Kept.scheduler.step()

    def by_object(x: torch.Tensor) -> None:
        model(x).mean().backward()
        optimizer.step()
        kept.scheduler.step()

    kept = _Kept()
    for function in (step, by_object):
        found = discover(function)
        assert [*found.schedulers.values()] == [_Kept.scheduler, _Kept.others[1]]
        assert [*found.optimizers] == ["optimizer", "optimizer_2"]


def test_an_optimizer_has_its_name_though_its_scheduler_comes_first() -> None:
    schedulers = [_Kept.scheduler]

    def step(x: torch.Tensor) -> None:
        for one in schedulers:
            one.step()
        last.step()

    last = optimizer
    assert [*discover(step).optimizers] == ["last"]


class _Teacher:
    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 1)
        self.scale = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(x) * self.scale
        return found


def test_objects_of_a_list_are_told_apart() -> None:
    """Which have equal attributes."""
    teachers = [_Teacher(), _Teacher()]

    def step(x: torch.Tensor) -> None:
        sum(teacher(x).mean() for teacher in teachers).backward()  # type: ignore[union-attr]

    values = OutsideValues(discover(step))
    names = [name for name in values.names if name.endswith("scale")]
    assert names == ["teachers[0].scale", "teachers[1].scale"]
    before = values.read()
    teachers[1].scale = 2.0
    assert values.read() != before


def test_packages_are_no_user_code_wherever_they_are_installed() -> None:
    """Those of ``pip install --user``, say, are not in the folder of the environment."""
    places = ("/home/ann/.local/lib/python3.11/site-packages", "/usr/lib/python3/dist-packages")
    for place in places:
        assert is_library_code(compile("x", f"{place}/transformers/models.py", "eval"))
    assert not is_library_code(compile("x", "/home/ann/my-site-packages/train.py", "eval"))
