"""Losses of ONNX, and the older ones of ONNX Runtime Training, in terms of the ops that PyTorch's losses become.

    SoftmaxCrossEntropyLoss(scores[n, c, d], labels[n, d], weights[c]) -> loss, log_prob[n, c, d]
    NegativeLogLikelihoodLoss(log_prob[n, c, d], labels[n, d], weights[c]) -> loss
    NegativeLogLikelihoodLossInternal(log_prob, labels, weights, ignore_index) -> loss
    SoftmaxCrossEntropyLossGrad(dy, log_prob, labels, weights) -> dscores
    SoftmaxCrossEntropy(scores[.., c], shares[.., c]) -> loss, log_prob       the labels are shares of each class
    SparseSoftmaxCrossEntropy(scores[.., c], labels[..], weights[..]) -> loss, log_prob
    SoftmaxCrossEntropyGrad, SparseSoftmaxCrossEntropyGrad(dy, log_prob, labels, weights) -> dscores

The last four have their classes on the last axis, and reduce by the number of rows or, where there are weights, which
then are those of rows and not of classes, by their sum.
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
from onnxtrain.ops.composite import composite, no_axes
from onnxtrain.ops.constructors import cast, never
from onnxtrain.ops.definition import Call, NodeView, numel
from onnxtrain.ops.fused import axes_constant, fused, total
from onnxtrain.ops.loss.reduction import number_of

Tensor = torch.Tensor
INT64 = ir.DataType.INT64
_STOPS = frozenset({"labels", "weights", "ignore_index"})
_NOTHING = -100  # an ignore_index that no label has


def _flops(name: str) -> Any:
    return lambda n: sizes.multiply(5, numel(getattr(n, name)))


def _ignored(op: Builder, n: NodeView) -> ir.Value | None:
    return None if n.ignore_index is None else op.scalar(n.ignore_index, INT64)


def _loss_shape(n: NodeView) -> tuple[Size, ...]:
    return sizes.dims_of(n.labels) if n.reduction == "none" else ()


# SoftmaxCrossEntropyLoss, NegativeLogLikelihoodLoss. Of no rows, onnxruntime's have the mean 0, or fail.


def _cross_entropy_types(n: NodeView) -> Sequence[TensorType]:
    dtype, shape = type_of(n.scores)
    return [TensorType(dtype, _loss_shape(n)), TensorType(dtype, shape)][: len(n.node.outputs)]


def _cross_entropy_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    """The loss in one op; log_prob, which then is differentiable too, beside it."""
    loss = op.ms.SoftmaxCrossEntropyLossInternal(
        n.scores, cast(op, n.labels, INT64), n.weights, _ignored(op, n), reduction=n.reduction
    )[0]
    return [loss] if len(n.node.outputs) == 1 else [loss, op.LogSoftmax(n.scores, axis=1)]


def cross_entropy(
    scores: Tensor, labels: Tensor, weights: Tensor | None, reduction: str, ignore_index: int | None, both: bool
) -> Tensor | tuple[Tensor, Tensor]:
    how: dict[str, Any] = {"weight": weights, "reduction": reduction}
    index = _NOTHING if ignore_index is None else ignore_index
    if not both:
        return torch.nn.functional.cross_entropy(scores, labels.long(), ignore_index=index, **how)
    log_prob = torch.log_softmax(scores, 1)
    return torch.nn.functional.nll_loss(log_prob, labels.long(), ignore_index=index, **how), log_prob


composite(
    "SoftmaxCrossEntropyLoss",
    ("scores", "labels", "weights?"),
    _cross_entropy_body,
    lambda n, scores, labels, weights: Call(
        cross_entropy, scores, labels, weights, n.reduction, n.ignore_index, len(n.node.outputs) > 1
    ),
    outputs=("loss", "log_prob?"),
    attributes={"reduction": "mean", "ignore_index": None},
    since_version=13,
    shapes=_cross_entropy_types,
    axes=no_axes,
    nondiff_inputs=_STOPS,
    flops=_flops("scores"),
    ort_compatible=never,
)


def _nll_body(op: Builder, n: NodeView) -> ir.Value:
    inputs = (n.log_prob, cast(op, n.labels, INT64), n.weights, _ignored(op, n))
    return op.ms.NegativeLogLikelihoodLossInternal2(*inputs, reduction=n.reduction)[0]  # type: ignore[no-any-return]


def nll_loss(
    log_prob: Tensor, labels: Tensor, weights: Tensor | None, reduction: str, ignore_index: int | None
) -> Tensor:
    index = _NOTHING if ignore_index is None else ignore_index
    how: dict[str, Any] = {"weight": weights, "reduction": reduction}
    return torch.nn.functional.nll_loss(log_prob, labels.long(), ignore_index=index, **how)


def _nll_type(n: NodeView) -> Sequence[TensorType]:
    return (TensorType(dtype_of(n.log_prob), _loss_shape(n)),)


composite(
    "NegativeLogLikelihoodLoss",
    ("log_prob", "labels", "weights?"),
    _nll_body,
    lambda n, x, labels, weights: Call(nll_loss, x, labels, weights, n.reduction, n.ignore_index),
    attributes={"reduction": "mean", "ignore_index": None},
    since_version=13,
    shapes=_nll_type,
    axes=no_axes,
    nondiff_inputs=_STOPS,
    flops=_flops("labels"),
    ort_compatible=never,
)
composite(
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


# SoftmaxCrossEntropyLossGrad: what the loss's own backward op does, without total_weight


def _grad_body(op: Builder, n: NodeView) -> ir.Value:
    labels, index = cast(op, n.labels, INT64), _ignored(op, n)
    total_weight = None
    if n.reduction == "mean":
        total_weight = op.ms.NegativeLogLikelihoodLossInternal2(n.log_prob, labels, n.weights, index)[1]
    else:
        total_weight = op.scalar(1, like=n.log_prob)  # not read
    return op.ms.SoftmaxCrossEntropyLossInternalGrad(  # type: ignore[no-any-return]
        n.dy, n.log_prob, labels, n.weights, index, None, total_weight, reduction=n.reduction
    )


def cross_entropy_grad(
    dy: Tensor, log_prob: Tensor, labels: Tensor, weights: Tensor | None, reduction: int, ignore_index: int
) -> Tensor:
    """The backward kernels of PyTorch's loss, which need the sum of the weights."""
    labels = labels.long().reshape(labels.shape[0], -1)
    planes = log_prob.reshape(*log_prob.shape[:2], -1)
    kept = labels != ignore_index
    each = torch.ones_like(labels, dtype=log_prob.dtype) if weights is None else weights[labels * kept]
    each = each * kept
    dy = dy.reshape(labels.shape) if reduction == 0 else dy
    weighted = (dy * each if reduction != 1 else dy * each / each.sum()).unsqueeze(1)
    dx = weighted * planes.exp()
    return dx.scatter_add_(1, (labels * kept).unsqueeze(1), -weighted).reshape(log_prob.shape)


