"""Train a VGG network on small images: ``python -m examples.vgg.train --quickstart``."""

from __future__ import annotations

import argparse
import itertools

import torch
from torch.utils.data import DataLoader, TensorDataset

import parallax
from examples.flags import add_data_dir, config_of, flags_of
from examples.flags import parse as parse_flags
from examples.images import CLASSES, Images, load_images
from examples.progress import Progress, print_result
from examples.resnet.model import accuracy
from examples.vgg.model import STAGES, VGG, make_optimizer, make_step

QUICKSTART = {"depth": 11, "width": 16, "features": 256, "steps": 200, "eval_images": 2_000}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = flags_of("vgg", "Train a VGG network on Fashion-MNIST or on digits.")
    add_data_dir(parser)
    add = parser.add_argument
    add("--data", choices=("auto", "fashion-mnist", "digits"), default="auto", help="images")
    add("--depth", type=int, choices=tuple(STAGES), default=16, help="layers with weights")
    add("--width", type=int, default=32, help="channels of the first stage; the paper has 64")
    add("--features", type=int, default=512, help="of the hidden layers; the paper has 4096")
    add("--dropout", type=float, default=0.5, help="share of these features that is dropped")
    add("--batch", type=int, default=64, help="images per worker in a step")
    add("--lr", type=float, default=0.01, help="learning rate that the schedule starts from")
    add("--momentum", type=float, default=0.9, help="momentum of SGD")
    add("--weight-decay", type=float, default=5e-4, help="weight decay of SGD")
    add("--clip", type=float, default=5.0, help="bound of the norm of the gradient")
    add("--steps", type=int, default=1_000, help="steps to run; the schedule ends with them")
    add("--eval-images", type=int, default=10_000, help="test images the accuracy is over")
    return parse_flags(parser, arguments, QUICKSTART)


def build_model(args: argparse.Namespace, data: Images) -> VGG:
    channels, size = data.train_images.shape[1:3]
    return VGG(args.depth, channels, CLASSES, size, args.width, args.features, args.dropout)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    torch.manual_seed(args.seed)
    data = load_images(args.data, args.data_dir)
    model = build_model(args, data)
    optimizer = make_optimizer(model, args.lr, args.momentum, args.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    pairs = TensorDataset(data.train_images, data.train_labels)
    loader = parallax.shard(DataLoader(pairs, args.batch, shuffle=True, drop_last=True))
    runner = parallax.get_runner(
        make_step(model, optimizer, args.clip),
        resource_info=args.resource_info,
        config=config_of(args),
    )

    chief = runner.worker_id == 0
    per_step = args.batch * runner.num_workers
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    with Progress(args.steps, unit="images", per_step=per_step, show=chief) as progress:
        for images, labels in itertools.islice(epochs, args.steps):
            progress.step(runner.run(images, labels))
            # Outside the step: each step reads the rate that it finds in the optimizer.
            schedule.step()

    state = runner.state_dict()["model"]
    if chief:
        trained = build_model(args, data)
        trained.load_state_dict(state)
        count = args.eval_images
        right = accuracy(trained, data.test_images[:count], data.test_labels[:count])
        print(runner.plan)
        print_result(
            f"VGG-{args.depth}",
            {
                "workers": f"{runner.num_workers}",
                "images/s": f"{progress.rate:,.0f}",
                "first step": f"{progress.first_step_seconds:.1f} s",
                "training loss": f"{progress.loss:.3f}",
                "test accuracy": f"{right:.1%}",
                "data": data.source,
            },
        )


if __name__ == "__main__":
    main()
