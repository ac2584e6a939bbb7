"""The steps of an LSTM with a compiled kernel (`native/lstm.cpp`), once it is loaded.

oneDNN's kernels, which eager PyTorch uses, always compute the gradient of x. Milliseconds, float32, 2 threads of a
Xeon, for [s, b, i] and h; our backward with and without dx:

                            oneDNN: forward    backward    compiled: forward    backward    without dx
    [64, 16, 256], 256                 4.97        9.53                 4.96        9.03           7.03
    [64, 1, 256], 256                  1.10        1.94                 1.06        1.26           1.05
    [128, 32, 64], 64                  2.42        4.12                 2.18        4.11           3.38
    [32, 16, 1024], 1024               43.0       106.9                 44.9        77.0           66.7
    [100, 128, 40], 128                20.3        31.5                 19.8        28.6           25.2
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onnxtrain.native import Library, pointers, read_sources

Tensor = torch.Tensor
_CPP_TYPES = {torch.float32: "float", torch.float64: "double"}
_MIN_HIDDEN_SIZE = 16  # units: the lanes of a vector
LIBRARY = Library(
    "lstm",
    read_sources("vectors.h", "gemm_tile.h", "exponential.h", "lstm.cpp"),
    {
        f"{direction}_{cpp_type}": f"{pointers}iiiii"
        for cpp_type in _CPP_TYPES.values()
        for direction, pointers in (("forward", "pppppp"), ("backward", "pppppppp"))
    },
)


def runs(dtype: torch.dtype, device: torch.device, hidden: int) -> bool:
    """Return whether the kernel is loaded and supports this dtype, device and hidden size."""
    return LIBRARY.functions is not None and device.type == "cpu" and dtype in _CPP_TYPES and hidden >= _MIN_HIDDEN_SIZE


def forward(r: Tensor, h: Tensor, c: Tensor, reverse: bool, y: Tensor, gates: Tensor, states: Tensor) -> None:
    """Run all steps.

    Args:
        r: [4 h, h].
        h: the initial state [b, h].
        c: the initial cell state [b, h].
        reverse: whether to run from the last step to the first.
        y: [s, b, h], written.
        gates: [s, b, 4 h]: W x plus both biases; overwritten with the gates.
        states: [s, b, h]: the cell states, written.
    """
    _run("forward", [r.contiguous(), gates, h.contiguous(), c.contiguous(), states, y], y, reverse)


def backward(
    r: Tensor, gates: Tensor, states: Tensor, c: Tensor, dy: Tensor, dh: Tensor, dc: Tensor, reverse: bool
) -> Tensor:
    """Return the gradients [s, b, 4 h] of the gates.

    Dh and dc, of the last states, are overwritten with the initial ones'.
    """
    dgates = torch.empty_like(gates)
    tensors = [r.contiguous(), gates, states, c.contiguous(), dy.contiguous(), dh, dc, dgates]
    _run("backward", tensors, states, reverse)
    return dgates


def _run(direction: str, tensors: Sequence[Tensor], like: Tensor, reverse: bool) -> None:
    run = getattr(LIBRARY.functions, f"{direction}_{_CPP_TYPES[like.dtype]}")
    run(*pointers(*tensors), *like.shape, reverse, torch.get_num_threads())
