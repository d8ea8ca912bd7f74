"""Words of a text, and the text that every machine has: its Python programs."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from parallax.errors import DataError

PROGRAM_BYTES = 40_000_000
PROGRAMS = "installed Python packages"

_WORD = re.compile(r"\w+|[^\w\s]")


def split_words(text: str) -> list[str]:
    """Words, numbers and single marks of ``text``, in lower case."""
    return _WORD.findall(text.lower())


def programs(limit: int) -> Iterator[str]:
    """Files of the standard library and of the installed packages, until ``limit`` characters."""
    paths = sysconfig.get_paths()
    size = 0
    for root in dict.fromkeys((paths["stdlib"], paths["purelib"])):
        for file in sorted(Path(root).rglob("*.py")):
            if size >= limit:
                return
            content = file.read_text(encoding="utf-8", errors="replace")
            size += len(content)
            yield content
    if not size:
        raise DataError(
            "No Python source was found among the installed packages.",
            hint="name a file of your own instead; --help says with which flag.",
        )
