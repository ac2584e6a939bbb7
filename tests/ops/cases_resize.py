"""Interpolation against torch.nn.functional."""

from typing import Any

import torch
import torch.nn.functional as F

from onnxtrain.testing import OpCase, SizesOf, Spec

DIMS = {1: "n c p", 2: "n c p q", 3: "n c p q r"}
SIZES = [{"n": 2, "c": 3, "p": 5, "q": 4, "r": 3}, {"n": 1, "c": 1, "p": 7, "q": 1, "r": 6}]
TORCH = {("linear", 1): "linear", ("linear", 2): "bilinear", ("linear", 3): "trilinear", ("cubic", 2): "bicubic"}


def sizes(rank: int) -> list[dict[str, int]]:
    return [{name: s[name] for name in DIMS[rank].split()} for s in SIZES]


def interpolate(mode: str, rank: int, align: int, scales: Any = None) -> Any:
    name = TORCH.get((mode, rank), mode)
    corners = None if mode.startswith("nearest") else bool(align)

    def reference(x: Any, size: Any) -> Any:
        given = {"scale_factor": tuple(scales)} if scales else {"size": tuple(size)}
        return F.interpolate(x, **given, mode=name, align_corners=corners)

    return reference


def case(mode: str, rank: int, size: str, align: int = 0, scales: Any = None, label: str = "") -> OpCase:
    return OpCase(
        "onnxtrain",
        "Interpolate",
        (Spec(DIMS[rank]), SizesOf(size)),
        interpolate(mode, rank, align, scales),
        {"mode": mode, "align_corners": align, **({"scales": scales} if scales else {})},
        sizes=sizes(rank),
        label=f"{mode}-{rank}d-{label}{align}",
    )


def by_autograd(forward: Any) -> Any:
    def reference(dy: Any, shape: tuple[int, ...]) -> Any:
        x = torch.zeros(shape, dtype=dy.dtype, requires_grad=True)
        return torch.autograd.grad(forward(x, dy.shape[2:]), x, dy)[0]

    return reference


CASES = [
    *(case(mode, 2, size) for mode in ("nearest", "nearest-exact") for size in ("2*p 3*q", "7 6", "3 2")),
    *(case(mode, 2, size, align) for mode in ("linear", "cubic") for size in ("2*p 3*q", "3 1") for align in (0, 1)),
    *(case(mode, 1, "11") for mode in ("nearest", "nearest-exact", "linear")),
    *(case(mode, 3, "2*p 3 7") for mode in ("nearest", "nearest-exact", "linear")),
    *(case(mode, 2, "2*p 3*q", scales=[2.0, 3.0], label="scaled") for mode in ("nearest", "linear", "cubic")),
    OpCase(
        "onnxtrain",
        "InterpolateGrad",
        (Spec("n c 6 5"), SizesOf("n c 4 3")),
        by_autograd(interpolate("linear", 2, 0)),
        {"mode": "linear"},
        sizes=[{"n": 2, "c": 3}, {"n": 1, "c": 1}],
    ),
]
