"""What the driver asks of workers and what they answer, as JSON between processes."""

from __future__ import annotations

from typing import Literal

import msgspec


class Contestant(msgspec.Struct, frozen=True):
    """A system in the rounds.

    Args:
        name: of the system.
        steps: in each of its turns.
        rounds: in how many rounds it takes part; slow ones in the first few only.
    """

    name: str
    steps: int
    rounds: int


class Task(msgspec.Struct, frozen=True):
    """What one start of workers does.

    Args:
        kind: ``"trial"`` runs a few steps of one system in processes of its own, for its memory and
            its losses; ``"rounds"`` lets systems in the same processes take turns.
        workload: its name.
        quick: sizes for a test.
        contestants: who takes part.
        rounds: measured ones.
        packages: a directory with further packages; they come last in the search path.
        answer: the file that worker 0 writes.
        traced: turns are recorded by PyTorch's profiler.
    """

    kind: Literal["trial", "rounds"]
    workload: str
    quick: bool
    contestants: list[Contestant]
    rounds: int
    packages: str
    answer: str
    traced: bool = False


class Trial(msgspec.Struct, frozen=True):
    """What a system did by itself.

    Args:
        losses: mean over workers, of the first steps.
        seconds: of the faster of the last two steps.
        empty_bytes: largest worker's resident memory before there was a model.
        held_bytes: the same after the steps.
        peak_bytes: the same at its peak.
        cross_bytes: least bytes per step that each host has to send, see ``limits``.
    """

    losses: list[float]
    seconds: float
    empty_bytes: int
    held_bytes: int
    peak_bytes: int
    cross_bytes: float


class Turn(msgspec.Struct, frozen=True):
    """One turn of one system.

    Args:
        system: its name.
        round: number of the round.
        seconds: per step.
        cpu_seconds: per step, of the average worker with all its threads; unlike ``seconds`` it
            does not grow when other programs want the cores.
        sent_bytes: per step, by the average host.
        most_bytes: per step, by the host that sent or received most, in the busier direction.
        predicted_seconds: per step, what parallax expected once it knew how long the computation
            alone takes; 0 for other systems.
        idle_seconds: per step, in which the average worker's training thread runs no operation, if
            the turn was traced.
        told: what else the system has to say; the same in all its turns.
        strategy: of parallax, a hash of how it synchronises each variable; equal ones are alike.
    """

    system: str
    round: int
    seconds: float
    cpu_seconds: float
    sent_bytes: float
    most_bytes: float
    predicted_seconds: float = 0.0
    idle_seconds: float = 0.0
    told: str = ""
    strategy: str = ""
