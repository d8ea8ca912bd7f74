"""Why a run on several hosts ended: which failure came first, and who only followed."""

from __future__ import annotations

from dataclasses import dataclass, field

from parallax.cluster.wire import Ended
from parallax.cluster.worker_watch import PEER_STATUS, describe_status
from parallax.errors import LaunchError

__all__ = ["Failure", "Verdict"]


@dataclass(frozen=True)
class Failure:
    """Something that ends a run.

    Args:
        host: as the resource file names it.
        text: what happened, without its full stop; names the host.
        status: the exit status that the run gets.
        rank: the worker, if it was one.
        follower: whether it is a consequence of another failure.
        hint: the way out.
    """

    host: str
    text: str
    status: int
    rank: int | None = None
    follower: bool = False
    hint: str = ""


@dataclass
class Verdict:
    """Collects failures in the order in which they were heard of."""

    failures: list[Failure] = field(default_factory=list)
    stopping: bool = False

    @property
    def first(self) -> Failure | None:
        """The failure that the run ended with: the first that follows from no other."""
        causes = [failure for failure in self.failures if not failure.follower]
        return next(iter(causes or self.failures), None)

    @property
    def known(self) -> bool:
        """Whether a failure was found that follows from no other."""
        return any(not failure.follower for failure in self.failures)

    def host_lost(self, host: str, problem: str, hint: str) -> None:
        """The link to a host has ended before its workers did."""
        self.failures.append(
            Failure(host, problem, LaunchError.exit_code, follower=self.stopping, hint=hint)
        )

    def host_ended(self, host: str, ended: Ended) -> None:
        """A host's workers have ended."""
        for end in ended.ends:
            if end.status == 0:
                continue
            # What ends after the others were told to stop does so because of that.
            told = self.stopping and (bool(ended.signal) or end.status < 0)
            self.failures.append(
                Failure(
                    host,
                    f"worker {end.rank} on {host} {describe_status(end.status)}",
                    end.status if end.status >= 0 else 128 - end.status,
                    rank=end.rank,
                    follower=end.stopped or told or end.status == PEER_STATUS,
                )
            )
        if ended.problem:
            text = f"{host}: {ended.problem.rstrip('.')}"
            self.failures.append(Failure(host, text, ended.status or 3, follower=self.stopping))
        elif ended.status and not any(end.status for end in ended.ends) and not ended.signal:
            text = f"the workers of {host} ended with status {ended.status}"
            self.failures.append(Failure(host, text, ended.status, follower=self.stopping))
        elif ended.signal and not self.stopping:
            text = f"torchrun's agent on {host} was stopped by signal {ended.signal}"
            self.failures.append(Failure(host, text, 128 + ended.signal))
