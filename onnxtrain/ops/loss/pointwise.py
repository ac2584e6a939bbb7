"""Losses that compare two tensors element by element, then reduce.

    MseLoss          d^2                                       with d = x - target
    SmoothL1Loss     d^2 / (2 beta) where |d| < beta, else |d| - beta/2
    HuberLoss        d^2 / 2 where |d| <= delta, else delta (|d| - delta/2)
    KlDivLoss        target (log target - x), exp(target) (target - x) with log_target
    SoftMarginLoss   log(1 + exp(-target x))
    BinaryCrossEntropy             -(target log x + (1 - target) log(1 - x)) weight        logarithms not below -100
    BinaryCrossEntropyWithLogits   ((1 - target) x - (1 + (pos_weight - 1) target) log sigmoid(x)) weight

Each has a backward op, (dy, x, target) -> dx. Where PyTorch differentiates with respect to target, the rule says how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.axes import NO_AXES
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, TensorType, dtype_of, rank_of, type_of
from onnxtrain.ops.constructors import cast, promoted
from onnxtrain.ops.definition import Call, FromTorch, Gradient, NodeView, numel
from onnxtrain.ops.fused import fused, plus, statistics_type, times
from onnxtrain.ops.loss.reduction import REDUCTIONS, number_of, reduced, unreduced
from onnxtrain.torch_compat import aten_kernels

aten = torch.ops.aten
Tensor = torch.Tensor
# (builder, x, target, node) -> the loss of each element, or its slope in x
PerElement = Callable[[Builder, ir.Value, ir.Value, NodeView], ir.Value]


def _elements(n: NodeView) -> sizes.Sizes:
    shape = sizes.broadcast(sizes.dims_of(n.x), sizes.dims_of(n.target))
    if len(shape) != rank_of(n.x) or len(shape) != rank_of(n.target):
        raise GraphError(f"{n.definition.name} takes two tensors of one shape")
    return shape


def _loss_type(n: NodeView) -> Sequence[TensorType]:
    shape = _elements(n)
    return (TensorType(dtype_of(n.x), shape if n.reduction == "none" else ()),)


def _names(n: NodeView) -> tuple[str, str]:
    """The axes of an element, and those of the loss."""
    each = " ".join(f"a{i}" for i in range(rank_of(n.x)))
    return each, each if n.reduction == "none" else ""


def _loss_axes(n: NodeView) -> str:
    each, loss = _names(n)
    return f"{', '.join([each] * len(n.node.inputs))} -> {loss}"


def _slope_axes(n: NodeView) -> str:
    if n.reduction == "mean":
        return NO_AXES  # the slope hangs on the number of elements
    each, loss = _names(n)
    return f"{', '.join([loss] + [each] * (len(n.node.inputs) - 1))} -> {each}"


def _body_of(per_element: PerElement) -> Callable[[Builder, NodeView], ir.Value]:
    def body(op: Builder, n: NodeView) -> ir.Value:
        dtype = statistics_type(dtype_of(n.x))
        loss = per_element(op, cast(op, n.x, dtype), cast(op, n.target, dtype), n)
        return cast(op, reduced(op, loss, n.reduction), dtype_of(n.x))

    return body


def _slope_body_of(slope: PerElement) -> Callable[[Builder, NodeView], ir.Value]:
    def body(op: Builder, n: NodeView) -> ir.Value:
        dtype = statistics_type(dtype_of(n.x))
        each = slope(op, cast(op, n.x, dtype), cast(op, n.target, dtype), n)
        dy = unreduced(op, cast(op, n.dy, dtype), each, n.reduction)
        return cast(op, op.Mul(each, dy), dtype_of(n.x))

    return body


def is_plain(x: ir.Value, target: ir.Value) -> bool:
    """Whether both have one shape as far as is known. PyTorch broadcasts them before, where they have not."""
    have, other = sizes.dims_of(x), sizes.dims_of(target)
    agree = (a == b or isinstance(a, str) or isinstance(b, str) for a, b in zip(have, other, strict=False))
    return len(have) == len(other) and all(agree)


def _captured(name: str, *attributes: str, mixes: bool = False) -> FromTorch:
    """An ATen loss (x, target, reduction, *attributes).

    One that `mixes` is a single kernel, which promotes first; those composed of several promote on the way.
    """

    def capture(op: Builder, x: ir.Value, target: ir.Value, reduction: int = 1, *rest: Any, **named: Any) -> Any:
        if not is_plain(x, target) or not (mixes or dtype_of(x) == dtype_of(target)):
            return NotImplemented
        x, target = promoted(op, x, target)
        given = {**dict(zip(attributes, rest, strict=False)), **named}
        return op.op(OWN, name)(x, target, reduction=REDUCTIONS[reduction], **given)

    return capture


def symmetric(
    name: str,
    overload: str,
    kernel: Callable[..., Tensor],
    backward: Callable[..., Tensor],
    per_element: PerElement,
    slope: PerElement,
    attributes: Mapping[str, float],
    flops: int,
) -> None:
    """Defines a loss and its backward op, where exchanging x and target gives the gradient of target."""
    settings = tuple(attributes)

    def gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
        grad = op.op(OWN, f"{name}Grad")
        given = {"reduction": n.reduction, **{a: getattr(n, a) for a in settings}}
        return [
            grad(dy, n.x, n.target, **given) if n.wants("x") else None,
            grad(dy, n.target, n.x, **given) if n.wants("target") else None,
        ]

    fused(
        OWN,
        name,
        ("x", "target"),
        ("loss",),
        attributes={"reduction": "mean", **attributes},
        from_torch={overload: _captured(name, *settings, mixes=True)},
        shapes=_loss_type,
        body=_body_of(per_element),
        gradient=(Gradient(gradient, reads=("x", "target")),),
        lower=lambda n, x, t: Call(kernel, x, t, number_of(n.reduction), *(getattr(n, a) for a in settings)),
        axes=_loss_axes,
        flops=lambda n: sizes.multiply(flops, numel(n.x)),
    )
    fused(
        OWN,
        f"{name}Grad",
        ("dy", "x", "target"),
        ("dx",),
        attributes={"reduction": "mean", **attributes},
        shapes=lambda n: (TensorType(dtype_of(n.x), _elements(n)),),
        body=_slope_body_of(slope),
        lower=lambda n, dy, x, t: Call(backward, dy, x, t, number_of(n.reduction), *(getattr(n, a) for a in settings)),
        axes=_slope_axes,
        flops=lambda n: sizes.multiply(flops, numel(n.x)),
    )


def _squared(op: Builder, x: ir.Value, target: ir.Value, n: NodeView) -> ir.Value:
    d = op.Sub(x, target)
    return op.Mul(d, d)  # type: ignore[no-any-return]


def _squared_slope(op: Builder, x: ir.Value, target: ir.Value, n: NodeView) -> ir.Value:
    return times(op, op.Sub(x, target), 2)


def _smooth_l1(op: Builder, x: ir.Value, target: ir.Value, n: NodeView) -> ir.Value:
    size = op.Abs(op.Sub(x, target))
    near = op.Less(size, op.scalar(n.beta, like=x))
    curved = op.Div(times(op, op.Mul(size, size), 0.5), op.scalar(n.beta, like=x))
    return op.Where(near, curved, plus(op, size, -0.5 * n.beta))  # type: ignore[no-any-return]


def _smooth_l1_slope(op: Builder, x: ir.Value, target: ir.Value, n: NodeView) -> ir.Value:
    d = op.Sub(x, target)
    near = op.Less(op.Abs(d), op.scalar(n.beta, like=x))
    return op.Where(near, op.Div(d, op.scalar(n.beta, like=x)), _side(op, d))  # type: ignore[no-any-return]


def _side(op: Builder, d: ir.Value) -> ir.Value:
    """1 where d > 0, else -1: PyTorch's slope of |d|, also where d is NaN, as here d is never 0."""
    one = op.scalar(1, like=d)
    return op.Where(op.Less(d, op.scalar(0, like=d)), op.scalar(-1, like=d), one)  # type: ignore[no-any-return]


