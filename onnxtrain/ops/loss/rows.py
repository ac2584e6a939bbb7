"""Cross entropy that keeps its scores and two numbers a row for backward, and no log-probabilities.

    CrossEntropy(scores[n, c, d], labels[n, d], weights[c], ignore_index)
            -> loss, peak[n, d], log_sum[n, d], total_weight
    CrossEntropyGrad(dy, scores, peak, log_sum, labels, weights, ignore_index, total_weight) -> dscores
        log softmax(scores) = scores - peak - log_sum      peak = max scores      log_sum = log sum exp(scores - peak)

Everything else is as in `cross_entropy.py`. The pass `save_logits_for_backward` replaces those ops with these. `peak`
and `log_sum` stay separate: their sum would lose the low-order bits of log_sum where the scores are far from 0.

Milliseconds of forward and backward of scores[1024, 8192], float32, 2 threads of a virtual Xeon: PyTorch's log_softmax
and nll_loss 10.2 and 21.4, these ops by PyTorch's operators 15.5 and 14.1, by the compiled kernel
(`native/cross_entropy.cpp`) 1.8 and 5.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, TensorType, dtype_of, type_of
from onnxtrain.native import Library, pointers, text
from onnxtrain.ops import huge_pages
from onnxtrain.ops.definition import Call, Gradient, Kernel, NodeView, numel
from onnxtrain.ops.fused import axes_constant, fused, only_first, total
from onnxtrain.ops.loss.cross_entropy import (
    at_label,
    axes_of,
    index_or_none,
    loss_type,
    losses,
    names_of,
    nll_loss,
    of_loss,
    weighted_cotangent,
)
from onnxtrain.ops.loss.reduction import number_of
from onnxtrain.ops.native_kernels import may_compile

Tensor = torch.Tensor

_NAMES = {torch.float32: "float", torch.float64: "double"}
_LEAST = 4096  # scores: below it nothing is gained that is worth a compile of 0.4 s
LIBRARY = Library(
    "cross_entropy",
    text("vectors.h", "exponential.h", "cross_entropy.cpp"),
    {
        **{f"forward_{name}": "pppipppppiii" for name in _NAMES.values()},
        **{f"backward_{name}": "pppppipiii" for name in _NAMES.values()},
    },
)


# Kernels


def rows_loss(
    scores: Tensor, labels: Tensor, weights: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """PyTorch's operators; the sum is read off the log-probability of the largest score."""
    log_prob = torch.log_softmax(scores, 1)
    loss, total_weight = nll_loss(log_prob, labels, weights, reduction, ignore_index)
    if scores.size(1) == 0:
        empty = scores.new_empty(labels.shape)
        return loss, empty, empty.clone(), total_weight
    return loss, scores.amax(1), log_prob.amax(1).neg_(), total_weight


def rows_gradient(
    dy: Tensor,
    scores: Tensor,
    peak: Tensor,
    log_sum: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    total_weight: Tensor,
    reduction: int,
    ignore_index: int,
) -> Tensor:
    """PyTorch's operators, in one piece of memory."""
    factor, known = _cotangents(dy, labels, weights, total_weight, reduction, ignore_index)
    factor = factor.unsqueeze(1)
    dx = torch.sub(scores, peak.unsqueeze(1)).sub_(log_sum.unsqueeze(1)).exp_().mul_(factor)
    return dx.scatter_add_(1, known.unsqueeze(1), -factor) if scores.size(1) else dx


