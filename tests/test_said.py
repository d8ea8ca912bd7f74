"""What a step prints and logs is said after each step, with the values of that step."""

from __future__ import annotations

import logging
import math
import pprint
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn

from parallax.config import Config
from parallax.errors import CaptureError
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World, single
from parallax.runtime.runner import Runner

logger = logging.getLogger("a script")
Say = Callable[[torch.Tensor, torch.Tensor, nn.Linear, int], Any]


def _step(say: Say) -> Callable[[torch.Tensor, int], Any]:
    """A step that says something between its backward pass and its update, and after it."""
    torch.manual_seed(4)
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor, number: int) -> Any:
        optimizer.zero_grad()
        scores = model(x)
        loss = scores.square().mean()
        loss.backward()
        found = say(loss.detach(), scores.detach(), model, number)
        optimizer.step()
        say(loss.detach(), scores.detach(), model, number)
        return found

    return step


def _runner(say: Say, world: World | None = None) -> Runner:
    step = _step(say)
    config = Config(workers=1, compile="none")
    return Runner(step, discover(step), config, world or single(torch.device("cpu")))


def _batches(count: int = 4) -> list[tuple[torch.Tensor, int]]:
    torch.manual_seed(3)
    return [(torch.randn(4 + n % 2, 3, dtype=torch.float64), n) for n in range(count)]


def _formats(loss: torch.Tensor, scores: torch.Tensor, model: nn.Linear, number: int) -> None:
    print(f"{number}: {loss:.3f} {loss.item():8.2e} {loss.item()!r} {(loss > 0.1).item()}")
    print("{:.3f} and {}".format(loss.item(), scores[0, 0]), str(loss.item()), sep=", ")  # noqa: UP032
    print("-".join([f"{value:.1f}" for value in (loss, loss * 2)]), end="!\n")


def _objects(loss: torch.Tensor, scores: torch.Tensor, model: nn.Linear, number: int) -> None:
    print("loss", loss, [loss.item(), {"a": scores}], scores.shape, None, model.bias.detach())
    print()


def _writes(loss: torch.Tensor, scores: torch.Tensor, model: nn.Linear, number: int) -> None:
    sys.stdout.write(f"\r{loss.item():.3f}")
    sys.stdout.write(" of ")
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def _aligned(loss: torch.Tensor, scores: torch.Tensor, model: nn.Linear, number: int) -> None:
    text = f"{loss.item():.3f}"
    print(f"{text:>12}|", text.rjust(9) + "|", text[:3], text.replace(".", ","), f"{loss!r:>40}")
    print([text, f"{number}"], {text: str(loss.item()).center(30, "*")})


def _pretty(loss: torch.Tensor, scores: torch.Tensor, model: nn.Linear, number: int) -> None:
    pprint.pprint({"loss": loss.item(), "number": number})


def _some(loss: torch.Tensor, scores: torch.Tensor, model: nn.Linear, number: int) -> None:
    if number % 2 == 0:
        print("step", number, loss.item(), len(scores))


def _logs(loss: torch.Tensor, scores: torch.Tensor, model: nn.Linear, number: int) -> None:
    logger.warning("loss %.3f of %d, %s%%", loss.item(), number, loss)
    logger.error(f"loss {loss:.3f} of %s, %s", f"<{loss.item():.1f}>", {"a": loss.item()})
    logger.info("the number %(n)d: %(loss).3f", {"n": number, "loss": loss.item()})
    logger.debug("not said: %s", loss)
    logging.getLogger("a script.below").warning(f"{loss.item()}", extra={"from": "me"})


