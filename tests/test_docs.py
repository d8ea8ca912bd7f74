"""What the documentation says is so: its programs run, its links lead somewhere, it leaves no
public name out.

A Python block whose first line is ``# name.py`` is a file that later blocks and commands of its
page use; ``# name.py, continued`` goes on with it. Any other block is a program of its own.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import worlds
from pool import Pool

import parallax
from parallax import errors, logs
from parallax.cluster import environment
from parallax.graph.objects.discovery import discover
from parallax.rewrite.pipeline import passes
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner
from parallax.strategy.registry import synchronizers

ROOT = Path(__file__).parents[1]
OWN_TEST = {"docs/data.md"}  # its programs run in test_docs_data.py, as two workers
PAGES = sorted(str(p.relative_to(ROOT)) for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"# ([\w/]+\.py)(, continued)?\n")
HEADING = re.compile(r"^#+ (.*)$", re.M)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
VARIABLES = re.compile(r"PARALLAX_[A-Z_]+")

Block = tuple[str, str]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """Language and content of each block."""
    return BLOCK.findall(text_of(page))


def files(page: str) -> dict[str, str]:
    """The files that a page writes, by name."""
    found: dict[str, str] = {}
    for language, code in blocks(page):
        match = FILE.match(code) if language == "python" else None
        if match:
            name, continued = match.groups()
            found[name] = found.get(name, "") + code if continued else code
    return found


@dataclass(frozen=True)
class Program:
    """A block that is a program of its own, and what its page says that it prints."""

    page: str
    number: int
    code: str
    printed: str


def programs() -> Iterator[Program]:
    for page in PAGES:
        found = blocks(page)
        for number, (language, code) in enumerate(found):
            if page in OWN_TEST or language != "python" or FILE.match(code):
                continue
            language, output = found[number + 1] if number + 1 < len(found) else ("", "")
            yield Program(page, number, code, output if language == "text" else "")


PROGRAMS = list(programs())


def run_program(code: str, name: str) -> str:
    """Run one program in this process, as its own main module would; what it prints."""
    state = torch.get_rng_state()
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
    finally:
        torch.set_rng_state(state)
    return output.getvalue()


def start(command: list[str], directory: Path) -> str:
    """Run a command to its end as a user would; what it prints."""
    variables = {k: v for k, v in os.environ.items() if k not in worlds.NAMES}
    variables["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr + done.stdout


def words_of(output: str) -> list[str]:
    """Printed lines with numbers, table lines and spaces left out: what a page can promise."""
    lines = []
    for line in output.splitlines():
        kept = re.sub(r"[\d.]+( [KMG]?B\b)?", "#", re.sub(r"[┏━┳┓┡╇┩└─┴┘]+", "", line))
        if kept.replace("[worker #]", "").strip():
            lines.append(" ".join(kept.split()))
    return lines


def write(page: str, directory: Path) -> None:
    for name, code in files(page).items():
        (directory / name).write_text(code, encoding="utf-8")


def printed(page: str, containing: str) -> str:
    """The block of output that contains a text."""
    texts = [code for language, code in blocks(page) if language == "text"]
    return next(code for code in texts if containing in code)


def test_every_page_is_looked_at() -> None:
    assert {"README.md", "CHANGELOG.md", "docs/tutorial.md", "docs/performance.md"} <= set(PAGES)
    assert {program.page for program in PROGRAMS} >= {"docs/tutorial.md", "docs/strategies.md"}
    assert sum(bool(program.printed) for program in PROGRAMS) == 2


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: f"{p.page}-{p.number}")
def test_program(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_program(program.code, program.page) == program.printed


def test_readme_on_two_workers(tmp_path: Path) -> None:
    write("README.md", tmp_path)
    output = start(["train.py"], tmp_path)
    promised = words_of(printed("README.md", "HYBRID on 2 workers"))
    assert len(promised) == 5
    found = words_of(output)
    assert [line for line in promised if line not in found] == []


def test_tutorial_on_two_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains with its launcher, then reads the checkpoint with plain PyTorch and on one worker."""
    page = "docs/tutorial.md"
    write(page, tmp_path)
    found = words_of(start(["train.py"], tmp_path))
    promised = words_of(printed(page, "HYBRID on 2 workers"))
    assert len(promised) == 12
    # Not the first line: it tells how many cores there are.
    assert [line for line in promised[1:] if line not in found] == []
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        evaluated = run_program(files(page)["evaluate.py"], page)
        assert float(evaluated.split()[-1]) < 0.05
        assert words_of(evaluated) == words_of(printed(page, "error on new pairs"))
        run_program(files(page)["resume.py"], page)
    finally:
        sys.modules.pop("ratings", None)


