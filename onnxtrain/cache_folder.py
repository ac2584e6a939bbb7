"""Where onnxtrain keeps what it measured and compiled on this machine. All of it can be made again.

$ONNXTRAIN_CACHE_DIR, else $XDG_CACHE_HOME/onnxtrain, else ~/.cache/onnxtrain
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "ONNXTRAIN_CACHE_DIR"


def cache_folder(kind: str) -> Path:
    """The folder for one kind of files. It may not be there yet; others may write to it at the same time."""
    own = os.environ.get(VARIABLE)
    if own:
        return Path(own) / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onnxtrain" / kind
