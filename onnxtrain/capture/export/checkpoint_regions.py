"""Regions of torch.utils.checkpoint: what a capture notes of them, so that backward computes them again.

Both kinds are run in place while a module is captured. The nodes of a region carry its number.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx.traceback import annotate

REGION = "checkpoint"  # in a node's metadata
_KEY = "onnxtrain_checkpoint"
_NUMBERS = itertools.count(1)


def region() -> AbstractContextManager[None]:
    """What is traced inside belongs to one region."""
    return annotate({_KEY: next(_NUMBERS)})


def region_of(node: torch.fx.Node) -> str:
    """The number of the innermost region that a node was traced in; "" outside of all."""
    return str((node.meta.get("custom") or {}).get(_KEY, ""))


def regions_for(owner: int, original: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    """`_checkpoint_without_reentrant_generator`, whose function runs in a region where thread `owner` calls it."""

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        if threading.get_ident() != owner:
            yield from original(*args, **kwargs)
            return
        with region():
            yield from original(*args, **kwargs)

    return generator
