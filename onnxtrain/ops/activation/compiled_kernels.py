"""Compiled activation kernels (`native/activation.cpp`), with PyTorch's operators as the fallback.

The fallback runs until the library is compiled, for small tensors, and for strides that the kernels do not support.
PyTorch's silu without `up` and its exact gelu are as fast as compiled kernels. That gelu is off by up to 1e-6, however:
a gelu that forward writes out with erf has a compiled kernel that is as accurate as erf. Milliseconds, float32,
2 threads of a virtual Xeon, forward and backward:

                                        PyTorch        compiled
    gelu by its tanh, [2048, 1536]      3.07, 3.26     0.78, 1.00
    silu * up, [1024, 688]              0.26, 0.64     0.16, 0.28
    silu * up, [2048, 1536]             1.28, 3.46     0.72, 1.39
    tanh gelu * up, [1024, 688]         0.80, 1.78     0.17, 0.28
"""

from __future__ import annotations

import math
from typing import Any

import torch

from onnxtrain.native import Library, pointers, read_sources
from onnxtrain.ops import huge_pages
from onnxtrain.ops.definition import Call, InPlaceCapableCall

Tensor = torch.Tensor

_C_TYPES = {torch.float32: "float", torch.float64: "double"}
_MIN_ELEMENTS = 16384  # for fewer elements a call through ctypes costs more than the kernel gains
COMPILED_GATES = ("silu", "tanh_gelu")
APPROXIMATE = {"gelu": "none", "tanh_gelu": "tanh"}  # the values of `approximate` in PyTorch and ONNX
LIBRARY = Library(
    "activation",
    read_sources("vectors.h", "exponential.h", "activation.cpp"),
    {
        f"{name}_{c_type}": signature
        for c_type in _C_TYPES.values()
        for name, signature in (
            ("tanh_gelu", "ppii"),
            ("tanh_gelu_backward", "pppii"),
            *((f"gated_{gate}", "pppiiiii") for gate in COMPILED_GATES),
            *((f"gated_{gate}_backward", "pppppiiiii") for gate in COMPILED_GATES),
        )
    }
    | {"exact_gelu_float": "ppii", "exact_gelu_backward_float": "pppii"},
)


def _kernel_supports(x: Tensor) -> bool:
    return LIBRARY.functions is not None and x.numel() >= _MIN_ELEMENTS and x.dtype in _C_TYPES and x.is_contiguous()


def _call_kernel(name: str, dtype: torch.dtype, *arguments: Any) -> None:
    getattr(LIBRARY.functions, f"{name}_{_C_TYPES[dtype]}")(*arguments, torch.get_num_threads())


def tanh_gelu(x: Tensor) -> Tensor:
    """Return gelu(x, approximate="tanh")."""
    if not _kernel_supports(x):
        return torch.nn.functional.gelu(x, approximate="tanh")
    y = huge_pages.empty_like(x)
    _call_kernel("tanh_gelu", x.dtype, *pointers(x, y), x.numel())
    return y


def exact_gelu(x: Tensor) -> Tensor:
    """Return x * Phi(x) in float32, for x < 0 without the cancellation in 1 + erf(x / sqrt(2))."""
    if not _kernel_supports(x):
        return torch.erfc(x * -math.sqrt(0.5)).mul_(x).mul_(0.5)
    y = huge_pages.empty_like(x)
    _call_kernel("exact_gelu", x.dtype, *pointers(x, y), x.numel())
    return y


