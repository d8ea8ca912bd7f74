"""The launcher's console: what it takes late is shown, what it never takes stops nothing."""

from __future__ import annotations

import os
import threading
import time

import pytest

from parallax.cluster.console import Console


def shown_late(console: Console, pieces: list[bytes]) -> bytes:
    """What a reader gets that begins only when all pieces were put."""
    reading, writing = os.pipe()
    for piece in pieces:
        console.put(writing, piece)
    found: list[bytes] = []

    def read() -> None:
        while piece := os.read(reading, 1 << 16):
            found.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    console.finish()
    os.close(writing)
    reader.join()
    os.close(reading)
    return b"".join(found)


def test_a_burst_of_lines_waits_for_a_console_that_takes_nothing_yet() -> None:
    lines = [f"line {at}\n".encode() for at in range(50_000)]
    assert shown_late(Console(), lines) == b"".join(lines)


def test_pieces_for_two_descriptors_keep_their_order(tmp_path) -> None:
    path = tmp_path / "both"
    first = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    second = os.dup(first)
    console = Console()
    pieces = [f"{at} ".encode() for at in range(1000)]
    for at, piece in enumerate(pieces):
        console.put(first if at % 3 else second, piece)
    console.finish()
    os.close(first)
    os.close(second)
    assert path.read_bytes() == b"".join(pieces)


def test_what_is_too_much_is_left_out_and_said(capfd: pytest.CaptureFixture[str]) -> None:
    block = b"x" * (1 << 16)
    shown = len(shown_late(Console(waiting_bytes=1 << 20), [block] * 40))
    # The pipe itself holds some of it.
    assert (1 << 20) - len(block) <= shown < 40 * len(block)
    missing = 40 * len(block) - shown
    note = f"parallax: {missing} bytes of output were not shown: the console is too slow"
    assert note in capfd.readouterr().err


def test_a_console_that_never_takes_anything_is_given_up() -> None:
    reading, writing = os.pipe()
    console = Console()
    console.put(writing, b"x" * (1 << 20))
    begun = time.monotonic()
    console.finish(0.2)
    assert time.monotonic() - begun < 30
    os.close(reading)  # the thread's write ends with an error
    os.close(writing)


def test_a_reader_that_left_does_not_stop_the_other_descriptor(tmp_path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with (tmp_path / "err").open("wb") as file:
        console = Console()
        console.put(writing, b"nobody reads this\n")
        console.put(file.fileno(), b"this is read\n")
        console.finish()
    os.close(writing)
    assert (tmp_path / "err").read_bytes() == b"this is read\n"
