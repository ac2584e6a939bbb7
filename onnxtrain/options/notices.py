"""What options have to say to the user: each once in a process, in the log."""

from __future__ import annotations

import logging

_LOG = logging.getLogger("onnxtrain")
_logged: set[str] = set()


def warn_once(text: str) -> None:
    """Logs a warning, unless it was logged before."""
    if text not in _logged:
        _logged.add(text)
        _LOG.warning("%s", text)
