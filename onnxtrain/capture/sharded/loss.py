"""The cross entropy of logits that are a DTensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from onnxtrain.capture.sharded.layout import PARTIAL, REPLICATED
from onnxtrain.capture.sharded.value import ShardedValue, refuse
from onnxtrain.ops.collective.transfers import OPERATORS
from onnxtrain.torch_compat.collectives import is_loss_parallel


def cross_entropy(function: Any, logits: Any, target: Any, weight: Any = None, **options: Any) -> ShardedValue:
    """Compute the loss from shards of the classes under `loss_parallel`, else from all classes.

    The target is a tensor with the same elements on every rank, or a replicated DTensor.
    """
    if not isinstance(logits, ShardedValue):
        raise refuse("cross_entropy has a DTensor as target only", "logits that are a DTensor")
    if isinstance(target, ShardedValue):
        if target.layout != REPLICATED:
            raise refuse("cross_entropy has a sharded target", "Replicate()", str(target.layout))
        target = target.local
    if logits.layout == PARTIAL or (logits.layout.kind == "sharded" and logits.layout.axis != logits.ndim - 1):
        raise refuse("cross_entropy has logits that are sharded over samples", "Replicate() or Shard(-1)")
    if logits.layout == REPLICATED or not is_loss_parallel.get()():
        replicated = logits.redistributed(REPLICATED)
        return replicated.with_local(F.cross_entropy(replicated.local, target, weight, **options))
    return _from_shards(logits, target, weight, **options)


def _from_shards(
    logits: ShardedValue,
    target: torch.Tensor,
    weight: Any,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    size_average: None = None,
    reduce: None = None,
) -> ShardedValue:
    if logits.ndim != 2 or target.dtype != torch.int64 or weight is not None or label_smoothing:
        raise refuse(
            "cross_entropy has sharded logits and options that a graph does not support",
            "logits [n, classes], class indices [n], no weight, no label smoothing",
        )
    group = logits.group
    losses, _ = OPERATORS.sharded_cross_entropy(logits.local, target, group.size, group.rank, group.name, ignore_index)
    if reduction == "mean":
        losses = losses.sum() / (target != ignore_index).sum().to(losses.dtype)
    elif reduction == "sum":
        losses = losses.sum()
    return logits.with_local(losses, REPLICATED)
