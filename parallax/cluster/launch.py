"""Turns the user's process into the launcher of N workers that run the same script.

The process is replaced, not left waiting: its memory is freed, and its number, console and
signals are the launcher's. What it cannot take along is undone: workers start in the directory in
which the user started the script, with the same interpreter options and arguments.
"""

from __future__ import annotations

import builtins
import contextlib
import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from parallax.cluster.environment import refuse_nested_launch
from parallax.errors import LaunchError

__all__ = [
    "AGENT",
    "Target",
    "find_target",
    "launch_command",
    "launch_local_workers",
    "made_directory",
    "original_command",
    "program",
]

# The script may change its directory before it asks for workers; it imports parallax earlier.
try:
    _directory_at_import: str | None = os.getcwd()
except FileNotFoundError:
    _directory_at_import = None

AGENT = str(Path(__file__).resolve().parent / "agent_start.py")
_HINT = (
    "put the program in a file and run `python train.py`, start it with torchrun, or use"
    " parallax.Config(workers=1)."
)
_OPTIONS_WITH_VALUE = "cmWX"
_LONG_OPTIONS_WITH_VALUE = ("--check-hash-based-pycs",)
_NOTEBOOK_MODULES = ("ipykernel", "ipykernel_launcher", "IPython", "colab_kernel_launcher")
_TEST_RUNNERS = ("pytest", "py.test", "_jb_pytest_runner.py")


@dataclass(frozen=True)
class Target:
    """What a Python interpreter was asked to run.

    Args:
        kind: a script, ``-m`` module, ``-c`` command, the standard input, or nothing.
        name: the script's path, the module's name or the command's text.
        index: where ``name`` begins in the command line (in the same word as ``-m``, perhaps).
    """

    kind: Literal["script", "module", "command", "stdin", "nothing"]
    name: str = ""
    index: int = 0


def find_target(words: Sequence[str]) -> Target:
    """Finds what a Python command line runs.

    Args:
        words: the command line, as in ``sys.orig_argv``.
    """
    index = 1
    while index < len(words):
        word = words[index]
        if word == "-":
            return Target("stdin", index=index)
        if not word.startswith("-"):
            return Target("script", word, index)
        if word.startswith("--"):
            index += 2 if word in _LONG_OPTIONS_WITH_VALUE else 1
            continue
        # Options may be joined ("-uBm pkg") and a value may follow in the same word ("-Wignore").
        letter_at = next((at for at, c in enumerate(word) if c in _OPTIONS_WITH_VALUE), None)
        if letter_at is None:
            index += 1
            continue
        letter, value = word[letter_at], word[letter_at + 1 :]
        value_at = index
        if not value:
            value_at = index + 1
            value = words[value_at] if value_at < len(words) else ""
        if letter == "m":
            return Target("module", value, value_at)
        if letter == "c":
            return Target("command", value, value_at)
        index = value_at + 1
    return Target("nothing")


def original_command(
    words: Sequence[str], executable: str, main_file: str | None, directory: str | None
) -> tuple[list[str], str | None]:
    """The command that starts the user's program again.

    Args:
        words: the command line that started it, as in ``sys.orig_argv``.
        executable: the interpreter.
        main_file: ``__main__.__file__``, which names the script although the directory changed.
        directory: the directory in which the program started, as far as is known.

    Returns:
        The command, and the directory to start it in (None: where the process is).

    Raises:
        LaunchError: there is no script or module that could be started again.
    """
    target = find_target(words)
    name = os.path.basename(target.name)
    if name in _TEST_RUNNERS:
        raise LaunchError(
            "The step runs inside pytest, which parallax cannot start again in every worker.",
            hint="use parallax.Config(workers=1) in the test, or let the test start a script.",
        )
    if target.kind == "module" and target.name.partition(".")[0] in _NOTEBOOK_MODULES:
        raise LaunchError(_cannot_start_again("a notebook"), hint=_HINT)
    if target.kind in ("command", "stdin", "nothing"):
        places = {"command": "a `python -c` command", "stdin": "its standard input"}
        place = places.get(target.kind, "an interactive session")
        raise LaunchError(_cannot_start_again(place), hint=_HINT)
    if not executable:
        raise LaunchError("Python does not know its own executable.", hint=_HINT)
    command = [executable, *words[1:]]
    if target.kind == "module" or os.path.isabs(target.name):
        return command, directory
    # A relative path ends the absolute one that Python made of it when it started, so what is
    # before it is the directory of that moment.
    ending = os.sep + target.name
    if main_file is not None and os.path.isabs(main_file):
        if main_file.endswith(ending) and os.path.isdir(main_file[: -len(ending)] or os.sep):
            return command, main_file[: -len(ending)] or os.sep
        if os.path.isfile(main_file) and not os.path.isdir(target.name):
            command[target.index] = main_file
            return command, directory
    if directory is None or not os.path.exists(os.path.join(directory, target.name)):
        raise LaunchError(f"The script {target.name} is no longer found.", hint=_HINT)
    return command, directory


