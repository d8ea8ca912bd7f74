"""Strategies for a person to read: one as a table, and what differs between two."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from parallax.strategy.data import Strategy, VariableStrategy

__all__ = ["Difference", "differences", "shown", "shown_differences", "summary"]

_WIDTH = 140
# Columns of their own in the table.
_APART = ("synchronizer", "owners", "why")


@dataclass(frozen=True)
class Difference:
    """One thing in which two strategies differ.

    Args:
        variable: whose; empty for the strategy as a whole.
        field: which; empty where only one of the two has the variable.
        one, other: its values in both, as text.
    """

    variable: str
    field: str
    one: str
    other: str

    def __str__(self) -> str:
        where = f"{self.variable}: " if self.variable else ""
        return f"{where}{self.field + ' ' if self.field else ''}{self.one} → {self.other}"


def differences(one: Strategy, other: Strategy) -> list[Difference]:
    """What differs between two strategies, in the order of the first one's variables.

    Reasons (``why``) are for people and do not count.
    """
    found = [
        Difference("", field, str(getattr(one, field)), str(getattr(other, field)))
        for field in ("fingerprint", "replicas")
        if getattr(one, field) != getattr(other, field)
    ]
    for name in dict.fromkeys((*one.variables, *other.variables)):
        left, right = one.variables.get(name), other.variables.get(name)
        if one.model.get(name) != other.model.get(name) and left is not None and right is not None:
            model = (one.model.get(name, "unknown"), other.model.get(name, "unknown"))
            found.append(Difference(name, "shape", *model))
        if left is None or right is None:
            found.append(Difference(name, "", _brief(left), _brief(right)))
            continue
        found += [
            Difference(name, field, _text(getattr(left, field)), _text(getattr(right, field)))
            for field in _fields()
            if field != "why" and getattr(left, field) != getattr(right, field)
        ]
    return found


def shown_differences(one: Strategy, other: Strategy, names: tuple[str, str]) -> str:
    """The same for a person: the differences below each variable's name.

    Args:
        one, other: the strategies.
        names: what to call them.
    """
    found = differences(one, other)
    if not found:
        return f"{names[0]} and {names[1]} decide the same."
    variables = {difference.variable for difference in found} - {""}
    count = len(set(one.variables) | set(other.variables))
    lines = [f"{names[0]} → {names[1]}: {len(variables)} of {count} variables differ"]
    last = ""
    for difference in found:
        if difference.variable != last:
            last = difference.variable
            lines.append(last)
        indent = "  " if last else ""
        field = f"{difference.field}: " if difference.field else ""
        lines.append(f"{indent}{field}{difference.one} → {difference.other}")
    return "\n".join(lines)


def shown(strategy: Strategy) -> str:
    """A strategy as a table; settings that are as usual are left out."""
    table = Table(
        title=f"for {strategy.replicas} worker{'s'[: strategy.replicas != 1]} and the model "
        f"{strategy.fingerprint}: {summary(strategy)}",
        title_justify="left",
    )
    for name in ("variable", "shape", "synchroniser", "owners", "settings", "why"):
        table.add_column(name)
    for name, choice in strategy.variables.items():
        table.add_row(
            name,
            strategy.model.get(name, ""),
            choice.synchronizer,
            _text(choice.owners) if choice.owners else "",
            _settings(choice),
            choice.why,
        )
    output = io.StringIO()
    Console(file=output, width=_WIDTH).print(table)
    return output.getvalue().rstrip()


def summary(strategy: Strategy) -> str:
    """How many variables are synchronised in each way, such as ``2 rows, 4 allreduce``."""
    counts = Counter(choice.synchronizer for choice in strategy.variables.values())
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "no variables"


def _fields() -> tuple[str, ...]:
    return VariableStrategy.__struct_fields__


def _brief(choice: VariableStrategy | None) -> str:
    return "(not there)" if choice is None else f"{choice.synchronizer} {_settings(choice)}".strip()


def _settings(choice: VariableStrategy) -> str:
    """Fields that are not as usual, as ``name=value``."""
    usual = VariableStrategy(choice.synchronizer)
    return " ".join(
        f"{field}={_text(getattr(choice, field))}"
        for field in _fields()
        if field not in _APART and getattr(choice, field) != getattr(usual, field)
    )


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return _numbers(value) if value else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return msgspec.json.encode(value).decode()
    return str(value)


def _numbers(values: tuple[int, ...]) -> str:
    """Numbers with runs of consecutive ones joined: ``0-3,8``."""
    spans: list[list[int]] = []
    for value in values:
        if spans and value == spans[-1][1] + 1:
            spans[-1][1] = value
        else:
            spans.append([value, value])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
