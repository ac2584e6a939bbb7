"""Norms over the last axes.

    LayerNormalization(x[rows, h], scale[h], b[h]) -> y[rows, h], mean[rows, 1], inv_std[rows, 1]
        y = (x - mean(x)) * inv_std * scale + b        inv_std = 1 / sqrt(mean((x - mean(x))^2) + epsilon)
    SimplifiedLayerNormalization(x[rows, h], scale[h]) -> y[rows, h], inv_std[rows, 1]
        y = x * inv_std * scale                        inv_std = 1 / sqrt(mean(x^2) + epsilon)

`h` stands for all axes from `axis` on, `rows` for those before. The statistics are float32, of a double x double. (On a
CPU PyTorch keeps those of half-precision x and scale in x's own type; only the backward kernels read them.)

ONNX's LayerNormalization knows one element type, and float32 statistics. The op of the same name in our domain also
takes double, no scale, and the mix of PyTorch's CPU autocast: x in bfloat16, scale and b in float32.

Sources: Ba et al. 2016, https://arxiv.org/abs/1607.06450 (eq. 3); Zhang and Sennrich 2019,
https://arxiv.org/abs/1910.07467 (eq. 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import MICROSOFT, ONNX, OWN, TensorType, dtype_of, normalize_axis, rank_of, type_of
from onnxtrain.ops.constructors import FUSIBLE, TORCH_DTYPES, cast
from onnxtrain.ops.definition import STANDARD, Call, Fusion, Gradient, Kernel, NodeView, numel
from onnxtrain.ops.fused import average, flags, fused, masked, only_first, plus, statistics_type, total, wanted
from onnxtrain.ops.native_kernels import may_compile
from onnxtrain.ops.norm import rms_kernels

aten = torch.ops.aten
Grads = list[ir.Value | None]


def _axis(n: NodeView) -> int:
    return normalize_axis(n.axis, rank_of(n.x))


def _rows_and_rest(n: NodeView) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes before `axis`, and the normalized ones."""
    axis, rank = _axis(n), rank_of(n.x)
    return tuple(range(axis)), tuple(range(axis, rank))


def _normalized(n: NodeView) -> Sizes:
    return sizes.dims_of(n.x)[_axis(n) :]


def _statistics(n: NodeView) -> TensorType:
    axis = _axis(n)
    shape = sizes.dims_of(n.x)
    return TensorType(statistics_type(dtype_of(n.x)), (*shape[:axis], *[1] * (len(shape) - axis)))


def _parameter(n: NodeView) -> TensorType:
    """The type of scale and b, and of their gradients."""
    return TensorType(dtype_of(n.x if n.scale is None else n.scale), _normalized(n))


def _norm_axes(pattern: str) -> Any:
    """An axis map: in `pattern` X stands for x's axes, H for the normalized ones, S for those of the statistics."""

    def axes(n: NodeView) -> str:
        rows, rest = _rows_and_rest(n)
        before, whole = [f"r{i}" for i in rows], [f"[h{i}]" for i in rest]
        named = {"X": before + whole, "H": whole, "S": before + ["1"] * len(whole)}
        given = iter(n.node.inputs)
        left, right = pattern.split("->")
        inputs = [" ".join(named[w.strip()]) if next(given, None) is not None else "-" for w in left.split(",")]
        inputs = inputs[: len(n.node.inputs)]
        return f"{', '.join(inputs)} -> {', '.join(' '.join(named[w.strip()]) for w in right.split(','))}"

    return axes


def _flops(per_element: int) -> Any:
    return lambda n: sizes.multiply(per_element, numel(n.x))


def _static(shape: Sequence[Size]) -> list[int] | None:
    """The sizes as a literal, where all are known."""
    return None if any(isinstance(s, str) for s in shape) else [int(s) for s in shape]


# LayerNormalization


def layer_norm(x: Any, axis: int, scale: Any, b: Any, epsilon: float) -> Any:
    """PyTorch's kernel where the normalized sizes are not known in advance."""
    return torch.native_layer_norm(x, x.shape[axis:], scale, b, epsilon)


def _lower_layer_norm(n: NodeView, x: Any, scale: Any, b: Any) -> Call:
    shape = _static(_normalized(n))
    if shape is None:
        return Call(layer_norm, x, _axis(n), scale, b, n.epsilon)
    return Call(torch.native_layer_norm, x, shape, scale, b, n.epsilon)


