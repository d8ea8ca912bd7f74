"""Every module imports what the table of rooms in docs/architecture.md allows, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "parallax"
INNER = re.compile(r"of `(\w+)/`: ")


def _table() -> dict[str, set[str]]:
    """By room, the rooms that it may import; those inside another begin with its name."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = text.partition("## Rooms")[2].partition("\n## ")[0]
    found: dict[str, set[str]] = {}
    for names, may in re.findall(r"^\| (`.+?) \| [^|]* \| ([^|]*) \|$", table, re.M):
        rooms = [re.sub(r"^parallax/|\.py$|/$", "", n) for n in re.findall(r"`([^`]+)`", names)]
        if may == "all above":
            found |= {room: {*found, *rooms} for room in rooms}
            continue
        outer = INNER.match(may)
        others = {one for one in INNER.sub("", may).split(", ") if one != "nothing"}
        if outer is not None:
            others = {f"{outer[1]}/{one}" for one in others} | found[outer[1]]
        found |= dict.fromkeys(rooms, others)
    return found


ALLOWED = _table()


def _room(parts: tuple[str, ...]) -> str:
    inner = "/".join(parts[:2])
    return inner if inner in ALLOWED else parts[0]


def _is_allowed(room: str, other: str) -> bool:
    """Whether a room may import another: it sees its inner rooms, and those of the rooms that it
    may import."""
    outer = other.partition("/")[0]
    return other in {room, *ALLOWED[room]} or outer in {room, *ALLOWED[room]}


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and room of every import of our own, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("parallax."):
            for name in node.names:
                yield node.lineno, _room((*(node.module or "").split(".")[1:], name.name))
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.startswith("parallax."):
                    yield node.lineno, _room(tuple(name.name.split(".")[1:]))


def _modules() -> Iterator[tuple[Path, str]]:
    for path in PACKAGE.rglob("*.py"):
        yield path, _room(path.relative_to(PACKAGE).with_suffix("").parts)


def test_every_room_is_in_the_table() -> None:
    public = {"__init__", "__main__"}
    assert {room for _, room in _modules()} - public == set(ALLOWED)


@pytest.mark.parametrize("outer", ["graph", "runtime"])
def test_every_folder_in_these_is_a_room(outer: str) -> None:
    folders = {f"{outer}/{path.parent.name}" for path in (PACKAGE / outer).glob("*/__init__.py")}
    assert folders
    assert folders <= set(ALLOWED)


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_what_it_may(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {other}"
        for path, of in _modules()
        if of == room
        for line, other in _imports(path)
        if not _is_allowed(room, other)
    ]
    assert wrong == []
