"""The package's logger. Its warnings name the package: without a handler, Python writes a message and nothing else."""

from __future__ import annotations

import logging

LOG = logging.getLogger("onnxtrain")
PREFIX = "onnxtrain: "
_logged: set[str] = set()


def warn(text: str) -> None:
    """Log a warning."""
    LOG.warning("%s%s", PREFIX, text)


def warn_once(text: str) -> None:
    """Log a warning, unless this process has logged it before."""
    if text not in _logged:
        _logged.add(text)
        warn(text)
