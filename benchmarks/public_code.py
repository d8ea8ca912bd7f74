"""Train what public packages bring, as plain PyTorch does and captured, and compare the numbers.

    python -m benchmarks.public_code --package timm --package transformers

The packages are no dependencies: install those that are to be tried. Each model is made twice from
the same seed, small and in float64 where it can be; both take a few steps on the same batches, one
of them as one worker of parallax. Parameters and losses must be equal up to rounding.
"""

from __future__ import annotations

import argparse
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import parallax
from parallax.errors import ParallaxError

STEPS, SEED = 4, 0
MOST_PARAMETERS = 20_000_000
ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4}
"""How far parameters may lie apart after the last step."""

Case = tuple[nn.Module, Callable[..., torch.Tensor], list[dict[str, Any]]]


@dataclass(frozen=True)
class Outcome:
    """What became of one model or optimizer: ``kind`` is a column of the table."""

    name: str
    kind: str
    detail: str = ""


def try_out(name: str, build: Callable[[], Case]) -> Outcome:
    """Train it both ways."""
    try:
        torch.manual_seed(SEED)
        plain, step, batches = build()
        losses = [float(step(**batch)) for batch in batches]
    except Exception as error:  # whatever a package raises: it does not fit, or is not for this
        return Outcome(name, "does not run", f"{type(error).__name__}: {error}".splitlines()[0])
    torch.manual_seed(SEED)
    model, step, batches = build()
    try:
        runner = parallax.get_runner(step, config={"workers": 1, "compile": "none"})
        found = [float(runner.run(**batch)) for batch in batches]
    except ParallaxError as error:
        return Outcome(name, "refused", str(error).splitlines()[0])
    state, expected = model.state_dict(), plain.state_dict()
    far = max(
        (float((state[key].double() - value.double()).abs().max()), key)
        for key, value in expected.items()
        if value.numel()
    )
    kind = next(p.dtype for p in plain.parameters())
    if not far[0] <= ROUNDING[kind]:
        return Outcome(name, "differs", f"{far[1]} by {far[0]:.1e}; losses {losses}, {found}")
    return Outcome(name, "same")


# -- Packages ---------------------------------------------------------------------------------


def _training(
    model: nn.Module,
    batches: list[dict[str, Any]],
    loss: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
) -> Case:
    used = optimizer or torch.optim.AdamW(model.parameters(), 1e-3)

    def step(**batch: Any) -> torch.Tensor:
        used.zero_grad()
        value = loss(model, **batch)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        used.step()
        return value

    return model, step, batches


def _classifying(model: nn.Module, size: int) -> Case:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = model(x)
        scores = scores[0] if isinstance(scores, tuple) else scores
        return F.cross_entropy(scores, y, label_smoothing=0.1)

    images = [
        {"x": torch.randn(4, 3, size, size, dtype=torch.float64), "y": torch.randint(10, (4,))}
        for _ in range(STEPS)
    ]
    return _training(model.double().train(), images, loss)


def timm() -> Iterator[tuple[str, Callable[[], Case]]]:
    """One model of each of its modules, the first by name, on images of 64 x 64."""
    package: Any = importlib.import_module("timm")
    for module in package.list_modules():
        names = [n for n in package.list_models(module=module) if "224" in n or "_" not in n]
        for name in (names or package.list_models(module=module))[:1]:

            def build(name: str = name) -> Case:
                try:
                    model = package.create_model(name, num_classes=10, img_size=64)
                except TypeError:
                    model = package.create_model(name, num_classes=10)
                return _classifying(_small(model), 64)

            yield name, build


SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "hidden_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "vocab_size": 100,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "state_size": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rotary_dim": 4,
    "moe_intermediate_size": 32,
    "experts_implementation": "batched_mm",
}
"""Settings of configurations of transformers, which take what they know."""


def transformers() -> Iterator[tuple[str, Callable[[], Case]]]:
    """All causal language models, of two small layers."""
    package: Any = importlib.import_module("transformers")
    package.logging.set_verbosity_error()
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    for name, kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():

        def build(name: str = name, kind: str = kind) -> Case:
            model_class = getattr(package, kind)
            settings = package.CONFIG_MAPPING[name](**SMALL)
            with torch.device("meta"):
                _small(model_class(settings))
            model = model_class(settings).train()
            words = [torch.randint(5, 100, (4, 16)) for _ in range(STEPS)]
            batches = [
                {"input_ids": one, "labels": one.clone(), "attention_mask": torch.ones_like(one)}
                for one in words
            ]
            precise = model if "moe" in name else model.double()
            return _training(precise, batches, lambda model, **batch: model(**batch).loss)

        yield name, build


def pytorch_optimizer() -> Iterator[tuple[str, Callable[[], Case]]]:
    """All its optimizers, on a network of three layers."""
    package: Any = importlib.import_module("pytorch_optimizer")
    for name in sorted(package.get_supported_optimizers()):

        def build(name: str = name) -> Case:
            layers = [nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3)]
            model = nn.Sequential(*layers).double()
            optimizer = package.load_optimizer(name)(model.parameters())
            batches = [
                {"x": torch.randn(6, 8, dtype=torch.float64), "y": torch.randint(3, (6,))}
                for _ in range(2 * STEPS)
            ]

            def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                return F.cross_entropy(model(x), y)

            return _training(model, batches, loss, optimizer)

        yield name, build


def _small(model: nn.Module) -> nn.Module:
    count = sum(p.numel() for p in model.parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count:,} parameters are too many to be tried here")
    return model


PACKAGES = {"timm": timm, "transformers": transformers, "pytorch_optimizer": pytorch_optimizer}
KINDS = ("same", "differs", "refused", "does not run")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--package", choices=PACKAGES, action="append", required=True)
    parser.add_argument("--only", help="names that have this in them")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    console = Console()
    table = Table("package", "tried", *KINDS)
    for package in options.package:
        outcomes = []
        for name, build in PACKAGES[package]():
            if options.only is None or options.only in name:
                outcomes.append(try_out(name, build))
                console.print(name, outcomes[-1].kind, outcomes[-1].detail, markup=False)
        counts = [sum(one.kind == kind for one in outcomes) for kind in KINDS]
        table.add_row(package, *map(str, (len(outcomes), *counts)))
    console.print(table)


if __name__ == "__main__":
    main()