def _cotangents(
    dy: Tensor, labels: Tensor, weights: Tensor | None, total_weight: Tensor, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Of each row's loss, times its weight: 0 where the row is ignored. And the labels, with 0 there."""
    ignored = labels == ignore_index
    known = labels.masked_fill(ignored, 0)
    each = dy / total_weight if reduction == 1 else dy
    if weights is not None:
        each = each * weights[known]
    return torch.where(ignored, torch.zeros((), dtype=each.dtype, device=each.device), each), known


def rows_loss_compiled(
    scores: Tensor, labels: Tensor, weights: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The compiled kernel as soon as it is there. A label that is no class is PyTorch's to refuse."""
    native = _native(scores, labels, weights)
    if native is None:
        return rows_loss(scores, labels, weights, reduction, ignore_index)
    rows, classes = scores.shape
    each, weight, peak, log_sum = (scores.new_empty(rows) for _ in range(4))
    wrong = torch.empty((), dtype=torch.int64)
    found = pointers(each, weight, peak, log_sum, wrong)
    run = getattr(native, f"forward_{_NAMES[scores.dtype]}")
    run(*pointers(scores, labels, weights), ignore_index, *found, rows, classes, torch.get_num_threads())
    if wrong.item():
        return rows_loss(scores, labels, weights, reduction, ignore_index)
    total_weight = weight.sum()
    if reduction == 0:
        return each, peak, log_sum, total_weight
    loss = each.sum()
    return loss / total_weight if reduction == 1 else loss, peak, log_sum, total_weight


def rows_gradient_compiled(
    dy: Tensor,
    scores: Tensor,
    peak: Tensor,
    log_sum: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    total_weight: Tensor,
    reduction: int,
    ignore_index: int,
) -> Tensor:
    """The compiled kernel as soon as it is there, whichever way forward went."""
    native = _native(scores, labels, weights)
    if native is None:
        return rows_gradient(dy, scores, peak, log_sum, labels, weights, total_weight, reduction, ignore_index)
    rows, classes = scores.shape
    factor, _ = _cotangents(dy, labels, weights, total_weight, reduction, ignore_index)
    factor = factor.expand(rows).contiguous()
    dx = huge_pages.empty_like(scores)
    given = (scores, labels, factor, peak.contiguous(), log_sum.contiguous())
    run = getattr(native, f"backward_{_NAMES[scores.dtype]}")
    run(*pointers(*given), ignore_index, dx.data_ptr(), rows, classes, torch.get_num_threads())
    return dx


def _native(scores: Tensor, labels: Tensor, weights: Tensor | None) -> Any:
    """The compiled functions, where they are there and such rows are theirs; asks for them where they are not."""
    plain = (
        scores.dtype in _NAMES
        and scores.dim() == 2
        and scores.numel() >= _LEAST
        and scores.is_contiguous()
        and labels.is_contiguous()
        and (weights is None or weights.is_contiguous())
    )
    if not plain:
        return None
    LIBRARY.request()
    return LIBRARY.functions


# CrossEntropy


def _types(n: NodeView) -> Sequence[TensorType]:
    dtype = dtype_of(n.scores)
    row = type_of(n.labels)._replace(dtype=dtype)
    return loss_type(n, dtype), row, row, TensorType(dtype, ())


def _body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    one = axes_constant(op, [1])
    peak = op.ReduceMax(n.scores, one, keepdims=1)
    shifted = op.Sub(n.scores, peak)
    log_sum = op.Log(total(op, op.Exp(shifted), (1,)))
    loss, total_weight = losses(op, n, op.Sub(shifted, log_sum))
    return loss, op.Squeeze(peak, one), op.Squeeze(log_sum, one), total_weight


def _gradient(op: Builder, n: NodeView, *cotangents: ir.Value | None) -> list[ir.Value | None]:
    if all(c is None for c in cotangents):
        return [None] * len(n.node.inputs)
    dscores = op.own.CrossEntropyGrad(
        only_first(n, cotangents),
        n.scores,
        n.peak,
        n.log_sum,
        n.labels,
        n.weights,
        n.ignore_index,
        n.total_weight,
        reduction=n.reduction,
    )
    return [dscores, *[None] * (len(n.node.inputs) - 1)]


def _axes(n: NodeView) -> str:
    scores, labels = names_of(n.scores)
    return axes_of(n, (scores, labels, "[c]", ""), (of_loss(n, labels), labels, labels, ""))


def _lower(n: NodeView, scores: Tensor, labels: Tensor, weights: Tensor | None, ignore_index: int | None) -> Call:
    return Call(rows_loss, scores, labels, weights, number_of(n.reduction), index_or_none(ignore_index))


def _lower_compiled(
    n: NodeView, scores: Tensor, labels: Tensor, weights: Tensor | None, ignore_index: int | None
) -> Call:
    return Call(rows_loss_compiled, scores, labels, weights, number_of(n.reduction), index_or_none(ignore_index))


CROSS_ENTROPY_OF_ROWS = fused(
    OWN,
    "CrossEntropy",
    ("scores", "labels", "weights?", "ignore_index?"),
    ("loss", "peak", "log_sum", "total_weight"),
    attributes={"reduction": "mean"},
    shapes=_types,
    body=_body,
    gradient=(Gradient(_gradient, reads=("scores", "peak", "log_sum", "labels", "weights", "total_weight")),),
    nondiff_inputs=frozenset({"labels", "weights", "ignore_index"}),
    kernels=(Kernel(lower=_lower_compiled, host_inputs=frozenset({3}), applies=may_compile),),
    lower=_lower,
    host_inputs=frozenset({3}),
    axes=_axes,
    flops=lambda n: sizes.multiply(5, numel(n.scores)),
)


# CrossEntropyGrad


def _grad_body(op: Builder, n: NodeView) -> ir.Value:
    one = axes_constant(op, [1])
    log_prob = op.Sub(op.Sub(n.scores, op.Unsqueeze(n.peak, one)), op.Unsqueeze(n.log_sum, one))
    weighted = weighted_cotangent(op, n, dtype_of(n.scores))
    hit = op.Where(at_label(op, n, n.scores), weighted, op.scalar(0, like=weighted))
    result: ir.Value = op.Sub(op.Mul(op.Exp(log_prob), weighted), hit)
    return result


def _grad_axes(n: NodeView) -> str:
    scores, labels = names_of(n.scores)
    return axes_of(n, (of_loss(n, labels), scores, labels, labels, labels, "[c]", "", ""), (scores,))


def _grad_arguments(n: NodeView, *given: Tensor) -> tuple[object, ...]:
    *tensors, ignore_index, total_weight = given
    return (*tensors, total_weight, number_of(n.reduction), index_or_none(ignore_index))


def _lower_grad(n: NodeView, *given: Tensor) -> Call:
    return Call(rows_gradient, *_grad_arguments(n, *given))


def _lower_grad_compiled(n: NodeView, *given: Tensor) -> Call:
    return Call(rows_gradient_compiled, *_grad_arguments(n, *given))


fused(
    OWN,
    "CrossEntropyGrad",
    ("dy", "scores", "peak", "log_sum", "labels", "weights?", "ignore_index?", "total_weight"),
    ("dscores",),
    attributes={"reduction": "mean"},
    shapes=lambda n: (type_of(n.scores),),
    body=_grad_body,
    kernels=(Kernel(lower=_lower_grad_compiled, host_inputs=frozenset({6}), applies=may_compile),),
    lower=_lower_grad,
    host_inputs=frozenset({6}),
    axes=_grad_axes,
    flops=lambda n: sizes.multiply(4, numel(n.scores)),
)
