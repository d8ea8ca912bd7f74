"""What encoders cost and save: ``python -m benchmarks.encoders``.

For each encoder the table has the bytes of an element, the nanoseconds of one thread to encode and
to decode one, and two sums for an element of a gradient in one step of N workers: all that one
worker encodes and decodes of it, residuals included, and the time by which the network carries its
bytes faster than those of float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from parallax.runtime.encoded.block_sums import CHUNK, decode, encode
from parallax.strategy.encoders import BlockEncoder, Encoder, SumEncoder, encoders

COLUMNS = 2048
REPEATS = 7


def nanoseconds(function: Callable[[], object], elements: int) -> float:
    """Of the fastest of some runs, for one element."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times) / elements * 1e9


def of_blocks(encoder: BlockEncoder, values: torch.Tensor, workers: int) -> tuple[float, ...]:
    """Nanoseconds an element: to encode, to decode, and a worker's work in a step."""
    count = values.numel()
    blocks = encoder.blocks(count)
    fields = [torch.empty(blocks, n, dtype=dtype) for dtype, n in encoder.fields]
    flat, out, scratch = values.view(-1), torch.zeros(count), torch.empty(CHUNK)
    encoding = nanoseconds(lambda: encode(encoder, flat, fields), count)
    decoding = nanoseconds(lambda: decode(encoder, fields, out), count)
    adding = nanoseconds(lambda: decode(encoder, fields, out, torch.add, scratch), count)
    # Its gradients and its share of the sums are encoded, and each kept as a residual; the shares
    # of all workers are added, and all sums decoded.
    share = 1 + 1 / workers
    kept = adding * share if encoder.feedback else 0.0
    return encoding, decoding, encoding * share + adding + kept + decoding


def of_sums(encoder: SumEncoder, values: torch.Tensor) -> tuple[float, ...]:
    """The same; to encode are all rounds."""
    coder = encoder.coder("w", values.shape, values.dtype, values.device)
    out, count = torch.empty_like(values), values.numel()

    def rounds() -> torch.Tensor:
        summed: torch.Tensor | None = None
        for _ in encoder.sizes(values.shape):
            summed = coder.values(values, summed).reshape(-1)
        assert summed is not None
        return summed

    last = rounds()
    encoding = nanoseconds(rounds, count)
    decoding = nanoseconds(lambda: coder.decode(last, out), count)
    keeping = nanoseconds(lambda: values.sub(out), count)
    return encoding, decoding, encoding + 2 * decoding + keeping


def row(encoder: Encoder, values: torch.Tensor, workers: int, rate: float) -> list[str]:
    """One line of the table."""
    size = encoder.encoded_bytes(values.shape, 4) / values.numel()
    if isinstance(encoder, BlockEncoder):
        encoding, decoding, step = of_blocks(encoder, values, workers)
    else:
        assert isinstance(encoder, SumEncoder)
        encoding, decoding, step = of_sums(encoder, values)
    saved = 2 * (workers - 1) / workers * (4 - size) * 8 / rate
    numbers = (size, encoding, decoding, step, saved, saved / step)
    return [encoder.name, *(f"{number:.2f}" for number in numbers)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--megabytes", type=int, default=16, help="of the gradient, in float32")
    add("--workers", type=int, default=4, help="that the sums are for")
    add("--gigabits", type=float, default=1.0, help="per second, that a link carries")
    add("--threads", type=int, default=1, help="torch's threads")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    values = torch.randn((args.megabytes << 20) // 4 // COLUMNS, COLUMNS)
    cluster = f"{args.workers} workers, {args.gigabits:g} Gbit/s"
    table = Table(title=f"ns an element of {args.megabytes} MB; {cluster}")
    for name in ("encoder", "bytes", "encode", "decode", "step", "saved", "saved/step"):
        table.add_column(name, justify="left" if name == "encoder" else "right")
    for kind in encoders().values():
        table.add_row(*row(kind(), values, args.workers, args.gigabits))
    Console().print(table)


if __name__ == "__main__":
    main()
