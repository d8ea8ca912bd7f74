"""Torchrun's agent as one of several: what the host's agent tells it, and what it answers.

Its standard output has one line in the end, an ``Ended`` message; then it waits until its standard
input is closed, since the store that it may hold serves other hosts that have not ended yet.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from parallax.cluster.host_output import pipe_path
from parallax.cluster.wire import Ended, WorkerEnded
from parallax.cluster.worker_watch import WorkerEnd
from parallax.errors import LaunchError

__all__ = ["Member", "MemberOutput", "take_channels"]

_input, _output = 0, 1


def take_channels() -> None:
    """Keeps standard input and output for the host's agent, away from workers and from prints."""
    global _input, _output
    _input, _output = os.dup(0), os.dup(1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """This host's part of a run; by default the only one.

    Args:
        run: name of the run.
        node, nodes: this host's number and how many there are.
        first_rank: number of its first worker.
        address, port: of the store.
        output: directory with the workers' output pipes.
        listener: descriptor of the socket on which the store is to listen; None to open one.
    """

    run: str
    node: int = 0
    nodes: int = 1
    first_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    output: str = ""
    listener: int | None = None

    @classmethod
    def of(cls, text: str) -> Member:
        """Reads the command line's form.

        Raises:
            LaunchError: it is none.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise LaunchError(f"The launcher cannot read its part of the run: {error}.") from error

    def rendezvous(self) -> dict[str, Any]:
        """Settings of the rendezvous."""
        return {
            "node": self.node,
            "nodes": self.nodes,
            "address": self.address,
            "port": self.port,
            "listener": self.listener,
        }

    def tell(
        self, status: int, ends: Sequence[WorkerEnd], received: int | None, problem: str = ""
    ) -> int:
        """Tells the host's agent how the workers ended, and waits for its leave.

        Args:
            status: 0 if all went well.
            ends: how workers ended, by their number on this host.
            received: the signal that stopped them, if any.
            problem: why they could not be started.

        Returns:
            The exit status.
        """
        ended = Ended(
            status,
            [WorkerEnded(self.first_rank + end.rank, end.status, end.stopped) for end in ends],
            received or 0,
            problem,
        )
        with contextlib.suppress(OSError):
            os.write(_output, msgspec.json.encode(ended) + b"\n")
            os.close(_output)
            while os.read(_input, 1024):
                pass
        return status


class MemberOutput:
    """The paths of pipes that the host's agent reads; the same face as ``WorkerOutput``."""

    def __init__(self, directory: str, workers: int) -> None:
        self.stdouts: Mapping[int, str] = _paths(directory, workers, False)
        self.stderrs: Mapping[int, str] = _paths(directory, workers, True)

    def start(self) -> None:
        """Nothing: the host's agent reads."""

    def finish(self) -> None:
        """Nothing: the host's agent reads."""


def _paths(directory: str, workers: int, error: bool) -> dict[int, str]:
    return {rank: pipe_path(directory, rank, error) for rank in range(workers)}
