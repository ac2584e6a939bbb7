"""Cross entropy and negative log likelihood with class indices.

    SoftmaxCrossEntropyLossInternal(scores[n, c, d], labels[n, d], weights[c], ignore_index)
            -> loss, log_prob[n, c, d], total_weight
        log_prob = log softmax(scores) over c          loss[i] = -weights[labels[i]] * log_prob[i, labels[i]]
    NegativeLogLikelihoodLossInternal2(log_prob[n, c, d], labels[n, d], weights[c], ignore_index) -> loss, total_weight

`d` stands for any further axes. The loss and its weight are 0 where the label is ignore_index. The mean divides the
sum by total_weight, the sum of all weights: NaN if all labels are ignored. Weights get no gradient, as in PyTorch.
`output_type` is the dtype of loss, log_prob and total_weight if it is not that of scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import MICROSOFT, OWN, TensorType, dtype_of, is_float, rank_of, type_of
from onnxtrain.ops.body_parts import cast, int64_vector, mul_scalar, reshaped, sum_over
from onnxtrain.ops.constructors import define_pure
from onnxtrain.ops.definition import Call, Gradient, NodeView, numel
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.gradient_masks import first_cotangent
from onnxtrain.ops.loss.reduction import REDUCTIONS, aten_reduction
from onnxtrain.torch_compat import aten_kernels

aten = torch.ops.aten
Tensor = torch.Tensor


# Kernels


def nll_loss(
    x: Tensor, labels: Tensor, weights: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return the loss and total_weight by PyTorch's kernels."""
    if x.ndim == 2:
        return aten.nll_loss_forward.default(x, labels, weights, reduction, ignore_index)
    if x.ndim == 4:
        return aten.nll_loss2d_forward.default(x, labels, weights, reduction, ignore_index)
    loss, total_weight = aten.nll_loss2d_forward.default(
        _as_image(x, 2), _as_image(labels, 1), weights, reduction, ignore_index
    )
    return loss.view(labels.shape) if reduction == 0 else loss, total_weight


