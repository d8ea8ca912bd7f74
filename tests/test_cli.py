"""The command line: what it offers, and what it answers to a wrong one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT

from parallax import cli
from parallax.cli import find_commands, main


def test_every_command_is_a_file_and_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    found = find_commands()
    assert {"check", "run"} <= set(found)
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert [name for name, command in found.items() if command.HELP not in shown] == []
    for name in found:
        with pytest.raises(SystemExit) as caught:
            main([name, "--help"])
        assert caught.value.code == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["chekc"], "invalid choice: 'chekc'"),
        (["check"], "the following arguments are required: --resource-info"),
        (["check", "--resource-info"], "expected one argument"),
        (["run", "hosts"], "the following arguments are required: train.py"),
        (["run", "--seed", "x", "hosts", "--", "train.py"], "invalid int value: 'x'"),
    ],
)
def test_a_wrong_command_line(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["check", "--resource-info", "absent"], "resource_info 'absent' is no file"),
        (["check", "--resource-info", "hosts", "absent.py"], "The script 'absent.py' is no file."),
        (["check", "--resource-info", "hosts", "--", "-m", "absent"], "The module 'absent' is not"),
        (["run", "hosts", "--", "absent.py"], "The script 'absent.py' is no file."),
        (["run", "hosts", "--", "-m", "absent.deep"], "The module 'absent.deep' is not found here"),
        (["run", "hosts", "--", "-m"], "The module '' is not found here"),
        (["run", "--seed", "-1", "hosts", "--", "train.py"], "seed must be an integer from 0"),
        (["run", "--redirect-path", "hosts", "hosts", "--", "train.py"], "hosts is a file"),
    ],
)
def test_errors_are_told_without_a_traceback(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("localhost: cpus=1\n")
    (tmp_path / "train.py").write_text("")
    for name in ("RANK", "WORLD_SIZE", "PARALLAX_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.startswith("error: ConfigError: ")


def start(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "parallax", *arguments],
        cwd=directory,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_run_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost: cpus=2\n")
    (tmp_path / "train.py").write_text(
        "import os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:])\n"
    )
    done = start(tmp_path, "run", "hosts", "--", "train.py", "--rate", "2", "--", "a b")
    assert done.returncode == 0, done.stderr
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__main__.py").write_text("import sys\nprint(sys.argv[1:])\n")
    module = start(tmp_path, "run", "hosts", "--", "-m", "pack", "--rate", "2")
    assert sorted(module.stdout.splitlines()) == [f"[worker {r}] ['--rate', '2']" for r in (0, 1)]
    told = sorted(done.stdout.splitlines())
    shown = "['--rate', '2', '--', 'a b']"
    assert told == [f"[worker {rank}] {rank} 2 {shown}" for rank in (0, 1)]


def test_check_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost: cpus=2\n")
    (tmp_path / "train.py").write_text("import helper\n")
    done = start(tmp_path, "check", "--resource-info", "hosts", "train.py")
    assert done.returncode == 0, done.stderr
    assert "parallax: localhost: Python 3." in done.stderr
    assert done.stderr.endswith("parallax: the host is ready\n")
    (tmp_path / "hosts").write_text("localhost: 0\n")
    done = start(tmp_path, "check", "--resource-info", "hosts")
    assert done.returncode == 3
    assert "localhost has no CUDA devices, but 0 was asked for" in done.stderr


def test_the_command_line_needs_no_torch() -> None:
    code = (
        f"import sys; import {cli.__name__} as c; c.find_commands(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