def _huber(op: Builder, x: ir.Value, target: ir.Value, n: NodeView) -> ir.Value:
    size = op.Abs(op.Sub(x, target))
    near = op.LessOrEqual(size, op.scalar(n.delta, like=x))
    straight = times(op, plus(op, size, -0.5 * n.delta), n.delta)
    return op.Where(near, times(op, op.Mul(size, size), 0.5), straight)  # type: ignore[no-any-return]


def _huber_slope(op: Builder, x: ir.Value, target: ir.Value, n: NodeView) -> ir.Value:
    d = op.Sub(x, target)
    limit = op.scalar(n.delta, like=d)
    return op.Where(op.LessOrEqual(op.Abs(d), limit), d, times(op, _side(op, d), n.delta))  # type: ignore[no-any-return]


symmetric(
    "MseLoss",
    "aten.mse_loss.default",
    aten_kernels.mse_loss,
    aten.mse_loss_backward.default,
    _squared,
    _squared_slope,
    {},
    3,
)
symmetric(
    "SmoothL1Loss",
    "aten.smooth_l1_loss.default",
    aten_kernels.smooth_l1_loss,
    aten.smooth_l1_loss_backward.default,
    _smooth_l1,
    _smooth_l1_slope,
    {"beta": 1.0},
    5,
)
symmetric(
    "HuberLoss",
    "aten.huber_loss.default",
    aten_kernels.huber_loss,
    aten.huber_loss_backward.default,
    _huber,
    _huber_slope,
    {"delta": 1.0},
    5,
)