def launch_local_workers(
    workers: int, *, redirect_path: str | None, seed: int | None = None
) -> NoReturn:
    """Replaces this process by the launcher of ``workers`` workers that run the same program.

    The program starts anew in each worker, in the directory in which it was started first; there
    ``worker_environment()`` says ``launched``. Functions registered with ``atexit`` do not run in
    this process.

    Args:
        workers: number of workers on this machine.
        redirect_path: directory that receives each worker's output, besides the console.
        seed: base of the workers' random numbers; a random one if None.

    Raises:
        LaunchError: this process is a worker already, or there is no script to start again.
    """
    refuse_nested_launch()
    command, directory = program()
    launch_command(command, directory, workers, redirect_path=redirect_path, seed=seed)


def launch_command(
    command: list[str],
    directory: str | None,
    workers: int,
    *,
    redirect_path: str | None,
    seed: int | None = None,
) -> NoReturn:
    """Replaces this process by the launcher of ``workers`` workers that run a command.

    Args:
        command: the interpreter and what it is to run.
        directory: where to start it; None for the current one.
        workers: number of workers on this machine.
        redirect_path: directory that receives each worker's output, besides the console.
        seed: base of the workers' random numbers; a random one if None.

    Raises:
        LaunchError: the launcher cannot be started.
    """
    options = ["--workers", str(workers)]
    if redirect_path is not None:
        options += ["--redirect", made_directory(redirect_path)]
    if seed is not None:
        options += ["--seed", str(seed)]
    launcher = [sys.executable, AGENT, *options, "--", *command]
    for stream in (sys.stdout, sys.stderr):
        # A closed console is the workers' business.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    try:
        if directory is not None:
            os.chdir(directory)
        os.execv(sys.executable, launcher)
    except OSError as error:
        raise LaunchError(f"The workers cannot be started: {error}.") from error


def program() -> tuple[list[str], str | None]:
    """The command that starts this process's program again, and where (None: here).

    Raises:
        LaunchError: there is no script or module that could be started again.
    """
    _refuse_unrepeatable_process()
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    return original_command(sys.orig_argv, sys.executable, main_file, _directory_at_import)


def _refuse_unrepeatable_process() -> None:
    if multiprocessing.parent_process() is not None:
        raise LaunchError(
            "This process was started by multiprocessing and is asked to start workers.",
            hint='put the training under `if __name__ == "__main__":`, which a spawned process'
            " does not run.",
        )
    if hasattr(builtins, "get_ipython"):
        raise LaunchError(_cannot_start_again("a notebook"), hint=_HINT)
    if hasattr(sys, "ps1"):
        raise LaunchError(_cannot_start_again("an interactive session"), hint=_HINT)


def _cannot_start_again(place: str) -> str:
    return (
        f"The program comes from {place}, and each worker must start it again: there is no script."
    )


def made_directory(path: str) -> str:
    """Makes a directory; its absolute path.

    Raises:
        LaunchError: it cannot be made.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"redirect_path cannot be made: {error}.") from error
    return os.path.abspath(path)
