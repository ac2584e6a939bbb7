"""The chain of an LSTM by a compiled kernel (`native/lstm.cpp`), as soon as it is there.

oneDNN's kernels, which eager PyTorch takes, compute the gradient of x in any case. Milliseconds, float32, 2 threads of
a Xeon, for [s, b, i] and h; backward with and without x's gradient:

                            oneDNN: forward    backward    compiled: forward    backward    without x's
    [64, 16, 256], 256                 4.97        9.53                 4.96        9.03           7.03
    [64, 1, 256], 256                  1.10        1.94                 1.06        1.26           1.05
    [128, 32, 64], 64                  2.42        4.12                 2.18        4.11           3.38
    [32, 16, 1024], 1024               43.0       106.9                 44.9        77.0           66.7
    [100, 128, 40], 128                20.3        31.5                 19.8        28.6           25.2
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onnxtrain.native import Library, pointers, text

Tensor = torch.Tensor
_NAMES = {torch.float32: "float", torch.float64: "double"}
_LEAST_HIDDEN = 16  # units: a vector holds as many
LIBRARY = Library(
    "lstm",
    text("vectors.h", "exponential.h", "lstm.cpp"),
    {
        f"{way}_{name}": f"{pointers}iiiii"
        for name in _NAMES.values()
        for way, pointers in (("forward", "pppppp"), ("backward", "pppppppp"))
    },
)


def runs(dtype: torch.dtype, device: torch.device, hidden: int) -> bool:
    """Whether the kernel is there and is for such states."""
    return LIBRARY.functions is not None and device.type == "cpu" and dtype in _NAMES and hidden >= _LEAST_HIDDEN


def forward(r: Tensor, h: Tensor, c: Tensor, reverse: bool, y: Tensor, gates: Tensor, states: Tensor) -> None:
    """Runs all steps.

    Args:
        r: [4 h, h].
        h: the first state [b, h].
        c: the first cell state [b, h].
        reverse: whether it goes from the last step to the first.
        y: [s, b, h], written.
        gates: [s, b, 4 h]: what x and the biases give; after it the gates.
        states: [s, b, h]: the cell states, written.
    """
    _run("forward", [r.contiguous(), gates, h.contiguous(), c.contiguous(), states, y], y, reverse)


def backward(
    r: Tensor, gates: Tensor, states: Tensor, c: Tensor, dy: Tensor, dh: Tensor, dc: Tensor, reverse: bool
) -> Tensor:
    """The gradients [s, b, 4 h] of the gates. dh and dc, of the last states, become those of the first."""
    found = torch.empty_like(gates)
    tensors = [r.contiguous(), gates, states, c.contiguous(), dy.contiguous(), dh, dc, found]
    _run("backward", tensors, states, reverse)
    return found


def _run(way: str, tensors: Sequence[Tensor], like: Tensor, reverse: bool) -> None:
    run = getattr(LIBRARY.functions, f"{way}_{_NAMES[like.dtype]}")
    run(*pointers(*tensors), *like.shape, reverse, torch.get_num_threads())
