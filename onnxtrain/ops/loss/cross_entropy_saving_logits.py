"""Cross entropy that saves its logits and two values per row for backward, instead of the log-probabilities.

    CrossEntropy(scores[n, c, d], labels[n, d], weights[c], ignore_index)
            -> loss, peak[n, d], log_sum[n, d], total_weight
    CrossEntropyGrad(dy, scores, peak, log_sum, labels, weights, ignore_index, total_weight) -> dscores
        log softmax(scores) = scores - peak - log_sum      peak = max scores      log_sum = log sum exp(scores - peak)

All else is as in `cross_entropy.py`. The pass `save_logits_for_backward` replaces those ops with these. `peak` and
`log_sum` stay separate: their sum would lose the low-order bits of log_sum for scores far from 0.

Milliseconds of forward and backward of scores[1024, 8192], float32, 2 threads of a virtual Xeon: PyTorch's log_softmax
and nll_loss 10.2 and 21.4; these ops with PyTorch's operators 15.5 and 14.1; with the compiled kernel
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
from onnxtrain.native import Library, pointers, read_sources
from onnxtrain.ops import huge_pages
from onnxtrain.ops.body_parts import int64_vector, sum_over
from onnxtrain.ops.constructors import define_pure
from onnxtrain.ops.definition import Call, Gradient, Kernel, NodeView, numel
from onnxtrain.ops.gradient_masks import first_cotangent
from onnxtrain.ops.interfaces.traced_calls import TRACED_CALLS
from onnxtrain.ops.loss.cross_entropy import (
    aten_ignore_index,
    axis_map,
    axis_names,
    label_mask,
    loss_axes,
    loss_type,
    losses,
    nll_loss,
    weighted_cotangent,
)
from onnxtrain.ops.loss.reduction import aten_reduction
from onnxtrain.ops.native_kernels import may_compile

Tensor = torch.Tensor

_CPP_TYPES = {torch.float32: "float", torch.float64: "double"}
_MIN_SCORES = 4096  # below, the gain is not worth a compile of 0.4 s
LIBRARY = Library(
    "cross_entropy",
    read_sources("vectors.h", "exponential.h", "cross_entropy.cpp"),
    {
        **{f"forward_{name}": "pppipppppiii" for name in _CPP_TYPES.values()},
        **{f"backward_{name}": "pppppipiii" for name in _CPP_TYPES.values()},
    },
)


# Kernels


def loss_by_aten(
    scores: Tensor, labels: Tensor, weights: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the forward op with PyTorch's operators; log_sum is minus the log-probability of the largest score."""
    log_prob = torch.log_softmax(scores, 1)
    loss, total_weight = nll_loss(log_prob, labels, weights, reduction, ignore_index)
    if scores.size(1) == 0:
        empty = scores.new_empty(labels.shape)
        return loss, empty, empty.clone(), total_weight
    return loss, scores.amax(1), log_prob.amax(1).neg_(), total_weight


