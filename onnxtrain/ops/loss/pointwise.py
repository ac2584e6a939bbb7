"""Pointwise losses: compare two tensors elementwise, then reduce.

    MseLoss          d^2                                       with d = x - target
    SmoothL1Loss     d^2 / (2 beta) where |d| < beta, else |d| - beta/2
    HuberLoss        d^2 / 2 where |d| <= delta, else delta (|d| - delta/2)
    KlDivLoss        target (log target - x), exp(target) (target - x) with log_target
    SoftMarginLoss   log(1 + exp(-target x))
    BinaryCrossEntropy             -(target log x + (1 - target) log(1 - x)) weight, each log at least -100
    BinaryCrossEntropyWithLogits   ((1 - target) x - (1 + (pos_weight - 1) target) log sigmoid(x)) weight

Each has a backward op, (dy, x, target) -> dx. Losses that PyTorch differentiates with respect to target too say so in
their gradient rules.
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
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import OWN, TensorType, dtype_of, rank_of, type_of
from onnxtrain.ops.body_parts import add_scalar, cast, mul_scalar, promoted
from onnxtrain.ops.constructors import define_pure
from onnxtrain.ops.definition import Call, FromTorch, Gradient, NodeView, numel
from onnxtrain.ops.dtypes import accumulation_dtype
from onnxtrain.ops.loss.reduction import REDUCTIONS, aten_reduction, reduced, unreduced
from onnxtrain.torch_compat import aten_kernels

aten = torch.ops.aten
Tensor = torch.Tensor
# (builder, x, target, node) -> the loss of each element, or its derivative in x
PerElement = Callable[[Builder, ir.Value, ir.Value, NodeView], ir.Value]


def _elements(n: NodeView) -> sizes.Sizes:
    shape = sizes.broadcast(sizes.dims_of(n.x), sizes.dims_of(n.target))
    if len(shape) != rank_of(n.x) or len(shape) != rank_of(n.target):
        raise GraphError(
            f"x and target of {n.definition.name} have different ranks",
            expected="two tensors of the same shape",
            got=f"x{list(sizes.dims_of(n.x))} and target{list(sizes.dims_of(n.target))}",
        )
    return shape


def _loss_type(n: NodeView) -> Sequence[TensorType]:
    shape = _elements(n)
    return (TensorType(dtype_of(n.x), shape if n.reduction == "none" else ()),)


def _axis_names(n: NodeView) -> tuple[str, str]:
    """Return the axes of x and target, and those of the loss."""
    elements = " ".join(f"a{i}" for i in range(rank_of(n.x)))
    return elements, elements if n.reduction == "none" else ""


def _loss_axes(n: NodeView) -> str:
    elements, loss = _axis_names(n)
    return f"{', '.join([elements] * len(n.node.inputs))} -> {loss}"


def _grad_axes(n: NodeView) -> str:
    if n.reduction == "mean":
        return NO_AXES  # the gradient depends on the number of elements
    elements, loss = _axis_names(n)
    return f"{', '.join([loss] + [elements] * (len(n.node.inputs) - 1))} -> {elements}"


def _body_of(per_element: PerElement) -> Callable[[Builder, NodeView], ir.Value]:
    def body(op: Builder, n: NodeView) -> ir.Value:
        dtype = accumulation_dtype(dtype_of(n.x))
        loss = per_element(op, cast(op, n.x, dtype), cast(op, n.target, dtype), n)
        return cast(op, reduced(op, loss, n.reduction), dtype_of(n.x))

    return body


def _grad_body_of(derivative: PerElement) -> Callable[[Builder, NodeView], ir.Value]:
    def body(op: Builder, n: NodeView) -> ir.Value:
        dtype = accumulation_dtype(dtype_of(n.x))
        slope = derivative(op, cast(op, n.x, dtype), cast(op, n.target, dtype), n)
        dy = unreduced(op, cast(op, n.dy, dtype), slope, n.reduction)
        return cast(op, op.Mul(slope, dy), dtype_of(n.x))

    return body


def same_shape(x: ir.Value, target: ir.Value) -> bool:
    """Return whether both have the same shape under the capture's guards: otherwise PyTorch broadcasts.

    Two symbolic sizes are equal, because the capture would have 1 in place of a size that is broadcast.
    """
    shape, target_shape = sizes.dims_of(x), sizes.dims_of(target)
    return len(shape) == len(target_shape) and all(map(_same_size, shape, target_shape))


def _same_size(a: Size, b: Size) -> bool:
    return a == b or (1 not in (a, b) and (isinstance(a, str) or isinstance(b, str)))


def _capture_as(name: str, *attributes: str, promotes_first: bool = False) -> FromTorch:
    """Capture an ATen loss (x, target, reduction, *attributes) as the op `name`.

    Args:
        name: the op.
        attributes: the names of the loss's further arguments.
        promotes_first: the loss is a single kernel, which promotes dtypes first; a decomposed loss promotes at each
            of its operators, so mixed dtypes are not captured.
    """

    def capture(op: Builder, x: ir.Value, target: ir.Value, reduction: int = 1, *rest: Any, **named: Any) -> Any:
        if not same_shape(x, target) or not (promotes_first or dtype_of(x) == dtype_of(target)):
            return NotImplemented
        x, target = promoted(op, x, target)
        settings = {**dict(zip(attributes, rest, strict=False)), **named}
        return op.op(OWN, name)(x, target, reduction=REDUCTIONS[reduction], **settings)

    return capture


def _define_symmetric(
    name: str,
    overload: str,
    kernel: Callable[..., Tensor],
    backward: Callable[..., Tensor],
    per_element: PerElement,
    derivative: PerElement,
    attributes: Mapping[str, float],
    flops: int,
) -> None:
    """Define a loss and its backward op; exchanging x and target in the backward op gives the gradient of target."""
    settings = tuple(attributes)

    def gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
        grad = op.op(OWN, f"{name}Grad")
        attribute_values = {"reduction": n.reduction, **{a: getattr(n, a) for a in settings}}
        return [
            grad(dy, n.x, n.target, **attribute_values) if n.wants("x") else None,
            grad(dy, n.target, n.x, **attribute_values) if n.wants("target") else None,
        ]

    define_pure(
        OWN,
        name,
        ("x", "target"),
        ("loss",),
        attributes={"reduction": "mean", **attributes},
        from_torch={overload: _capture_as(name, *settings, promotes_first=True)},
        shapes=_loss_type,
        body=_body_of(per_element),
        gradient=(Gradient(gradient, reads=("x", "target")),),
        lower=lambda n, x, t: Call(kernel, x, t, aten_reduction(n.reduction), *(getattr(n, a) for a in settings)),
        axes=_loss_axes,
        flops=lambda n: sizes.multiply(flops, numel(n.x)),
    )
    define_pure(
        OWN,
        f"{name}Grad",
        ("dy", "x", "target"),
        ("dx",),
        attributes={"reduction": "mean", **attributes},
        shapes=lambda n: (TensorType(dtype_of(n.x), _elements(n)),),
        body=_grad_body_of(derivative),
        lower=lambda n, dy, x, t: Call(
            backward, dy, x, t, aten_reduction(n.reduction), *(getattr(n, a) for a in settings)
        ),
        axes=_grad_axes,
        flops=lambda n: sizes.multiply(flops, numel(n.x)),
    )


def _squared(op: Builder, x: ir.Value, target: ir.Value, n: NodeView) -> ir.Value:
    d = op.Sub(x, target)
    return op.Mul(d, d)


def _squared_slope(op: Builder, x: ir.Value, target: ir.Value, n: NodeView) -> ir.Value:
    return mul_scalar(op, op.Sub(x, target), 2)


def _smooth_l1(op: Builder, x: ir.Value, target: ir.Value, n: NodeView) -> ir.Value:
    distance = op.Abs(op.Sub(x, target))
    near = op.Less(distance, op.scalar(n.beta, like=x))
    quadratic = op.Div(mul_scalar(op, op.Mul(distance, distance), 0.5), op.scalar(n.beta, like=x))
    return op.Where(near, quadratic, add_scalar(op, distance, -0.5 * n.beta))


def _smooth_l1_slope(op: Builder, x: ir.Value, target: ir.Value, n: NodeView) -> ir.Value:
    d = op.Sub(x, target)
    near = op.Less(op.Abs(d), op.scalar(n.beta, like=x))
    return op.Where(near, op.Div(d, op.scalar(n.beta, like=x)), _sign(op, d))


def _sign(op: Builder, d: ir.Value) -> ir.Value:
    """-1 where d < 0, else 1: PyTorch's derivative of |d|. NaN gives 1 too; d is never 0 here."""
    one = op.scalar(1, like=d)
    return op.Where(op.Less(d, op.scalar(0, like=d)), op.scalar(-1, like=d), one)


