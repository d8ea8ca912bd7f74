"""Automatic distributed training: write a training step for one device, run it on many."""

from parallax.config import Config

__version__ = "0.1.0"
__all__ = ["Config"]
