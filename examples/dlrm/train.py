"""Train a recommendation model: ``python -m examples.dlrm.train --quickstart``."""

from __future__ import annotations

import argparse
import itertools

import torch
from torch.utils.data import DataLoader, TensorDataset

import parallax
from examples.dlrm.data import Samples, load_samples
from examples.dlrm.model import DLRM, make_optimizer, make_step, predict
from examples.flags import add_data_dir, config_of, flags_of
from examples.flags import parse as parse_flags
from examples.progress import Progress, print_result
from parallax.errors import DataError

try:
    from sklearn.metrics import log_loss, roc_auc_score
except ImportError as error:
    raise DataError(
        "scikit-learn, which measures the predictions, is not installed.",
        hint='pip install "parallax[examples]" brings it.',
    ) from error

DEFAULT_LR = {"sgd": 0.1, "adagrad": 0.05, "adam": 0.001}
QUICKSTART = {"rows": 20_000, "features": 16, "bottom": [64], "top": [64], "epochs": 1.0}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags_of("dlrm", "Train a recommendation model with 26 embedding tables.")
    add_data_dir(parser)
    add = parser.add_argument
    add("--data", choices=("auto", "ml-100k", "cells"), default="auto", help="samples")
    add("--rows", type=int, default=100_000, help="rows of each of the tables that are hashed to")
    add("--features", type=int, default=32, help="of a row")
    add("--bottom", type=int, nargs="+", default=[256, 64], help="sizes of the lower network")
    add("--top", type=int, nargs="+", default=[256, 64], help="sizes of the upper network")
    add("--batch", type=int, default=128, help="samples per worker in a step")
    add("--optimizer", choices=tuple(DEFAULT_LR), default="adagrad", help="update rule")
    add("--lr", type=float, default=None, help=f"learning rate; None: {DEFAULT_LR}")
    add("--epochs", type=float, default=1.0, help="passes over the samples")
    add("--steps", type=int, default=None, help="stop after so many steps instead")
    args = parse_flags(parser, arguments, QUICKSTART)
    if args.lr is None:
        args.lr = DEFAULT_LR[args.optimizer]
    return args


def build_model(args: argparse.Namespace, data: Samples) -> DLRM:
    # Sparse gradients spare one device the rows that a step does not touch, with the same numbers;
    # torch's Adam does not take them, since it moves all rows.
    sparse = args.optimizer != "adam"
    return DLRM(data.numbers.shape[1], data.rows, args.features, args.bottom, args.top, sparse)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    torch.manual_seed(args.seed)
    data = load_samples(args.data, args.data_dir, args.rows)
    model = build_model(args, data)
    optimizer = make_optimizer(model, args.optimizer, args.lr)

    parts = data.numbers, data.ids, data.clicks
    train = TensorDataset(*(part[: data.train] for part in parts))
    loader = parallax.shard(DataLoader(train, args.batch, shuffle=True, drop_last=True))
    runner = parallax.get_runner(
        make_step(model, optimizer),
        resource_info=args.resource_info,
        config=config_of(args),
    )

    chief = runner.worker_id == 0
    steps = args.steps or max(1, round(args.epochs * len(loader)))
    if chief:
        print(
            f"{data.train:,} samples of {data.source}, {len(data.rows)} tables with "
            f"{sum(data.rows):,} rows and {sum(data.lookups)} lookups a sample; {steps:,} steps of "
            f"{args.batch} samples on {runner.num_workers} workers",
            flush=True,
        )
    per_step = args.batch * runner.num_workers
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    samples = ((numbers, ids.split(data.lookups, 1), clicks) for numbers, ids, clicks in epochs)
    with Progress(steps, unit="samples", per_step=per_step, show=chief) as progress:
        for batch in runner.ahead(itertools.islice(samples, steps), late_updates=True):
            progress.step(runner.run(*batch))

    # The trained rows live on their owners: every worker helps to collect them.
    state = runner.state_dict()["model"]
    if chief:
        trained = build_model(args, data)
        trained.load_state_dict(state)
        numbers, ids, clicks = (part[data.train :] for part in parts)
        chances = predict(trained, numbers, ids.split(data.lookups, 1)).sigmoid().double()
        print(runner.plan)
        print_result(
            "Recommendation",
            {
                "workers": f"{runner.num_workers}",
                "samples/s": f"{progress.rate:,.0f}",
                "first step": f"{progress.first_step_seconds:.1f} s",
                "training loss": f"{progress.loss:.3f}",
                "test log loss": f"{log_loss(clicks, chances):.4f}",
                "of the mean": f"{log_loss(clicks, clicks.mean().expand_as(clicks)):.4f}",
                "test AUC": f"{roc_auc_score(clicks, chances):.4f}",
                "data": data.source,
            },
        )


if __name__ == "__main__":
    main()
