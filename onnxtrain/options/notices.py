"""Warnings about options, each logged once per process."""

from __future__ import annotations

import logging

_LOG = logging.getLogger("onnxtrain")
_logged: set[str] = set()


def warn_once(text: str) -> None:
    """Log a warning, unless this process has logged it before."""
    if text not in _logged:
        _logged.add(text)
        _LOG.warning("%s", text)