fused(
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
        number_of(n.reduction),
        _NOTHING if n.ignore_index is None else n.ignore_index,
    ),
    axes=no_axes,
    flops=lambda n: sizes.multiply(4, numel(n.log_prob)),
)


# SoftmaxCrossEntropy, SparseSoftmaxCrossEntropy: the first losses of ONNX Runtime Training


def _rows(x: ir.Value) -> Size:
    return sizes.multiply(1, *sizes.dims_of(x)[:-1])


def _old_types(n: NodeView) -> Sequence[TensorType]:
    return TensorType(dtype_of(n.scores), ()), type_of(n.scores)


def _shares_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    log_prob = op.LogSoftmax(n.scores, axis=-1)
    every = range(len(sizes.dims_of(n.scores)))
    loss = op.Neg(total(op, op.Mul(n.shares, log_prob), every, keepdims=False))
    if n.reduction == "mean":
        loss = op.Div(loss, op.size(_rows(n.scores), dtype_of(loss)))
    return loss, log_prob


def shares_loss(scores: Tensor, shares: Tensor, mean: bool) -> tuple[Tensor, Tensor]:
    log_prob = torch.log_softmax(scores, -1)
    loss = -(shares * log_prob).sum()
    return loss / scores.shape[:-1].numel() if mean else loss, log_prob


def _labels_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    log_prob = op.LogSoftmax(n.scores, axis=-1)
    last = axes_constant(op, [len(sizes.dims_of(n.labels))])
    places = op.Unsqueeze(cast(op, n.labels, INT64), last)
    found = op.Neg(op.Squeeze(op.GatherElements(log_prob, places, axis=-1), last))
    every = range(len(sizes.dims_of(n.labels)))
    weights = n.weights
    loss = total(op, found if weights is None else op.Mul(found, weights), every, keepdims=False)
    if n.reduction == "mean":
        count = (
            op.size(_rows(n.scores), dtype_of(loss)) if weights is None else total(op, weights, every, keepdims=False)
        )
        loss = op.Div(loss, count)
    return loss, log_prob


