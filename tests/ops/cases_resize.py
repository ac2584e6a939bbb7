"""Cases of Interpolate against torch.nn.functional, and of Resize against that and ONNX's reference evaluator."""

import functools
import math
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F

from tests.op_case import OpCase, SizesOf, Spec

DIMS = {1: "n c p", 2: "n c p q", 3: "n c p q r"}
SIZES = [{"n": 2, "c": 3, "p": 5, "q": 4, "r": 3}, {"n": 1, "c": 1, "p": 7, "q": 1, "r": 6}]
TORCH = {("linear", 1): "linear", ("linear", 2): "bilinear", ("linear", 3): "trilinear", ("cubic", 2): "bicubic"}


def sizes(rank: int) -> list[dict[str, int]]:
    return [{name: s[name] for name in DIMS[rank].split()} for s in SIZES]


def interpolate(mode: str, rank: int, align: int, scales: Any = None) -> Any:
    name = TORCH.get((mode, rank), mode)
    corners = None if mode.startswith("nearest") else bool(align)

    def reference(x: Any, size: Any) -> Any:
        target = {"scale_factor": tuple(scales)} if scales else {"size": tuple(size)}
        return F.interpolate(x, **target, mode=name, align_corners=corners)

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


# Resize is tested in both dtypes without body, and in float32 with it, because onnxruntime's does not support double.
# ONNX's reference computes cubic weights in float32: [1:] skips the first dtype.


def antialiased(x: Any, size: Any) -> Any:
    return F.interpolate(x, tuple(size), mode="bicubic", antialias=True)


@functools.cache
def weight_matrix(
    size: int, out: int, scale: float | None, region: tuple[float, float], attribute_items: tuple[Any, ...]
) -> Any:
    """Return the weights [out, size] of one axis: the Resize of an identity matrix by ONNX's reference."""
    from onnx.reference import ReferenceEvaluator

    attributes = dict(attribute_items) | {"axes": [0], "extrapolation_value": 0.0}
    names = ["x", "roi", "scales" if scale else "", "" if scale else "sizes"]
    node = onnx.helper.make_node("Resize", names, ["y"], **attributes)
    feeds: dict[str, Any] = {"x": np.eye(size), "roi": np.array(region, np.float64)}
    feeds |= {"scales": np.array([scale], np.float32)} if scale else {"sizes": np.array([out])}
    return torch.from_numpy(np.asarray(ReferenceEvaluator(node).run(None, feeds)[0]).astype(np.float64))


def by_matrices(scales: Any = None, region: Any = None, extrapolation_value: float = 0.0, **attributes: Any) -> Any:
    """Return a reference that resizes the last two axes by `weight_matrix`."""
    attribute_items = tuple(sorted(attributes.items()))

    def reference(x: Any, *others: Any) -> Any:
        y, output_sizes = x, others[-1] if scales is None else None
        for i, axis in enumerate((x.ndim - 2, x.ndim - 1)):
            size, scale = x.shape[axis], None if scales is None else scales[i]
            out = int(output_sizes[axis]) if scale is None else int(size * scale)
            span = (0.0, 1.0) if region is None else (region[i], region[i + 2])
            weights = weight_matrix(size, out, scale, span, attribute_items).to(x.dtype)
            y = (y.movedim(axis, -1) @ weights.T).movedim(-1, axis)
            if extrapolation_value:  # rows without weights are outside
                outside = (weights == 0).all(1).view([-1 if k == axis else 1 for k in range(x.ndim)])
                y = torch.where(outside, torch.full((), extrapolation_value, dtype=x.dtype), y)
        return y

    return reference


def resize(label: str, size: str, **attributes: Any) -> list[OpCase]:
    reference = by_matrices(**attributes)
    return [
        OpCase(
            "",
            "Resize",
            (Spec("n c p q", dtype), None, None, SizesOf(f"n c {size}")),
            lambda x, _, __, output_sizes: reference(x, output_sizes),
            attributes,
            sizes=sizes(2),
            bodies=dtype != "float",
            label=f"{label}-{size}-{dtype}",
        )
        for dtype in ("float", torch.float32)
    ]


def scaled(label: str, *scales: float, **attributes: Any) -> list[OpCase]:
    reference = by_matrices(scales, **attributes)
    scales_spec = Spec("4", torch.float32, value=[1.0, 1.0, *scales])
    return [
        OpCase(
            "",
            "Resize",
            (Spec("n c p q", dtype), None, scales_spec),
            lambda x, *_: reference(x),
            attributes,
            sizes=sizes(2)[:1],
            bodies=dtype != "float",
            label=f"{label}-{dtype}",
        )
        for dtype in ("float", torch.float32)
    ]


