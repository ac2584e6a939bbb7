"""Pools, compared with torch.nn.functional.

The averages twice: in both dtypes without body, and in float32 with it. For double, onnxruntime has no kernel and
`onnx.reference` fails.
"""

from typing import Any

import torch
import torch.nn.functional as F

from tests.op_case import OpCase, SizesOf, Spec

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
ADAPTIVE_AVERAGE = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
ADAPTIVE_MAX = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}
DIMS = {1: "n c p", 2: "n c p q", 3: "n c p q r"}
SIZES = [
    {"n": 2, "c": 3, "p": 9, "q": 8, "r": 5},
    {"n": 1, "c": 1, "p": 7, "q": 5, "r": 6},
    {"n": 0, "c": 2, "p": 5, "q": 6, "r": 7},
    {"n": 3, "c": 2, "p": 6, "q": 10, "r": 8},
]


def sizes(rank: int) -> list[dict[str, int]]:
    return [{name: s[name] for name in DIMS[rank].split()} for s in SIZES]


def window(rank: int, kernel: int, stride: int, pad: int, ceil: int = 0, **more: Any) -> dict[str, Any]:
    geometry = {"kernel_shape": [kernel] * rank, "strides": [stride] * rank, "pads": [pad] * 2 * rank}
    return {**geometry, "ceil_mode": ceil, **more}


def max_pool(attributes: dict[str, Any], tensor_indices: bool = False) -> Any:
    rank = len(attributes["kernel_shape"])

    def reference(x: Any) -> Any:
        y, indices = MAX[rank](
            x, attributes["kernel_shape"], attributes["strides"], attributes["pads"][:rank], attributes["dilations"],
            ceil_mode=bool(attributes["ceil_mode"]), return_indices=True,
        )  # fmt: skip
        if tensor_indices:
            images = torch.arange(x.shape[0] * x.shape[1]).view(*x.shape[:2], *[1] * rank)
            indices = indices + images * x.shape[2:].numel()
        return y, indices

    return reference


def average_pool(attributes: dict[str, Any]) -> Any:
    rank = len(attributes["kernel_shape"])
    rest = (attributes["kernel_shape"], attributes["strides"], attributes["pads"][:rank])
    return lambda x: AVERAGE[rank](x, *rest, bool(attributes["ceil_mode"]), bool(attributes["count_include_pad"]))


def max_cases(rank: int, label: str, attributes: dict[str, Any]) -> list[OpCase]:
    attributes = {"dilations": [1] * rank, **attributes}
    return [
        OpCase(
            domain,
            "MaxPool",
            (Spec(DIMS[rank]),),
            max_pool(attributes, not domain),
            attributes,
            sizes=sizes(rank),
            label=label,
        )
        for domain in ("", "onnxtrain")
    ]


def average_cases(rank: int, label: str, attributes: dict[str, Any]) -> list[OpCase]:
    attributes = {"count_include_pad": 0, **attributes}
    return [
        OpCase(
            "",
            "AveragePool",
            (Spec(DIMS[rank], dtype),),
            average_pool(attributes),
            attributes,
            sizes=sizes(rank),
            bodies=dtype != "float",
            label=f"{label}-{dtype}",
        )
        for dtype in ("float", torch.float32)
    ]


def max_pool_grad(dy: Any, indices: Any, shape: tuple[int, ...]) -> Any:
    dx = torch.zeros(shape[0], shape[1], shape[2] * shape[3], dtype=dy.dtype)
    return dx.scatter_add(2, indices.flatten(2), dy.flatten(2)).reshape(shape)


