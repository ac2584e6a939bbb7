"""Activations by compiled kernels (`native/activation.cpp`) as soon as they are there, and what stands in until then.

PyTorch's operators serve until then, for small tensors, and for those whose elements do not lie in order. The exact
gelu and silu alone are as fast in PyTorch as compiled: they stay there. Milliseconds, float32, 2 threads of a virtual
Xeon, forward and backward:

                                        PyTorch        compiled
    gelu by its tanh, [2048, 1536]      3.07, 3.26     0.78, 1.00
    silu * up, [1024, 688]              0.26, 0.64     0.16, 0.28
    silu * up, [2048, 1536]             1.28, 3.46     0.72, 1.39
    tanh gelu * up, [1024, 688]         0.80, 1.78     0.17, 0.28
"""

from __future__ import annotations

from typing import Any

import torch

from onnxtrain.native import Library, pointers, text
from onnxtrain.ops import large_memory
from onnxtrain.ops.definition import Call, InPlaceCapableCall

Tensor = torch.Tensor

_NAMES = {torch.float32: "float", torch.float64: "double"}
_LEAST = 16384  # elements: below it the way through ctypes costs more than is gained
COMPILED_GATES = ("silu", "tanh_gelu")
APPROXIMATE = {"gelu": "none", "tanh_gelu": "tanh"}  # PyTorch's and ONNX's word for it
LIBRARY = Library(
    "activation",
    text("vectors.h", "exponential.h", "activation.cpp"),
    {
        f"{name}_{dtype}": letters
        for dtype in _NAMES.values()
        for name, letters in (
            ("tanh_gelu", "ppii"),
            ("tanh_gelu_backward", "pppii"),
            *((f"gated_{gate}", "pppiiiii") for gate in COMPILED_GATES),
            *((f"gated_{gate}_backward", "pppppiiiii") for gate in COMPILED_GATES),
        )
    },
)


def _is_plain(x: Tensor) -> bool:
    return LIBRARY.functions is not None and x.numel() >= _LEAST and x.dtype in _NAMES and x.is_contiguous()


def _run(name: str, dtype: torch.dtype, *arguments: Any) -> None:
    getattr(LIBRARY.functions, f"{name}_{_NAMES[dtype]}")(*arguments, torch.get_num_threads())


def tanh_gelu(x: Tensor) -> Tensor:
    """Gives gelu(x, approximate="tanh")."""
    if not _is_plain(x):
        return torch.nn.functional.gelu(x, approximate="tanh")
    y = large_memory.empty_like(x)
    _run("tanh_gelu", x.dtype, *pointers(x, y), x.numel())
    return y


def gelu_backward(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    """Gives dy times the slope of gelu at x."""
    return torch.ops.aten.gelu_backward.default(dy, x, approximate=approximate)  # type: ignore[no-any-return]


def gelu_backward_(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    """The same, written over dy."""
    into = torch.ops.aten.gelu_backward.grad_input
    return into(dy, x, approximate=approximate, grad_input=dy)  # type: ignore[no-any-return]


def tanh_gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Gives dy times the slope of `tanh_gelu` at x."""
    if not _is_plain(x) or not dy.is_contiguous():
        return gelu_backward(dy, x, "tanh")
    dx = large_memory.empty_like(x)
    _run("tanh_gelu_backward", x.dtype, *pointers(dy, x, dx), x.numel())
    return dx


def tanh_gelu_backward_(dy: Tensor, x: Tensor) -> Tensor:
    """The same, written over dy."""
    if not _is_plain(x) or not dy.is_contiguous():
        return gelu_backward_(dy, x, "tanh")
    _run("tanh_gelu_backward", x.dtype, *pointers(dy, x, dy), x.numel())
    return dy


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Gives activation(gate) * up, of one shape and type; `activation` is one of COMPILED_GATES."""
    rows = _rows(gate, up)
    if rows is None:
        return composed_gated(gate, up, activation)
    y = large_memory.empty(gate.shape, gate)
    _run(f"gated_{activation}", y.dtype, *pointers(gate, up, y), *rows)
    return y


def composed_gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """By PyTorch's operators, for any activation."""
    return _activated(gate, activation).mul_(up)


def gated_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up in `gated`, in one pass."""
    return _gated_backward(dy, gate, up, activation, over=False)


def gated_backward_(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The same, that of the gate written over dy."""
    return _gated_backward(dy, gate, up, activation, over=True)


def _gated_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: str, *, over: bool) -> tuple[Tensor, Tensor]:
    rows = _rows(gate, up)
    if rows is None or not dy.is_contiguous():
        dgate, dup = composed_gated_backward(dy, gate, up, activation)
        return dy.copy_(dgate) if over else dgate, dup
    dgate, dup = dy if over else large_memory.empty(gate.shape, gate), large_memory.empty(gate.shape, gate)
    _run(f"gated_{activation}_backward", dy.dtype, *pointers(dy, gate, up, dgate, dup), *rows)
    return dgate, dup


def composed_gated_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """By PyTorch's operators, for any activation."""
    dup = _activated(gate, activation).mul_(dy)
    if activation == "silu":
        return torch.ops.aten.silu_backward.default(dy * up, gate), dup
    return gelu_backward(dy * up, gate, APPROXIMATE[activation]), dup


def _activated(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(gate)
    return torch.nn.functional.gelu(gate, approximate=APPROXIMATE[activation])


def _rows(gate: Tensor, up: Tensor) -> tuple[int, int, int, int] | None:
    """Count and width of the rows that the kernel goes over, and how far apart those of gate and up lie.

    None where PyTorch's operators have to serve.
    """
    count = gate.numel()
    if LIBRARY.functions is None or count < _LEAST or gate.dtype not in _NAMES:
        return None
    if gate.is_contiguous() and up.is_contiguous():
        return 1, count, count, count
    width, gate_row, up_row = gate.size(-1), _row_distance(gate), _row_distance(up)
    return None if gate_row is None or up_row is None else (count // width, width, gate_row, up_row)


def _row_distance(x: Tensor) -> int | None:
    """How many elements lie from row to row; None where that varies, or the last axis is not in order."""
    if x.stride(-1) != 1:
        return None
    distance: int | None = None
    expected = x.size(-1)
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if distance is None:
            distance = expected = stride
        elif stride != expected:
            return None
        expected = stride * size
    return x.size(-1) if distance is None else distance


def lowered(function: Any, *arguments: Any) -> Call:
    """A call of one of these functions, for a node that may run compiled."""
    LIBRARY.request()
    return Call(function, *arguments)


def lowered_tanh_gelu_backward(dy: Any, x: Any) -> Call:
    """The same of `tanh_gelu_backward`, which can write over dy."""
    LIBRARY.request()
    return InPlaceCapableCall(tanh_gelu_backward, tanh_gelu_backward_, dy, x)


def lowered_gated_backward(*arguments: Any) -> Call:
    """The same of `gated_backward`."""
    LIBRARY.request()
    return InPlaceCapableCall(gated_backward, gated_backward_, *arguments)
