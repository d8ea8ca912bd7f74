"""In which order the messages of a phase's gradients start, the same on all workers.

Workers' graphs may make gradients in another order: batches of one row, or none, are captured for
themselves. What a process group carries must be in one order, so a message waits for its turn,
which follows from the strategy alone. Groups are numbered in the order of the first graph, so where
graphs are alike nothing waits. Where updates are left to the step that follows, the strategy has
another order, in which what that step needs first overtakes the rest.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from parallax.rewrite.context import Phase, Rewriting
from parallax.strategy.data import VariableStrategy
from parallax.strategy.registry import facts


def take_turns(work: Rewriting) -> bool:
    """Whether messages of gradients wait for their turn: all but those of rows, which have a
    process group of their own. What other synchronisers send among them keeps to the graph."""
    used = [facts(choice) for choice in work.strategy.variables.values()]
    return all(one.sparse or one.in_turn or one.name == "none" for one in used)


def in_order(work: Rewriting, marks: Iterable[Node]) -> list[Node]:
    """Marks of gradients by their groups, and in a group by their variables."""
    place = {name: number for number, name in enumerate(work.strategy.variables)}
    return sorted(marks, key=lambda m: (_choice(work, m).group, place[str(m.args[1])]))


def message_of(work: Rewriting, mark: Node) -> tuple[object, ...]:
    """What is equal of gradients that travel in one message, whenever they are made."""
    choice = _choice(work, mark)
    encoder = (choice.encoder, tuple(sorted(choice.encoder_options.items())))
    how = (choice.synchronizer, choice.hierarchy, choice.reduction, choice.order, *encoder)
    dtype = work.analysis.variables[str(mark.args[1])].dtype
    alone = mark if choice.pieces > 1 else None
    return (dtype, choice.average, *how, choice.group, alone)


def turns(work: Rewriting, phase: Phase) -> dict[Node | str, int]:
    """By mark, the turn of its message in the phase, or that of its first piece; by synchroniser of
    factors, the turn of the message with their sizes.

    Messages of one group (of several types, say) go as backward does: from the last variable on.
    """
    marks = [mark for mark in phase.marks if facts(_choice(work, mark)).in_turn]
    factors = {_choice(work, m).synchronizer for m in marks if facts(_choice(work, m)).factors}
    found: dict[Node | str, int] = {name: turn for turn, name in enumerate(sorted(factors))}
    following = len(found)
    messages: dict[tuple[object, ...], int] = {}
    backwards = reversed(in_order(work, marks))
    for mark in sorted(backwards, key=lambda mark: _place(work, mark)):
        key = message_of(work, mark)
        if key not in messages:
            messages[key] = following
            following += _choice(work, mark).pieces
        found[mark] = messages[key]
    return found


def _place(work: Rewriting, mark: Node) -> tuple[bool, int, int]:
    """By what messages are ordered; variables that are trained only later have no late turn."""
    choice = _choice(work, mark)
    turn = choice.late_turn if work.late else 0
    return (work.late and not turn, turn, choice.group)


def _choice(work: Rewriting, mark: Node) -> VariableStrategy:
    return work.strategy.variables[str(mark.args[1])]
