"""What a worker sent to others, and what it waited for."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Traffic:
    """Bytes this worker sent to others, by what they were for."""

    sent: Counter[str] = field(default_factory=Counter)
    across: Counter[str] = field(default_factory=Counter)
    """Those of them that went to another host."""
    in_memory: Counter[str] = field(default_factory=Counter)
    """Those of them that others of this host read of memory that it shares; nothing sent them."""
    messages: int = 0
    """Collectives that were started."""
    waited: float = 0.0
    """Seconds spent waiting for messages."""
    recorder: Any = None
    """Notes each message and each time of waiting, if there is one."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Threads of the runtime count, too."""

    def wait(self, seconds: float) -> None:
        """Note a time of waiting that ends now."""
        self.waited += seconds
        if self.recorder is not None:
            now = time.perf_counter()
            self.recorder.add("waiting", "waiting", now - seconds, now)

    def start(self, purpose: str, count: float, work: Any) -> None:
        """Note a collective that has just started."""
        if self.recorder is not None:
            self.recorder.message(purpose, count, work)

    def end(self, purpose: str, count: float, began: float) -> None:
        """Note a message of our own that ends now.

        Args:
            purpose, count: what it was for, and bytes of it that this worker sent.
            began: when it started, by ``time.perf_counter``.
        """
        if self.recorder is not None:
            self.recorder.add("message", purpose, began, time.perf_counter(), count)

    def add(self, purpose: str, count: float, across: float) -> None:
        with self._lock:
            self.sent[purpose] += round(count)
            self.across[purpose] += round(across)

    def begin(self) -> None:
        """Count a collective that starts."""
        with self._lock:
            self.messages += 1
