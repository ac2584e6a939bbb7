"""Selection among values: Where, maxima and minima of tensors, clamping, and replacing NaN.

Where(condition, a, b)
Max(terms...), Min(terms...)    NaN if a term is NaN; of two equal terms each gets half of the gradient
Clip(x, min?, max?)             bounds are 0-dimensional and not differentiated; where x is a bound, x gets the gradient
Clamp(x, min?, max?)            bounds are tensors and differentiable
NanToNum(x)                     NaN, inf and -inf replaced
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, TensorType, dtype_of, is_float
from onnxtrain.ops.body_parts import as_value, promoted
from onnxtrain.ops.constructors import define_pure, define_unary, elementwise_on_host, same_as
from onnxtrain.ops.definition import (
    STANDARD,
    Call,
    FromTorch,
    Gradient,
    Kernel,
    NodeView,
    OpDef,
)
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.elementwise.arithmetic import broadcast_terms, number_of
from onnxtrain.ops.interfaces.cpp import CPP, Elementwise

Grad = ir.Value | None


def _zero(op: Builder, value: ir.Value) -> ir.Value:
    return op.scalar(0.0, like=value)


# Where


def _capture_where(op: Builder, condition: ir.Value, a: Any, b: Any) -> Any:
    return op.Where(as_value(op, condition, ir.DataType.BOOL), *promoted(op, a, b))


def _capture_masked_fill(op: Builder, x: ir.Value, mask: ir.Value, value: Any) -> Any:
    return op.Where(as_value(op, mask, ir.DataType.BOOL), as_value(op, value, dtype_of(x)), x)


def _where_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, Grad, Grad]:
    zero = _zero(op, dy)
    da = op.Where(n.condition, dy, zero) if n.wants("a") else None
    return None, da, op.Where(n.condition, zero, dy) if n.wants("b") else None


WHERE = define_pure(
    "",
    "Where",
    ("condition", "a", "b"),
    ("y",),
    from_torch={
        "aten.where.self": _capture_where,
        "aten.where.ScalarOther": _capture_where,
        "aten.where.ScalarSelf": _capture_where,
        "aten.where.Scalar": _capture_where,
        "aten.masked_fill.Scalar": _capture_masked_fill,
        "aten.masked_fill.Tensor": _capture_masked_fill,
    },
    shapes=lambda n: (TensorType(dtype_of(n.a), sizes.broadcast(*map(sizes.dims_of, (n.condition, n.a, n.b)))),),
    body=STANDARD,
    gradient=(Gradient(_where_gradient, ("condition",)),),
    nondiff_inputs=frozenset({"condition"}),
    lower=lambda n, condition, a, b: Call(torch.where, condition, a, b),
    axes=lambda n: "..., ..., ... -> ...",
)
CPP.register(WHERE, Elementwise("{0} ? {1} : {2}"))


# Max, Min


def _is_not_chosen(name: str, op: Builder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Return whether b is chosen over a; False if they are equal or one is NaN."""
    return op.Less(a, b) if name == "Max" else op.Greater(a, b)


