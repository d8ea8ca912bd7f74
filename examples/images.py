"""Images: Fashion-MNIST out of a Debian package, or scikit-learn's digits."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from examples.fetch import chosen, debian_files
from parallax.errors import DataError

CLASSES = 10
_IMAGES_HEADER, _LABELS_HEADER = 16, 8  # bytes before the values of an idx file


@dataclass(frozen=True)
class Images:
    """Images, [count, 1, height, width] float32 around zero, and their labels, [count] int64."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor
    source: str


def load_images(name: str, cache: Path) -> Images:
    """The images that ``name`` names: ``"fashion-mnist"``, ``"digits"``, or ``"auto"`` for the
    first of these that can be had. ``cache`` keeps what is fetched."""
    if name == "auto":
        name = chosen(
            cache / "images-auto.txt",
            lambda: "digits" if _fashion_mnist_folder(cache) is None else "fashion-mnist",
        )
    if name == "digits":
        return _digits()
    folder = _fashion_mnist_folder(cache)
    if folder is None:
        raise DataError(
            "Debian's package dataset-fashion-mnist cannot be fetched here.",
            hint='use "--data digits" for the small digits that scikit-learn ships.',
        )
    return _fashion_mnist(folder)


def _fashion_mnist_folder(cache: Path) -> Path | None:
    return debian_files("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist", cache)


def _fashion_mnist(folder: Path) -> Images:
    def part(prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = _idx(folder / f"{prefix}-images-idx3-ubyte.gz", _IMAGES_HEADER)
        labels = _idx(folder / f"{prefix}-labels-idx1-ubyte.gz", _LABELS_HEADER)
        images = torch.from_numpy(pixels).view(-1, 1, 28, 28).float().div_(255)
        return images.sub_(0.286).div_(0.353), torch.from_numpy(labels).long()

    return Images(*part("train"), *part("t10k"), "Fashion-MNIST (Debian dataset-fashion-mnist)")


def _idx(file: Path, header: int) -> np.ndarray:
    with gzip.open(file) as stream:
        return np.frombuffer(stream.read(), np.uint8, offset=header).copy()


def _digits() -> Images:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "There is neither Fashion-MNIST nor scikit-learn here.",
            hint='pip install "parallax[examples]" brings scikit-learn and its digits.',
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).view(-1, 1, 8, 8).float().sub_(4.88).div_(6.02)
    targets = torch.from_numpy(labels).long()
    # The order is by writer, in runs of ten digits: every fifth run is another hand's.
    test = torch.arange(len(targets)) // 10 % 5 == 4
    return Images(images[~test], targets[~test], images[test], targets[test], "scikit-learn digits")
