"""Train a translator: ``python -m examples.nmt.train --quickstart``."""

from __future__ import annotations

import argparse
import itertools

import torch
from torch.utils.data import DataLoader, TensorDataset

import parallax
from examples.flags import add_data_dir, config_of, flags_of
from examples.flags import parse as parse_flags
from examples.nmt.batches import ByLength, collate
from examples.nmt.data import Pairs, decode, load_pairs
from examples.nmt.model import (
    PADDING,
    Translator,
    evaluate,
    make_optimizer,
    make_step,
    translate,
    trimmed,
)
from examples.progress import Progress, print_result

DEFAULT_LR = {"sgd": 0.3, "adagrad": 0.05, "adam": 0.002}
QUICKSTART = {
    "longest": 15,
    "embedding": 128,
    "hidden": 192,
    "layers": 1,
    "dropout": 0.0,
    "steps": 300,
    "eval_pairs": 200,
}
SHOWN = 3


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags_of("nmt", "Train an encoder-decoder LSTM with attention.")
    add_data_dir(parser)
    add = parser.add_argument
    add("--vocab", type=int, default=20_000, help="words of each language, if it has as many")
    add("--longest", type=int, default=25, help="words of a sentence; longer ones are left out")
    add("--embedding", type=int, default=256, help="features of a word")
    add("--hidden", type=int, default=512, help="LSTM cells")
    add("--layers", type=int, default=2, help="LSTM layers of encoder and decoder")
    add("--dropout", type=float, default=0.2, help="share of features that are dropped")
    add("--batch", type=int, default=32, help="pairs per worker in a step")
    add("--optimizer", choices=tuple(DEFAULT_LR), default="adam", help="update rule")
    add("--lr", type=float, default=None, help=f"learning rate; None: {DEFAULT_LR}")
    add("--clip", type=float, default=5.0, help="bound of the norm of the dense gradients")
    add("--epochs", type=float, default=5.0, help="passes over the pairs")
    add("--steps", type=int, default=None, help="stop after so many steps instead")
    add("--eval-pairs", type=int, default=1_000, help="held-out pairs to evaluate")
    add(
        "--text",
        default="auto",
        help='"libreoffice-de", "libreoffice-fr", "docstrings", "auto" or a file of pairs',
    )
    args = parse_flags(parser, arguments, QUICKSTART)
    if args.lr is None:
        args.lr = DEFAULT_LR[args.optimizer]
    return args


def build_model(args: argparse.Namespace, pairs: Pairs) -> Translator:
    sizes = len(pairs.source_words), len(pairs.target_words)
    return Translator(*sizes, args.embedding, args.hidden, args.layers, args.dropout)


def spread(count: int, wanted: int) -> torch.Tensor:
    """Up to ``wanted`` of ``count`` places from all over: texts are in the order of their files."""
    return torch.linspace(0, count - 1, min(count, wanted)).long()


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    torch.manual_seed(args.seed)
    pairs = load_pairs(args.text, args.data_dir, longest=args.longest, vocab=args.vocab)
    model = build_model(args, pairs)
    optimizer = make_optimizer(model, args.optimizer, args.lr)

    data = TensorDataset(pairs.source, pairs.target)
    runner = parallax.get_runner(
        make_step(model, optimizer, args.clip),
        resource_info=args.resource_info,
        config=config_of(args),
    )
    order = ByLength(pairs.source, pairs.target, args.batch * runner.num_workers)
    loader = parallax.shard(
        DataLoader(data, args.batch, sampler=order, collate_fn=collate, drop_last=True)
    )

    chief = runner.worker_id == 0
    steps = args.steps or max(1, round(args.epochs * len(loader)))
    # BEGIN is given, and PADDING costs time but is no word.
    words = int((pairs.target[:, 1:] != PADDING).sum()) / len(pairs.target)
    if chief:
        print(
            f"{len(data):,} pairs of {pairs.origin}, vocabularies {len(pairs.source_words):,} and "
            f"{len(pairs.target_words):,}; {steps:,} steps of {args.batch} pairs on "
            f"{runner.num_workers} workers",
            flush=True,
        )

    per_step = round(words * args.batch * runner.num_workers)
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    with Progress(steps, unit="target words", per_step=per_step, show=chief) as progress:
        for source, target in runner.ahead(itertools.islice(epochs, steps)):
            progress.step(runner.run(source, target))

    # The trained rows live on their owners: every worker helps to collect them.
    state = runner.state_dict()["model"]
    if chief:
        trained = build_model(args, pairs)
        trained.load_state_dict(state)
        rows = spread(len(pairs.held_out_source), args.eval_pairs)
        sources, targets = pairs.held_out_source[rows], pairs.held_out_target[rows]
        held_out, right = evaluate(trained, sources, targets)
        print(runner.plan)
        shown = spread(len(sources), SHOWN)
        found = translate(trained, trimmed(sources[shown]), longest=args.longest + 1)
        for source, target, output in zip(sources[shown], targets[shown], found, strict=True):
            print("source    ", decode(source, pairs.source_words))
            print("reference ", decode(target, pairs.target_words))
            print("translated", decode(output, pairs.target_words))
        print_result(
            "Translation",
            {
                "workers": f"{runner.num_workers}",
                "target words/s": f"{progress.rate:,.0f}",
                "first step": f"{progress.first_step_seconds:.1f} s",
                "training loss (of a sentence)": f"{progress.loss:.3f}",
                "held-out perplexity": f"{held_out:,.1f}",
                "held-out words predicted right": f"{right:.1%}",
                "text": pairs.origin,
            },
        )


if __name__ == "__main__":
    main()
