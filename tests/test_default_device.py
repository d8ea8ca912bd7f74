"""``torch.set_default_device``: the runtime's own tensors are where they belong all the same."""

from __future__ import annotations

import default_device
import pytest
import torch
from pool import Pool

from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import single
from parallax.runtime.runner import Runner


@pytest.mark.parametrize(
    ("option", "case", "size"),
    [
        ("HYBRID", ("sparse", "sgd", "average"), 1),
        ("HYBRID", ("tied", "nesterov", "none"), 3),
        ("PS", ("dense", "momentum", "clip_norm"), 2),
        ("PS", ("lazy", "sgd", "none"), 3),
        ("AR", ("sparse", "momentum", "clip_value"), 2),
    ],
)
def test_numbers_are_those_of_one_device(
    pool: Pool, option: str, case: tuple[str, str, str], size: int
) -> None:
    for far in pool.run(size, default_device.compare, option, case):
        assert far < 1e-12


def test_the_step_makes_its_tensors_where_the_script_says() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss, torch.ones(2)

    runner = Runner(step, discover(step), Config(workers=1, seed=1), single(torch.device("cpu")))
    x = torch.randn(4, 3)
    with torch.device("meta"):
        loss, ones = runner.run(x)
        assert torch.zeros(1).device.type == "meta"
    assert (loss.device.type, ones.device.type) == ("cpu", "meta")
    assert torch.zeros(1).device.type == "cpu"
