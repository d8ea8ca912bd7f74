"""What parallax says while it runs: its logger, and the variable that sets how much."""

from __future__ import annotations

import logging
import os

from parallax.errors import ConfigError

LOG_LEVEL_VARIABLE = "PARALLAX_LOG_LEVEL"

_LEVELS = {
    "": logging.INFO,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
}


def configure_logging() -> logging.Logger:
    """The package's logger at the level of ``PARALLAX_LOG_LEVEL`` (INFO unless set)."""
    logger = logging.getLogger("parallax")
    text = os.environ.get(LOG_LEVEL_VARIABLE, "INFO").strip().upper()
    level = _LEVELS.get(text)
    if level is None:
        raise ConfigError(
            f"{LOG_LEVEL_VARIABLE} is {text!r}, which is no log level.",
            hint="use DEBUG, INFO, WARNING, ERROR or CRITICAL.",
        )
    logger.setLevel(level)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("parallax: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    return logger
