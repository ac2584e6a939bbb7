"""Binary cross entropy of probabilities and of logits.

    BinaryCrossEntropy(x, target, weight) -> loss
        -(target log x + (1 - target) log(1 - x)) weight               logarithms clamped to at least -100
    BinaryCrossEntropyWithLogits(x, target, weight, pos_weight) -> loss
        ((1 - target) x - (1 + (pos_weight - 1) target) log sigmoid(x)) weight

weight and pos_weight broadcast to x and get no gradient, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.axes import NO_AXES
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, TensorType, dtype_of, rank_of, type_of
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.constructors import define_pure
from onnxtrain.ops.definition import Call, Gradient, NodeView, numel
from onnxtrain.ops.dtypes import accumulation_dtype
from onnxtrain.ops.loss.reduction import REDUCTIONS, aten_reduction, reduced, unreduced
from onnxtrain.torch_compat import aten_kernels

aten = torch.ops.aten
Tensor = torch.Tensor
_LOWEST_LOG = -100.0
_MIN_VARIANCE = 1e-12  # PyTorch clamps its divisor x (1 - x) to this


def _types(n: NodeView) -> Sequence[TensorType]:
    shape = sizes.dims_of(n.x)
    for name in n.definition.inputs[1:]:
        operand = getattr(n, name.rstrip("?"))
        if operand is not None and not _may_broadcast(sizes.dims_of(operand), shape):
            raise GraphError(
                f"{name.rstrip('?')} of {n.definition.name} does not broadcast to x",
                expected=f"a shape that broadcasts to {list(shape)}",
                got=list(sizes.dims_of(operand)),
            )
    return (TensorType(dtype_of(n.x), shape if n.reduction == "none" else ()),)


def _may_broadcast(source: sizes.Sizes, target: sizes.Sizes) -> bool:
    """Return whether `source` may broadcast to `target`; symbolic dimensions count as compatible."""
    if len(source) > len(target):
        return False
    pairs = zip(reversed(source), reversed(target), strict=False)
    return all(s in (1, t) or isinstance(s, str) or isinstance(t, str) for s, t in pairs)


def _axes(n: NodeView, inputs: Sequence[Any], loss_first: bool) -> str:
    """Return the axis map: weights align with x from the right. The gradient of a mean depends on every dimension."""
    if loss_first and n.reduction == "mean":
        return NO_AXES
    rank = rank_of(n.x)
    axes = [f"a{i}" for i in range(rank)]
    loss = " ".join(axes) if n.reduction == "none" else ""
    operands = ["-" if v is None else " ".join(axes[rank - rank_of(v) :]) for v in inputs]
    if loss_first:
        return f"{', '.join([loss, *operands])} -> {' '.join(axes)}"
    return f"{', '.join(operands)} -> {loss}"


def _widened(op: Builder, n: NodeView, *names: str) -> list[Any]:
    """Return the named inputs in the dtype of the computation; None for an absent one."""
    dtype = accumulation_dtype(dtype_of(n.x))
    inputs = (getattr(n, name) for name in names)
    return [None if v is None else cast(op, v, dtype) for v in inputs]


def _weighted(op: Builder, x: ir.Value, weight: ir.Value | None) -> ir.Value:
    return x if weight is None else op.Mul(x, weight)


def _one_per_input(n: NodeView, gradients: Sequence[ir.Value | None]) -> list[ir.Value | None]:
    return [*gradients, None, None][: len(n.node.inputs)]


# BinaryCrossEntropy: x is a probability


def _clamped_log(op: Builder, log: ir.Value) -> ir.Value:
    """`log` clamped to at least `_LOWEST_LOG`; NaN stays NaN."""
    lowest = op.scalar(_LOWEST_LOG, like=log)
    return op.Where(op.Less(log, lowest), lowest, log)


def _probability_body(op: Builder, n: NodeView) -> ir.Value:
    x, target, weight = _widened(op, n, "x", "target", "weight")
    one = op.scalar(1, like=x)
    log_x, log_1_minus_x = _clamped_log(op, op.Log(x)), _clamped_log(op, op.own.Log1p(op.Neg(x)))
    loss = op.Sub(op.Mul(op.Sub(target, one), log_1_minus_x), op.Mul(target, log_x))
    return cast(op, reduced(op, _weighted(op, loss, weight), n.reduction), dtype_of(n.x))


def _probability_gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    dx = None
    if n.wants("x"):
        dx = op.own.BinaryCrossEntropyGrad(dy, n.x, n.target, n.weight, reduction=n.reduction)
    if not n.wants("target"):
        return _one_per_input(n, [dx, None])
    # The derivative in target is log((1 - x) / x), without the clamp, as in PyTorch.
    odds = op.Div(n.x, op.Sub(op.scalar(1, like=n.x), n.x))
    slope = _weighted(op, op.Neg(op.Log(odds)), n.weight)
    return _one_per_input(n, [dx, op.Mul(slope, unreduced(op, dy, n.x, n.reduction))])


def _capture_probability(op: Builder, x: ir.Value, target: ir.Value, weight: Any = None, reduction: int = 1) -> Any:
    return op.own.BinaryCrossEntropy(x, target, weight, reduction=REDUCTIONS[reduction])


define_pure(
    OWN,
    "BinaryCrossEntropy",
    ("x", "target", "weight?"),
    ("loss",),
    attributes={"reduction": "mean"},
    from_torch={"aten.binary_cross_entropy.default": _capture_probability},
    shapes=_types,
    body=_probability_body,
    gradient=(Gradient(_probability_gradient, reads=("x", "target", "weight")),),
    nondiff_inputs=frozenset({"weight"}),
    lower=lambda n, x, target, weight: Call(
        aten_kernels.binary_cross_entropy, x, target, weight, aten_reduction(n.reduction)
    ),
    axes=lambda n: _axes(n, n.node.inputs, loss_first=False),
    flops=lambda n: sizes.multiply(8, numel(n.x)),
)


def _probability_grad_body(op: Builder, n: NodeView) -> ir.Value:
    dy, x, target, weight = _widened(op, n, "dy", "x", "target", "weight")
    variance = op.Mul(op.Sub(op.scalar(1, like=x), x), x)
    smallest = op.scalar(_MIN_VARIANCE, like=x)
    variance = op.Where(op.Less(variance, smallest), smallest, variance)
    slope = _weighted(op, op.Div(op.Sub(x, target), variance), weight)
    return cast(op, op.Mul(slope, unreduced(op, dy, x, n.reduction)), dtype_of(n.x))


define_pure(
    OWN,
    "BinaryCrossEntropyGrad",
    ("dy", "x", "target", "weight?"),
    ("dx",),
    attributes={"reduction": "mean"},
    shapes=lambda n: (type_of(n.x),),
    body=_probability_grad_body,
    lower=lambda n, dy, x, target, weight: Call(
        aten.binary_cross_entropy_backward.default, dy, x, target, weight, aten_reduction(n.reduction)
    ),
    axes=lambda n: _axes(n, n.node.inputs[1:], loss_first=True),
    flops=lambda n: sizes.multiply(6, numel(n.x)),
)


# BinaryCrossEntropyWithLogits: x is a logit


def _log_sigmoid(op: Builder, x: ir.Value) -> ir.Value:
    zero = op.scalar(0, like=x)
    lower = op.Where(op.Greater(x, zero), zero, x)
    return op.Sub(lower, op.own.Log1p(op.Exp(op.Neg(op.Abs(x)))))


def _logits_body(op: Builder, n: NodeView) -> ir.Value:
    x, target, weight, pos_weight = _widened(op, n, "x", "target", "weight", "pos_weight")
    one = op.scalar(1, like=x)
    log = _log_sigmoid(op, x)
    if pos_weight is not None:
        log = op.Mul(log, op.Add(op.Mul(op.Sub(pos_weight, one), target), one))
    loss = op.Sub(op.Mul(op.Sub(one, target), x), log)
    return cast(op, reduced(op, _weighted(op, loss, weight), n.reduction), dtype_of(n.x))


def _logits_gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    dx = None
    if n.wants("x"):
        dx = op.own.BinaryCrossEntropyWithLogitsGrad(dy, n.x, n.target, n.weight, n.pos_weight, reduction=n.reduction)
    if not n.wants("target"):
        return _one_per_input(n, [dx, None])
    slope = op.Neg(n.x)
    if n.pos_weight is not None:
        slope = op.Sub(_log_sigmoid(op, slope), op.Mul(n.pos_weight, _log_sigmoid(op, n.x)))
    slope = _weighted(op, slope, n.weight)
    return _one_per_input(n, [dx, op.Mul(slope, unreduced(op, dy, n.x, n.reduction))])


def _capture_logits(
    op: Builder, x: ir.Value, target: ir.Value, weight: Any = None, pos_weight: Any = None, reduction: int = 1
) -> Any:
    operands = [v for v in (x, target, weight, pos_weight) if v is not None]
    if any(dtype_of(v) != op.out[0].dtype for v in operands):
        return NotImplemented  # PyTorch promotes the dtype at each of the operators it runs
    return op.own.BinaryCrossEntropyWithLogits(x, target, weight, pos_weight, reduction=REDUCTIONS[reduction])


define_pure(
    OWN,
    "BinaryCrossEntropyWithLogits",
    ("x", "target", "weight?", "pos_weight?"),
    ("loss",),
    attributes={"reduction": "mean"},
    from_torch={"aten.binary_cross_entropy_with_logits.default": _capture_logits},
    shapes=_types,
    body=_logits_body,
    gradient=(Gradient(_logits_gradient, reads=("x", "target", "weight", "pos_weight")),),
    nondiff_inputs=frozenset({"weight", "pos_weight"}),
    lower=lambda n, x, target, weight, pos_weight: Call(
        torch.binary_cross_entropy_with_logits, x, target, weight, pos_weight, aten_reduction(n.reduction)
    ),
    axes=lambda n: _axes(n, n.node.inputs, loss_first=False),
    flops=lambda n: sizes.multiply(9, numel(n.x)),
)


def logits_backward(
    dy: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None, mean: bool
) -> Tensor:
    """Return the formula of PyTorch's autograd, which has no single backward operator for it."""
    if pos_weight is None:
        slope = x.sigmoid().sub_(target)
    else:
        positive = pos_weight * target
        slope = (positive + 1).sub_(target).mul_(x.sigmoid()).sub_(positive)
    slope.mul_(dy)
    if weight is not None:
        slope.mul_(weight)
    return slope.div_(x.numel()) if mean else slope


def _logits_grad_body(op: Builder, n: NodeView) -> ir.Value:
    dy, x, target, weight, pos_weight = _widened(op, n, "dy", "x", "target", "weight", "pos_weight")
    one = op.scalar(1, like=x)
    positive = target if pos_weight is None else op.Mul(pos_weight, target)
    slope = op.Sub(op.Mul(op.Sub(op.Add(positive, one), target), op.Sigmoid(x)), positive)
    dx = op.Mul(_weighted(op, slope, weight), unreduced(op, dy, x, n.reduction))
    return cast(op, dx, dtype_of(n.x))


define_pure(
    OWN,
    "BinaryCrossEntropyWithLogitsGrad",
    ("dy", "x", "target", "weight?", "pos_weight?"),
    ("dx",),
    attributes={"reduction": "mean"},
    shapes=lambda n: (type_of(n.x),),
    body=_logits_grad_body,
    lower=lambda n, dy, x, target, weight, pos_weight: Call(
        logits_backward, dy, x, target, weight, pos_weight, n.reduction == "mean"
    ),
    axes=lambda n: _axes(n, n.node.inputs[1:], loss_first=True),
    flops=lambda n: sizes.multiply(7, numel(n.x)),
)
