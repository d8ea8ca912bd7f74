"""Messages of ids between real workers, whose lengths change from step to step."""

from __future__ import annotations

import random

import torch

from parallax.runtime.comm.id_messages import IdsUnderWay, Room
from parallax.runtime.comm.world import World


def lengths(seed: int, step: int, size: int) -> list[list[int]]:
    """By sender and receiver: steady for a while, then many more, or nothing at all."""
    numbers = random.Random(seed * 1000 + step)
    usual = [
        [random.Random(seed + i * size + j).randrange(200) for j in range(size)]
        for i in range(size)
    ]
    kind = numbers.choice(["steady", "steady", "steady", "burst", "none", "one"])
    if kind == "burst":
        return [[n * numbers.randrange(1, 30) for n in row] for row in usual]
    if kind == "none":
        return [[0] * size for _ in range(size)]
    if kind == "one":
        sender = numbers.randrange(size)
        return [[n if i == sender else 0 for n in row] for i, row in enumerate(usual)]
    return [[max(n + numbers.randrange(-3, 4), 0) for n in row] for row in usual]


def sent(sender: int, receiver: int, step: int, length: int) -> list[int]:
    """What a worker sends another in a step."""
    return [(7 * sender + 11 * receiver + 13 * step + i) % 1000 - 500 for i in range(length)]


def exchanges(world: World, seed: int, steps: int, kind: str) -> list[int]:
    """Exchange, check what arrives, and return how many messages each step took."""
    dtype = getattr(torch, kind)
    room = Room(world.size)
    messages = []
    for step in range(steps):
        table = lengths(seed, step, world.size)
        mine = [sent(world.rank, to, step, n) for to, n in enumerate(table[world.rank])]
        ids = torch.tensor([i for part in mine for i in part], dtype=dtype)
        heads = [[2**62 - world.rank, to, -step] for to in range(world.size)]
        before = world.traffic.messages
        message = IdsUnderWay(world, room, heads, ids, table[world.rank], "test")
        told, received = message.finish()
        messages.append(world.traffic.messages - before)
        assert told == [[2**62 - sender, world.rank, -step] for sender in range(world.size)]
        wanted = [
            i
            for sender in range(world.size)
            for i in sent(sender, world.rank, step, table[sender][world.rank])
        ]
        assert received.dtype is dtype
        assert received.tolist() == wanted, (seed, step)
    return messages


def steady(world: World, ids: int, steps: int) -> tuple[list[int], float]:
    """Equally many ids in each step: messages by step, and bytes that the last one sent."""
    room = Room(world.size)
    messages, number = [], 0.0
    for _ in range(steps):
        before, number = world.traffic.messages, sum(world.traffic.sent.values())
        values = torch.zeros(ids * world.size, dtype=torch.int32)
        heads = [[1]] * world.size
        IdsUnderWay(world, room, heads, values, [ids] * world.size, "test").finish()
        messages.append(world.traffic.messages - before)
    return messages, sum(world.traffic.sent.values()) - number


def two_under_way(world: World, seed: int, steps: int) -> None:
    """Each step's message starts before that of the step before has ended, as those of ids that
    are sent ahead do; sizes change, so that some need a second message."""
    room = Room(world.size)
    before: tuple[int, IdsUnderWay] | None = None
    for step in range(steps):
        table = lengths(seed, step, world.size)
        mine = [sent(world.rank, to, step, n) for to, n in enumerate(table[world.rank])]
        ids = torch.tensor([i for part in mine for i in part], dtype=torch.int32)
        heads = [[step]] * world.size
        message = IdsUnderWay(world, room, heads, ids, table[world.rank], "test")
        if before is not None:
            _check(world, seed, *before)
        before = step, message
    assert before is not None
    _check(world, seed, *before)


def _check(world: World, seed: int, step: int, message: IdsUnderWay) -> None:
    told, received = message.finish()
    assert told == [[step]] * world.size
    table = lengths(seed, step, world.size)
    wanted = [
        i
        for sender in range(world.size)
        for i in sent(sender, world.rank, step, table[sender][world.rank])
    ]
    assert received.tolist() == wanted, (seed, step)
