"""Convolutions against torch.nn.functional.

Each twice: in both dtypes without its body, and in float32 with it. For double, onnxruntime has no kernel and
`onnx.reference` fails on groups and on absent biases.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from onnxtrain.testing import OpCase, Spec

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
Geometry = Mapping[str, Any]


def sizes(*letters: str) -> list[dict[str, int]]:
    """Samples, then sizes large enough for the kernels here. One is odd where the stride leaves places over."""
    found = [
        {"n": 2, "h": 9, "w": 8, "p": 5, "q": 4, "r": 3},
        {"n": 1, "h": 7, "w": 5, "p": 3, "q": 5, "r": 4},
        {"n": 0, "h": 8, "w": 9, "p": 4, "q": 3, "r": 5},
    ]
    return [{name: s[name] for name in ("n", *letters)} for s in found]


def geometry(rank: int, stride: int = 1, pad: int = 0, dilation: int = 1, group: int = 1) -> dict[str, Any]:
    return {"strides": [stride] * rank, "pads": [pad] * 2 * rank, "dilations": [dilation] * rank, "group": group}


def conv(how: Geometry) -> Any:
    rank = len(how["strides"])

    def reference(x: Any, w: Any, b: Any = None) -> Any:
        return CONV[rank](x, w, b, how["strides"], how["pads"][:rank], how["dilations"], how["group"])

    return reference


def conv_transpose(how: Geometry, more: int = 0) -> Any:
    rank = len(how["strides"])

    def reference(x: Any, w: Any, b: Any = None) -> Any:
        return TRANSPOSED[rank](x, w, b, how["strides"], how["pads"][:rank], more, how["group"], how["dilations"])

    return reference


def by_autograd(forward: Any) -> Any:
    """(dx, dw, db) of a convolution."""

    def reference(dy: Any, x: Any, w: Any) -> Any:
        leaves = [t.detach().requires_grad_() for t in (x, w, torch.zeros(dy.shape[1], dtype=x.dtype))]
        return torch.autograd.grad(forward(*leaves), leaves, dy)

    return reference


def conv_cases(label: str, x: str, w: str, how: dict[str, Any], bias: bool = True) -> OpCase:
    inputs = (Spec(x), Spec(w), *([Spec(w.split()[0])] if bias else []))
    return OpCase("", "Conv", inputs, conv(how), how, sizes=sizes(*x.split()[2:]), label=label)


def transposed_cases(label: str, x: str, w: str, b: str, how: dict[str, Any], more: int, bodies: bool = True) -> OpCase:
    rank = len(how["strides"])
    attributes = {**how, "output_padding": [more] * rank}
    return OpCase(
        "",
        "ConvTranspose",
        (Spec(x), Spec(w), Spec(b)),
        conv_transpose(how, more),
        attributes,
        sizes=sizes(*x.split()[2:]),
        bodies=bodies,
        label=label,
    )


STRIDED = geometry(2, stride=2, pad=1)


def weight_gradients(label: str, outs: str, channels: str) -> tuple[OpCase, OpCase]:
    """ConvGrad with these channels, whose body computes the gradient of w in the way of the label."""
    dy, x, w = f"n {outs}", f"n {channels}", f"{outs} {channels}"
    same = geometry(2, pad=1)
    return (
        OpCase(
            "com.microsoft",
            "ConvGrad",
            (Spec(f"{dy} h w"), Spec(f"{x} h w"), Spec(f"{w} 3 3")),
            by_autograd(conv(same)),
            same,
            sizes=sizes("h", "w"),
            label=label,
        ),
        OpCase(
            "com.microsoft",
            "ConvGrad",
            (Spec(f"{dy} p q"), Spec(f"{x} h w"), Spec(f"{w} 3 2")),
            by_autograd(conv(STRIDED)),
            STRIDED,
            sizes=[
                {"n": 2, "h": 9, "w": 8, "p": 5, "q": 5},
                {"n": 1, "h": 7, "w": 5, "p": 4, "q": 3},
                {"n": 0, "h": 8, "w": 9, "p": 4, "q": 5},
            ],
            label=f"{label} strided",
        ),
    )


_CASES = [
    conv_cases("plain", "n 4 h w", "6 4 3 3", geometry(2)),
    conv_cases("padded", "n 4 h w", "6 4 3 3", geometry(2, pad=1), bias=False),
    conv_cases("strided", "n 4 h w", "6 4 3 2", STRIDED),
    conv_cases("dilated", "n 4 h w", "6 2 3 2", geometry(2, stride=3, pad=2, dilation=2, group=2)),
    conv_cases("depthwise", "n 4 h w", "8 1 3 3", geometry(2, pad=1, group=4)),
    conv_cases("point", "n 4 h w", "6 4 1 1", geometry(2, stride=2)),
    conv_cases("1d", "n 4 h", "6 2 3", geometry(1, stride=2, pad=1, group=2)),
    conv_cases("3d", "n 2 p q r", "4 2 2 3 2", geometry(3, stride=2, pad=1)),
    OpCase(
        "",
        "Conv",
        (Spec("n c h w"), Spec("o c 3 3"), Spec("o")),
        conv(STRIDED),
        STRIDED,
        sizes=[{"n": 2, "c": 3, "o": 4, "h": 6, "w": 5}, {"n": 1, "c": 1, "o": 1, "h": 3, "w": 4}],
        label="symbolic",
    ),
    transposed_cases("plain", "n 4 h w", "4 6 3 3", "6", geometry(2), 0),
    transposed_cases("strided", "n 4 h w", "4 6 3 2", "6", STRIDED, 1),
    transposed_cases("dilated", "n 4 h w", "4 3 3 2", "6", geometry(2, stride=2, pad=1, dilation=3, group=2), 1),
    # onnxruntime takes an output padding below the stride only, PyTorch and ONNX also one below the dilation.
    transposed_cases(
        "far", "n 4 h w", "4 3 3 2", "6", geometry(2, stride=2, pad=1, dilation=3, group=2), 2, bodies=False
    ),
    transposed_cases("1d", "n 4 h", "4 3 3", "3", geometry(1, stride=2, pad=1), 1),
    transposed_cases("3d", "n 2 p q r", "2 3 2 3 2", "3", geometry(3, stride=2, pad=1), 1),
    OpCase(
        "com.microsoft",
        "ConvGrad",
        (Spec("n 6 h w"), Spec("n 4 h w"), Spec("6 4 3 3")),
        by_autograd(conv(geometry(2, pad=1))),
        geometry(2, pad=1),
        sizes=sizes("h", "w"),
    ),
    # Of many channels the body's gradient of w is a matrix product for each place of a window.
    *weight_gradients("products", "6", "16"),
    # Of few, one product with all places of the windows below each other.
    *weight_gradients("columns", "12", "2"),
    OpCase(
        "com.microsoft",
        "ConvTransposeGrad",
        (Spec("n 6 h w"), Spec("n 4 h w"), Spec("4 6 3 3")),
        by_autograd(conv_transpose(geometry(2, pad=1))),
        geometry(2, pad=1),
        sizes=sizes("h", "w"),
    ),
]


def in_float32(case: OpCase) -> OpCase:
    inputs = tuple(dataclasses.replace(spec, dtype=torch.float32) for spec in case.inputs if isinstance(spec, Spec))
    return dataclasses.replace(case, inputs=inputs, label=f"{case.label}-float32")


CASES = [dataclasses.replace(case, bodies=False) for case in _CASES] + [in_float32(c) for c in _CASES if c.bodies]
