"""Ids that an exchange sends one step before the rows that they ask for.

Which rows a step reads is known as soon as its batch is, before the step before has updated them.
So ids can be on their way while that one computes; its owners answer when their rows are new. All
workers send them or none does: each says in a message of ids whether it has the batch that follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from parallax.runtime.comm.control import Step

Asked = TypeVar("Asked")


class IdsAhead(Generic[Asked]):
    """What one exchange asked for ahead, if it did."""

    def __init__(self, exchange: Any) -> None:
        """
        Args:
            exchange: by which a step knows what it is asked for.
        """
        self._exchange = exchange
        self._sent: tuple[Step, Asked] | None = None

    def take(self, step: Step) -> Asked | None:
        """What was asked for ahead of this step; what was for another one is forgotten."""
        sent, self._sent = self._sent, None
        return sent[1] if sent is not None and sent[0] is step else None

    def send(self, step: Step, agreed: bool, ask: Callable[[Any, Step], Asked]) -> None:
        """Ask for what the step after ``step`` looks up.

        Args:
            step: the present one.
            agreed: all workers do.
            ask: given what the exchange looks up by and the step to come, starts the message.
        """
        if not agreed:
            return
        following = step.following
        assert following is not None  # or this worker would not have agreed
        inputs = following.ids().get(self._exchange)
        if inputs is not None:
            self._sent = (following, ask(inputs, following))
