"""The residual network of the examples, trained with encoded gradients."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from encoded_steps import Options
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from examples.fetch import CACHE
from examples.images import load_images
from examples.resnet import model as resnet
from parallax.config import Config
from parallax.graph.objects.discovery import discover
from parallax.runtime.comm.world import World
from parallax.runtime.runner import Runner
from parallax.strategy.builders import Encoded

SEED = 7
BATCH, STEPS = 32, 2000


def accuracy(world: World, encoder: str, options: Options) -> dict[str, Any]:
    """Train on the digits; the accuracy on other hands' digits, and bytes sent per step.

    After forty epochs it moves by no more than an image or two with the random numbers: encoders
    can be told apart by it.
    """
    data = load_images("digits", CACHE)
    pairs = TensorDataset(data.train_images, data.train_labels)
    torch.manual_seed(SEED)
    model = resnet.ResNet(blocks=1, width=16)
    optimizer = resnet.make_optimizer(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    step = resnet.make_step(model, optimizer)
    config = Config(strategy=Encoded(encoder, **options), workers=1, seed=SEED)
    runner = Runner(step, discover(step), config, world)
    sampler: DistributedSampler[Any] = DistributedSampler(pairs, world.size, world.rank, seed=SEED)
    loader = DataLoader(pairs, BATCH, sampler=sampler, drop_last=True)
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    before = 0
    for number, (images, labels) in enumerate(itertools.islice(epochs, STEPS)):
        if number == 2:
            before = sum(runner.traffic.values())
        runner.run(images, labels)
        schedule.step()
    return {
        "bytes": (sum(runner.traffic.values()) - before) / (STEPS - 2),
        "accuracy": resnet.accuracy(model, data.test_images, data.test_labels),
    }
