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
from parallax.graph.discovery import discover
from parallax.runtime.comm import World
from parallax.runtime.runner import Runner
from parallax.strategy.builders import Encoded

SEED = 7
BATCH, STEPS = 32, 2000


def accuracies(world: World, cases: list[tuple[str, Options]]) -> list[dict[str, Any]]:
    """Test accuracy, and bytes sent per step, of each encoder after the same steps."""
    data = load_images("digits", CACHE)
    pairs = TensorDataset(data.train_images, data.train_labels)
    results = []
    for encoder, options in cases:
        torch.manual_seed(SEED)
        model = resnet.ResNet(blocks=1, width=16)
        optimizer = resnet.make_optimizer(model)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        step = resnet.make_step(model, optimizer)
        config = Config(strategy=Encoded(encoder, **options), workers=1, seed=SEED)
        runner = Runner(step, discover(step), config, world)
        sampler = DistributedSampler(pairs, world.size, world.rank, seed=SEED)
        loader = DataLoader(pairs, BATCH, sampler=sampler, drop_last=True)
        epochs = itertools.chain.from_iterable(itertools.repeat(loader))
        before = 0
        for number, (images, labels) in enumerate(itertools.islice(epochs, STEPS)):
            if number == 2:
                before = sum(runner.traffic.values())
            runner.run(images, labels)
            schedule.step()
        sent = (sum(runner.traffic.values()) - before) / (STEPS - 2)
        right = resnet.accuracy(model, data.test_images, data.test_labels)
        results.append({"encoder": encoder, "accuracy": right, "bytes": sent})
    return results