def gradient_by_aten(
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
    """Compute the backward op with PyTorch's operators, in one buffer."""
    factor, class_indices = _cotangents(dy, labels, weights, total_weight, reduction, ignore_index)
    factor = factor.unsqueeze(1)
    dx = torch.sub(scores, peak.unsqueeze(1)).sub_(log_sum.unsqueeze(1)).exp_().mul_(factor)
    return dx.scatter_add_(1, class_indices.unsqueeze(1), -factor) if scores.size(1) else dx


def _traced_gradient(dy: Tensor, scores: Tensor, peak: Tensor, log_sum: Tensor, *others: Any) -> Tensor:
    """Compute `gradient_by_aten` for Inductor, which would write and read the scores once more for a scatter."""
    factor, class_indices = _cotangents(dy, *others)
    factor = factor.unsqueeze(1)
    is_label = torch.arange(scores.size(1), device=scores.device) == class_indices.unsqueeze(1)
    dx = (scores - peak.unsqueeze(1) - log_sum.unsqueeze(1)).exp() * factor
    return torch.where(is_label, dx - factor, dx)


TRACED_CALLS[gradient_by_aten] = _traced_gradient


def _cotangents(
    dy: Tensor, labels: Tensor, weights: Tensor | None, total_weight: Tensor, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return the cotangent of each row's loss times its weight, 0 for ignored rows.

    And the labels, 0 for ignored rows.
    """
    ignored = labels == ignore_index
    class_indices = labels.masked_fill(ignored, 0)
    factor = dy / total_weight if reduction == 1 else dy
    if weights is not None:
        factor = factor * weights[class_indices]
    return torch.where(ignored, torch.zeros((), dtype=factor.dtype, device=factor.device), factor), class_indices


def compiled_loss(
    scores: Tensor, labels: Tensor, weights: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the forward op with the compiled kernel once it is loaded. PyTorch raises the error for an invalid label."""
    native = _compiled_functions(scores, labels, weights)
    if native is None:
        return loss_by_aten(scores, labels, weights, reduction, ignore_index)
    rows, classes = scores.shape
    row_losses, weight, peak, log_sum = (scores.new_empty(rows) for _ in range(4))
    invalid_label = torch.empty((), dtype=torch.int64)
    outputs = pointers(row_losses, weight, peak, log_sum, invalid_label)
    run = getattr(native, f"forward_{_CPP_TYPES[scores.dtype]}")
    run(*pointers(scores, labels, weights), ignore_index, *outputs, rows, classes, torch.get_num_threads())
    if invalid_label.item():
        return loss_by_aten(scores, labels, weights, reduction, ignore_index)
    total_weight = weight.sum()
    if reduction == 0:
        return row_losses, peak, log_sum, total_weight
    loss = row_losses.sum()
    return loss / total_weight if reduction == 1 else loss, peak, log_sum, total_weight


def compiled_gradient(
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
    """Run the backward op with the compiled kernel once it is loaded, whichever kernel forward used."""
    native = _compiled_functions(scores, labels, weights)
    if native is None:
        return gradient_by_aten(dy, scores, peak, log_sum, labels, weights, total_weight, reduction, ignore_index)
    rows, classes = scores.shape
    factor = dy / total_weight if reduction == 1 else dy
    if weights is not None:  # the kernel reads no factor of an ignored row
        factor = factor * weights[labels.masked_fill(labels == ignore_index, 0)]
    factor = factor.expand(rows).contiguous()
    dx = huge_pages.empty_like(scores)
    inputs = (scores, labels, factor, peak.contiguous(), log_sum.contiguous())
    run = getattr(native, f"backward_{_CPP_TYPES[scores.dtype]}")
    run(*pointers(*inputs), ignore_index, dx.data_ptr(), rows, classes, torch.get_num_threads())
    return dx


def _compiled_functions(scores: Tensor, labels: Tensor, weights: Tensor | None) -> Any:
    """Return the compiled functions, else None: unsupported tensors, or still compiling.

    Requests the compile if needed.
    """
    supported = (
        scores.dtype in _CPP_TYPES
        and scores.dim() == 2
        and scores.numel() >= _MIN_SCORES
        and scores.is_contiguous()
        and labels.is_contiguous()
        and (weights is None or weights.is_contiguous())
    )
    if not supported:
        return None
    LIBRARY.request()
    return LIBRARY.functions


# CrossEntropy


def _types(n: NodeView) -> Sequence[TensorType]:
    dtype = dtype_of(n.scores)
    row = type_of(n.labels)._replace(dtype=dtype)
    return loss_type(n, dtype), row, row, TensorType(dtype, ())


def _body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    one = int64_vector(op, [1])
    peak = op.ReduceMax(n.scores, one, keepdims=1)
    shifted = op.Sub(n.scores, peak)
    log_sum = op.Log(sum_over(op, op.Exp(shifted), (1,)))
    loss, total_weight = losses(op, n, op.Sub(shifted, log_sum))
    return loss, op.Squeeze(peak, one), op.Squeeze(log_sum, one), total_weight


def _gradient(op: Builder, n: NodeView, *cotangents: ir.Value | None) -> list[ir.Value | None]:
    if all(c is None for c in cotangents):
        return [None] * len(n.node.inputs)
    dscores = op.own.CrossEntropyGrad(
        first_cotangent(n, cotangents),
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
    scores, labels = axis_names(n.scores)
    return axis_map(n, (scores, labels, "[c]", ""), (loss_axes(n, labels), labels, labels, ""))


def _lower(n: NodeView, scores: Tensor, labels: Tensor, weights: Tensor | None, ignore_index: int | None) -> Call:
    return Call(loss_by_aten, scores, labels, weights, aten_reduction(n.reduction), aten_ignore_index(ignore_index))


def _lower_compiled(
    n: NodeView, scores: Tensor, labels: Tensor, weights: Tensor | None, ignore_index: int | None
) -> Call:
    return Call(compiled_loss, scores, labels, weights, aten_reduction(n.reduction), aten_ignore_index(ignore_index))


define_pure(
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
    one = int64_vector(op, [1])
    log_prob = op.Sub(op.Sub(n.scores, op.Unsqueeze(n.peak, one)), op.Unsqueeze(n.log_sum, one))
    weighted = weighted_cotangent(op, n, dtype_of(n.scores))
    weighted_one_hot = op.Where(label_mask(op, n, n.scores), weighted, op.scalar(0, like=weighted))
    return op.Sub(op.Mul(op.Exp(log_prob), weighted), weighted_one_hot)


def _grad_axes(n: NodeView) -> str:
    scores, labels = axis_names(n.scores)
    return axis_map(n, (loss_axes(n, labels), scores, labels, labels, labels, "[c]", "", ""), (scores,))


def _grad_arguments(n: NodeView, *operands: Tensor) -> tuple[object, ...]:
    *tensors, ignore_index, total_weight = operands
    return (*tensors, total_weight, aten_reduction(n.reduction), aten_ignore_index(ignore_index))


def _lower_grad(n: NodeView, *operands: Tensor) -> Call:
    return Call(gradient_by_aten, *_grad_arguments(n, *operands))


def _lower_grad_compiled(n: NodeView, *operands: Tensor) -> Call:
    return Call(compiled_gradient, *_grad_arguments(n, *operands))


define_pure(
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
