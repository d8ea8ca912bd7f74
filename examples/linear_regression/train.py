"""Fit y = 10 x - 5: ``python -m examples.linear_regression.train``."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parallax
from examples.flags import config_of, flags_of
from examples.flags import parse as parse_flags
from examples.progress import Progress, print_result

SLOPE, INTERCEPT = 10.0, -5.0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags_of("linear_regression", "Fit a line through noisy points.")
    add = parser.add_argument
    add("--points", type=int, default=4096, help="points to fit")
    add("--noise", type=float, default=0.1, help="standard deviation of the points' noise")
    add("--batch", type=int, default=32, help="points per worker in a step")
    add("--lr", type=float, default=0.1, help="learning rate")
    add("--steps", type=int, default=200, help="steps to run")
    return parse_flags(parser, arguments)


def points(count: int, noise: float) -> TensorDataset:
    """``count`` points of the line, with noise: x and y, each [count, 1]."""
    x = torch.rand(count, 1) * 2 - 1
    return TensorDataset(x, SLOPE * x + INTERCEPT + noise * torch.randn(count, 1))


def make_step(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The training step for one device."""

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return train_step


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    torch.manual_seed(args.seed)
    data = points(args.points, args.noise)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)

    loader = parallax.shard(DataLoader(data, args.batch, shuffle=True, drop_last=True))
    runner = parallax.get_runner(
        make_step(model, optimizer),
        resource_info=args.resource_info,
        config=config_of(args),
    )

    chief = runner.worker_id == 0
    per_step = args.batch * runner.num_workers
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    with Progress(args.steps, unit="points", per_step=per_step, show=chief) as progress:
        for x, y in itertools.islice(epochs, args.steps):
            progress.step(runner.run(x, y))

    state = runner.state_dict()["model"]
    if chief:
        slope, intercept = float(state["weight"]), float(state["bias"])
        print_result(
            "Linear regression",
            {
                "workers": f"{runner.num_workers}",
                "found": f"y = {slope:.3f} x {intercept:+.3f}",
                "true": f"y = {SLOPE:.3f} x {INTERCEPT:+.3f}",
                "loss": f"{progress.loss:.4f}",
            },
        )


if __name__ == "__main__":
    main()
