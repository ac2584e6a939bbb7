"""Softmax cross entropy of logits whose classes are sharded over the ranks of a group, without gathering them.

    ShardedCrossEntropy(logits[n, c], target[n]) -> losses[n], log_probabilities[n, c]
    ShardedCrossEntropyGrad(d_losses[n], log_probabilities[n, c], target[n]) -> d_logits[n, c]

c are the classes of this rank, of which the first is number rank * c. Three AllReduces of n elements: the maxima, the
sums of exponentials, the log-probabilities of the targets. The steps are those of
`torch.distributed.tensor.parallel.loss_parallel`; the gradient needs no communication.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.axes import NO_AXES
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, TensorType, dtype_of, type_of
from onnxtrain.ops.collective.transfers import NO_BODY, sum_over_ranks
from onnxtrain.ops.definition import (
    NOT_DIFFERENTIABLE,
    REQUIRED,
    Call,
    Effects,
    Gradient,
    Kernel,
    NodeView,
    OpDef,
)
from onnxtrain.ops.registry import define
from onnxtrain.torch_compat import dispatch

Tensor = torch.Tensor

_LIBRARY = torch.library.Library("onnxtrain", "FRAGMENT")
_LIBRARY.define(
    "sharded_cross_entropy(Tensor logits, Tensor target, int size, int rank, str group, int ignore_index)"
    " -> (Tensor, Tensor)"
)


def _on_fakes(logits: Tensor, target: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return logits.new_empty(target.shape), torch.empty_like(logits)


dispatch.register_fake(_LIBRARY, "onnxtrain::sharded_cross_entropy", _on_fakes)


# Kernels


def _own_targets(target: Tensor, classes: int, rank: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the targets as indices into the classes of this rank, and which of them belong to another rank."""
    own = torch.where(target != ignore_index, target, 0) - rank * classes
    others = (own < 0) | (own >= classes)
    return own.masked_fill_(others, 0).unsqueeze(1), others.unsqueeze(1)


def _losses(logits: Tensor, target: Tensor, group: tuple[int, int, str], ignore_index: int) -> tuple[Tensor, Tensor]:
    size, rank, name = group
    maxima = sum_over_ranks(logits.amax(1, keepdim=True), size, name, "max")
    shifted = logits - maxima
    total = sum_over_ranks(shifted.exp().sum(1, keepdim=True), size, name)
    log_probabilities = shifted - total.log()
    own, others = _own_targets(target, logits.shape[1], rank, ignore_index)
    chosen = log_probabilities.gather(1, own).masked_fill_(others, 0.0)
    losses = -sum_over_ranks(chosen, size, name).squeeze(1)
    return torch.where(target != ignore_index, losses, 0.0), log_probabilities


def _gradient_of_logits(
    cotangent: Tensor, log_probabilities: Tensor, target: Tensor, rank: int, ignore_index: int
) -> Tensor:
    own, others = _own_targets(target, log_probabilities.shape[1], rank, ignore_index)
    result = torch.zeros_like(log_probabilities).scatter_(1, own, others.to(log_probabilities.dtype) - 1.0)
    return result.add_(log_probabilities.exp()).mul_(torch.where(target != ignore_index, cotangent, 0.0).unsqueeze(1))


# Definitions


def _types(n: NodeView) -> tuple[TensorType, TensorType]:
    return TensorType(dtype_of(n.logits), sizes.dims_of(n.target)), type_of(n.logits)


def _gradient(op: Builder, n: NodeView, cotangent: ir.Value | None, _: ir.Value | None) -> list[ir.Value | None]:
    if cotangent is None:
        return [None, None]
    attributes = {"rank": n.rank, "ignore_index": n.ignore_index}
    return [op.own.ShardedCrossEntropyGrad(cotangent, n.log_probabilities, n.target, **attributes), None]


def _capture(op: Builder, logits: ir.Value, target: ir.Value, *settings: Any) -> Any:
    size, rank, group, ignore_index = settings
    return op.own.ShardedCrossEntropy(logits, target, size=size, rank=rank, group=group, ignore_index=ignore_index)


define(
    OpDef(
        domain=OWN,
        name="ShardedCrossEntropy",
        inputs=("logits", "target"),
        outputs=("losses", "log_probabilities"),
        attributes={"size": REQUIRED, "rank": REQUIRED, "group": REQUIRED, "ignore_index": -100},
        from_torch={"onnxtrain.sharded_cross_entropy.default": _capture},
        shapes=_types,
        body=NO_BODY,
        gradient=(Gradient(_gradient, reads=("log_probabilities", "target")),),
        nondiff_inputs=frozenset({"target"}),
        nondiff_outputs=frozenset({"log_probabilities"}),
        kernels=(Kernel(lower=lambda n, x, t: Call(_losses, x, t, (n.size, n.rank, n.group), n.ignore_index)),),
        axes=lambda n: NO_AXES,
        effects=Effects.COLLECTIVE,
        aliases={},
    )
)
define(
    OpDef(
        domain=OWN,
        name="ShardedCrossEntropyGrad",
        inputs=("cotangent", "log_probabilities", "target"),
        outputs=("d_logits",),
        attributes={"rank": REQUIRED, "ignore_index": -100},
        from_torch={},
        shapes=lambda n: (type_of(n.log_probabilities),),
        body=NO_BODY,
        gradient=NOT_DIFFERENTIABLE,
        nondiff_inputs=frozenset(),
        kernels=(Kernel(lower=lambda n, dy, p, t: Call(_gradient_of_logits, dy, p, t, n.rank, n.ignore_index)),),
        axes=lambda n: NO_AXES,
        effects=Effects.NONE,
        aliases={},
    )
)
