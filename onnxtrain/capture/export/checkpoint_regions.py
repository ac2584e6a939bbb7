"""Mark the nodes traced inside torch.utils.checkpoint, so that backward recomputes them.

A capture runs the function of a checkpoint, reentrant or not, inline. The nodes of one region share its number.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx.traceback import annotate

REGION = "checkpoint"  # the key in an ONNX node's metadata
_KEY = "onnxtrain_checkpoint"
_NUMBERS = itertools.count(1)


def checkpoint_region() -> AbstractContextManager[None]:
    """Mark every node traced in this context as part of one new region."""
    return annotate({_KEY: next(_NUMBERS)})


def checkpoint_region_of(node: torch.fx.Node) -> str:
    """Return the number of the innermost region that a node was traced in; "" outside of any region."""
    return str((node.meta.get("custom") or {}).get(_KEY, ""))


def mark_checkpoints(owner: int, original: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    """Wrap `_checkpoint_without_reentrant_generator` so that a checkpoint of the thread `owner` runs in a region."""

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        if threading.get_ident() != owner:
            yield from original(*args, **kwargs)
            return
        with checkpoint_region():
            yield from original(*args, **kwargs)

    return generator