def labels_loss(scores: Tensor, labels: Tensor, weights: Tensor | None, mean: bool) -> tuple[Tensor, Tensor]:
    log_prob = torch.log_softmax(scores, -1)
    each = -log_prob.gather(-1, labels.long().unsqueeze(-1)).squeeze(-1)
    if weights is not None:
        loss = (each * weights).sum()
        return loss / weights.sum() if mean else loss, log_prob
    return each.mean() if mean else each.sum(), log_prob


composite(
    "SoftmaxCrossEntropy",
    ("scores", "shares"),
    _shares_body,
    lambda n, scores, shares: Call(shares_loss, scores, shares, n.reduction == "mean"),
    domain=MICROSOFT,
    outputs=("loss", "log_prob"),
    attributes={"reduction": "mean"},
    shapes=_old_types,
    axes=no_axes,
    nondiff_inputs=frozenset({"shares"}),
    flops=_flops("scores"),
)
composite(
    "SparseSoftmaxCrossEntropy",
    ("scores", "labels", "weights?"),
    _labels_body,
    lambda n, scores, labels, weights: Call(labels_loss, scores, labels, weights, n.reduction == "mean"),
    domain=MICROSOFT,
    outputs=("loss", "log_prob"),
    attributes={"reduction": "mean"},
    shapes=_old_types,
    axes=no_axes,
    nondiff_inputs=_STOPS,
    flops=_flops("scores"),
)


def _shares_grad_body(op: Builder, n: NodeView) -> ir.Value:
    """exp(log_prob) * sum(shares) - shares, times dy, by the number of rows."""
    mass = total(op, n.shares, [len(sizes.dims_of(n.shares)) - 1])
    dx = op.Mul(op.Sub(op.Mul(op.Exp(n.log_prob), mass), n.shares), n.dy)
    return op.Div(dx, op.size(_rows(n.log_prob), dtype_of(dx))) if n.reduction == "mean" else dx  # type: ignore[no-any-return]


def shares_loss_grad(dy: Tensor, log_prob: Tensor, shares: Tensor, mean: bool) -> Tensor:
    dx = (log_prob.exp() * shares.sum(-1, keepdim=True) - shares) * dy
    return dx / log_prob.shape[:-1].numel() if mean else dx


def _labels_grad_body(op: Builder, n: NodeView) -> ir.Value:
    rank = len(sizes.dims_of(n.labels))
    last, weights = axes_constant(op, [rank]), n.weights
    classes = op.Range(op.size(0), op.size(sizes.dims_of(n.log_prob)[-1]), op.size(1))
    hot = op.Cast(op.Equal(op.Unsqueeze(cast(op, n.labels, INT64), last), classes), to=dtype_of(n.log_prob))
    scale = n.dy
    if n.reduction == "mean" and weights is None:
        scale = op.Div(scale, op.size(_rows(n.log_prob), dtype_of(scale)))
    elif n.reduction == "mean":
        scale = op.Div(scale, total(op, weights, range(rank), keepdims=False))
    scale = scale if weights is None else op.Unsqueeze(op.Mul(weights, scale), last)
    return op.Mul(op.Sub(op.Exp(n.log_prob), hot), scale)  # type: ignore[no-any-return]


def labels_loss_grad(dy: Tensor, log_prob: Tensor, labels: Tensor, weights: Tensor | None, mean: bool) -> Tensor:
    each = torch.ones(labels.shape, dtype=log_prob.dtype, device=log_prob.device) if weights is None else weights
    scale = (each * dy / each.sum() if mean else each * dy).unsqueeze(-1)
    dx = log_prob.exp() * scale
    return dx.scatter_add_(-1, labels.long().unsqueeze(-1), -scale)


fused(
    MICROSOFT,
    "SoftmaxCrossEntropyGrad",
    ("dy", "log_prob", "shares"),
    ("dscores",),
    attributes={"reduction": "mean"},
    shapes=lambda n: (type_of(n.log_prob),),
    body=_shares_grad_body,
    lower=lambda n, dy, log_prob, shares: Call(shares_loss_grad, dy, log_prob, shares, n.reduction == "mean"),
    axes=no_axes,
    flops=lambda n: sizes.multiply(4, numel(n.log_prob)),
)
fused(
    MICROSOFT,
    "SparseSoftmaxCrossEntropyGrad",
    ("dy", "log_prob", "labels", "weights?"),
    ("dscores",),
    attributes={"reduction": "mean"},
    shapes=lambda n: (type_of(n.log_prob),),
    body=_labels_grad_body,
    lower=lambda n, dy, log_prob, labels, weights: Call(
        labels_loss_grad, dy, log_prob, labels, weights, n.reduction == "mean"
    ),
    axes=no_axes,
    flops=lambda n: sizes.multiply(4, numel(n.log_prob)),
)
