"""Cases of convolutions, with torch.nn.functional as the reference.

Each case runs in both dtypes without its body, and in float32 with it: onnxruntime has no kernel for double, and
`onnx.reference` fails for groups and absent biases.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from tests.op_case import OpCase, Spec

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
Geometry = Mapping[str, Any]


def sizes(*letters: str) -> list[dict[str, int]]:
    """Return sets of sizes that are large enough for the kernels here; with odd ones, strides leave elements over."""
    size_sets = [
        {"n": 2, "h": 9, "w": 8, "p": 5, "q": 4, "r": 3},
        {"n": 1, "h": 7, "w": 5, "p": 3, "q": 5, "r": 4},
        {"n": 0, "h": 8, "w": 9, "p": 4, "q": 3, "r": 5},
    ]
    return [{name: s[name] for name in ("n", *letters)} for s in size_sets]


def geometry(rank: int, stride: int = 1, pad: int = 0, dilation: int = 1, group: int = 1) -> dict[str, Any]:
    return {"strides": [stride] * rank, "pads": [pad] * 2 * rank, "dilations": [dilation] * rank, "group": group}


def conv(attributes: Geometry) -> Any:
    strides, pads, dilations, group = (attributes[name] for name in ("strides", "pads", "dilations", "group"))
    rank = len(strides)

    def reference(x: Any, w: Any, b: Any = None) -> Any:
        return CONV[rank](x, w, b, strides, pads[:rank], dilations, group)

    return reference


def conv_transpose(attributes: Geometry, output_padding: int = 0) -> Any:
    strides, pads, dilations, group = (attributes[name] for name in ("strides", "pads", "dilations", "group"))
    rank = len(strides)

    def reference(x: Any, w: Any, b: Any = None) -> Any:
        return TRANSPOSED[rank](x, w, b, strides, pads[:rank], output_padding, group, dilations)

    return reference


def autograd_gradients(forward: Any) -> Any:
    """Return autograd's (dx, dw, db) of a convolution, as a function of dy, x and w."""

    def reference(dy: Any, x: Any, w: Any) -> Any:
        leaves = [t.detach().requires_grad_() for t in (x, w, torch.zeros(dy.shape[1], dtype=x.dtype))]
        return torch.autograd.grad(forward(*leaves), leaves, dy)

    return reference


def conv_case(label: str, x: str, w: str, attributes: dict[str, Any], bias: bool = True) -> OpCase:
    inputs = (Spec(x), Spec(w), *([Spec(w.split()[0])] if bias else []))
    return OpCase("", "Conv", inputs, conv(attributes), attributes, sizes=sizes(*x.split()[2:]), label=label)


def transposed_case(
    label: str, x: str, w: str, b: str, attributes: dict[str, Any], output_padding: int, bodies: bool = True
) -> OpCase:
    rank = len(attributes["strides"])
    return OpCase(
        "",
        "ConvTranspose",
        (Spec(x), Spec(w), Spec(b)),
        conv_transpose(attributes, output_padding),
        {**attributes, "output_padding": [output_padding] * rank},
        sizes=sizes(*x.split()[2:]),
        bodies=bodies,
        label=label,
    )


STRIDED = geometry(2, stride=2, pad=1)


def weight_gradient_cases(label: str, out_channels: str, channels: str) -> tuple[OpCase, OpCase]:
    """Return cases of ConvGrad with these channels; `label` names the body of dw that they select."""
    dy, x, w = f"n {out_channels}", f"n {channels}", f"{out_channels} {channels}"
    padded = geometry(2, pad=1)
    return (
        OpCase(
            "com.microsoft",
            "ConvGrad",
            (Spec(f"{dy} h w"), Spec(f"{x} h w"), Spec(f"{w} 3 3")),
            autograd_gradients(conv(padded)),
            padded,
            sizes=sizes("h", "w"),
            label=label,
        ),
        OpCase(
            "com.microsoft",
            "ConvGrad",
            (Spec(f"{dy} p q"), Spec(f"{x} h w"), Spec(f"{w} 3 2")),
            autograd_gradients(conv(STRIDED)),
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
    conv_case("plain", "n 4 h w", "6 4 3 3", geometry(2)),
    conv_case("padded", "n 4 h w", "6 4 3 3", geometry(2, pad=1), bias=False),
    conv_case("strided", "n 4 h w", "6 4 3 2", STRIDED),
    conv_case("dilated", "n 4 h w", "6 2 3 2", geometry(2, stride=3, pad=2, dilation=2, group=2)),
    conv_case("depthwise", "n 4 h w", "8 1 3 3", geometry(2, pad=1, group=4)),
    conv_case("point", "n 4 h w", "6 4 1 1", geometry(2, stride=2)),
    conv_case("1d", "n 4 h", "6 2 3", geometry(1, stride=2, pad=1, group=2)),
    conv_case("3d", "n 2 p q r", "4 2 2 3 2", geometry(3, stride=2, pad=1)),
    OpCase(
        "",
        "Conv",
        (Spec("n c h w"), Spec("o c 3 3"), Spec("o")),
        conv(STRIDED),
        STRIDED,
        sizes=[{"n": 2, "c": 3, "o": 4, "h": 6, "w": 5}, {"n": 1, "c": 1, "o": 1, "h": 3, "w": 4}],
        label="symbolic",
    ),
    transposed_case("plain", "n 4 h w", "4 6 3 3", "6", geometry(2), 0),
    transposed_case("strided", "n 4 h w", "4 6 3 2", "6", STRIDED, 1),
    transposed_case("dilated", "n 4 h w", "4 3 3 2", "6", geometry(2, stride=2, pad=1, dilation=3, group=2), 1),
    # onnxruntime requires an output padding below the stride, PyTorch and ONNX one below the stride or the dilation.
    transposed_case(
        "far", "n 4 h w", "4 3 3 2", "6", geometry(2, stride=2, pad=1, dilation=3, group=2), 2, bodies=False
    ),
    transposed_case("1d", "n 4 h", "4 3 3", "3", geometry(1, stride=2, pad=1), 1),
    transposed_case("3d", "n 2 p q r", "2 3 2 3 2", "3", geometry(3, stride=2, pad=1), 1),
    OpCase(
        "com.microsoft",
        "ConvGrad",
        (Spec("n 6 h w"), Spec("n 4 h w"), Spec("6 4 3 3")),
        autograd_gradients(conv(geometry(2, pad=1))),
        geometry(2, pad=1),
        sizes=sizes("h", "w"),
    ),
    # For many channels, the body of dw has one matmul per kernel position.
    *weight_gradient_cases("matmuls", "6", "16"),
    # For few channels, it has a single matmul for all kernel positions.
    *weight_gradient_cases("one-matmul", "12", "2"),
    OpCase(
        "com.microsoft",
        "ConvTransposeGrad",
        (Spec("n 6 h w"), Spec("n 4 h w"), Spec("4 6 3 3")),
        autograd_gradients(conv_transpose(geometry(2, pad=1))),
        geometry(2, pad=1),
        sizes=sizes("h", "w"),
    ),
]


def in_float32(case: OpCase) -> OpCase:
    inputs = tuple(dataclasses.replace(spec, dtype=torch.float32) for spec in case.inputs if isinstance(spec, Spec))
    return dataclasses.replace(case, inputs=inputs, label=f"{case.label}-float32")


CASES = [dataclasses.replace(case, bodies=False) for case in _CASES] + [in_float32(c) for c in _CASES if c.bodies]