def test_builder_without_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "docs/extending.md"
    write(page, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    output = run_program(files(page)["try_builder.py"], page)
    assert output == printed(page, "small allgather")


def with_builder(world: World, directory: str) -> tuple[dict[str, str], float]:
    """Train two tables with the builder of the page; what it chose, and the last loss."""
    sys.path.insert(0, directory)
    try:
        builder = importlib.import_module("sharded_if_large").ShardedIfLarge()
        return train_two_tables(world, parallax.Config(strategy=builder))
    finally:
        sys.path.remove(directory)
        sys.modules.pop("sharded_if_large", None)


def train_two_tables(
    world: World, config: parallax.Config | None = None
) -> tuple[dict[str, str], float]:
    """Synchronisers by variable, and the mean loss of the last step."""
    torch.manual_seed(0)
    small, large = torch.nn.Embedding(50, 8), torch.nn.Embedding(40_000, 8)
    optimizer = torch.optim.Adam([small.weight, large.weight], lr=0.1)
    ids = torch.arange(12).chunk(world.size)[world.rank]

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (small(ids) - large(ids * 3)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    runner = Runner(step, discover(step), config or parallax.Config(), world)
    for _ in range(3):
        loss = runner.run(ids)
    chosen = {row.variable.name: row.choice.synchronizer for row in runner.plan.rows}
    return chosen, float(loss)


def test_builder_on_two_workers(pool: Pool, tmp_path: Path) -> None:
    write("docs/extending.md", tmp_path)
    found = pool.run(2, with_builder, str(tmp_path))
    expected = {"small.weight": "allgather", "large.weight": "rows"}
    assert [chosen for chosen, _ in found] == [expected, expected]
    (_, alone), *_ = pool.run(1, train_two_tables)
    assert sum(loss for _, loss in found) / 2 == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    ("script", "containing"),
    [
        pytest.param("train_in_float8.py", "loss below", marks=pytest.mark.long),
        ("train_with_star.py", "the same numbers"),
    ],
)
def test_extensions_on_two_workers(script: str, containing: str, tmp_path: Path) -> None:
    """An encoder and a synchroniser, each of one file."""
    page = "docs/extending.md"
    write(page, tmp_path)
    promised = printed(page, containing).strip()
    assert f"[worker 0] {promised}" in start([script], tmp_path)


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    titles = HEADING.findall(BLOCK.sub("", text_of(page)))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    broken = []
    for link in LINK.findall(BLOCK.sub("", text_of(page))):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        page_of_target = os.path.relpath(target, ROOT)
        if not target.exists() or (anchor and anchor not in anchors(page_of_target)):
            broken.append(link)
    assert broken == []


def test_every_public_name_is_documented() -> None:
    reference = text_of("docs/tutorial.md").partition("## Reference")[2]
    names = [f"parallax.{name}" for name in parallax.__all__]
    names += [f"`{field.name}`" for field in dataclasses.fields(parallax.Config)]
    names += [name for name in vars(parallax.Runner) if not name.startswith("_")]
    assert [name for name in names if name not in reference] == []


def test_every_error_is_documented() -> None:
    page = text_of("docs/troubleshooting.md")
    classes = [name for name in errors.__all__ if name.endswith("Error")]
    assert len(classes) > 10
    assert [name for name in classes if f"`{name}`" not in page] == []


def test_exit_statuses_are_those_of_the_classes() -> None:
    page = text_of("docs/troubleshooting.md")
    rows = re.findall(r"^\| `(\w+Error)` \| (\d) \|", page, re.M)
    assert len(rows) == sum(name.endswith("Error") for name in errors.__all__)
    assert [(n, s) for n, s in rows if getattr(errors, n).exit_code != int(s)] == []


def test_every_environment_variable_is_documented() -> None:
    page = text_of("docs/troubleshooting.md")
    table = page.partition("## Environment variables")[2]
    package = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "parallax").rglob("*.py"))
    used = set(VARIABLES.findall(package)) | {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
    used |= {"LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"}
    assert {logs.LOG_LEVEL_VARIABLE, environment.SEED_VARIABLE} <= used
    assert [name for name in sorted(used) if f"`{name}`" not in table] == []


def test_dependencies_are_those_of_the_package() -> None:
    page = text_of("docs/dependencies.md")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = re.findall(r"^(?:dependencies|dev|examples) = \[(.*?)\]", project, re.M | re.S)
    names = {name for text in lists for name in re.findall(r'"([\w-]+)[><=]', text)}
    assert {"torch", "msgspec", "pytest"} <= names
    assert [name for name in sorted(names) if f"| {name} |" not in page] == []


def messages() -> list[str]:
    """Every string of the package, with a gap where a value is formatted in."""
    found = []
    for path in (ROOT / "parallax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "\0" for p in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_quoted_messages_are_those_of_the_package() -> None:
    """A quoted message is found piece by piece: dots and numbers stand for values."""
    errors_part = text_of("docs/troubleshooting.md").partition("## Errors")[2]
    errors_part = errors_part.partition("## Without an error")[0]
    strategies = text_of("docs/strategies.md").partition("cannot be sharded. The plan")[2]
    quoted = re.findall(r"(?<![*\w])\*([^*\n]+)\*(?!\*)", errors_part)
    quoted += re.findall(r"^\| `([^`]*)` \| ", strategies.partition("A dense optimizer")[0], re.M)
    assert len(quoted) > 40
    package = messages()
    pieces = [p.strip() for text in quoted for p in re.split(r"\.\.\.|\d+", text) if p.strip()]
    missing = [piece for piece in pieces if not any(piece in text for text in package)]
    assert missing == []


def test_rooms_import_what_the_page_says() -> None:
    rows = re.findall(
        r"^\| `parallax/(\w+)/` \| .* \| (.*) \|$", text_of("docs/architecture.md"), re.M
    )
    assert len(rows) == 7
    wrong = []
    for room, allowed in rows:
        files_of_room = list((ROOT / "parallax" / room).rglob("*.py"))
        assert files_of_room
        for path in files_of_room:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("parallax."):
                    found = str(node.module).split(".")[1]
                    if found not in {room, *re.findall(r"\w+", allowed)}:
                        wrong.append(f"{path.relative_to(ROOT)} imports {found}")
    assert wrong == []


def test_passes_are_those_of_the_page() -> None:
    section = text_of("docs/architecture.md").partition("## Rewriting")[2].partition("\n## ")[0]
    named = re.findall(r"^\d+\. `(\w+)`", section, re.M)
    assert named == [one_pass.__name__ for one_pass in passes(synchronizers())]