def _gradients_of_two(name: str, op: Builder, dy: ir.Value, a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return da and db: dy for the chosen operand; half of it for each if they are equal; dy for both if one is NaN."""
    zero, two = _zero(op, dy), op.scalar(2.0, like=dy)
    share = op.Where(op.Equal(a, b), op.Div(dy, two), dy)
    da, db = (op.Where(_is_not_chosen(name, op, x, y), zero, share) for x, y in ((a, b), (b, a)))
    return da, db


def _extreme_gradient(name: str) -> Any:
    """Return the gradient rule for any number of terms, which is that of maximum(maximum(a, b), c) in PyTorch."""

    def gradient(op: Builder, n: NodeView, dy: ir.Value) -> Sequence[Grad]:
        running = list(itertools.accumulate(n.terms, op.op("", name)))
        gradients: list[Grad] = []
        for extreme, term in zip(reversed(running[:-1]), reversed(n.terms[1:]), strict=True):
            dy, dterm = _gradients_of_two(name, op, dy, extreme, term)
            gradients.append(dterm)
        return [*reversed([*gradients, dy])]

    return gradient


def _capture_extreme(name: str) -> FromTorch:
    def capture(op: Builder, a: ir.Value, b: ir.Value) -> Any:
        a, b = promoted(op, a, b)
        if dtype_of(a) == ir.DataType.BOOL:
            return op.Or(a, b) if name == "Max" else op.And(a, b)
        return op.op("", name)(a, b)

    return capture


def _host_extreme(name: str) -> Callable[[Any, Any], Any]:
    def choose(a: Any, b: Any) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return max(a, b) if name == "Max" else min(a, b)
        symbolic, other = (b, a) if isinstance(a, int) else (a, b)
        return symbolic.largest(other) if name == "Max" else symbolic.smallest(other)

    return choose


def _on_host(name: str) -> Callable[..., Any]:
    return lambda n, *terms: functools.reduce(lambda a, b: elementwise_on_host(_host_extreme(name), a, b), terms)


def _define_extreme(name: str, torch_name: str, kernel: Callable[[Any, Any], Any], symbol: str) -> OpDef:
    def lower(n: NodeView, terms: Sequence[Any]) -> Call:
        return functools.reduce(lambda a, b: Call(kernel, a, b), terms) if len(terms) > 1 else Call(torch.clone, *terms)

    op = define_pure(
        "",
        name,
        ("terms...",),
        ("y",),
        from_torch=dict.fromkeys((f"aten.{torch_name}.default", f"aten.{name.lower()}.other"), _capture_extreme(name)),
        shapes=broadcast_terms,
        body=STANDARD,
        gradient=(Gradient(_extreme_gradient(name), ("terms",)),),
        lower=lower,
        axes=lambda n: f"{', '.join(['...'] * len(n.terms))} -> ...",
        host_eval=_on_host(name),
    )
    CPP.register(op, Elementwise(f"{{0}} {symbol} {{1}} || {{0}} != {{0}} ? {{0}} : {{1}}"))  # of two terms
    return op


MAX = _define_extreme("Max", "maximum", torch.maximum, ">")
MIN = _define_extreme("Min", "minimum", torch.minimum, "<")


# Clip and Clamp


def _capture_clamp(op: Builder, x: ir.Value, low: Any, high: Any) -> Any:
    """Capture `clamp(x, min, max)`, whose bounds are numbers or tensors."""
    dtype = op.out[0].dtype
    x = as_value(op, x, dtype)
    if isinstance(low, (ir.Value, str)) or isinstance(high, (ir.Value, str)):
        return op.own.Clamp(x, *(None if v is None else as_value(op, v, dtype) for v in (low, high)))
    if is_float(dtype):  # ONNX clips to the largest finite number without a bound, which would change infinities
        low, high = -math.inf if low is None else low, math.inf if high is None else high
    return op.Clip(x, *(None if v is None else op.scalar(v, like=x) for v in (low, high)))


def _clip_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, ...]:
    is_within = _is_within_bounds(op, n)
    return (op.Where(is_within, dy, _zero(op, dy)) if is_within else dy, None, None)[: len(n.node.inputs)]


def _has_min(n: NodeView) -> bool:
    return n.min is not None and number_of(n.min) != -math.inf


def _has_max(n: NodeView) -> bool:
    return n.max is not None and number_of(n.max) != math.inf


def _clip_call(n: NodeView, x: Any, low: Any, high: Any) -> Call:
    if not _has_min(n) and not _has_max(n):
        return Call(torch.clone, x)
    return Call(torch.clamp, x, low if _has_min(n) else None, high if _has_max(n) else None)


def _is_within_bounds(op: Builder, n: NodeView) -> ir.Value | None:
    """Return whether min <= x <= max; None without bounds."""
    above = op.GreaterOrEqual(n.x, n.min) if _has_min(n) else None
    below = op.LessOrEqual(n.x, n.max) if _has_max(n) else None
    return op.And(above, below) if above is not None and below is not None else above or below


def _clamp_gradient(op: Builder, n: NodeView, dy: ir.Value) -> tuple[Grad, ...]:
    """Return dx, dmin and dmax: dy for the one that is the result, which is max where min > max."""
    dx, dlow, dhigh = _clip_gradient(op, n, dy)[0], None, None
    zero = _zero(op, dy)
    if n.min is not None and n.wants("min"):
        is_min = op.Less(n.x, n.min)
        is_min = is_min if n.max is None else op.And(op.Less(n.min, n.max), is_min)
        dlow = op.Where(is_min, dy, zero)
    if n.max is not None and n.wants("max"):
        is_max = op.Greater(n.x, n.max)
        is_max = is_max if n.min is None else op.Or(op.Less(n.max, n.min), is_max)
        dhigh = op.Where(is_max, dy, zero)
    return (dx, dlow, dhigh)[: len(n.node.inputs)]


def _clamp_body(op: Builder, n: NodeView) -> ir.Value:
    above = n.x if n.min is None else op.Max(n.x, n.min)
    return above if n.max is None else op.Min(above, n.max)


def _clamp_types(n: NodeView) -> Sequence[TensorType]:
    return (TensorType(dtype_of(n.x), sizes.broadcast(*(sizes.dims_of(v) for v in n.node.inputs if v is not None))),)


def _clamp_axes(n: NodeView) -> str:
    return f"{', '.join('-' if v is None else '...' for v in n.node.inputs)} -> ..."


def _clamps(overload: str) -> dict[str, FromTorch]:
    """Return the conversions of the operators whose bounds are numbers (default) or tensors (Tensor)."""
    return {
        f"aten.clamp.{overload}": lambda op, x, min=None, max=None: _capture_clamp(op, x, min, max),
        f"aten.clip.{overload}": lambda op, x, min=None, max=None: _capture_clamp(op, x, min, max),
        f"aten.clamp_min.{overload}": lambda op, x, min: _capture_clamp(op, x, min, None),
        f"aten.clamp_max.{overload}": lambda op, x, max: _capture_clamp(op, x, None, max),
    }


CLIP = define_pure(
    "",
    "Clip",
    ("x", "min?", "max?"),
    ("y",),
    from_torch=_clamps("default"),
    shapes=same_as("x"),
    body=STANDARD,
    gradient=(Gradient(_clip_gradient, ("x", "min", "max")),),
    nondiff_inputs=frozenset({"min", "max"}),
    kernels=(Kernel(lower=_clip_call, accepts_scalars=True),),
    axes=_clamp_axes,
)
CLAMP = define_pure(
    OWN,
    "Clamp",
    ("x", "min?", "max?"),
    ("y",),
    from_torch=_clamps("Tensor"),
    shapes=_clamp_types,
    body=_clamp_body,
    gradient=(Gradient(_clamp_gradient, ("x", "min", "max")),),
    lower=lambda n, x, low, high: Call(torch.clamp, x, low, high),
    axes=_clamp_axes,
)


# NanToNum


def _replacements(n: NodeView) -> tuple[float, float, float]:
    """Return the replacements of NaN, inf and -inf."""
    limit = torch.finfo(TORCH_DTYPES[dtype_of(n.x)]).max
    high = limit if n.posinf is None else n.posinf
    return n.nan or 0.0, high, -limit if n.neginf is None else n.neginf


def _nan_to_num_body(op: Builder, n: NodeView) -> ir.Value:
    nan, high, low = (op.scalar(v, like=n.x) for v in _replacements(n))
    result = op.Where(op.IsInf(n.x, detect_negative=0), high, n.x)
    result = op.Where(op.IsInf(n.x, detect_positive=0), low, result)
    return op.Where(op.IsNaN(n.x), nan, result)


def _nan_to_num_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    return op.Mul(dy, op.Cast(op.ms.IsFinite(n.x), to=dtype_of(dy)))


def _capture_nan_to_num(
    op: Builder, x: ir.Value, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Any:
    if not is_float(dtype_of(x)):
        return op.Identity(x)
    return op.own.NanToNum(x, nan=nan, posinf=posinf, neginf=neginf)


NAN_TO_NUM = define_unary(
    "NanToNum",
    {"aten.nan_to_num.default": _capture_nan_to_num},
    torch.nan_to_num,
    _nan_to_num_gradient,
    domain=OWN,
    attributes={"nan": None, "posinf": None, "neginf": None},
    body=_nan_to_num_body,
    lower=lambda n, x: Call(torch.nan_to_num, x, n.nan, n.posinf, n.neginf),
)