def _huber(op: Builder, x: ir.Value, target: ir.Value, n: NodeView) -> ir.Value:
    distance = op.Abs(op.Sub(x, target))
    near = op.LessOrEqual(distance, op.scalar(n.delta, like=x))
    linear = mul_scalar(op, add_scalar(op, distance, -0.5 * n.delta), n.delta)
    return op.Where(near, mul_scalar(op, op.Mul(distance, distance), 0.5), linear)


def _huber_slope(op: Builder, x: ir.Value, target: ir.Value, n: NodeView) -> ir.Value:
    d = op.Sub(x, target)
    limit = op.scalar(n.delta, like=d)
    return op.Where(op.LessOrEqual(op.Abs(d), limit), d, mul_scalar(op, _sign(op, d), n.delta))


_define_symmetric(
    "MseLoss",
    "aten.mse_loss.default",
    aten_kernels.mse_loss,
    aten.mse_loss_backward.default,
    _squared,
    _squared_slope,
    {},
    3,
)
_define_symmetric(
    "SmoothL1Loss",
    "aten.smooth_l1_loss.default",
    aten_kernels.smooth_l1_loss,
    aten.smooth_l1_loss_backward.default,
    _smooth_l1,
    _smooth_l1_slope,
    {"beta": 1.0},
    5,
)
_define_symmetric(
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
    return op.own.Log1p(op.Exp(op.Neg(op.Mul(target, x))))


def _soft_margin_slope(op: Builder, x: ir.Value, target: ir.Value, n: NodeView) -> ir.Value:
    power = op.Exp(op.Neg(op.Mul(target, x)))
    return op.Div(op.Neg(op.Mul(target, power)), add_scalar(op, power, 1))


def _soft_margin_gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    return [op.own.SoftMarginLossGrad(dy, n.x, n.target, reduction=n.reduction), None]


define_pure(
    OWN,
    "SoftMarginLoss",
    ("x", "target"),
    ("loss",),
    attributes={"reduction": "mean"},
    from_torch={"aten.soft_margin_loss.default": _capture_as("SoftMarginLoss")},
    shapes=_loss_type,
    body=_body_of(_soft_margin),
    gradient=(Gradient(_soft_margin_gradient, reads=("x", "target")),),
    nondiff_inputs=frozenset({"target"}),
    lower=lambda n, x, t: Call(aten_kernels.soft_margin_loss, x, t, aten_reduction(n.reduction)),
    axes=_loss_axes,
    flops=lambda n: sizes.multiply(4, numel(n.x)),
)
define_pure(
    OWN,
    "SoftMarginLossGrad",
    ("dy", "x", "target"),
    ("dx",),
    attributes={"reduction": "mean"},
    shapes=lambda n: (type_of(n.x),),
    body=_grad_body_of(_soft_margin_slope),
    lower=lambda n, dy, x, t: Call(aten.soft_margin_loss_backward.default, dy, x, t, aten_reduction(n.reduction)),
    axes=_grad_axes,
    flops=lambda n: sizes.multiply(6, numel(n.x)),
)


# KlDivLoss: x is a log probability


def _kl_div(op: Builder, x: ir.Value, target: ir.Value, n: NodeView) -> ir.Value:
    if n.log_target:
        return op.Mul(op.Exp(target), op.Sub(target, x))
    zero = op.scalar(0, like=target)
    entropy = op.Where(op.Equal(target, zero), zero, op.Mul(target, op.Log(target)))
    return op.Sub(entropy, op.Mul(target, x))


def _kl_div_gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    """The derivative in target is log target + 1 - x; NaN where target is 0, as in PyTorch."""
    dy = unreduced(op, dy, n.x, n.reduction)
    dx = op.Neg(op.Mul(dy, op.Exp(n.target) if n.log_target else n.target))
    if not n.wants("target"):
        return [dx, None]
    if n.log_target:
        slope = op.Mul(op.Exp(n.target), add_scalar(op, op.Sub(n.target, n.x), 1))
    else:
        slope = op.Sub(op.Add(op.Log(n.target), op.Div(n.target, n.target)), n.x)
    return [dx, op.Mul(dy, slope)]


define_pure(
    OWN,
    "KlDivLoss",
    ("x", "target"),
    ("loss",),
    attributes={"reduction": "mean", "log_target": 0},
    from_torch={"aten.kl_div.default": _capture_as("KlDivLoss", "log_target")},
    shapes=_loss_type,
    body=_body_of(_kl_div),
    gradient=(Gradient(_kl_div_gradient, reads=("x", "target")),),
    lower=lambda n, x, t: Call(torch.kl_div, x, t, aten_reduction(n.reduction), log_target=bool(n.log_target)),
    axes=_loss_axes,
    flops=lambda n: sizes.multiply(4, numel(n.x)),
)
