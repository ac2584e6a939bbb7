"""Cases of GridSample, its gradient and AffineGrid, with torch.nn.functional as the reference.

Each case runs in both dtypes without its body, and in float32 with it: onnxruntime's GridSample lacks double, and
`onnx.reference` computes weights in float32.
"""

from typing import Any

import torch
import torch.nn.functional as F

from tests.op_case import OpCase, Spec

TORCH = {"linear": "bilinear", "nearest": "nearest", "cubic": "bicubic"}
SIZES = [
    {"n": 2, "c": 3, "h": 5, "w": 4, "d": 3, "p": 3, "q": 6},
    {"n": 1, "c": 1, "h": 1, "w": 7, "d": 2, "p": 1, "q": 1},
]


def sizes(*letters: str, least: int = 1) -> list[dict[str, int]]:
    """Return sets of sizes with at least `least` rows: the slopes of cubic over one row are rounding errors of 0."""
    return [{k: max(s[k], least) if k == "h" else s[k] for k in letters} for s in SIZES]


def sample(attributes: dict[str, Any]) -> Any:
    mode, padding_mode, align_corners = (attributes[name] for name in ("mode", "padding_mode", "align_corners"))
    return lambda x, grid: F.grid_sample(x, grid, TORCH[mode], padding_mode, bool(align_corners))


def cases(mode: str, padding: str, align: int) -> list[OpCase]:
    attributes = {"mode": mode, "padding_mode": padding, "align_corners": align}
    return [
        OpCase(
            "",
            "GridSample",
            (Spec("n c h w", dtype), Spec("n p q 2", dtype, low=-1.7, high=1.7)),
            sample(attributes),
            attributes,
            sizes=sizes(*"nchwpq", least=2 if mode == "cubic" else 1),
            bodies=dtype != "float",
            label=f"{mode}-{padding}-{align}-{dtype}",
        )
        for dtype in ("float", torch.float32)
    ]


def by_autograd(attributes: dict[str, Any]) -> Any:
    def reference(dy: Any, x: Any, grid: Any) -> Any:
        x, grid = x.detach().requires_grad_(), grid.detach().requires_grad_()
        return torch.autograd.grad(sample(attributes)(x, grid), (x, grid), dy)

    return reference


VOLUME = {"mode": "linear", "padding_mode": "reflection", "align_corners": 0}
CASES = [
    *(
        OpCase(
            "",
            "AffineGrid",
            (Spec("n 2 3"), Spec("4", "int64", value=[n, 3, 4, 1])),
            lambda theta, size, align=align: F.affine_grid(theta, size.tolist(), align_corners=bool(align)),
            {"align_corners": align},
            sizes=[{"n": n}],
            label=f"{n}-{align}",
        )
        for n in (2, 1)
        for align in (0, 1)
    ),
    OpCase(
        "",
        "AffineGrid",
        (Spec("2 3 4"), Spec("5", "int64", value=[2, 1, 3, 4, 5])),
        lambda theta, size: F.affine_grid(theta, size.tolist(), align_corners=True),
        {"align_corners": 1},
        label="volume",
    ),
    *(
        case
        for mode in ("linear", "nearest", "cubic")
        for padding in ("zeros", "border", "reflection")
        for align in (0, 1)
        for case in cases(mode, padding, align)
    ),
    *(
        OpCase(
            "onnxtrain",
            "GridSampleGrad",
            (Spec("n c d p q"), Spec("n c d h w"), Spec("n d p q 3", low=-1.7, high=1.7)),
            by_autograd({**VOLUME, "mode": mode}),
            {**VOLUME, "mode": mode},
            sizes=sizes(*"nchwdpq"),
            label=f"volume-{mode}",
        )
        for mode in ("linear", "nearest")
    ),
]
