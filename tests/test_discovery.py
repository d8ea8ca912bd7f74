"""What a step reaches is what its code names, and nothing that is only called alike."""

from __future__ import annotations

import torch

from parallax.graph.common.user_code import is_library_code
from parallax.graph.objects.discovery import discover

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


def test_packages_are_no_user_code_wherever_they_are_installed() -> None:
    """Those of ``pip install --user``, say, are not in the folder of the environment."""
    places = ("/home/ann/.local/lib/python3.11/site-packages", "/usr/lib/python3/dist-packages")
    for place in places:
        assert is_library_code(compile("x", f"{place}/transformers/models.py", "eval"))
    assert not is_library_code(compile("x", "/home/ann/my-site-packages/train.py", "eval"))
