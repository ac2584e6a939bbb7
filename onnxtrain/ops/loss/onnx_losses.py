"""Losses of ONNX and the older losses of ONNX Runtime Training; their bodies use the ops of PyTorch's losses.

    SoftmaxCrossEntropyLoss(scores[n, c, d], labels[n, d], weights[c]) -> loss, log_prob[n, c, d]
    NegativeLogLikelihoodLoss(log_prob[n, c, d], labels[n, d], weights[c]) -> loss
    NegativeLogLikelihoodLossInternal(log_prob, labels, weights, ignore_index) -> loss
    SoftmaxCrossEntropyLossGrad(dy, log_prob, labels, weights) -> dscores
    SoftmaxCrossEntropy(scores[.., c], shares[.., c]) -> loss, log_prob       labels are class probabilities
    SparseSoftmaxCrossEntropy(scores[.., c], labels[..], weights[..]) -> loss, log_prob
    SoftmaxCrossEntropyGrad, SparseSoftmaxCrossEntropyGrad(dy, log_prob, labels, weights) -> dscores

The last four have their classes on the last axis. Their weights are per row, not per class; a mean divides by the sum
of the weights, or without weights by the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import MICROSOFT, TensorType, dtype_of, type_of
from onnxtrain.ops.body_parts import cast, int64_vector, sum_over
from onnxtrain.ops.constructors import define_by_body, define_pure, never, no_axes
from onnxtrain.ops.definition import Call, NodeView, numel
from onnxtrain.ops.interfaces.stock_kernels import STOCK_KERNELS
from onnxtrain.ops.loss.reduction import aten_reduction

Tensor = torch.Tensor
INT64 = ir.DataType.INT64
_STOPS = frozenset({"labels", "weights", "ignore_index"})
_NO_INDEX = -100  # an ignore_index that no label has


def _flops(name: str) -> Any:
    return lambda n: sizes.multiply(5, numel(getattr(n, name)))


def _ignore_index(op: Builder, n: NodeView) -> ir.Value | None:
    return None if n.ignore_index is None else op.scalar(n.ignore_index, INT64)


def _loss_shape(n: NodeView) -> tuple[Size, ...]:
    return sizes.dims_of(n.labels) if n.reduction == "none" else ()


# SoftmaxCrossEntropyLoss, NegativeLogLikelihoodLoss. For no rows, onnxruntime's mean is 0, or its kernel fails.


def _cross_entropy_types(n: NodeView) -> Sequence[TensorType]:
    dtype, shape = type_of(n.scores)
    return [TensorType(dtype, _loss_shape(n)), TensorType(dtype, shape)][: len(n.node.outputs)]


def _cross_entropy_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    """Return the loss in one op; log_prob separately, because it is differentiable too."""
    loss = op.ms.SoftmaxCrossEntropyLossInternal(
        n.scores, cast(op, n.labels, INT64), n.weights, _ignore_index(op, n), reduction=n.reduction
    )[0]
    return [loss] if len(n.node.outputs) == 1 else [loss, op.LogSoftmax(n.scores, axis=1)]


def cross_entropy(
    scores: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    reduction: str,
    ignore_index: int | None,
    needs_log_prob: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    index = _NO_INDEX if ignore_index is None else ignore_index
    settings: dict[str, Any] = {"weight": weights, "reduction": reduction, "ignore_index": index}
    if not needs_log_prob:
        return torch.nn.functional.cross_entropy(scores, labels.long(), **settings)
    log_prob = torch.log_softmax(scores, 1)
    return torch.nn.functional.nll_loss(log_prob, labels.long(), **settings), log_prob


SOFTMAX_CROSS_ENTROPY_LOSS = define_by_body(
    "SoftmaxCrossEntropyLoss",
    ("scores", "labels", "weights?"),
    _cross_entropy_body,
    lambda n, scores, labels, weights: Call(
        cross_entropy, scores, labels, weights, n.reduction, n.ignore_index, len(n.node.outputs) > 1
    ),
    outputs=("loss", "log_prob?"),
    attributes={"reduction": "mean", "ignore_index": None},
    shapes=_cross_entropy_types,
    axes=no_axes,
    nondiff_inputs=_STOPS,
    flops=_flops("scores"),
)
STOCK_KERNELS.register(SOFTMAX_CROSS_ENTROPY_LOSS, never)


def _nll_body(op: Builder, n: NodeView) -> ir.Value:
    inputs = (n.log_prob, cast(op, n.labels, INT64), n.weights, _ignore_index(op, n))
    return op.ms.NegativeLogLikelihoodLossInternal2(*inputs, reduction=n.reduction)[0]


def nll_loss(
    log_prob: Tensor, labels: Tensor, weights: Tensor | None, reduction: str, ignore_index: int | None
) -> Tensor:
    index = _NO_INDEX if ignore_index is None else ignore_index
    return torch.nn.functional.nll_loss(log_prob, labels.long(), weights, ignore_index=index, reduction=reduction)


def _nll_type(n: NodeView) -> Sequence[TensorType]:
    return (TensorType(dtype_of(n.log_prob), _loss_shape(n)),)


NEGATIVE_LOG_LIKELIHOOD_LOSS = define_by_body(
    "NegativeLogLikelihoodLoss",
    ("log_prob", "labels", "weights?"),
    _nll_body,
    lambda n, x, labels, weights: Call(nll_loss, x, labels, weights, n.reduction, n.ignore_index),
    attributes={"reduction": "mean", "ignore_index": None},
    shapes=_nll_type,
    axes=no_axes,
    nondiff_inputs=_STOPS,
    flops=_flops("labels"),
)
STOCK_KERNELS.register(NEGATIVE_LOG_LIKELIHOOD_LOSS, never)
define_by_body(
    "NegativeLogLikelihoodLossInternal",
    ("log_prob", "labels", "weights?", "ignore_index?"),
    lambda op, n: op.ms.NegativeLogLikelihoodLossInternal2(*n.node.inputs, reduction=n.reduction)[0],
    lambda n, x, labels, weights, index: Call(nll_loss, x, labels, weights, n.reduction, index),
    domain=MICROSOFT,
    outputs=("loss",),
    attributes={"reduction": "mean"},
    shapes=_nll_type,
    axes=no_axes,
    nondiff_inputs=_STOPS,
    flops=_flops("labels"),
    host_inputs=frozenset({3}),
)


# SoftmaxCrossEntropyLossGrad: as SoftmaxCrossEntropyLossInternalGrad, but without the input total_weight


def _grad_body(op: Builder, n: NodeView) -> ir.Value:
    labels, index = cast(op, n.labels, INT64), _ignore_index(op, n)
    total_weight = None
    if n.reduction == "mean":
        total_weight = op.ms.NegativeLogLikelihoodLossInternal2(n.log_prob, labels, n.weights, index)[1]
    else:
        total_weight = op.scalar(1, like=n.log_prob)  # not read
    return op.ms.SoftmaxCrossEntropyLossInternalGrad(
        n.dy, n.log_prob, labels, n.weights, index, None, total_weight, reduction=n.reduction
    )


def cross_entropy_grad(
    dy: Tensor, log_prob: Tensor, labels: Tensor, weights: Tensor | None, reduction: int, ignore_index: int
) -> Tensor:
    """Return the gradient of the scores: (softmax - one-hot label) * weight of the label * cotangent."""
    labels = labels.long().reshape(labels.shape[0], -1)
    flat_log_prob = log_prob.reshape(*log_prob.shape[:2], -1)
    counted = labels != ignore_index
    label_weights = torch.ones_like(labels, dtype=log_prob.dtype) if weights is None else weights[labels * counted]
    label_weights = label_weights * counted
    dy = dy.reshape(labels.shape) if reduction == 0 else dy
    weighted = (dy * label_weights if reduction != 1 else dy * label_weights / label_weights.sum()).unsqueeze(1)
    dx = weighted * flat_log_prob.exp()
    return dx.scatter_add_(1, (labels * counted).unsqueeze(1), -weighted).reshape(log_prob.shape)


define_pure(
    MICROSOFT,
    "SoftmaxCrossEntropyLossGrad",
    ("dy", "log_prob", "labels", "weights?"),
    ("dscores",),
    attributes={"reduction": "mean", "ignore_index": None},
    shapes=lambda n: (type_of(n.log_prob),),
    body=_grad_body,
    lower=lambda n, dy, log_prob, labels, weights: Call(
        cross_entropy_grad,
        dy,
        log_prob,
        labels,
        weights,
        aten_reduction(n.reduction),
        _NO_INDEX if n.ignore_index is None else n.ignore_index,
    ),
    axes=no_axes,
    flops=lambda n: sizes.multiply(4, numel(n.log_prob)),
)


# SoftmaxCrossEntropy, SparseSoftmaxCrossEntropy: the first losses of ONNX Runtime Training


def _rows(x: ir.Value) -> Size:
    return sizes.multiply(1, *sizes.dims_of(x)[:-1])


def _last_axis_types(n: NodeView) -> Sequence[TensorType]:
    return TensorType(dtype_of(n.scores), ()), type_of(n.scores)


def _shares_loss_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    log_prob = op.LogSoftmax(n.scores, axis=-1)
    all_axes = range(len(sizes.dims_of(n.scores)))
    loss = op.Neg(sum_over(op, op.Mul(n.shares, log_prob), all_axes, keepdims=False))
    if n.reduction == "mean":
        loss = op.Div(loss, op.size(_rows(n.scores), dtype_of(loss)))
    return loss, log_prob


def shares_loss(scores: Tensor, shares: Tensor, mean: bool) -> tuple[Tensor, Tensor]:
    log_prob = torch.log_softmax(scores, -1)
    loss = -(shares * log_prob).sum()
    return loss / scores.shape[:-1].numel() if mean else loss, log_prob


def _labels_loss_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    log_prob = op.LogSoftmax(n.scores, axis=-1)
    last = int64_vector(op, [len(sizes.dims_of(n.labels))])
    indices = op.Unsqueeze(cast(op, n.labels, INT64), last)
    row_losses = op.Neg(op.Squeeze(op.GatherElements(log_prob, indices, axis=-1), last))
    all_axes = range(len(sizes.dims_of(n.labels)))
    weights = n.weights
    loss = sum_over(op, row_losses if weights is None else op.Mul(row_losses, weights), all_axes, keepdims=False)
    if n.reduction == "mean":
        if weights is None:
            divisor = op.size(_rows(n.scores), dtype_of(loss))
        else:
            divisor = sum_over(op, weights, all_axes, keepdims=False)
        loss = op.Div(loss, divisor)
    return loss, log_prob


def labels_loss(scores: Tensor, labels: Tensor, weights: Tensor | None, mean: bool) -> tuple[Tensor, Tensor]:
    log_prob = torch.log_softmax(scores, -1)
    row_losses = -log_prob.gather(-1, labels.long().unsqueeze(-1)).squeeze(-1)
    if weights is not None:
        loss = (row_losses * weights).sum()
        return loss / weights.sum() if mean else loss, log_prob
    return row_losses.mean() if mean else row_losses.sum(), log_prob


define_by_body(
    "SoftmaxCrossEntropy",
    ("scores", "shares"),
    _shares_loss_body,
    lambda n, scores, shares: Call(shares_loss, scores, shares, n.reduction == "mean"),
    domain=MICROSOFT,
    outputs=("loss", "log_prob"),
    attributes={"reduction": "mean"},
    shapes=_last_axis_types,
    axes=no_axes,
    nondiff_inputs=frozenset({"shares"}),
    flops=_flops("scores"),
)
define_by_body(
    "SparseSoftmaxCrossEntropy",
    ("scores", "labels", "weights?"),
    _labels_loss_body,
    lambda n, scores, labels, weights: Call(labels_loss, scores, labels, weights, n.reduction == "mean"),
    domain=MICROSOFT,
    outputs=("loss", "log_prob"),
    attributes={"reduction": "mean"},
    shapes=_last_axis_types,
    axes=no_axes,
    nondiff_inputs=_STOPS,
    flops=_flops("scores"),
)


def _shares_loss_grad_body(op: Builder, n: NodeView) -> ir.Value:
    """(exp(log_prob) * sum(shares) - shares) * dy; for a mean, divided by the number of rows."""
    mass = sum_over(op, n.shares, [len(sizes.dims_of(n.shares)) - 1])
    dx = op.Mul(op.Sub(op.Mul(op.Exp(n.log_prob), mass), n.shares), n.dy)
    return op.Div(dx, op.size(_rows(n.log_prob), dtype_of(dx))) if n.reduction == "mean" else dx


def shares_loss_grad(dy: Tensor, log_prob: Tensor, shares: Tensor, mean: bool) -> Tensor:
    dx = (log_prob.exp() * shares.sum(-1, keepdim=True) - shares) * dy
    return dx / log_prob.shape[:-1].numel() if mean else dx


def _labels_loss_grad_body(op: Builder, n: NodeView) -> ir.Value:
    rank = len(sizes.dims_of(n.labels))
    last, weights = int64_vector(op, [rank]), n.weights
    classes = op.Range(op.size(0), op.size(sizes.dims_of(n.log_prob)[-1]), op.size(1))
    one_hot = op.Cast(op.Equal(op.Unsqueeze(cast(op, n.labels, INT64), last), classes), to=dtype_of(n.log_prob))
    scale = n.dy
    if n.reduction == "mean" and weights is None:
        scale = op.Div(scale, op.size(_rows(n.log_prob), dtype_of(scale)))
    elif n.reduction == "mean":
        scale = op.Div(scale, sum_over(op, weights, range(rank), keepdims=False))
    scale = scale if weights is None else op.Unsqueeze(op.Mul(weights, scale), last)
    return op.Mul(op.Sub(op.Exp(n.log_prob), one_hot), scale)


def labels_loss_grad(dy: Tensor, log_prob: Tensor, labels: Tensor, weights: Tensor | None, mean: bool) -> Tensor:
    if weights is None:
        weights = torch.ones(labels.shape, dtype=log_prob.dtype, device=log_prob.device)
    scale = (weights * dy / weights.sum() if mean else weights * dy).unsqueeze(-1)
    dx = log_prob.exp() * scale
    return dx.scatter_add_(-1, labels.long().unsqueeze(-1), -scale)


define_pure(
    MICROSOFT,
    "SoftmaxCrossEntropyGrad",
    ("dy", "log_prob", "shares"),
    ("dscores",),
    attributes={"reduction": "mean"},
    shapes=lambda n: (type_of(n.log_prob),),
    body=_shares_loss_grad_body,
    lower=lambda n, dy, log_prob, shares: Call(shares_loss_grad, dy, log_prob, shares, n.reduction == "mean"),
    axes=no_axes,
    flops=lambda n: sizes.multiply(4, numel(n.log_prob)),
)
define_pure(
    MICROSOFT,
    "SparseSoftmaxCrossEntropyGrad",
    ("dy", "log_prob", "labels", "weights?"),
    ("dscores",),
    attributes={"reduction": "mean"},
    shapes=lambda n: (type_of(n.log_prob),),
    body=_labels_loss_grad_body,
    lower=lambda n, dy, log_prob, labels, weights: Call(
        labels_loss_grad, dy, log_prob, labels, weights, n.reduction == "mean"
    ),
    axes=no_axes,
    flops=lambda n: sizes.multiply(4, numel(n.log_prob)),
)
