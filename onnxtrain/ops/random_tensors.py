"""ONNX's random tensors. They draw from the device's torch generator, which manual_seed and saved states govern.

    RandomNormal, RandomUniform                a tensor of the shape `shape`
    RandomNormalLike, RandomUniformLike(x)     one of x's shape; x is not read
    Bernoulli(x)                               1 with probability x, else 0
    Multinomial(x[rows, classes])              `sample_size` classes of each row, from unnormalized log-probabilities

`seed` is not used: ONNX Runtime and PyTorch draw other numbers from the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.axes import NO_AXES
from onnxtrain.graph.values import ONNX, TensorType, dtype_of
from onnxtrain.ops.constructors import TORCH_DTYPES, always, elementwise_flops
from onnxtrain.ops.definition import (
    DEVICE,
    NOT_DIFFERENTIABLE,
    REQUIRED,
    STANDARD,
    Call,
    Effects,
    Kernel,
    NodeView,
    OpDef,
)
from onnxtrain.ops.registry import define


def _random(
    name: str,
    inputs: tuple[str, ...],
    attributes: dict[str, Any],
    shapes: Callable[[NodeView], Sequence[TensorType]],
    lower: Callable[..., Call],
    since: int,
) -> None:
    define(
        OpDef(
            domain=ONNX,
            name=name,
            inputs=inputs,
            outputs=("y",),
            attributes={**attributes, "seed": None},
            since=since,
            from_torch={},
            shapes=shapes,
            body=STANDARD,
            native_ok=always,
            gradient=NOT_DIFFERENTIABLE,
            stops=frozenset(),
            kernels=(Kernel(lower=lower),),
            axes=lambda n: NO_AXES,
            effects=Effects.RANDOM,
            aliases={},
            flops=elementwise_flops,
            host=None,
        )
    )


def _dtype(n: NodeView) -> ir.DataType:
    if n.dtype is not None:
        return ir.DataType(n.dtype)
    return dtype_of(n.x) if n.node.inputs else ir.DataType.FLOAT


def _of_attribute(n: NodeView) -> Sequence[TensorType]:
    return (TensorType(_dtype(n), tuple(n.shape)),)


def _of_input(n: NodeView) -> Sequence[TensorType]:
    return (TensorType(_dtype(n), sizes.of(n.x)),)


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

_random(
    "RandomNormal",
    (),
    {**_NORMAL, "shape": REQUIRED},
    _of_attribute,
    lambda n: Call(normal, n.shape, n.mean, n.scale, TORCH_DTYPES[_dtype(n)], DEVICE),
    1,
)
_random(
    "RandomUniform",
    (),
    {**_UNIFORM, "shape": REQUIRED},
    _of_attribute,
    lambda n: Call(uniform, n.shape, n.low, n.high, TORCH_DTYPES[_dtype(n)], DEVICE),
    1,
)
_random(
    "RandomNormalLike",
    ("x",),
    _NORMAL,
    _of_input,
    lambda n, x: Call(normal_like, x, n.mean, n.scale, TORCH_DTYPES[_dtype(n)]),
    1,
)
_random(
    "RandomUniformLike",
    ("x",),
    _UNIFORM,
    _of_input,
    lambda n, x: Call(uniform_like, x, n.low, n.high, TORCH_DTYPES[_dtype(n)]),
    1,
)
_random(
    "Bernoulli",
    ("x",),
    {"dtype": None},
    _of_input,
    lambda n, x: Call(bernoulli, x, TORCH_DTYPES[_dtype(n)]),
    15,
)
_random(
    "Multinomial",
    ("x",),
    {"dtype": int(ir.DataType.INT32), "sample_size": 1},
    lambda n: (TensorType(_dtype(n), (sizes.of(n.x)[0], n.sample_size)),),
    lambda n, x: Call(multinomial, x, n.sample_size, TORCH_DTYPES[_dtype(n)]),
    7,
)
