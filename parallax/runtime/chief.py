"""What the chief alone decides, and all read."""

from __future__ import annotations

from collections.abc import Callable

from parallax.errors import StrategyError
from parallax.runtime.comm.world import World
from parallax.strategy.data import Strategy

__all__ = ["strategy_of_chief"]

_FAILED = "failed: "


def strategy_of_chief(world: World, make: Callable[[], Strategy]) -> Strategy:
    """What worker 0 makes, read from its JSON by all; all workers must call it.

    Raises:
        StrategyError: worker 0 failed to, for a reason that it raises itself.
    """
    made, failed = "", None
    if world.rank == 0:
        try:
            made = make().to_json().decode()
        except Exception as error:
            made, failed = f"{_FAILED}{type(error).__name__}: {error}", error
    text = world.texts("strategy", made)[0]
    if failed is not None:
        world.settle()
        raise failed
    if text.startswith(_FAILED):
        world.settle()
        raise StrategyError(f"Worker 0 could not make a strategy: {text[len(_FAILED) :]}")
    return Strategy.from_json(text)
