"""The rule by which items are dealt to workers, and what becomes of those that do not go round.

Every worker goes through the same order and keeps its own part, so that all get equally many
without a word between them. Blocks of ``block`` items are dealt in turn: with N workers, round k is
the items from ``k*N*block`` on, exactly the batch k that one device would get with the batch size
``N*block``, and worker i has its i-th N-th:

    order    0 1 2 3 | 4 5 6 7 | 8 9 10          (2 workers, block 2)
    worker 0 0 1     | 4 5     | 8
    worker 1     2 3 |     6 7 |   9             10 is left over: the tail
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeVar, cast, get_args

from parallax.errors import ConfigError, ShardError

__all__ = ["Division", "Tail", "checked_tail", "known_length", "source_name"]

T = TypeVar("T")

Tail = Literal["drop", "repeat", "error"]

_TAILS: tuple[str, ...] = get_args(Tail)
_logger = logging.getLogger("parallax")


def checked_tail(tail: object) -> Tail:
    """The ``tail`` that a user passed.

    Raises:
        ConfigError: it is none of the known ones.
    """
    if tail in _TAILS:
        return cast(Tail, tail)
    near = difflib.get_close_matches(str(tail).lower(), _TAILS, n=1)
    raise ConfigError(
        f'tail must be "drop", "repeat" or "error", found {tail!r}.',
        hint=f'did you mean "{near[0]}"?' if near else "",
    )


def source_name(source: object) -> str:
    """A source in the words of a message: the kind of object the user passed."""
    return f"the {type(source).__name__}"


def known_length(source: object) -> int | None:
    """How many items a source has, if it can tell before they are read."""
    try:
        return len(source)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # a dataset may refuse to tell its length
        # Many classes have a __len__ that raises one of these when what is below has none.
        return None


@dataclass(frozen=True)
class Division:
    """How one source of data is dealt to the workers.

    Args:
        what: the source in words, such as ``"the TensorDataset"``.
        tail: what becomes of the last items that do not give every worker one.
        block: how many consecutive items a worker gets in a full round, its local batch size.
        drop_last: leave out the last round unless it is full; ``tail`` then decides nothing.
        unit: what is dealt, ``"items"`` or ``"batches"``.
    """

    what: str
    tail: Tail
    block: int = 1
    drop_last: bool = False
    unit: str = "items"

    def length(self, total: int, workers: int) -> int:
        """How many of ``total`` items each worker gets."""
        rounds, rest = divmod(total, workers * self.block)
        if self.drop_last:
            return rounds * self.block
        last = -(-rest // workers) if self.tail == "repeat" else rest // workers
        return rounds * self.block + last

    def check(self, total: int, workers: int) -> None:
        """Refuses a source that does not give each worker a batch, or divides badly.

        Raises:
            ShardError: there is nothing, or too little, or a rest that ``tail="error"`` forbids.
        """
        if total == 0:
            raise ShardError(
                f"No batches: {self.what} has no {self.unit}.",
                hint="check the path, split or filter that it was made from; a generator gives its"
                " items only once, so make a new one for each epoch.",
            )
        if total < workers:
            raise ShardError(
                f"{self._subject()} has {_count(total, self.unit)}, fewer than the {workers}"
                f" workers: {workers - total} would have none.",
                hint=f"use at most {_count(total, 'workers')}, or"
                f" {'smaller batches' if self.unit == 'batches' else 'more data'}.",
            )
        if self.length(total, workers) == 0:
            raise ShardError(
                f"No batches: {self.what} has {_count(total, self.unit)}, and drop_last=True leaves"
                f" them out because one batch of {self.block} for each of"
                f" {_count(workers, 'workers')} takes {self.block * workers}.",
                hint=f"use a batch size of at most {total // workers}, or drop_last=False.",
            )
        self._check_rest(total, workers)

    def _check_rest(self, total: int, workers: int) -> None:
        rest = total % workers
        if rest and self.tail == "error" and not self.drop_last:
            raise ShardError(
                f"{self._subject()} has {_count(total, self.unit)}, which {workers} workers cannot"
                f' share equally: {rest} left over, and tail="error".',
                hint='tail="drop" leaves the rest out, tail="repeat" gives some items twice.',
            )

    def _subject(self) -> str:
        return self.what[0].upper() + self.what[1:]

    def tell(self, total: int, workers: int, *, partial: bool = False) -> None:
        """Says what becomes of the tail, which changes what one epoch means.

        Args:
            total: number of items.
            workers: number of workers.
            partial: the items are those of one process of a DataLoader.
        """
        rest = total % workers
        if rest == 0 or self.drop_last or self.tail == "error":
            return
        each = self.length(total, workers)
        fate = (
            f"the last {rest} left out of each epoch"
            if self.tail == "drop"
            else f"{workers - rest} repeated in each epoch"
        )
        _logger.warning(
            "%s has %s%s: %s, so that each of %d workers gets %d (tail=%r).",
            self.what,
            _count(total, self.unit),
            " in one process of the DataLoader" if partial else "",
            fate,
            workers,
            each,
            self.tail,
        )

    def blocks_of(
        self, order: Iterator[T], worker: int, workers: int, common: AbstractContextManager[None]
    ) -> Iterator[T]:
        """This worker's part of an order of indices, which is read a round ahead.

        Args:
            order: the indices, or index batches, of all workers.
            worker: this worker's number.
            workers: how many there are.
            common: entered while ``order`` is read.

        Raises:
            ShardError: at the end, as ``check`` does.
        """
        total = 0
        first: list[T] = []
        size = workers * self.block
        while True:
            with common:
                dealt = list(islice(order, size))
            if not total and self.tail == "repeat":
                first = dealt[: workers - 1]
            total += len(dealt)
            if len(dealt) < size:
                break
            yield from dealt[worker * self.block : (worker + 1) * self.block]
        self.check(total, workers)
        if self.drop_last:
            return
        if self.tail == "repeat":
            dealt += first[: -len(dealt) % workers]
        each = len(dealt) // workers
        yield from dealt[worker * each : (worker + 1) * each]

    def stream_of(
        self,
        items: Iterator[T],
        worker: int,
        workers: int,
        common: AbstractContextManager[None],
        *,
        rounds: int,
        partial: bool,
        tell: bool,
    ) -> Iterator[T]:
        """This worker's part of a stream: item i if ``i % workers == worker``.

        An item is given only when the items of its whole round were read: only then is it certain
        that the other workers have one, too. Other workers' items are not kept.

        Args:
            items: the stream, the same on every worker.
            worker: this worker's number.
            workers: how many there are.
            common: entered while ``items`` is read.
            rounds: how many are read at once, each of which gives this worker an item.
            partial: this stream is that of one process of a DataLoader, which may be short.
            tell: say what became of the tail.

        Raises:
            ShardError: at the end, as ``check`` does.
        """
        total = 0
        count = workers
        first: list[T] = []
        while count == workers:
            own: list[T] = []
            with common:
                for _ in range(rounds):
                    count = 0
                    for item in islice(items, workers):
                        if count == worker:
                            last = item
                        if self.tail == "repeat" and len(first) < workers - 1:
                            first.append(item)
                        count += 1
                    total += count
                    if count < workers:
                        break
                    own.append(last)
            yield from own
        if partial:
            self._check_rest(total, workers)
        else:
            self.check(total, workers)
        if tell:
            self.tell(total, workers, partial=partial)
        if self.tail == "repeat" and count:
            yield last if worker < count else first[(worker - count) % len(first)]


def _count(number: int, unit: str) -> str:
    if number != 1:
        return f"{number} {unit}"
    return "1 batch" if unit == "batches" else f"1 {unit.removesuffix('s')}"