@pytest.mark.parametrize("say", [_formats, _objects, _writes, _aligned, _pretty, _some, _logs])
def test_what_is_said_is_that_of_one_device(
    say: Say, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def records() -> list[tuple[Any, ...]]:
        return [
            (one.name, one.levelno, one.pathname, one.lineno, one.funcName, one.getMessage())
            for one in caplog.records
            if one.name.startswith(logger.name)
        ]

    caplog.set_level("INFO", logger="a script")
    step = _step(say)
    for batch in _batches():
        step(*batch)
    expected = capsys.readouterr().out, records()
    assert any(expected)
    caplog.clear()
    runner = _runner(say)
    for batch in _batches():
        runner.run(*batch)
    assert (capsys.readouterr().out, records()) == expected


def _said(world: World, count: int) -> tuple[list[str], list[float]]:
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Handler()
    logger.addHandler(handler)
    try:
        runner = _runner(_own_loss, world)
        torch.manual_seed(world.rank)
        losses = [float(runner.run(torch.randn(4, 3).double(), 0)) for _ in range(count)]
    finally:
        logger.removeHandler(handler)
    return found, losses


def _own_loss(loss: torch.Tensor, scores: torch.Tensor, model: nn.Linear, number: int) -> Any:
    logger.error(f"{loss.item()}")
    return loss


def test_each_worker_says_its_own(pool: Pool) -> None:
    first, second = pool.run(2, _said, 2)
    for said, losses in (first, second):
        assert said == [repr(loss) for loss in losses for _ in range(2)]
    assert first != second


def test_what_is_said_on_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if not loss.isfinite():
            print(f"left out: {loss.item()}")
            return loss
        loss.backward()
        optimizer.step()
        print("updated")
        return loss

    runner = Runner(step, discover(step), Config(workers=1), single(torch.device("cpu")))
    for factor in (1, math.nan, 1):
        runner.run(torch.ones(2, 3) * factor)
    assert capsys.readouterr().out.splitlines() == ["updated", "left out: nan", "updated"]


def _returned(loss: torch.Tensor, scores: torch.Tensor, model: nn.Linear, number: int) -> str:
    return f"{loss:.3f}"


def _said_and_returned(*given: Any) -> str:
    text = f"{given[0]:.3f}"
    print(text)
    return text


def _put(loss: torch.Tensor, scores: torch.Tensor, model: nn.Linear, number: int) -> None:
    model.last = f"{loss:.3f}"  # type: ignore[assignment]
    print(model.last)


def _named(loss: torch.Tensor, scores: torch.Tensor, model: nn.Linear, number: int) -> None:
    {}.setdefault(str(loss.item()), 1)


@pytest.mark.parametrize("say", [_returned, _said_and_returned, _put])
def test_texts_for_other_things_are_refused(say: Say) -> None:
    with pytest.raises(CaptureError, match="formats a number that is only known when") as caught:
        _runner(say).run(*_batches()[0])
    assert caught.value.where is not None
    assert "test_said.py" in caught.value.where.file
    assert "print or log the text" in str(caught.value)


def _messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Of the script."""
    return [one.getMessage() for one in caplog.records if one.name == logger.name]


def test_what_is_counted_is_said_on_both_ways(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def made() -> Callable[[torch.Tensor], Any]:
        torch.manual_seed(2)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        seen = {"all": 0, "left out": 0}

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            seen["all"] += 1
            if nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 5:
                seen["left out"] += 1
                logger.info("left out %d of %d", seen["left out"], seen["all"])
                print(seen)
                return
            print("done", seen)
            optimizer.step()

        return step

    caplog.set_level("INFO", logger="a script")
    torch.manual_seed(3)
    batches = [torch.randn(4, 3) * (9 if n % 2 else 0.1) for n in range(7)]
    plain, step = made(), made()
    for x in batches:
        plain(x)
    expected = capsys.readouterr().out, _messages(caplog)
    assert len(expected[1]) == 3
    caplog.clear()
    runner = Runner(step, discover(step), Config(workers=1), single(torch.device("cpu")))
    for x in batches:
        runner.run(x)
    assert (capsys.readouterr().out, _messages(caplog)) == expected


def test_a_rate_that_is_said_after_its_scheduler_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.step()
        print(f"{optimizer.param_groups[0]['lr']:.3f}")

    runner = Runner(step, discover(step), Config(workers=1), single(torch.device("cpu")))
    with caplog.at_level("WARNING", logger="parallax"):
        runner.run(torch.ones(2, 3))
    assert "says a learning rate of optimizer as it was before the scheduler's step" in caplog.text


def test_texts_that_are_not_said_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="parallax"):
        _runner(_named).run(*_batches()[0])
    assert "makes a text of a number that is only known when it runs, and neither" in caplog.text
    assert "test_said.py" in caplog.text


@pytest.mark.parametrize(
    "ask", [len, lambda text: text.split(), lambda text: "." in text, lambda t: t.find("1")]
)
def test_what_a_text_has_is_not_known(ask: Callable[[str], Any]) -> None:
    def say(loss: torch.Tensor, *_: Any) -> None:
        ask(f"{loss:.3f}")

    with pytest.raises(CaptureError, match="of the text of a number, which is only known when"):
        _runner(say).run(*_batches()[0])


def test_other_threads_print_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    def say(*_: Any) -> None:
        thread = threading.Thread(target=print, args=("beside",))
        thread.start()
        thread.join()

    _runner(say).run(*_batches()[0])
    assert "beside" in capsys.readouterr().out