# SoftMarginLoss: PyTorch has no gradient for target


def _soft_margin(op: Builder, x: ir.Value, target: ir.Value, n: NodeView) -> ir.Value:
    return op.own.Log1p(op.Exp(op.Neg(op.Mul(target, x))))  # type: ignore[no-any-return]


def _soft_margin_slope(op: Builder, x: ir.Value, target: ir.Value, n: NodeView) -> ir.Value:
    power = op.Exp(op.Neg(op.Mul(target, x)))
    return op.Div(op.Neg(op.Mul(target, power)), plus(op, power, 1))  # type: ignore[no-any-return]


def _soft_margin_gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    return [op.own.SoftMarginLossGrad(dy, n.x, n.target, reduction=n.reduction), None]


fused(
    OWN,
    "SoftMarginLoss",
    ("x", "target"),
    ("loss",),
    attributes={"reduction": "mean"},
    from_torch={"aten.soft_margin_loss.default": _captured("SoftMarginLoss")},
    shapes=_loss_type,
    body=_body_of(_soft_margin),
    gradient=(Gradient(_soft_margin_gradient, reads=("x", "target")),),
    nondiff_inputs=frozenset({"target"}),
    lower=lambda n, x, t: Call(aten_kernels.soft_margin_loss, x, t, number_of(n.reduction)),
    axes=_loss_axes,
    flops=lambda n: sizes.multiply(4, numel(n.x)),
)
fused(
    OWN,
    "SoftMarginLossGrad",
    ("dy", "x", "target"),
    ("dx",),
    attributes={"reduction": "mean"},
    shapes=lambda n: (type_of(n.x),),
    body=_slope_body_of(_soft_margin_slope),
    lower=lambda n, dy, x, t: Call(aten.soft_margin_loss_backward.default, dy, x, t, number_of(n.reduction)),
    axes=_slope_axes,
    flops=lambda n: sizes.multiply(6, numel(n.x)),
)


# KlDivLoss: x is a log probability


def _kl_div(op: Builder, x: ir.Value, target: ir.Value, n: NodeView) -> ir.Value:
    if n.log_target:
        return op.Mul(op.Exp(target), op.Sub(target, x))  # type: ignore[no-any-return]
    zero = op.scalar(0, like=target)
    entropy = op.Where(op.Equal(target, zero), zero, op.Mul(target, op.Log(target)))
    return op.Sub(entropy, op.Mul(target, x))  # type: ignore[no-any-return]


def _kl_div_gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    """In target the slope is log target + 1 - x, where target is not 0: there PyTorch gives NaN."""
    dy = unreduced(op, dy, n.x, n.reduction)
    dx = op.Neg(op.Mul(dy, op.Exp(n.target) if n.log_target else n.target))
    if not n.wants("target"):
        return [dx, None]
    if n.log_target:
        slope = op.Mul(op.Exp(n.target), plus(op, op.Sub(n.target, n.x), 1))
    else:
        slope = op.Sub(op.Add(op.Log(n.target), op.Div(n.target, n.target)), n.x)
    return [dx, op.Mul(dy, slope)]


fused(
    OWN,
    "KlDivLoss",
    ("x", "target"),
    ("loss",),
    attributes={"reduction": "mean", "log_target": 0},
    from_torch={"aten.kl_div.default": _captured("KlDivLoss", "log_target")},
    shapes=_loss_type,
    body=_body_of(_kl_div),
    gradient=(Gradient(_kl_div_gradient, reads=("x", "target")),),
    lower=lambda n, x, t: Call(torch.kl_div, x, t, number_of(n.reduction), log_target=bool(n.log_target)),
    axes=_loss_axes,
    flops=lambda n: sizes.multiply(4, numel(n.x)),
)