def image_indices(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Indices into images of 6 by 4, one per window of 2 by 2."""
    down = torch.randint(2, shape, generator=generator) + 2 * torch.arange(shape[2])[:, None]
    return down * 4 + torch.randint(2, shape, generator=generator) + 2 * torch.arange(shape[3])


def by_autograd(forward: Any) -> Any:
    def reference(dy: Any, shape: tuple[int, ...]) -> Any:
        x = torch.zeros(shape, dtype=dy.dtype, requires_grad=True)
        return torch.autograd.grad(forward(x), x, dy)[0]

    return reference


def adaptive_cases(rank: int, *parts: int) -> list[OpCase]:
    size = Spec(str(rank), "int64", value=list(parts))
    return [
        OpCase(
            "onnxtrain",
            name,
            (Spec(DIMS[rank]), size),
            lambda x, _, pool=pool: pool[rank](x, parts),
            sizes=sizes(rank),
            label=f"{rank}d",
        )
        for name, pool in (("AdaptiveAveragePool", ADAPTIVE_AVERAGE), ("AdaptiveMaxPool", WITH_INDICES))
    ]


WITH_INDICES = {rank: lambda x, parts, f=f: f(x, parts, return_indices=True) for rank, f in ADAPTIVE_MAX.items()}
SMALL = [{"n": 2, "c": 3}, {"n": 1, "c": 1}, {"n": 0, "c": 2}]
SPREAD = window(2, 3, 2, 1, count_include_pad=1)

CASES = [
    *max_cases(2, "plain", window(2, 2, 2, 0)),
    *max_cases(2, "overlapping", window(2, 3, 2, 1)),
    *max_cases(2, "ceil", window(2, 3, 2, 1, 1)),
    *max_cases(2, "dilated", window(2, 2, 2, 1, 1, dilations=[2, 2])),
    *max_cases(1, "1d", window(1, 3, 2, 1, 1)),
    *max_cases(3, "3d", window(3, 2, 2, 1, dilations=[2, 2, 2])),
    *average_cases(2, "plain", window(2, 2, 2, 0)),
    *average_cases(2, "padded", window(2, 3, 2, 1)),
    *average_cases(2, "counted", window(2, 3, 2, 1, count_include_pad=1)),
    *average_cases(2, "ceil", window(2, 3, 2, 1, 1)),
    *average_cases(2, "ceil-counted", window(2, 3, 2, 1, 1, count_include_pad=1)),
    *average_cases(2, "apart", window(2, 2, 3, 0, 1)),
    *average_cases(1, "1d", window(1, 3, 2, 1, 1)),
    *average_cases(3, "3d", window(3, 2, 2, 1, count_include_pad=1)),
    OpCase(
        "com.microsoft",
        "MaxPoolGrad",
        (Spec("n c 3 2"), Spec("n c 3 2", "int64", make=image_indices), SizesOf("n c 6 4")),
        max_pool_grad,
        window(2, 2, 2, 0),
        sizes=SMALL,
    ),
    OpCase(
        "com.microsoft",
        "AveragePoolGrad",
        (Spec("n c 3 2", torch.float32), SizesOf("n c 6 4")),
        by_autograd(average_pool(SPREAD)),
        SPREAD,
        sizes=SMALL,
    ),
    *(
        OpCase(
            "",
            "GlobalAveragePool",
            (Spec("n c p q", dtype),),
            lambda x: x.mean((2, 3), keepdim=True),
            sizes=sizes(2),
            bodies=dtype != "float",
            label=str(dtype),
        )
        for dtype in ("float", torch.float32)
    ),
    *adaptive_cases(2, 3, 5),
    *adaptive_cases(1, 4),
    *adaptive_cases(3, 2, 7, 3),
    OpCase(
        "onnxtrain",
        "AdaptiveAveragePool",
        (Spec("n c p q"), SizesOf("p 3")),
        F.adaptive_avg_pool2d,
        sizes=sizes(2),
        label="symbolic",
    ),
    OpCase(
        "onnxtrain",
        "AdaptiveAveragePoolGrad",
        (Spec("n c 3 2"), SizesOf("n c 7 4")),
        by_autograd(lambda x: F.adaptive_avg_pool2d(x, (3, 2))),
        sizes=SMALL,
    ),
    OpCase(
        "onnxtrain",
        "AdaptiveMaxPoolGrad",
        (Spec("n c 3 2"), Spec("n c 3 2", "int64", make=image_indices), SizesOf("n c 6 4")),
        max_pool_grad,
        sizes=SMALL,
    ),
]
