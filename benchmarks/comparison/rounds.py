"""Systems that take turns, each household of them in processes of its own."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.comparison.launch import Launcher
from benchmarks.comparison.values import Play, Task, Tell, Told, Trial, Turn
from benchmarks.dialogue import Asked, SilentError
from benchmarks.pairing import in_turns
from benchmarks.peers.systems import CAPTURED, COMPUTATION, SYSTEMS


@dataclass(frozen=True)
class Contestant:
    """A system in the rounds.

    Args:
        name: of the system.
        steps: in each of its turns.
        rounds: in how many rounds it takes part; slow ones in the first few only.
        limit: seconds that a turn may take.
    """

    name: str
    steps: int
    rounds: int
    limit: float


def play(
    launcher: Launcher, task: Task, contestants: Sequence[Contestant], traced: bool = False
) -> tuple[list[Turn], dict[str, str]]:
    """Start all, and let them take turns.

    Args:
        launcher: starts workers.
        task: what is trained; its systems are the contestants.
        contestants: who takes part.
        traced: record turns by PyTorch's profiler.

    Returns:
        All turns; and by system why it failed, of those that did.
    """
    members = households([one.name for one in contestants])
    failed: dict[str, str] = {}
    turns: list[Turn] = []
    asked: dict[str, Asked] = {}

    def lose(household: str, error: SilentError) -> None:
        asked.pop(household).close()
        failed.update(dict.fromkeys(members[household], str(error)))

    with contextlib.ExitStack() as stack:
        for household, names in members.items():
            # One after the other: some measure machines and links when they start.
            held = launcher.start(msgspec.structs.replace(task, systems=names))
            stack.callback(held.close)
            asked[household] = held
            try:
                held.answer(list[Trial], launcher.limit * len(names))
            except SilentError as error:
                lose(household, error)
        for number in range(max(one.rounds for one in contestants)):
            playing = [one for one in contestants if number < one.rounds]
            for one in in_turns(playing, number):
                household = SYSTEMS[one.name].household
                if household not in asked:
                    continue
                question = Play(one.name, number, one.steps, traced)
                try:
                    turns.append(asked[household].ask(question, Turn, one.limit))
                except SilentError as error:
                    lose(household, error)
        told = _told(asked, turns, launcher.limit)
    turns = [
        msgspec.structs.replace(turn, **msgspec.structs.asdict(told[turn.system]))
        for turn in turns
        if turn.system not in failed
    ]
    return turns, failed


def households(names: Sequence[str]) -> dict[str, list[str]]:
    """Which systems share processes, by household."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(SYSTEMS[name].household, []).append(name)
    return found


def _told(asked: dict[str, Asked], turns: Sequence[Turn], limit: float) -> dict[str, Told]:
    by_system: dict[str, list[float]] = {}
    for turn in turns:
        by_system.setdefault(turn.system, []).append(turn.seconds)
    alone = by_system.get(CAPTURED) or by_system.get(COMPUTATION) or [0.0]
    told: dict[str, Told] = {}
    for one in asked.values():
        told |= one.ask(Tell(statistics.median(alone)), dict[str, Told], limit)
    return told