REGION = [0.0, 0.0, 0.125, 0.25, 1.0, 1.0, 0.75, 1.25]
CROP = {"coordinate_transformation_mode": "tf_crop_and_resize", "mode": "linear"}
DOWN = {"mode": "cubic", "antialias": 1, "cubic_coeff_a": -0.5, "exclude_outside": 1}
LARGER = {"keep_aspect_ratio_policy": "not_smaller", "mode": "linear"}

RESIZES = [
    *resize("nearest", "2*p 3"),
    *resize("floor", "2*p 3*q", nearest_mode="floor", coordinate_transformation_mode="asymmetric"),
    *resize("linear", "7 3*q", mode="linear"),
    *resize("corners", "7 3*q", mode="linear", coordinate_transformation_mode="align_corners"),
    *resize("cubic", "7 3*q", mode="cubic", cubic_coeff_a=-0.5, exclude_outside=1)[1:],
    *resize("antialias", "2 3*q", mode="linear", antialias=1),
    *scaled("scaled", 1.5, 2.25, mode="linear"),
    *scaled("symmetric", 1.5, 0.75, mode="cubic", coordinate_transformation_mode="half_pixel_symmetric")[1:],
    *scaled("shrunken", 0.5, 0.75, mode="cubic", antialias=1)[1:],
    *(
        OpCase(
            "",
            "Resize",
            (Spec("n c 6 5", dtype), None, None, SizesOf("n c 2 3")),
            lambda x, _, __, size: antialiased(x, size[2:]),
            DOWN,
            sizes=[{"n": 2, "c": 3}, {"n": 1, "c": 1}],
            bodies=dtype != "float",
            label=f"antialias-cubic-{dtype}",
        )
        for dtype in ("float", torch.float32)
    ),
    OpCase(
        "",
        "Resize",
        (Spec("n c p q"), None, None, SizesOf("2*p 3*q")),
        lambda x, _, __, size: F.interpolate(x, size, mode="bilinear"),
        {"mode": "linear", "axes": [2, 3]},
        sizes=sizes(2),
        bodies=False,
        label="axes",
    ),
    OpCase(
        "",
        "Resize",
        (Spec("n c 4 8", torch.float32), Spec("8", torch.float32, value=REGION), None, SizesOf("n c 3 5")),
        lambda x, roi, _, size: by_matrices(None, (0.125, 0.25, 0.75, 1.25), 9.0, **CROP)(x, size),
        {**CROP, "extrapolation_value": 9.0},
        sizes=[{"n": 2, "c": 3}],
        label="crop",
    ),
    OpCase(
        "",
        "Resize",
        (Spec("n 4 8", torch.float32), None, None, Spec("2", "int64", value=[7, 10])),
        lambda x, *_: F.interpolate(x[None], (7, 14), mode="bilinear")[0],
        {**LARGER, "axes": [1, 2]},
        sizes=[{"n": 2}],
        label="ratio",
    ),
    OpCase(
        "com.microsoft",
        "ResizeGrad",
        (Spec("n c 2 3"), SizesOf("n c 6 5"), None, None, SizesOf("n c 2 3")),
        lambda dy, shape, *_: by_autograd(antialiased)(dy, shape),
        DOWN,
        sizes=[{"n": 2, "c": 3}, {"n": 1, "c": 1}],
        bodies=False,
    ),
]

MANTISSA = int(math.ldexp(math.frexp(1.7)[0], 53))


def antialiased_interpolate(mode: str, scales: Any = None) -> Any:
    def reference(x: Any, size: Any) -> Any:
        target = {"scale_factor": tuple(scales)} if scales else {"size": tuple(size)}
        return F.interpolate(x, **target, mode=mode, antialias=True)

    return reference


def antialias_case(mode: str, label: str, size: str, scales: Any = None) -> OpCase:
    return OpCase(
        "onnxtrain",
        "Interpolate",
        (Spec("n c 9 8", torch.float32), SizesOf(size)),
        antialiased_interpolate(mode, scales),
        {
            "mode": f"{'linear' if mode == 'bilinear' else 'cubic'}-antialias",
            **({"scales": scales} if scales else {}),
        },
        sizes=[{"n": 2, "c": 3}, {"n": 1, "c": 1}],
        label=f"{mode}-{label}",
    )


ANTIALIAS_SIZES = (("down", "4 3"), ("up", "13 17"), ("mixed", "3 20"))

CASES = [
    *RESIZES,
    OpCase(
        "onnxtrain",
        "ScaledSize",
        (Spec("n", "int64", low=0, high=1000),),
        lambda x: torch.tensor([math.floor(float(size) * 1.7) for size in x.tolist()], dtype=torch.int64),
        {"mantissa": MANTISSA, "exponent": 1 - 53},
    ),
    *(antialias_case("bilinear", label, size) for label, size in ANTIALIAS_SIZES),
    *(
        antialias_case("bicubic", label, size)
        for label, size in ANTIALIAS_SIZES
        if label != "up"  # onnxruntime rounds weights to float32
    ),
    antialias_case("bilinear", "scaled", "4 4", [0.5, 0.5]),
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
