"""The examples of docs/data.md run, and print what the page says they print."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from worlds import as_worker

PAGE = (Path(__file__).parents[1] / "docs" / "data.md").read_text()
EXAMPLE = re.compile(r"^```python\n(.*?)^```$(?:(?:(?!```).)*?^```text\n(.*?)^```$)?", re.M | re.S)
EXAMPLES = EXAMPLE.findall(PAGE)


def test_every_example_was_found() -> None:
    assert len(EXAMPLES) == PAGE.count("```python")
    assert sum(bool(printed) for _, printed in EXAMPLES) == PAGE.count("```text")


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(number: int) -> None:
    code, printed = EXAMPLES[number]
    lines = []
    for rank in range(2):
        output = io.StringIO()
        with as_worker(rank, 2), contextlib.redirect_stdout(output):
            exec(compile(code, f"docs/data.md, example {number}", "exec"), {})
        lines += [f"worker {rank}: {line.rstrip()}" for line in output.getvalue().splitlines()]
    assert lines == printed.splitlines()
