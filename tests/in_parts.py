"""Exchanges in parts, forced, on the workers of a pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import bag_steps
import by_host
import equality
import synchronizers
import torch

from parallax.cluster.network import Network
from parallax.ops.reductions import Schedule
from parallax.runtime.comm import parts as parts_module
from parallax.runtime.comm.parts import Parts
from parallax.runtime.comm.world import World
from parallax.runtime.exchange import sums
from parallax.runtime.predictions import probe


@contextmanager
def forced(piece: int, as_fast: float = 0.0) -> Iterator[list[int]]:
    """Let every exchange that can travel in parts of so many bytes, if these are so many times as
    fast; gives how many parts there were in each, and of each message of a ring."""
    made: list[int] = []
    cut = sums.in_pieces

    def counted(steps: Schedule, elements: int) -> Schedule:
        pieces = cut(steps, elements)
        made.append(len(pieces) // len(steps))
        return pieces

    class Counted(Parts):
        def __init__(self, started: Any) -> None:
            super().__init__(started)
            made.append(len(self._started))

    with ExitStack() as stack:
        for name, value in (("LEAST_PIECE", piece), ("PIECE_SECONDS", 0.0), ("AS_FAST", as_fast)):
            stack.enter_context(mock.patch.object(probe, name, value))
        # What travels through memory is not cut.
        stack.enter_context(mock.patch.object(World, "is_in_memory", return_value=False))
        stack.enter_context(mock.patch.object(parts_module, "Parts", Counted))
        stack.enter_context(mock.patch.object(sums, "in_pieces", counted))
        yield made


def exchanged(world: World, parts: int) -> tuple[bool, int]:
    """An exchange of unequal numbers of rows, in parts: whether it brings the same, and how many
    collectives it took."""
    torch.manual_seed(1)
    counts = torch.randint(0, 9, (world.size, world.size)).tolist()
    rows = [torch.randn(sum(row), 3, dtype=torch.float64) for row in counts]
    arriving = [row[world.rank] for row in counts]
    expected = [mine.split(row)[world.rank] for mine, row in zip(rows, counts, strict=True)]
    before, world.pieces = world.traffic.messages, {"rows": 100}
    received = torch.full((sum(arriving), 3), torch.nan, dtype=torch.float64)
    try:
        with mock.patch.object(World, "is_in_memory", return_value=False):
            world.all_to_all(
                received, rows[world.rank], arriving, counts[world.rank], "test", most=100 * parts
            ).wait()
    finally:
        world.pieces = {}
    return torch.equal(received, torch.cat(expected)), world.traffic.messages - before


def equal(
    world: World, option: str, cases: list[tuple[str, str, str]], late: bool = False
) -> tuple[dict[str, float], int]:
    """As ``equality.compare``, and the most parts of an exchange."""
    with forced(40) as made:
        return equality.compare(world, option, cases, late), max(made, default=0)


def equal_by(world: World, wanted: Any, cases: Any) -> tuple[dict[str, Any], int]:
    """As ``synchronizers.compare``, and the most parts of an exchange."""
    with forced(40) as made:
        return synchronizers.compare(world, wanted, cases), max(made, default=0)


def bags(world: World, kind: str) -> tuple[float, int]:
    """As ``bag_steps.train``, and the most parts of an exchange."""
    with forced(40) as made:
        found = bag_steps.train(world, kind, "adam", True)
        return found["difference"], max(made, default=0)


def by_levels(world: World, levels: str) -> tuple[dict[str, float], int]:
    """As ``by_host.compare``, and the most parts of an exchange."""
    with forced(40) as made:
        cases = [("sparse", "adam", "clip_norm"), ("several", "momentum", "none")]
        return by_host.compare(world, "HYBRID", cases, levels), max(made, default=0)


def measured(world: World, as_fast: float) -> tuple[Network, dict[str, int], int]:
    """The network, what the world makes of it, and the most parts of an exchange."""
    with forced(1000, as_fast) as made:
        network = probe.measure_network(world)
        pieces, world.pieces = world.pieces, {}
        return network, pieces, max(made, default=0)
