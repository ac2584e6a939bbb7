"""Mark the nodes traced inside torch.utils.checkpoint, so that backward recomputes them.

A capture runs the function of a checkpoint, reentrant or not, inline. The nodes of one region share its number.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx.traceback import annotate, get_current_meta

REGION = "checkpoint"  # the key in an ONNX node's metadata
_KEY = "onnxtrain_checkpoint"
_NUMBERS = itertools.count(1)


def checkpoint_region() -> AbstractContextManager[None]:
    """Mark every node traced in this context as part of one new region."""
    return annotate({_KEY: next(_NUMBERS)})


def checkpoint_region_of(node: torch.fx.Node) -> str:
    """Return the number of the innermost region that a node was traced in; "" outside of any region."""
    return str((node.meta.get("custom") or {}).get(_KEY, ""))


def current_region() -> str:
    """Return the number of the region that is being traced; "" outside of any region."""
    return str((get_current_meta().get("custom") or {}).get(_KEY, ""))


def current_annotations() -> Hashable:
    """Return the annotations that nodes get now, besides the region."""
    return other_annotations(get_current_meta())


def other_annotations(meta: Mapping[str, Any]) -> Hashable:
    """Return the annotations in a node's metadata besides its region."""
    return tuple((key, repr(value)) for key, value in (meta.get("custom") or {}).items() if key != _KEY)


def in_new_regions(metas: Iterable[dict[str, Any]], outer_regions: tuple[str, str]) -> None:
    """Move copies of nodes from the region around the originals to that around the copies, others to new regions.

    Args:
        metas: the metadata of the copies.
        outer_regions: the region around the originals, and that around the copies.
    """
    numbers = dict([outer_regions])
    for meta in metas:
        custom = meta.get("custom") or {}
        region = str(custom.get(_KEY, ""))
        number = numbers[region] if region in numbers else numbers.setdefault(region, str(next(_NUMBERS)))
        if region != number:
            others = {key: value for key, value in custom.items() if key != _KEY}
            meta["custom"] = {**others, _KEY: number} if number else others


def mark_checkpoints(owner: int, original: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    """Wrap `_checkpoint_without_reentrant_generator` so that a checkpoint of the thread `owner` runs in a region."""

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        if threading.get_ident() != owner:
            yield from original(*args, **kwargs)
            return
        with checkpoint_region():
            yield from original(*args, **kwargs)

    return generator
