"""What the driver asks of workers and what they answer, as JSON between processes."""

from __future__ import annotations

import msgspec


class Task(msgspec.Struct, frozen=True):
    """What workers hold, from when they start.

    Args:
        workload: its name.
        quick: sizes for a test.
        systems: that share the processes; each does a trial at first.
        packages: a directory with further packages; they come last in the search path.
    """

    workload: str
    quick: bool
    systems: list[str]
    packages: str


class Trial(msgspec.Struct, frozen=True):
    """What a system did at first; of its memory, if it has its processes for itself.

    Args:
        losses: mean over workers, of the first steps.
        seconds: of the faster of the last two steps.
        empty_bytes: largest worker's memory that it shares with no other, before there was a model.
        held_bytes: the same after the steps.
        peak_bytes: of the largest worker, all that was resident at its peak.
        cross_bytes: least bytes per step that each host has to send, see ``limits``.
    """

    losses: list[float]
    seconds: float
    empty_bytes: int
    held_bytes: int
    peak_bytes: int
    cross_bytes: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A question: are all workers there, with what they import; the answer is ``True``."""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """A question: build the task's systems and run their first steps; the answer is their
    ``list[Trial]``."""


class Play(msgspec.Struct, frozen=True, tag=True):
    """A question: have a turn, which is the answer.

    Args:
        system: whose turn it is.
        round: of which number.
        steps: in the turn.
        traced: record it by PyTorch's profiler.
    """

    system: str
    round: int
    steps: int
    traced: bool = False


class Tell(msgspec.Struct, frozen=True, tag=True):
    """A question: what runners of parallax have to say; the answer is ``dict[str, Told]``.

    Args:
        alone: seconds per step that the computation takes alone; 0 if that is not known.
    """

    alone: float


class Told(msgspec.Struct, frozen=True):
    """What a system says of itself.

    Args:
        predicted_seconds: per step, what parallax expects once it knows how long the computation
            alone takes; 0 for other systems.
        told: what else there is to say.
        strategy: of parallax, a hash of how it synchronises each variable; equal ones are alike.
    """

    predicted_seconds: float
    told: str
    strategy: str


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
        idle_seconds: per step, in which the average worker's training thread runs no operation, if
            the turn was traced.
        predicted_seconds, told, strategy: see :class:`Told`; the same in all turns of a system.
    """

    system: str
    round: int
    seconds: float
    cpu_seconds: float
    sent_bytes: float
    most_bytes: float
    idle_seconds: float = 0.0
    predicted_seconds: float = 0.0
    told: str = ""
    strategy: str = ""
