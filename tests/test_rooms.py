"""Every module imports what the table of rooms in docs/architecture.md allows, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "parallax"
INNER = "of `runtime/`: "


def _allowed() -> dict[str, set[str]]:
    """By room, the rooms that it may import; those inside runtime/ begin with that."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = text.partition("## Rooms")[2].partition("\n## ")[0]
    found: dict[str, set[str]] = {}
    for names, may in re.findall(r"^\| (`.+?) \| [^|]* \| ([^|]*) \|$", table, re.M):
        rooms = [re.sub(r"^parallax/|\.py$|/$", "", n) for n in re.findall(r"`([^`]+)`", names)]
        if may == "all above":
            found |= {room: {*found, *rooms} for room in rooms}
            continue
        inner = may.startswith(INNER)
        others = {one for one in may.removeprefix(INNER).split(", ") if one != "nothing"}
        if inner:
            others = {f"runtime/{one}" for one in others} | found["runtime"]
        found |= dict.fromkeys(rooms, others)
    inside = {room for room in found if room.startswith("runtime/")}
    return {room: may | (inside if room == "runtime" else set()) for room, may in found.items()}


def _room(parts: tuple[str, ...]) -> str:
    within = parts[0] == "runtime" and len(parts) > 1 and (PACKAGE / "runtime" / parts[1]).is_dir()
    return "/".join(parts[: 2 if within else 1])


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and room of every import of our own, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("parallax."):
            yield node.lineno, _room(tuple((node.module or "").split(".")[1:]))
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.startswith("parallax."):
                    yield node.lineno, _room(tuple(name.name.split(".")[1:]))


ALLOWED = _allowed()


def test_every_room_is_in_the_table() -> None:
    public = {"__init__", "__main__"}
    rooms = {
        _room(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")
    }
    assert rooms - public == set(ALLOWED)


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_what_it_may(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {other}"
        for path in PACKAGE.rglob("*.py")
        if _room(path.relative_to(PACKAGE).with_suffix("").parts) == room
        for line, other in _imports(path)
        if other != room and other not in ALLOWED[room]
    ]
    assert wrong == []
