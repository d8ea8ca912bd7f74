"""Every error a user can meet.

A message says what is wrong in terms of the user's own program, where it is (file and line,
variable, worker), what was found against what was expected, and the way out. The classes form
five families with one exit status each, which a started worker hands to its launcher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = [
    "BatchError",
    "CaptureError",
    "CheckError",
    "CheckpointError",
    "ConfigError",
    "DataDependentError",
    "DataError",
    "DisagreementError",
    "LaunchError",
    "ModelError",
    "ParallaxError",
    "PeerError",
    "PlanError",
    "RowIdError",
    "ShardError",
    "SourceLine",
    "StepError",
    "StrategyError",
    "UnsupportedError",
    "VariableError",
]


@dataclass(frozen=True)
class SourceLine:
    """A place in the user's own code."""

    file: str
    line: int
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f": {self.code}" if self.code else "")


class ParallaxError(Exception):
    """Base of all errors: ``problem``, then where it is, then ``hint``, the way out."""

    exit_code: ClassVar[int] = 1

    def __init__(self, problem: str, *, hint: str = "", where: SourceLine | None = None) -> None:
        self.problem = problem
        self.hint = hint
        self.where = where
        super().__init__(self._text())

    def _text(self) -> str:
        lines = [self.problem]
        if self.where is not None:
            lines.append(f"  at {self.where}")
        if self.hint:
            lines.append(f"  What to do: {self.hint}")
        return "\n".join(lines)


class ConfigError(ParallaxError):
    """A setting, argument or environment variable is wrong (exit status 2)."""

    exit_code = 2


class StrategyError(ConfigError):
    """A strategy does not fit the model or the cluster, or contradicts itself."""


class LaunchError(ParallaxError):
    """Workers cannot be started or cannot meet (exit status 3)."""

    exit_code = 3


class PeerError(LaunchError):
    """Another worker failed or stopped answering while this one waited for it."""


class PlanError(LaunchError):
    """No plan can be made of a script: it ended, or failed, before its first step."""


class DisagreementError(LaunchError):
    """Workers hold different models, code, data sizes or plans; names worker and difference."""


class ModelError(ParallaxError):
    """The model or the step cannot be distributed as written (exit status 4)."""

    exit_code = 4


class CaptureError(ModelError):
    """The step could not be captured as one graph."""


class DataDependentError(CaptureError):
    """Python control flow in the step depends on the values of tensors."""


class StepError(ModelError):
    """An operation of the captured step failed when it ran; names the line that it came from."""


class CheckError(StepError):
    """What the step itself checks did not hold when it ran, on some worker: raised on all."""


class UnsupportedError(ModelError):
    """The step uses something that parallax deliberately refuses; the hint names what to use."""


class VariableError(ModelError):
    """A parameter is of a kind, or is changed in a way, that cannot be distributed."""


class DataError(ParallaxError):
    """The data or its division over workers is wrong (exit status 5)."""

    exit_code = 5


class ShardError(DataError):
    """Data cannot be split over the workers as asked."""


class BatchError(DataError):
    """A batch differs in structure from what the step was captured with, or between workers."""


class RowIdError(DataError):
    """A lookup asks for a row that the table does not have; names worker, table and id."""


class CheckpointError(ParallaxError):
    """A state dict does not fit the models and optimizers of this run (exit status 6)."""

    exit_code = 6
