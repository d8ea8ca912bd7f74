"""Quantities with units, as people write them in resource files.

A unit is never guessed: "10G" could be bits or bytes, a factor of eight in every prediction.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

__all__ = [
    "format_bandwidth",
    "format_bytes",
    "format_time",
    "parse_bandwidth",
    "parse_bytes",
    "parse_time",
]

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]{1,2})?)\s*(\S*)", re.IGNORECASE)
# Exact factors, so that 0.1 ms is the number that a program writes as 1e-4.
_PREFIXES = {"": Decimal(1), "k": Decimal("1e3"), "M": Decimal("1e6"), "G": Decimal("1e9")}
_PREFIXES["T"] = Decimal("1e12")
_BANDWIDTH = {f"{p}bit/s": factor / 8 for p, factor in _PREFIXES.items()}
_BANDWIDTH |= {f"{p}B/s": factor for p, factor in _PREFIXES.items()}
_BANDWIDTH |= {f"{p}iB/s": Decimal(1024) ** power for power, p in enumerate("KMGT", 1)}
_BYTES = {f"{p}B": factor for p, factor in _PREFIXES.items()}
_BYTES |= {f"{p}iB": Decimal(1024) ** power for power, p in enumerate("KMGT", 1)}
_TIME = {"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6"), "ns": Decimal("1e-9")}
_TIME["µs"] = _TIME["us"]


def parse_bandwidth(text: str) -> float:
    """Bytes per second of a text such as ``1 Gbit/s`` or ``125 MB/s``.

    Raises:
        ValueError: says what is expected; the unit is missing or unknown, or the value not
            positive.
    """
    return _parse(text, _BANDWIDTH, "'1 Gbit/s' or '125 MB/s'")


def parse_time(text: str) -> float:
    """Seconds of a text such as ``0.1 ms`` or ``50 us``.

    Raises:
        ValueError: says what is expected; the unit is missing or unknown, or the value not
            positive.
    """
    return _parse(text, _TIME, "'0.1 ms' or '50 us'")


def parse_bytes(text: str) -> int:
    """Bytes of a text such as ``16 GB`` or ``16 GiB``.

    Raises:
        ValueError: says what is expected; the unit is missing or unknown, or the value not
            positive.
    """
    return round(_parse(text, _BYTES, "'16 GB' or '16 GiB'"))


def format_bytes(value: int) -> str:
    """Bytes with a unit, which :func:`parse_bytes` reads."""
    for prefix in ("T", "G", "M", "k"):
        factor = float(_PREFIXES[prefix])
        if value >= factor:
            return f"{value / factor:.6g} {prefix}B"
    return f"{value} B"


def format_bandwidth(value: float) -> str:
    """Bytes per second as bits per second with a unit, which :func:`parse_bandwidth` reads."""
    bits = value * 8
    for prefix in ("T", "G", "M", "k"):
        factor = float(_PREFIXES[prefix])
        if bits >= factor:
            return f"{bits / factor:.6g} {prefix}bit/s"
    return f"{bits:.6g} bit/s"


def format_time(value: float) -> str:
    """Seconds with a unit, which :func:`parse_time` reads."""
    for unit in ("s", "ms", "us"):
        if value >= float(_TIME[unit]):
            return f"{value / float(_TIME[unit]):.6g} {unit}"
    return f"{value / 1e-9:.6g} ns"


def _parse(text: str, units: dict[str, Decimal], example: str) -> float:
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"must be a positive number with a unit such as {example}, found {text!r}")
    number, unit = found.groups()
    if unit not in units:
        what = "has no unit" if not unit else f"has the unknown unit {unit!r}"
        raise ValueError(f"{what}: {text!r}; write it as {example}")
    value = float(Decimal(number) * units[unit])
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"must be a positive number with a unit such as {example}, found {text!r}")
    return value
