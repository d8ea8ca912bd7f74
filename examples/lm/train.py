"""Train the language model: ``python -m examples.lm.train --quickstart``."""

from __future__ import annotations

import argparse
import itertools
import warnings

import torch

import parallax
from examples.flags import add_data_dir, config_of, flags_of
from examples.flags import parse as parse_flags
from examples.lm.data import batches_per_epoch, load_corpus, streams
from examples.lm.model import LanguageModel, make_optimizer, make_step, perplexity
from examples.progress import Progress, print_result
from parallax.errors import DataError

# Rates that stay stable on the dictionary text with the default sizes and vocabularies to 200,000.
DEFAULT_LR = {"sgd": 0.3, "adagrad": 0.2, "adam": 0.002}
# A minute or two on two CPU cores: small features, but a real text and a big vocabulary.
QUICKSTART = {
    "vocab": 50_000,
    "embedding": 128,
    "hidden": 256,
    "projection": 128,
    "sampled": 512,
    "optimizer": "adam",
    "steps": 400,
    "eval_words": 10_000,
    "workers": 2,
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags_of("lm", "Train an LSTM language model with sampled softmax.")
    add_data_dir(parser)
    add = parser.add_argument
    add("--vocab", type=int, default=50_000, help="words in the vocabulary, rows of the tables")
    add("--embedding", type=int, default=256, help="features of a word")
    add("--hidden", type=int, default=512, help="LSTM cells")
    add("--projection", type=int, default=256, help="features the cells are projected to")
    add("--sampled", type=int, default=1024, help="classes sampled for the softmax")
    add("--batch", type=int, default=32, help="streams per worker")
    add("--unroll", type=int, default=20, help="words per stream in a step")
    add("--optimizer", choices=tuple(DEFAULT_LR), default="adagrad", help="update rule")
    add("--lr", type=float, default=None, help=f"learning rate; None: {DEFAULT_LR}")
    add("--clip", type=float, default=10.0, help="bound of the norm of the LSTM's gradient")
    add("--epochs", type=float, default=1.0, help="passes over the text")
    add("--steps", type=int, default=None, help="stop after so many steps instead")
    add("--eval-words", type=int, default=20_000, help="held-out words the perplexity is over")
    add("--text", default="auto", help='"gcide", "programs", "auto" or a text file')
    args = parse_flags(parser, arguments, QUICKSTART)
    if args.lr is None:
        args.lr = DEFAULT_LR[args.optimizer]
    return args


def build_model(args: argparse.Namespace) -> LanguageModel:
    return LanguageModel(args.vocab, args.embedding, args.hidden, args.projection, args.sampled)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    # True and harmless: only the fused CPU kernel lacks projections.
    warnings.filterwarnings("ignore", message="LSTM with projections is not supported")
    torch.manual_seed(args.seed)
    corpus = load_corpus(args.text, args.data_dir)
    train_ids, held_out_ids = corpus.within(args.vocab)
    if min(args.eval_words, len(held_out_ids) - 1) < args.unroll:
        # Better now than after the training.
        raise DataError(
            f"Only {len(held_out_ids)} words are held out, or --eval-words is {args.eval_words}: "
            f"too few for one stretch of --unroll {args.unroll} words.",
            hint="use a longer text, more --eval-words or a smaller --unroll.",
        )

    model = build_model(args)
    optimizer = make_optimizer(model, args.optimizer, args.lr)
    train_step = make_step(model, optimizer, args.clip)
    runner = parallax.get_runner(
        train_step,
        resource_info=args.resource_info,
        config=config_of(args),
    )

    chief = runner.worker_id == 0
    shard, shards = parallax.shard_id(), parallax.num_shards()
    batches = streams(train_ids, args.batch, args.unroll, shard, shards)
    per_epoch = batches_per_epoch(train_ids, args.batch, args.unroll, shards)
    steps = args.steps or max(1, round(args.epochs * per_epoch))
    if chief:
        print(
            f"{len(train_ids):,} words of {corpus.source}, vocabulary {args.vocab:,}; "
            f"{steps:,} steps of {args.batch} x {args.unroll} words on {shards} workers",
            flush=True,
        )

    words_per_step = args.batch * args.unroll * shards
    with Progress(steps, unit="words", per_step=words_per_step, show=chief) as progress:
        for tokens, targets in itertools.islice(batches, steps):
            progress.step(runner.run(tokens, targets))

    # The trained rows live on their owners: every worker helps to collect them.
    state = runner.state_dict()
    if chief:
        trained = build_model(args)
        trained.load_state_dict(state["model"])
        held_out = perplexity(trained, held_out_ids, limit=args.eval_words, unroll=args.unroll)
        print(runner.plan)
        print_result(
            "Language model",
            {
                "workers": f"{shards}",
                "words/s": f"{progress.rate:,.0f}",
                "first step": f"{progress.first_step_seconds:.1f} s",
                "training loss (sampled softmax)": f"{progress.loss:.3f}",
                "held-out perplexity (full softmax)": f"{held_out:,.1f}",
                "text": corpus.source,
            },
        )


if __name__ == "__main__":
    main()