def _standard_types(n: NodeView) -> Sequence[TensorType]:
    types = {dtype_of(v) for v in (n.x, n.scale, n.b) if v is not None}
    if len(types) > 1 or ir.DataType.DOUBLE in types:
        raise GraphError(
            "ONNX's LayerNormalization takes one element type, and no double: its statistics are float32",
            got=", ".join(sorted(t.name for t in types)),
            todo="use LayerNormalization of the onnxtrain domain",
        )
    return type_of(n.x), _statistics(n), _statistics(n)


def _own_types(n: NodeView) -> Sequence[TensorType]:
    return type_of(n.x), _statistics(n), _statistics(n)


def _layer_norm_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    rest = _rows_and_rest(n)[1]
    dtype = statistics_type(dtype_of(n.x))
    x = cast(op, n.x, dtype)
    mean = average(op, x, rest)
    centred = op.Sub(x, mean)
    inv_std = op.Reciprocal(op.Sqrt(plus(op, average(op, op.Mul(centred, centred), rest), n.epsilon)))
    y = op.Mul(centred, inv_std)
    if n.scale is not None:
        y = op.Mul(y, cast(op, n.scale, dtype))
    if n.b is not None:
        y = op.Add(y, cast(op, n.b, dtype))
    return cast(op, y, dtype_of(n.x)), mean, inv_std


def _layer_norm_gradient(op: Builder, n: NodeView, *cotangents: ir.Value | None) -> Grads:
    dy = only_first(n, cotangents)
    mask = wanted(n, "x", "scale", "b")
    grads = op.ms.LayerNormalizationGrad(dy, n.x, n.scale, n.mean, n.inv_std, axis=n.axis, output_mask=mask)
    return masked(grads, mask, n)


def _capture_native(
    op: Builder, x: ir.Value, normalized_shape: Sequence[Size], weight: Any, bias: Any, epsilon: float
) -> Any:
    if weight is None and bias is not None:
        return NotImplemented  # no module makes it: left to PyTorch
    return layer_normalized(op, x, weight, bias, rank_of(x) - len(normalized_shape), epsilon)


def layer_normalized(
    op: Builder, x: ir.Value, scale: ir.Value | None, b: ir.Value | None, axis: int, epsilon: float
) -> tuple[ir.Value, ...]:
    """ONNX's LayerNormalization where it takes these element types, else ours: y, mean, inv_std."""
    uniform = scale is not None and all(dtype_of(v) == dtype_of(x) for v in (scale, b) if v is not None)
    standard = uniform and dtype_of(x) != ir.DataType.DOUBLE
    outputs: tuple[ir.Value, ...] = op.op(ONNX if standard else OWN, "LayerNormalization")(
        x, scale, b, axis=axis, epsilon=epsilon
    )
    return outputs


def _capture_native_layer_norm(op: Builder, *arguments: Any) -> Any:
    found = _capture_native(op, *arguments)
    if found is NotImplemented:
        return found
    # On a CPU PyTorch's statistics may have x's half type. They are for backward, which is ours: nobody reads those.
    return [v if dtype_of(v) == t.dtype else None for v, t in zip(found, op.out, strict=True)]


