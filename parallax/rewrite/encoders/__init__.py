"""Encoders of gradients, one file each; see :mod:`parallax.strategy.encoders`."""
