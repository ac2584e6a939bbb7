"""ONNX's random tensors, sampled from the torch generator of the device: manual_seed and saved RNG states apply.

    RandomNormal, RandomUniform                a tensor of the shape `shape`
    RandomNormalLike, RandomUniformLike(x)     a tensor of x's shape; the elements of x are not read
    Bernoulli(x)                               1 with probability x, else 0
    Multinomial(x[rows, classes])              `sample_size` classes of each row, from unnormalized log-probabilities

`seed` is ignored: ONNX Runtime and PyTorch sample different values from the same seed.

PyTorch samples in memory order: if the tensor is not contiguous, the operator stays an ATen node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.axes import NO_AXES
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import ONNX, TensorType, dtype_of
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.definition import (
    DEVICE,
    NOT_DIFFERENTIABLE,
    REQUIRED,
    STANDARD,
    Call,
    Effects,
    FromTorch,
    Kernel,
    NodeView,
    OpDef,
)
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.elementwise.copies import overwritten
from onnxtrain.ops.index.creation import filled
from onnxtrain.ops.registry import define

_BOOL = ir.DataType.BOOL


def _define_random(
    name: str,
    inputs: tuple[str, ...],
    attributes: dict[str, Any],
    shapes: Callable[[NodeView], Sequence[TensorType]],
    lower: Callable[..., Call],
    from_torch: Mapping[str, FromTorch] | None = None,
) -> None:
    define(
        OpDef(
            domain=ONNX,
            name=name,
            inputs=inputs,
            outputs=("y",),
            attributes={**attributes, "seed": None},
            from_torch=from_torch or {},
            shapes=shapes,
            body=STANDARD,
            gradient=NOT_DIFFERENTIABLE,
            nondiff_inputs=frozenset(),
            kernels=(Kernel(lower=lower),),
            axes=lambda n: NO_AXES,
            effects=Effects.RANDOM,
            aliases={},
        )
    )


def _capture(name: str) -> FromTorch:
    """Capture `rand`, `rand_like`, `randn` and `randn_like`; the sizes are those of the output."""

    def capture(op: Builder, *_: Any, **options: Any) -> Any:
        if not op.is_contiguous():
            return NotImplemented
        dtype, shape = op.out[0]
        if all(isinstance(size, int) for size in shape):
            return op.op(ONNX, name)(shape=list(shape), dtype=int(dtype))
        return op.op(ONNX, f"{name}Like")(filled(op, shape, 0, dtype))

    return capture


def _capture_bernoulli(op: Builder, x: ir.Value, *, generator: torch.Generator | None = None) -> Any:
    if not op.is_contiguous() or generator is not None:
        return NotImplemented
    return overwritten(op, x, op.Bernoulli(x))


def _capture_bernoulli_p(op: Builder, x: ir.Value, p: Any = 0.5, *, generator: torch.Generator | None = None) -> Any:
    """Capture one probability for all, as in `dropout2d`: the mask of a Dropout, which samples the same on a CPU."""
    is_random = isinstance(p, float) and 0 < p < 1 and op.device == "cpu"
    if not op.is_contiguous() or generator is not None or not is_random:
        return NotImplemented
    dtype, shape = op.out[0]
    mask = op.Dropout(filled(op, shape, 0, dtype), op.scalar(1 - p, ir.DataType.DOUBLE), op.scalar(True, _BOOL))[1]
    return overwritten(op, x, cast(op, mask, dtype))


def _dtype(n: NodeView) -> ir.DataType:
    if n.dtype is not None:
        return ir.DataType(n.dtype)
    return dtype_of(n.x) if n.node.inputs else ir.DataType.FLOAT


def _type_by_attribute(n: NodeView) -> Sequence[TensorType]:
    return (TensorType(_dtype(n), tuple(n.shape)),)


def _type_by_input(n: NodeView) -> Sequence[TensorType]:
    return (TensorType(_dtype(n), sizes.dims_of(n.x)),)


def normal(shape: Sequence[int], mean: float, scale: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(list(shape), dtype=dtype, device=device).normal_(mean, scale)


def uniform(shape: Sequence[int], low: float, high: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(list(shape), dtype=dtype, device=device).uniform_(low, high)


def normal_like(x: torch.Tensor, mean: float, scale: float, dtype: torch.dtype) -> torch.Tensor:
    return normal(x.shape, mean, scale, dtype, x.device)


def uniform_like(x: torch.Tensor, low: float, high: float, dtype: torch.dtype) -> torch.Tensor:
    return uniform(x.shape, low, high, dtype, x.device)


def bernoulli(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.bernoulli().to(dtype)


def multinomial(x: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.multinomial(x.softmax(1), count, replacement=True).to(dtype)


_NORMAL = {"mean": 0.0, "scale": 1.0, "dtype": None}
_UNIFORM = {"low": 0.0, "high": 1.0, "dtype": None}

_define_random(
    "RandomNormal",
    (),
    {**_NORMAL, "shape": REQUIRED},
    _type_by_attribute,
    lambda n: Call(normal, n.shape, n.mean, n.scale, TORCH_DTYPES[_dtype(n)], DEVICE),
    dict.fromkeys(("aten.randn.default", "aten.randn_like.default"), _capture("RandomNormal")),
)
_define_random(
    "RandomUniform",
    (),
    {**_UNIFORM, "shape": REQUIRED},
    _type_by_attribute,
    lambda n: Call(uniform, n.shape, n.low, n.high, TORCH_DTYPES[_dtype(n)], DEVICE),
    dict.fromkeys(("aten.rand.default", "aten.rand_like.default"), _capture("RandomUniform")),
)
_define_random(
    "RandomNormalLike",
    ("x",),
    _NORMAL,
    _type_by_input,
    lambda n, x: Call(normal_like, x, n.mean, n.scale, TORCH_DTYPES[_dtype(n)]),
)
_define_random(
    "RandomUniformLike",
    ("x",),
    _UNIFORM,
    _type_by_input,
    lambda n, x: Call(uniform_like, x, n.low, n.high, TORCH_DTYPES[_dtype(n)]),
)
_define_random(
    "Bernoulli",
    ("x",),
    {"dtype": None},
    _type_by_input,
    lambda n, x: Call(bernoulli, x, TORCH_DTYPES[_dtype(n)]),
    {"aten.bernoulli.default": _capture_bernoulli, "aten.bernoulli.p": _capture_bernoulli_p},
)
_define_random(
    "Multinomial",
    ("x",),
    {"dtype": int(ir.DataType.INT32), "sample_size": 1},
    lambda n: (TensorType(_dtype(n), (sizes.dims_of(n.x)[0], n.sample_size)),),
    lambda n, x: Call(multinomial, x, n.sample_size, TORCH_DTYPES[_dtype(n)]),
)