def exact_gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Return dy * (Phi(x) + x * Phi'(x)) in float32, for x < 0 without the cancellation in Phi(x)."""
    if not _kernel_supports(x) or not dy.is_contiguous():
        density = torch.square(x).mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
        return torch.erfc(x * -math.sqrt(0.5)).mul_(0.5).addcmul_(density, x).mul_(dy)
    dx = huge_pages.empty_like(x)
    _call_kernel("exact_gelu_backward", x.dtype, *pointers(dy, x, dx), x.numel())
    return dx


def exact_gelu_backward_(dy: Tensor, x: Tensor) -> Tensor:
    """Compute `exact_gelu_backward` in place: the result overwrites dy."""
    if not _kernel_supports(x) or not dy.is_contiguous():
        return dy.copy_(exact_gelu_backward(dy, x))
    _call_kernel("exact_gelu_backward", x.dtype, *pointers(dy, x, dy), x.numel())
    return dy


def gelu_backward(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    """Return dy * gelu'(x)."""
    return torch.ops.aten.gelu_backward.default(dy, x, approximate=approximate)


def gelu_backward_(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    """Compute `gelu_backward` in place: the result overwrites dy."""
    backward_out = torch.ops.aten.gelu_backward.grad_input
    return backward_out(dy, x, approximate=approximate, grad_input=dy)


def tanh_gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Return dy * tanh_gelu'(x)."""
    if not _kernel_supports(x) or not dy.is_contiguous():
        return gelu_backward(dy, x, "tanh")
    dx = huge_pages.empty_like(x)
    _call_kernel("tanh_gelu_backward", x.dtype, *pointers(dy, x, dx), x.numel())
    return dx


def tanh_gelu_backward_(dy: Tensor, x: Tensor) -> Tensor:
    """Compute `tanh_gelu_backward` in place: the result overwrites dy."""
    if not _kernel_supports(x) or not dy.is_contiguous():
        return gelu_backward_(dy, x, "tanh")
    _call_kernel("tanh_gelu_backward", x.dtype, *pointers(dy, x, dy), x.numel())
    return dy


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up for tensors of the same shape and dtype; `activation` is one of COMPILED_GATES."""
    rows = _row_layout(gate, up)
    if rows is None:
        return aten_gated(gate, up, activation)
    y = huge_pages.empty(gate.shape, gate)
    _call_kernel(f"gated_{activation}", y.dtype, *pointers(gate, up, y), *rows)
    return y


def aten_gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Compute `gated` by PyTorch's operators, for any activation."""
    return _activated(gate, activation).mul_(up)


def gated_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up in `gated`, computed in one pass."""
    return _gated_backward(dy, gate, up, activation, in_place=False)


def gated_backward_(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Compute `gated_backward`; the gradient of gate overwrites dy."""
    return _gated_backward(dy, gate, up, activation, in_place=True)


def _gated_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: str, *, in_place: bool) -> tuple[Tensor, Tensor]:
    rows = _row_layout(gate, up)
    if rows is None or not dy.is_contiguous():
        dgate, dup = aten_gated_backward(dy, gate, up, activation)
        return dy.copy_(dgate) if in_place else dgate, dup
    dgate, dup = dy if in_place else huge_pages.empty(gate.shape, gate), huge_pages.empty(gate.shape, gate)
    _call_kernel(f"gated_{activation}_backward", dy.dtype, *pointers(dy, gate, up, dgate, dup), *rows)
    return dgate, dup


def aten_gated_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Compute `gated_backward` by PyTorch's operators, for any activation."""
    dup = _activated(gate, activation).mul_(dy)
    if activation == "silu":
        return torch.ops.aten.silu_backward.default(dy * up, gate), dup
    return gelu_backward(dy * up, gate, APPROXIMATE[activation]), dup


def _activated(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(gate)
    return torch.nn.functional.gelu(gate, approximate=APPROXIMATE[activation])


def _row_layout(gate: Tensor, up: Tensor) -> tuple[int, int, int, int] | None:
    """Return the number and width of the rows, and the row strides of gate and up in elements.

    None: the compiled kernel does not support these tensors.
    """
    count = gate.numel()
    if LIBRARY.functions is None or count < _MIN_ELEMENTS or gate.dtype not in _C_TYPES:
        return None
    if gate.is_contiguous() and up.is_contiguous():
        return 1, count, count, count
    width, gate_stride, up_stride = gate.size(-1), _row_stride(gate), _row_stride(up)
    return None if gate_stride is None or up_stride is None else (count // width, width, gate_stride, up_stride)


def _row_stride(x: Tensor) -> int | None:
    """Return the elements from one row to the next; None if that varies, or if the last axis has a stride other than 1.

    Rows are the slices along the last axis.
    """
    if x.stride(-1) != 1:
        return None
    row_stride: int | None = None
    expected = x.size(-1)
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if row_stride is None:
            row_stride = expected = stride
        elif stride != expected:
            return None
        expected = stride * size
    return x.size(-1) if row_stride is None else row_stride


def compiled_call(function: Any, *arguments: Any) -> Call:
    """Request the library and return a call of one of these functions."""
    LIBRARY.request()
    return Call(function, *arguments)


def tanh_gelu_backward_call(dy: Any, x: Any) -> Call:
    """Request the library and return a call of `tanh_gelu_backward`, which may overwrite dy."""
    LIBRARY.request()
    return InPlaceCapableCall(tanh_gelu_backward, tanh_gelu_backward_, dy, x)


def gated_backward_call(*arguments: Any) -> Call:
    """Request the library and return a call of `gated_backward`, which may overwrite dy."""
    LIBRARY.request()
    return InPlaceCapableCall(gated_backward, gated_backward_, *arguments)
