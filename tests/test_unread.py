"""Texts in a batch that the step does not read, and those that it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from errors_help import alone, linear, raised

from parallax.errors import CaptureError


class Log:
    def __init__(self) -> None:
        self.last: Any = None
        self.seen: list[Any] = []


Read = Callable[[torch.Tensor, list[str], Log], Any]
READS: dict[str, tuple[Read, int]] = {
    "nothing": (lambda loss, paths, log: loss, 1),
    "passed on": (lambda loss, paths, log: _passed_on(loss, paths=paths), 1),
    "returned": (lambda loss, paths, log: {"loss": loss, "paths": paths}, 3),
    "kept": (lambda loss, paths, log: setattr(log, "last", paths) or loss, 3),
    "appended": (lambda loss, paths, log: log.seen.append(paths) or loss, 3),
    "counted": (lambda loss, paths, log: loss * len(paths), 3),
    "compared": (lambda loss, paths, log: loss * (paths == ["0.png"] * 4), 3),
    "searched": (lambda loss, paths, log: loss * (2 if "1.png" in paths else 1), 3),
    "converted": (lambda loss, paths, log: loss * float(paths[0][0]), 3),
    "joined": (lambda loss, paths, log: loss * len(", ".join(paths)), 3),
}


def _passed_on(loss: torch.Tensor, paths: list[str] | None = None) -> torch.Tensor:
    return loss if paths is not None else loss * 0


def _built(read: Read) -> tuple[Callable[..., Any], Log]:
    model, optimizer = linear()
    log = Log()

    def step(batch: dict[str, Any]) -> Any:
        optimizer.zero_grad()
        loss = model(batch["image"]).square().mean()
        loss.backward()
        optimizer.step()
        return read(loss.detach(), batch["paths"], log)

    return step, log


def _batches() -> list[dict[str, Any]]:
    made = torch.Generator().manual_seed(1)
    return [
        {"image": torch.randn(4, 3, generator=made), "paths": [f"{place}.png"] * 4}
        for place in range(3)
    ]


@pytest.mark.parametrize("name", READS)
def test_texts_are_constants_only_where_they_are_read(name: str) -> None:
    read, captures = READS[name]
    plain, expected_log = _built(read)
    expected = [plain(batch) for batch in _batches()]
    step, log = _built(read)
    runner = alone(step)
    before = 0
    for number, batch in enumerate(_batches()):
        assert runner.run(batch) == expected[number]
        # What was captured without texts, and failed or was not taken, is not counted.
        before = before or runner._preparation.captures.count
    assert runner._preparation.captures.count - before + 1 == captures
    assert vars(log) == vars(expected_log)


def test_more_or_fewer_texts_are_no_other_batch() -> None:
    step, _ = _built(READS["nothing"][0])
    runner = alone(step)
    for place, batch in enumerate(_batches()):
        runner.run({**batch, "paths": batch["paths"][place:]})
    assert runner._preparation.captures.count == 1


def test_what_fails_with_texts_is_said_as_without() -> None:
    def read(loss: torch.Tensor, paths: list[str], log: Log) -> Any:
        raise ValueError(f"no such picture: {paths[0]}")

    step, _ = _built(read)
    raised(lambda: alone(step).run(_batches()[0]), CaptureError, "no such picture: 0.png")
