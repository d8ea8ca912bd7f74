"""Tells torchrun where the workers' output goes: into the pipes of ``worker_output.py``."""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

__all__ = ["PipeLogs"]


class PipeLogs(LogsSpecs):
    """Named pipes as the workers' standard output and error; torchrun follows nothing itself.

    Args:
        stdouts: path by worker.
        stderrs: path by worker.
    """

    def __init__(self, stdouts: Mapping[int, str], stderrs: Mapping[int, str]) -> None:
        super().__init__()
        self._stdouts = dict(stdouts)
        self._stderrs = dict(stderrs)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for variables in envs.values():
            # torchrun's error files repeat what the worker prints, and would need a directory.
            variables["TORCHELASTIC_ERROR_FILE"] = ""
        return LogsDest(
            stdouts=self._stdouts,
            stderrs=self._stderrs,
            error_files=dict.fromkeys(envs, os.devnull),
        )

    @property
    def root_log_dir(self) -> str:
        return os.devnull