def _capture_layer_norm(
    op: Builder,
    x: ir.Value,
    normalized_shape: Sequence[Size],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    found = _capture_native(op, x, normalized_shape, weight, bias, eps)
    return found if found is NotImplemented else found[0]


fused(
    ONNX,
    "LayerNormalization",
    ("x", "scale", "b?"),
    ("y", "mean", "inv_std"),
    attributes={"axis": -1, "epsilon": 1e-5, "stash_type": 1},
    since_version=17,
    from_torch={
        "aten.layer_norm.default": _capture_layer_norm,
        "aten.native_layer_norm.default": _capture_native_layer_norm,
    },
    shapes=_standard_types,
    body=STANDARD,
    gradient=(Gradient(_layer_norm_gradient, reads=("x", "scale", "mean", "inv_std")),),
    lower=_lower_layer_norm,
    axes=_norm_axes("X, H, H -> X, S, S"),
    flops=_flops(8),
    fusion=FUSIBLE,
)
fused(
    OWN,
    "LayerNormalization",
    ("x", "scale?", "b?"),
    ("y", "mean", "inv_std"),
    attributes={"axis": -1, "epsilon": 1e-5},
    shapes=_own_types,
    body=_layer_norm_body,
    gradient=(Gradient(_layer_norm_gradient, reads=("x", "scale", "mean", "inv_std")),),
    lower=_lower_layer_norm,
    axes=_norm_axes("X, H, H -> X, S, S"),
    flops=_flops(8),
    fusion=FUSIBLE,
)


# LayerNormalizationGrad(dy, x, scale, mean, inv_std) -> dx, dscale, db  with z = (x - mean) * inv_std, g = dy * scale
#     dx = inv_std * (g - mean(g) - z * mean(g * z))        dscale = sum(dy * z)        db = sum(dy)
# `output_mask` says which gradients are read; the kernel leaves the others out.


def _layer_norm_grad_types(n: NodeView) -> Sequence[TensorType]:
    return type_of(n.x), _parameter(n), _parameter(n)


def _layer_norm_grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    rows, rest = _rows_and_rest(n)
    dtype = statistics_type(dtype_of(n.x))
    dy = cast(op, n.dy, dtype)
    z = op.Mul(op.Sub(cast(op, n.x, dtype), n.mean), n.inv_std)
    g = dy if n.scale is None else op.Mul(dy, cast(op, n.scale, dtype))
    slope = op.Sub(op.Sub(g, average(op, g, rest)), op.Mul(z, average(op, op.Mul(g, z), rest)))
    dx = cast(op, op.Mul(slope, n.inv_std), dtype_of(n.x))
    dscale = total(op, op.Mul(dy, z), rows, keepdims=False)
    db = total(op, dy, rows, keepdims=False)
    parameter = _parameter(n).dtype
    return dx, cast(op, dscale, parameter), cast(op, db, parameter)


def layer_norm_backward(
    dy: Any, x: Any, axis: int, mean: Any, inv_std: Any, scale: Any, b: Any, mask: list[bool]
) -> Any:
    """PyTorch's kernel where the normalized sizes are not known in advance."""
    return aten.native_layer_norm_backward.default(dy, x, x.shape[axis:], mean, inv_std, scale, b, mask)


def _lower_layer_norm_grad(n: NodeView, dy: Any, x: Any, scale: Any, mean: Any, inv_std: Any) -> Call:
    mask = flags(n.output_mask)
    b = scale if mask[2] else None  # the kernel looks only at b's type and sizes: they are scale's
    shape = _static(_normalized(n))
    if shape is None:
        return Call(layer_norm_backward, dy, x, _axis(n), mean, inv_std, scale, b, mask)
    return Call(aten.native_layer_norm_backward.default, dy, x, shape, mean, inv_std, scale, b, mask)


fused(
    MICROSOFT,
    "LayerNormalizationGrad",
    ("dy", "x", "scale?", "mean", "inv_std"),
    ("dx", "dscale", "db"),
    attributes={"axis": -1, "output_mask": (1, 1, 1)},
    shapes=_layer_norm_grad_types,
    body=_layer_norm_grad_body,
    lower=_lower_layer_norm_grad,
    axes=_norm_axes("X, X, H, S, S -> X, H, H"),
    flops=_flops(14),
    fusion=FUSIBLE,
)


# SimplifiedLayerNormalization: the root mean square norm. ONNX's RMSNormalization does not give inv_std.


def _capture_rms_norm(
    op: Builder, x: ir.Value, normalized_shape: Sequence[Size], weight: Any = None, eps: float | None = None
) -> Any:
    axis = rank_of(x) - len(normalized_shape)
    if eps is None:  # that of the type in which PyTorch computes
        eps = torch.finfo(TORCH_DTYPES[statistics_type(dtype_of(x))]).eps
    y, _ = op.ms.SimplifiedLayerNormalization(x, weight, axis=axis, epsilon=eps)
    return y


def _rms_norm_types(n: NodeView) -> Sequence[TensorType]:
    return type_of(n.x), _statistics(n)


def _rms_norm_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    dtype = statistics_type(dtype_of(n.x))
    x = cast(op, n.x, dtype)
    mean_square = average(op, op.Mul(x, x), _rows_and_rest(n)[1])
    inv_std = op.Reciprocal(op.Sqrt(plus(op, mean_square, n.epsilon)))
    y = op.Mul(x, inv_std)
    if n.scale is not None:
        y = op.Mul(y, cast(op, n.scale, dtype))
    return cast(op, y, dtype_of(n.x)), inv_std


def _rms_norm_gradient(op: Builder, n: NodeView, *cotangents: ir.Value | None) -> Grads:
    dy = only_first(n, cotangents)
    mask = wanted(n, "x", "scale")
    grads = op.ms.SimplifiedLayerNormalizationGrad(dy, n.x, n.scale, n.inv_std, axis=n.axis, output_mask=mask)
    return masked(grads, mask, n)


def _wide_bytes(n: NodeView, tensors: int) -> Size:
    """What so many tensors of x's shape take in the type in which norms compute."""
    return sizes.multiply(tensors, numel(n.x), int(statistics_type(dtype_of(n.x)).itemsize))


def _one_type_on_cuda(n: NodeView, device: str) -> bool:
    return device == "cuda" and (n.scale is None or dtype_of(n.scale) == dtype_of(n.x))


fused(
    MICROSOFT,
    "SimplifiedLayerNormalization",
    ("x", "scale?"),
    ("y", "inv_std"),
    attributes={"axis": -1, "epsilon": 1e-5},
    from_torch={"aten.rms_norm.default": _capture_rms_norm},
    shapes=_rms_norm_types,
    body=_rms_norm_body,
    gradient=(Gradient(_rms_norm_gradient, reads=("x", "scale", "inv_std")),),
    kernels=(
        Kernel(
            lower=lambda n, x, scale: Call(rms_kernels.on_cuda, x, _axis(n), scale, n.epsilon),
            applies=_one_type_on_cuda,
        ),
        Kernel(
            lower=lambda n, x, scale: rms_kernels.lowered(x, _axis(n), scale, n.epsilon),
            applies=may_compile,
            workspace_bytes=lambda n: _wide_bytes(n, 1),  # of the operators that serve at first
        ),
    ),
    lower=lambda n, x, scale: Call(rms_kernels.composed, x, _axis(n), scale, n.epsilon),
    workspace_bytes=lambda n: _wide_bytes(n, 1),
    axes=_norm_axes("X, H -> X, S"),
    flops=_flops(4),
    fusion=Fusion(profitable=True),  # add + norm of [2048, 384]: 0.41 ms in one kernel, 0.67 in PyTorch's six
)


# SimplifiedLayerNormalizationGrad(dy, x, scale, inv_std, added) -> dx, dscale      with z = x * inv_std, g = dy * scale
#     dx = inv_std * (g - z * mean(g * z)) + added        dscale = sum(dy * z)


def _rms_norm_grad_types(n: NodeView) -> Sequence[TensorType]:
    return type_of(n.x), _parameter(n)


def _rms_norm_grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    rows, rest = _rows_and_rest(n)
    dtype = statistics_type(dtype_of(n.x))
    dy = cast(op, n.dy, dtype)
    z = op.Mul(cast(op, n.x, dtype), n.inv_std)
    g = dy if n.scale is None else op.Mul(dy, cast(op, n.scale, dtype))
    dx = op.Mul(op.Sub(g, op.Mul(z, average(op, op.Mul(g, z), rest))), n.inv_std)
    dx = cast(op, dx, dtype_of(n.x))
    dscale = total(op, op.Mul(dy, z), rows, keepdims=False)
    return dx if n.added is None else op.Add(dx, n.added), cast(op, dscale, _parameter(n).dtype)


fused(
    MICROSOFT,
    "SimplifiedLayerNormalizationGrad",
    ("dy", "x", "scale?", "inv_std", "added?"),
    ("dx", "dscale"),
    attributes={"axis": -1, "output_mask": (1, 1)},
    shapes=_rms_norm_grad_types,
    body=_rms_norm_grad_body,
    kernels=(
        Kernel(
            lower=lambda n, *tensors: Call(rms_kernels.on_cuda_backward, *tensors, _axis(n), flags(n.output_mask)),
            applies=_one_type_on_cuda,
        ),
        Kernel(
            lower=lambda n, *tensors: rms_kernels.lowered_backward(*tensors, _axis(n), flags(n.output_mask)),
            applies=may_compile,
            workspace_bytes=lambda n: _wide_bytes(n, 3),  # of the operators that serve at first
        ),
    ),
    lower=lambda n, *tensors: Call(rms_kernels.composed_backward, *tensors, _axis(n), flags(n.output_mask)),
    workspace_bytes=lambda n: _wide_bytes(n, 3),
    axes=_norm_axes("X, X, H, S, X -> X, H"),
    flops=_flops(10),
    fusion=Fusion(profitable=True),
    output_addend="added",
)
