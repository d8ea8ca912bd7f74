"""What a step caches while it is captured has no values, and does not stay."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from errors_help import warnings_of_parallax
from torch import nn

from parallax.config import Config
from parallax.errors import CaptureError
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import single
from parallax.runtime.runner import Runner

sys.path.insert(0, str(Path(__file__).parent / "site-packages"))
import caching

WORDS, WIDTH = 20, 6
Mask = Callable[[int], torch.Tensor]
MAKER = caching.Maker()
MASKS: dict[str, Mask] = {
    "cached function": caching.cached,
    "several of a cached function": lambda size: caching.cached_pair(size)[1],
    "dict": caching.in_a_dict,
    "list": caching.in_a_list,
    "attribute": lambda size: MAKER(size),
    "class": caching.Maker.of_all,
    "property": lambda size: MAKER.large[:size, :size],
}


class Attention(nn.Module):
    """Scores words by those before them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.table = nn.Embedding(WORDS, WIDTH)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        rows = self.table(words)
        scores = rows @ rows.transpose(1, 2) + MASKS[self.name](words.shape[1])
        found: torch.Tensor = self.out(scores.softmax(-1) @ rows)
        return found


def made(name: str) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    torch.manual_seed(5)
    model = Attention(name).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)

    def step(words: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words)[:, :-1].transpose(1, 2), words[:, 1:])
        loss.backward()
        optimizer.step()
        return loss

    return model, step


def runner_of(step: Callable[..., torch.Tensor]) -> Runner:
    return Runner(step, discover(step), Config(workers=1), single(torch.device("cpu")))


@pytest.mark.parametrize("name", MASKS)
def test_what_is_cached_is_computed_anew(name: str) -> None:
    batches = [torch.randint(WORDS, (rows, length)) for rows, length in [(3, 5), (2, 5), (3, 7)]]
    (model, step), (trained, same) = made(name), made(name)
    runner = runner_of(same)
    for words in batches:
        expected, found = step(words), runner.run(words)
        assert abs(float((found - expected).detach())) < 1e-12
        # The user's own code goes on with what is in the caches.
        assert float((trained(words) - model(words)).abs().max()) < 1e-12


def test_a_step_that_cannot_be_captured_leaves_none_either() -> None:
    model, step = made("dict")
    caching._MASKS.clear()

    def failing(words: torch.Tensor) -> torch.Tensor:
        loss = step(words)
        raise ValueError("no")
        return loss

    with pytest.raises(CaptureError):
        runner_of(failing).run(torch.randint(WORDS, (3, 4)))
    assert type(model(torch.randint(WORDS, (3, 4))).detach()) is torch.Tensor


def test_attributes_are_told() -> None:
    _, step = made("attribute")
    MAKER.last = None
    with warnings_of_parallax() as messages:
        runner_of(step).run(torch.randint(WORDS, (3, 5)))
    assert MAKER.last is None
    (told,) = [one for one in messages if "does not look" in one]
    assert "None after it: Maker.last; keep them in an object of your own" in told
