"""Texts that workers tell each other through the store, without a collective."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parallax.errors import PeerError

START_TIMEOUT = timedelta(minutes=5)


class Texts:
    """What one worker tells the others, by topic; each topic may come up again and again."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        """
        Args:
            rank, size: which worker this is, of how many.
            store: that all of them share; None with one worker.
        """
        self.rank = rank
        self.size = size
        self._store = store
        self._round: Counter[str] = Counter()

    def exchange(self, topic: str, text: str) -> list[str]:
        """Every worker's text, in worker order; waits for all.

        Raises:
            PeerError: names the workers that did not come.
        """
        if self.size == 1:
            return [text]
        key = f"parallax/{topic}/{self._round[topic]}"
        self._round[topic] += 1
        try:
            return self._exchange(topic, key, text)
        except dist.DistError as error:
            raise PeerError(
                f"Worker {self.rank} lost the others while agreeing on {topic}: "
                f"{str(error).splitlines()[0]}",
                hint="the first failure in the other workers' output is the cause.",
            ) from error

    def _exchange(self, topic: str, key: str, text: str) -> list[str]:
        self._store.set(f"{key}/{self.rank}", text)
        keys = [f"{key}/{worker}" for worker in range(self.size)]
        deadline = time.monotonic() + START_TIMEOUT.total_seconds()
        pause, looked = 0.0005, time.monotonic()
        while not self._store.check(keys):
            now = time.monotonic()
            if now - looked > 1.0:
                looked = now
                self._check_ended(topic, keys)
            if now > deadline:
                absent = ", ".join(map(str, self._absent(keys)))
                raise PeerError(
                    f"Worker {self.rank} waited {START_TIMEOUT.total_seconds():.0f} s to agree on "
                    f"{topic}; still missing: worker {absent}.",
                    hint="see those workers' output for the cause.",
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return [self._store.get(k).decode() for k in keys]

    def _absent(self, keys: list[str]) -> list[int]:
        return [worker for worker, key in enumerate(keys) if not self._store.check([key])]

    def _check_ended(self, topic: str, keys: list[str]) -> None:
        ended = [w for w in range(self.size) if self._store.check([f"parallax/ended/{w}"])]
        gone = [worker for worker in self._absent(keys) if worker in ended]
        if gone:
            raise PeerError(
                f"Worker {self.rank} waits to agree on {topic}, but worker {gone[0]} has ended.",
                hint="give every worker the same number of batches (parallax.shard() does); if "
                f"worker {gone[0]} failed, its output has the cause.",
            )

    def say_goodbye(self) -> None:
        """Let workers that still wait for this one know that it will not come."""
        with contextlib.suppress(Exception):
            self._store.set(f"parallax/ended/{self.rank}", "")


def digest(text: str | bytes) -> str:
    """A short hash of text."""
    data = text.encode() if isinstance(text, str) else text
    return hashlib.sha256(data).hexdigest()[:16]