def nll_loss_backward(
    dy: Tensor,
    x: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """Return the gradient of x by PyTorch's kernels. That of images requires contiguous scores."""
    rest = (weights, reduction, ignore_index, total_weight)
    if x.ndim == 2:
        return aten.nll_loss_backward.default(dy, x, labels, *rest)
    if x.ndim == 4:
        return aten.nll_loss2d_backward.default(dy, x.contiguous(), labels, *rest)
    dy = _as_image(dy, 1) if reduction == 0 else dy
    dx: Tensor = aten.nll_loss2d_backward.default(dy, _as_image(x.contiguous(), 2), _as_image(labels, 1), *rest)
    return dx.view(x.shape)


def _as_image(x: Tensor, leading: int) -> Tensor:
    """Collapse all axes after the first `leading` ones into two."""
    return x.reshape(*x.shape[:leading], *((1, -1) if x.numel() else (0, 0)))


def cross_entropy(
    scores: Tensor, labels: Tensor, weights: Tensor | None, reduction: int, ignore_index: int, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the kernels of PyTorch's cross_entropy_loss; also return log-probabilities and total_weight for backward."""
    log_prob = torch.log_softmax(scores, 1, dtype)
    loss, total_weight = nll_loss(log_prob, labels, weights, reduction, ignore_index)
    return loss, log_prob, total_weight


def cross_entropy_backward(
    dy: Tensor,
    log_prob: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    bias: Tensor | None,
    total_weight: Tensor,
    reduction: int,
    ignore_index: int,
    dtype: torch.dtype | None,
) -> Tensor:
    """Run the backward kernels of `cross_entropy`."""
    d_log_prob = nll_loss_backward(dy, log_prob, labels, weights, reduction, ignore_index, total_weight)
    if dy.device.type == "cpu":
        # In place: the kernel sums a row before it writes it, so no second tensor of the scores' size is needed.
        dx: Tensor = aten_kernels.log_softmax_grad(d_log_prob, log_prob, 1, log_prob.dtype, out=d_log_prob)
    else:
        dx = aten_kernels.log_softmax_grad(d_log_prob, log_prob, 1, log_prob.dtype)
    if dtype is not None:
        dx = dx.to(dtype)
    return dx if bias is None else dx + bias


# Parts of the bodies


def _ignored(op: Builder, n: NodeView) -> ir.Value | None:
    """Return a mask of the ignored labels; None if no label can be ignored."""
    if n.ignore_index is None:
        return None
    return op.Equal(n.labels, n.ignore_index)


def _zero_ignored(op: Builder, ignored: ir.Value | None, x: ir.Value) -> ir.Value:
    """`x` with 0 where `ignored`."""
    if ignored is None:
        return x
    return op.Where(ignored, op.scalar(0, like=x), x)


def _label_weights(op: Builder, n: NodeView, ignored: ir.Value | None, dtype: ir.DataType) -> ir.Value:
    """Return the weight of each label, 0 where it is ignored."""
    if n.weights is None:
        weights = op.Expand(op.scalar(1, dtype), op.shape_of(n.labels))
    else:
        weights = op.Gather(cast(op, n.weights, dtype), _zero_ignored(op, ignored, n.labels), axis=0)
    return _zero_ignored(op, ignored, weights)


def _summed(op: Builder, x: ir.Value) -> ir.Value:
    return sum_over(op, x, range(rank_of(x)), keepdims=False)


def losses(op: Builder, n: NodeView, log_prob: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return the reduced loss and total_weight."""
    ignored, one = _ignored(op, n), int64_vector(op, [1])
    weight = _label_weights(op, n, ignored, dtype_of(log_prob))
    at_labels = op.GatherElements(log_prob, op.Unsqueeze(_zero_ignored(op, ignored, n.labels), one), axis=1)
    loss = _zero_ignored(op, ignored, op.Neg(op.Mul(op.Squeeze(at_labels, one), weight)))
    total_weight = _summed(op, weight)
    if n.reduction == "mean":
        return op.Div(_summed(op, loss), total_weight), total_weight
    return (loss if n.reduction == "none" else _summed(op, loss)), total_weight


def weighted_cotangent(op: Builder, n: NodeView, dtype: ir.DataType) -> ir.Value:
    """-dloss/dlog_prob at each label: [n, 1, d]."""
    weight = _label_weights(op, n, _ignored(op, n), dtype)
    dy = cast(op, n.dy, dtype)
    if n.reduction == "mean":
        dy = op.Div(dy, cast(op, n.total_weight, dtype))
    return op.Unsqueeze(_zero_ignored(op, _ignored(op, n), op.Mul(dy, weight)), int64_vector(op, [1]))


def label_mask(op: Builder, n: NodeView, x: ir.Value) -> ir.Value:
    """Return the one-hot mask of the labels, of x's shape."""
    shape = sizes.dims_of(x)
    classes = op.Range(op.scalar(0, ir.DataType.INT64), op.size(shape[1]), op.scalar(1, ir.DataType.INT64))
    classes = reshaped(op, classes, [1, shape[1], *[1] * (len(shape) - 2)])
    return op.Equal(op.Unsqueeze(n.labels, int64_vector(op, [1])), classes)


# Axes and types


def axis_names(x: ir.Value) -> tuple[str, str]:
    """Return the axes of the scores and those of the labels."""
    inner = [f"d{i}" for i in range(rank_of(x) - 2)]
    return " ".join(["n", "[c]", *inner]), " ".join(["n", *inner])


def loss_axes(n: NodeView, labels: str) -> str:
    return labels if n.reduction == "none" else ""


def axis_map(n: NodeView, inputs: Sequence[str], outputs: Sequence[str]) -> str:
    present = [name if value is not None else "-" for name, value in zip(inputs, n.node.inputs, strict=False)]
    return f"{', '.join(present)} -> {', '.join(outputs)}"


def loss_type(n: NodeView, dtype: ir.DataType) -> TensorType:
    return TensorType(dtype, sizes.dims_of(n.labels) if n.reduction == "none" else ())


def _output_dtype(n: NodeView) -> torch.dtype | None:
    return None if n.output_type is None else TORCH_DTYPES[ir.DataType(n.output_type)]


# SoftmaxCrossEntropyLossInternal


def _types(n: NodeView) -> Sequence[TensorType]:
    dtype = dtype_of(n.scores) if n.output_type is None else ir.DataType(n.output_type)
    return loss_type(n, dtype), TensorType(dtype, sizes.dims_of(n.scores)), TensorType(dtype, ())


def _body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    log_prob = op.LogSoftmax(cast(op, n.scores, _types(n)[1].dtype), axis=1)
    loss, total_weight = losses(op, n, log_prob)
    return loss, log_prob, total_weight


# total_weight depends on labels and weights alone: its cotangent is dropped.


def _gradient(
    op: Builder, n: NodeView, dloss: ir.Value | None, dlog_prob: ir.Value | None, dtotal: ir.Value | None
) -> list[ir.Value | None]:
    if dloss is None and dlog_prob is None:
        return [None] * len(n.node.inputs)
    dscores = op.ms.SoftmaxCrossEntropyLossInternalGrad(
        first_cotangent(n, (dloss, dlog_prob, None)),
        n.log_prob,
        n.labels,
        n.weights,
        n.ignore_index,
        None,
        n.total_weight,
        reduction=n.reduction,
        output_type=None if n.output_type is None else int(dtype_of(n.scores)),
    )
    return [dscores, *[None] * (len(n.node.inputs) - 1)]


def _cross_entropy_axes(n: NodeView) -> str:
    scores, labels = axis_names(n.scores)
    return axis_map(n, (scores, labels, "[c]", ""), (loss_axes(n, labels), scores, ""))


def _capture(
    op: Builder,
    scores: ir.Value,
    target: ir.Value,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: Size = -100,
    label_smoothing: float = 0.0,
) -> Any:
    unbatched = rank_of(scores) == 1
    if unbatched:
        scores, target = _batch_of_one(op, scores), _batch_of_one(op, target)
    if is_float(dtype_of(target)):
        loss = _with_probabilities(op, scores, target, weight, reduction, label_smoothing)
    elif label_smoothing:
        loss = _smoothed(op, scores, target, weight, reduction, ignore_index, label_smoothing)
    else:
        loss, _, _ = op.ms.SoftmaxCrossEntropyLossInternal(
            scores,
            cast(op, target, ir.DataType.INT64),
            weight,
            op.size(ignore_index),
            reduction=REDUCTIONS[reduction],
        )
    return reshaped(op, loss, ()) if unbatched else loss


def _batch_of_one(op: Builder, x: ir.Value) -> ir.Value:
    return op.Unsqueeze(x, int64_vector(op, [0]))


def _broadcast_over_classes(op: Builder, weight: ir.Value, scores: ir.Value) -> ir.Value:
    """Reshape a vector of one value per class so that it broadcasts over scores."""
    return reshaped(op, weight, [1, sizes.dims_of(weight)[0], *[1] * (rank_of(scores) - 2)])


def _divide_by_classes(op: Builder, number: float, scores: ir.Value, dtype: ir.DataType) -> ir.Value:
    """`number` divided by the number of classes."""
    classes = sizes.dims_of(scores)[1]
    if isinstance(classes, int):
        return op.scalar(number / classes, dtype)
    return op.Div(op.scalar(number, dtype), op.size(classes, dtype))


def _smoothed(
    op: Builder, scores: ir.Value, target: ir.Value, weight: Any, reduction: int, ignore_index: Size, smoothing: float
) -> ir.Value:
    """(1 - smoothing) * loss + smoothing / c * (the loss summed over all classes), as PyTorch decomposes it."""
    log_prob, labels = op.LogSoftmax(scores, axis=1), cast(op, target, ir.DataType.INT64)
    index = op.size(ignore_index)
    loss, total_weight = op.ms.NegativeLogLikelihoodLossInternal2(
        log_prob, labels, weight, index, reduction=REDUCTIONS[reduction]
    )
    weighted = log_prob if weight is None else op.Mul(log_prob, _broadcast_over_classes(op, weight, scores))
    over_classes = op.Neg(sum_over(op, weighted, (1,), keepdims=False))
    over_classes = op.Where(op.Equal(labels, index), op.scalar(0, like=over_classes), over_classes)
    if REDUCTIONS[reduction] != "none":
        over_classes = _summed(op, over_classes)
    if REDUCTIONS[reduction] == "mean":
        over_classes = op.Div(over_classes, total_weight)
    share = _divide_by_classes(op, smoothing, scores, dtype_of(loss))
    return op.Add(mul_scalar(op, loss, 1 - smoothing), op.Mul(over_classes, share))


def _with_probabilities(
    op: Builder, scores: ir.Value, target: ir.Value, weight: Any, reduction: int, smoothing: float
) -> ir.Value:
    """-sum(target * log_prob) over classes, as PyTorch decomposes it. The mean is over all axes but the classes."""
    dtype = op.out[0].dtype
    log_prob = op.LogSoftmax(scores, axis=1)
    if smoothing:
        share = _divide_by_classes(op, smoothing, scores, dtype_of(target))
        target = op.Add(mul_scalar(op, target, 1 - smoothing), share)
    weighted = op.Mul(cast(op, log_prob, dtype), cast(op, target, dtype))
    if weight is not None:
        weighted = op.Mul(weighted, cast(op, _broadcast_over_classes(op, weight, scores), dtype))
    if REDUCTIONS[reduction] == "none":
        return op.Neg(sum_over(op, weighted, (1,), keepdims=False))
    loss: ir.Value = op.Neg(_summed(op, weighted))
    if REDUCTIONS[reduction] == "mean":
        samples = sizes.multiply(1, *(s for axis, s in enumerate(sizes.dims_of(scores)) if axis != 1))
        loss = op.Div(loss, op.size(samples, dtype))
    return loss


CROSS_ENTROPY = define_pure(
    MICROSOFT,
    "SoftmaxCrossEntropyLossInternal",
    ("scores", "labels", "weights?", "ignore_index?"),
    ("loss", "log_prob", "total_weight"),
    attributes={"reduction": "mean", "output_type": None},
    from_torch={"aten.cross_entropy_loss.default": _capture},
    shapes=_types,
    body=_body,
    gradient=(Gradient(_gradient, reads=("log_prob", "labels", "weights", "total_weight")),),
    nondiff_inputs=frozenset({"labels", "weights", "ignore_index"}),
    lower=lambda n, scores, labels, weights, ignore_index: Call(
        cross_entropy,
        scores,
        labels,
        weights,
        aten_reduction(n.reduction),
        aten_ignore_index(ignore_index),
        _output_dtype(n),
    ),
    host_inputs=frozenset({3}),
    axes=_cross_entropy_axes,
    flops=lambda n: sizes.multiply(5, numel(n.scores)),
)


def aten_ignore_index(ignore_index: Any) -> Any:
    """Return the ignore_index for PyTorch's kernels, which always ignore one label.

    None becomes an index of no class.
    """
    return -100 if ignore_index is None else ignore_index


# SoftmaxCrossEntropyLossInternalGrad: (softmax - one-hot label) * weight of the label * cotangent, plus `bias`.


def _grad_type(n: NodeView) -> Sequence[TensorType]:
    dtype = dtype_of(n.log_prob) if n.output_type is None else ir.DataType(n.output_type)
    return (TensorType(dtype, sizes.dims_of(n.log_prob)),)


def _grad_body(op: Builder, n: NodeView) -> ir.Value:
    weighted = weighted_cotangent(op, n, dtype_of(n.log_prob))
    weighted_one_hot = op.Where(label_mask(op, n, n.log_prob), weighted, op.scalar(0, like=weighted))
    dx = cast(op, op.Sub(op.Mul(op.Exp(n.log_prob), weighted), weighted_one_hot), _grad_type(n)[0].dtype)
    return dx if n.bias is None else op.Add(dx, n.bias)


def _grad_axes(n: NodeView) -> str:
    scores, labels = axis_names(n.log_prob)
    return axis_map(n, (loss_axes(n, labels), scores, labels, "[c]", "", scores, ""), (scores,))


define_pure(
    MICROSOFT,
    "SoftmaxCrossEntropyLossInternalGrad",
    ("dy", "log_prob", "labels", "weights?", "ignore_index?", "bias?", "total_weight"),
    ("dscores",),
    attributes={"reduction": "mean", "output_type": None},
    shapes=_grad_type,
    body=_grad_body,
    lower=lambda n, dy, log_prob, labels, weights, ignore_index, bias, total_weight: Call(
        cross_entropy_backward,
        dy,
        log_prob,
        labels,
        weights,
        bias,
        total_weight,
        aten_reduction(n.reduction),
        aten_ignore_index(ignore_index),
        _output_dtype(n),
    ),
    host_inputs=frozenset({4}),
    axes=_grad_axes,
    flops=lambda n: sizes.multiply(4, numel(n.log_prob)),
)


# NegativeLogLikelihoodLossInternal2


def _nll_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    return losses(op, n, n.log_prob)


def _nll_gradient(op: Builder, n: NodeView, dy: ir.Value | None, dtotal: ir.Value | None) -> list[ir.Value | None]:
    if dy is None:
        return [None] * len(n.node.inputs)
    dx = op.own.NegativeLogLikelihoodLossGrad(
        dy, n.log_prob, n.labels, n.weights, n.ignore_index, n.total_weight, reduction=n.reduction
    )
    return [dx, *[None] * (len(n.node.inputs) - 1)]


def _nll_axes(n: NodeView) -> str:
    scores, labels = axis_names(n.log_prob)
    return axis_map(n, (scores, labels, "[c]", ""), (loss_axes(n, labels), ""))


def _capture_nll(
    op: Builder, x: ir.Value, target: ir.Value, weight: Any = None, reduction: int = 1, ignore_index: Size = -100
) -> Any:
    unbatched = rank_of(x) == 1
    if unbatched:
        x, target = _batch_of_one(op, x), _batch_of_one(op, target)
    labels = cast(op, target, ir.DataType.INT64)
    loss, _ = op.ms.NegativeLogLikelihoodLossInternal2(
        x, labels, weight, op.size(ignore_index), reduction=REDUCTIONS[reduction]
    )
    return reshaped(op, loss, ()) if unbatched else loss


NEGATIVE_LOG_LIKELIHOOD = define_pure(
    MICROSOFT,
    "NegativeLogLikelihoodLossInternal2",
    ("log_prob", "labels", "weights?", "ignore_index?"),
    ("loss", "total_weight"),
    attributes={"reduction": "mean"},
    from_torch={
        "aten.nll_loss_nd.default": _capture_nll,
        "aten.nll_loss.default": _capture_nll,
        "aten.nll_loss2d.default": _capture_nll,
    },
    shapes=lambda n: (loss_type(n, dtype_of(n.log_prob)), TensorType(dtype_of(n.log_prob), ())),
    body=_nll_body,
    gradient=(Gradient(_nll_gradient, reads=("log_prob", "labels", "weights", "total_weight")),),
    nondiff_inputs=frozenset({"labels", "weights", "ignore_index"}),
    lower=lambda n, x, labels, weights, ignore_index: Call(
        nll_loss, x, labels, weights, aten_reduction(n.reduction), aten_ignore_index(ignore_index)
    ),
    host_inputs=frozenset({3}),
    axes=_nll_axes,
    flops=lambda n: numel(n.labels),
)


def _nll_grad_body(op: Builder, n: NodeView) -> ir.Value:
    weighted = op.Neg(weighted_cotangent(op, n, dtype_of(n.log_prob)))
    return op.Where(label_mask(op, n, n.log_prob), weighted, op.scalar(0, like=weighted))


def _nll_grad_axes(n: NodeView) -> str:
    scores, labels = axis_names(n.log_prob)
    return axis_map(n, (loss_axes(n, labels), scores, labels, "[c]", "", ""), (scores,))


define_pure(
    OWN,
    "NegativeLogLikelihoodLossGrad",
    ("dy", "log_prob", "labels", "weights?", "ignore_index?", "total_weight"),
    ("dx",),
    attributes={"reduction": "mean"},
    shapes=lambda n: (type_of(n.log_prob),),
    body=_nll_grad_body,
    lower=lambda n, dy, x, labels, weights, ignore_index, total_weight: Call(
        nll_loss_backward,
        dy,
        x,
        labels,
        weights,
        aten_reduction(n.reduction),
        aten_ignore_index(ignore_index),
        total_weight,
    ),
    host_inputs=frozenset({4}),
    axes=_nll_grad_axes,
    flops=lambda n: numel(n.log_prob),
)
