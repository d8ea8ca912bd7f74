"""Systems that take turns, each household of them in processes of its own."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.comparison.launch import Launcher
from benchmarks.comparison.values import Begin, Play, Ready, Task, Tell, Told, Trial, Turn
from benchmarks.dialogue import Asked, SilentError
from benchmarks.pairing import in_turns
from benchmarks.peers.systems import CAPTURED, COMPUTATION, SYSTEMS

NOTHING = Told(0.0, "", "")


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


@dataclass(frozen=True)
class Played:
    """What came of rounds.

    Args:
        turns: all of them.
        failed: by system why it failed, of those that did.
        trials: by system how it began, of those that did not fail at once.
    """

    turns: list[Turn]
    failed: dict[str, str]
    trials: dict[str, Trial]


def play(
    launcher: Launcher,
    task: Task,
    names: Sequence[str],
    contestant: Callable[[str, Trial], Contestant],
    traced: bool = False,
) -> Played:
    """Start all, and let them take turns.

    Args:
        launcher: starts workers.
        task: what is trained; its systems are those that take part.
        names: of the systems.
        contestant: how each takes part, by its name and how it began.
        traced: record turns by PyTorch's profiler.
    """
    members = households(names)
    failed: dict[str, str] = {}
    trials: dict[str, Trial] = {}
    turns: list[Turn] = []
    asked: dict[str, Asked] = {}

    def lose(household: str, error: SilentError) -> None:
        asked.pop(household).close()
        failed.update(dict.fromkeys(members[household], str(error)))

    with contextlib.ExitStack() as stack:
        for household, systems in members.items():
            held = launcher.start(msgspec.structs.replace(task, systems=systems))
            stack.callback(held.close)
            asked[household] = held
        for household in members:
            try:
                asked[household].ask(Ready(), bool, launcher.limit)
            except SilentError as error:
                lose(household, error)
        for household, held in list(asked.items()):
            # One after the other: some measure machines and links when they begin.
            limit = launcher.limit * len(members[household])
            try:
                began = held.ask(Begin(), list[Trial], limit)
            except SilentError as error:
                lose(household, error)
            else:
                trials.update(zip(members[household], began, strict=True))
        contestants = [contestant(name, trials[name]) for name in names if name in trials]
        for number in range(max((one.rounds for one in contestants), default=0)):
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
        msgspec.structs.replace(turn, **msgspec.structs.asdict(told.get(turn.system, NOTHING)))
        for turn in turns
        if turn.system not in failed
    ]
    return Played(turns, failed, trials)


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
        with contextlib.suppress(SilentError):  # it has had its turns
            told |= one.ask(Tell(statistics.median(alone)), dict[str, Told], limit)
    return told
