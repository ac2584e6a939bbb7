"""Normalizations, compared with torch.nn.functional. Epsilons are powers of two: ONNX attributes are float32."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.op_case import OpCase, Spec

EPS = 2.0**-15
FLOAT = torch.float32  # ONNX's LayerNormalization does not support double
ROWS = [{"b": 3, "s": 5}, {"b": 1, "s": 1}, {"b": 0, "s": 5}, {"b": 4, "s": 1}]


def layer_norm_grad(dy: Any, x: Any, scale: Any, mean: Any, inv_std: Any) -> Any:
    """The formula of the op definition, with arbitrary statistics."""
    z, g = (x - mean) * inv_std, dy * scale
    dx = inv_std * (g - g.mean(-1, keepdim=True) - z * (g * z).mean(-1, keepdim=True))
    return dx, (dy * z).sum((0, 1)), dy.sum((0, 1))


def mixed_layer_norm(x: Any, w: Any, b: Any) -> Any:
    """PyTorch mixes bfloat16 with float32; the exact result is all in float64."""
    x = x.double() if w.dtype == torch.float64 else x
    return F.layer_norm(x, (8,), w, b, EPS), None, None


def rms_reference(x: Any, scale: Any) -> Any:
    y = F.rms_norm(x, (8,), scale, EPS)
    return y, None


def batch_norm_then_relu(*inputs: Any) -> Any:
    *inputs, residual = inputs
    y, *others = batch_norm(*inputs)
    return torch.relu(y if residual is None else y + residual), *others


def batch_norm(x: Any, scale: Any, b: Any, mean: Any, var: Any) -> Any:
    if mean is None:
        return F.batch_norm(x, None, None, scale, b, True, 0.25, EPS), None, None
    new_mean, new_var = mean.clone(), var.clone()
    y = F.batch_norm(x, new_mean, new_var, scale, b, True, 0.25, EPS)
    return y, new_mean, new_var


def inference_grad(dy: Any, x: Any, scale: Any, mean: Any, var: Any) -> Any:
    leaves = [x.detach().requires_grad_(), scale.detach().requires_grad_(), torch.zeros_like(mean, requires_grad=True)]
    y = F.batch_norm(leaves[0], mean, var, leaves[1], leaves[2], False, 0.0, EPS)
    return torch.autograd.grad(y, leaves, dy)


def batch_norm_grad(dy: Any, x: Any, scale: Any, mean: Any, inv_std: Any) -> Any:
    """The formula in the paper's appendix, with arbitrary statistics."""
    view = (1, -1, *[1] * (x.ndim - 2))
    axes = [a for a in range(x.ndim) if a != 1]
    z = (x - mean.view(view)) * inv_std.view(view)
    count = x.numel() // x.shape[1]
    dz = dy * scale.view(view)
    dx = inv_std.view(view) * (dz - dz.sum(axes, keepdim=True) / count - z * (dz * z).sum(axes, keepdim=True) / count)
    return dx, (dy * z).sum(axes), dy.sum(axes)


def masked_batch_norm_grad(dy: Any, x: Any, scale: Any, mean: Any, inv_std: Any, y: Any) -> Any:
    g = torch.where(y <= 0, 0.0, dy)
    return *batch_norm_grad(g, x, scale, mean, inv_std), g


def group_norm_grad(dy: Any, x: Any, scale: Any, mean: Any, inv_std: Any) -> Any:
    z = (x.reshape(x.shape[0], 3, -1) - mean[..., None]) * inv_std[..., None]
    g = (dy * scale[:, None, None]).reshape(z.shape)
    dx = inv_std[..., None] * (g - g.mean(-1, keepdim=True) - z * (g * z).mean(-1, keepdim=True))
    return dx.reshape(x.shape), (dy * z.reshape(x.shape)).sum((0, 2, 3)), dy.sum((0, 2, 3))


def rms_grad(dy: Any, x: Any, scale: Any, inv_std: Any, added: Any = 0) -> Any:
    z, g = x * inv_std, dy * scale
    return inv_std * (g - z * (g * z).mean(-1, keepdim=True)) + added, (dy * z).sum((0, 1))


def with_grad_of_layer_norm(x: Any) -> Any:
    return F.layer_norm(x, (8,), None, None, EPS), None, None


def weight_norm(dim: int) -> Callable[..., Any]:
    return lambda v, g: (torch._weight_norm(v, g, dim), None)


def weight_norm_grad(dw: Any, v: Any, g: Any, norm: Any) -> Any:
    along = (dw * v).sum(1, keepdim=True) / norm
    return (dw - v * along / norm) * g / norm, along


CHANNELS = (Spec("6"), Spec("6"))
RUNNING = (Spec("6", grad=False), Spec("6", low=0.5, high=2.0, grad=False))
IMAGES = [{"n": 3, "h": 5, "w": 4}, {"n": 1, "h": 5, "w": 1}, {"n": 4, "h": 1, "w": 1}, {"n": 2, "h": 7, "w": 3}]
# Not 0: PyTorch's weight norm of no elements crashes. The gradient over one element is nothing but rounding error.
WEIGHTS = [{"o": 3, "i": 5, "k": 2}, {"o": 1, "i": 2, "k": 1}, {"o": 1, "i": 7, "k": 3}, {"o": 9, "i": 3, "k": 4}]
MIDDLE = [{"o": 3, "i": 5, "k": 2}, {"o": 2, "i": 1, "k": 1}, {"o": 1, "i": 3, "k": 4}]
POSITIVE = {"low": 0.5, "high": 2.0}

CASES = [
    OpCase(
        "",
        "LayerNormalization",
        (Spec("b s 8", FLOAT), Spec("8", FLOAT), Spec("8", FLOAT)),
        lambda x, w, b: (F.layer_norm(x, (8,), w, b, EPS), None, None),
        {"epsilon": EPS},
        specials=True,
    ),
    OpCase(
        "",
        "LayerNormalization",
        (Spec("b s 8", FLOAT), Spec("8", FLOAT)),
        lambda x, w: (F.layer_norm(x, (8,), w, None, EPS), None, None),
        {"epsilon": EPS},
        label="no-bias",
    ),
    OpCase(
        "",
        "LayerNormalization",
        (Spec("b s h", FLOAT), Spec("s h", FLOAT), Spec("s h", FLOAT)),
        lambda x, w, b: (F.layer_norm(x, w.shape, w, b, EPS), None, None),
        {"epsilon": EPS, "axis": 1},
        label="symbolic",
        sizes=[{"b": 3, "s": 5, "h": 2}, {"b": 1, "s": 1, "h": 3}, {"b": 0, "s": 2, "h": 3}, {"b": 2, "s": 1, "h": 9}],
    ),
    OpCase(
        "onnxtrain",
        "LayerNormalization",
        (Spec("b s 8"), Spec("8"), Spec("8")),
        lambda x, w, b: (F.layer_norm(x, (8,), w, b, EPS), None, None),
        {"epsilon": EPS},
        specials=True,
    ),
    OpCase(
        "onnxtrain", "LayerNormalization", (Spec("b s 8"),), with_grad_of_layer_norm, {"epsilon": EPS}, label="plain"
    ),
    OpCase(
        "onnxtrain",
        "LayerNormalization",
        (Spec("b s h"), Spec("b s h"), Spec("b s h")),
        lambda x, w, b: (F.layer_norm(x, x.shape, w, b, EPS), None, None),
        {"epsilon": EPS, "axis": 0},
        label="whole",
        sizes=[{"b": 3, "s": 5, "h": 2}, {"b": 1, "s": 1, "h": 3}],
    ),
    OpCase(
        "onnxtrain",
        "LayerNormalization",
        (Spec("b s 8", torch.bfloat16), Spec("8", FLOAT), Spec("8", FLOAT)),
        mixed_layer_norm,
        {"epsilon": EPS},
        label="mixed",
        sizes=ROWS,
        bodies=False,  # onnxruntime does not accept bfloat16 from numpy
    ),
    OpCase(
        "onnxtrain",
        "LayerNormalization",
        (Spec("b s 8", torch.float16), Spec("8", FLOAT), Spec("8", FLOAT)),
        mixed_layer_norm,
        {"epsilon": EPS},
        label="half",
        sizes=ROWS,
        differentiate=False,  # PyTorch's own gradient has an error of 0.1 %, that of the body has not
    ),
    OpCase(
        "com.microsoft",
        "LayerNormalizationGrad",
        (Spec("b s 8"), Spec("b s 8"), Spec("8"), Spec("b s 1"), Spec("b s 1", **POSITIVE)),
        layer_norm_grad,
        sizes=ROWS,
    ),
    OpCase(
        "com.microsoft",
        "SimplifiedLayerNormalization",
        (Spec("b s 8"), Spec("8")),
        rms_reference,
        {"epsilon": EPS},
        specials=True,
    ),
    OpCase(
        "com.microsoft",
        "SimplifiedLayerNormalization",
        (Spec("b s 8"), None),
        rms_reference,
        {"epsilon": EPS},
        label="plain",
    ),
    OpCase(
        "com.microsoft",
        "SimplifiedLayerNormalization",
        (Spec("b s 8", torch.bfloat16), Spec("8", FLOAT)),
        rms_reference,
        {"epsilon": EPS},
        label="mixed",
        sizes=ROWS,
        bodies=False,  # onnxruntime does not accept bfloat16 from numpy
    ),
    OpCase(
        "com.microsoft",
        "SimplifiedLayerNormalizationGrad",
        (Spec("b s 8"), Spec("b s 8"), Spec("8"), Spec("b s 1", **POSITIVE)),
        rms_grad,
    ),
    OpCase(
        "com.microsoft",
        "SimplifiedLayerNormalizationGrad",
        (Spec("b s 8"), Spec("b s 8"), Spec("8"), Spec("b s 1", **POSITIVE), Spec("b s 8")),
        rms_grad,
        label="sum",
    ),
    OpCase(
        "com.microsoft",
        "BatchNormInternal",
        (Spec("n 6 h w"), *CHANNELS, *RUNNING),
        batch_norm,
        {"epsilon": EPS, "momentum": 0.75},
        sizes=IMAGES,
        specials=True,
    ),
    OpCase(
        "com.microsoft",
        "BatchNormInternal",
        (Spec("n 6"), *CHANNELS, *RUNNING),
        batch_norm,
        {"epsilon": EPS, "momentum": 0.75},
        sizes=[{"n": 3}, {"n": 2}, {"n": 0}, {"n": 9}],
        label="2d",
    ),
    OpCase(
        "com.microsoft",
        "BatchNormInternal",
        (Spec("n 6 h"), None, None, None, None),
        batch_norm,
        {"epsilon": EPS, "momentum": 0.75},
        sizes=IMAGES,
        label="plain",
    ),
    OpCase(
        "com.microsoft",
        "BatchNormInternal",
        (Spec("n 6 h w"), *CHANNELS, *RUNNING, Spec("n 6 h w")),
        lambda *inputs: (batch_norm(*inputs[:5])[0] + inputs[5], *batch_norm(*inputs[:5])[1:]),
        {"epsilon": EPS, "momentum": 0.75},
        sizes=IMAGES,
        label="sum",
    ),
    OpCase(
        "com.microsoft",
        "BatchNormInternal",
        (Spec("n 6 h w"), *CHANNELS, *RUNNING, Spec("n 6 h w")),
        batch_norm_then_relu,
        {"epsilon": EPS, "momentum": 0.75, "activation": "Relu"},
        sizes=IMAGES,
        label="sum relu",
    ),
    OpCase(
        "com.microsoft",
        "BatchNormInternal",
        (Spec("n 6 h"), *CHANNELS, None, None, None),
        batch_norm_then_relu,
        {"epsilon": EPS, "momentum": 0.75, "activation": "Relu"},
        sizes=IMAGES,
        label="relu",
    ),
    OpCase(
        "com.microsoft",
        "BatchNormalizationGrad",
        (Spec("n 6 h w"), Spec("n 6 h w"), Spec("6"), Spec("6"), Spec("6", **POSITIVE)),
        lambda *inputs: (*batch_norm_grad(*inputs), None),
        {"epsilon": EPS},
        sizes=IMAGES,
    ),
    OpCase(
        "com.microsoft",
        "BatchNormalizationGrad",
        (Spec("n 6 h w"), Spec("n 6 h w"), Spec("6"), Spec("6"), Spec("6", **POSITIVE), Spec("n 6 h w")),
        masked_batch_norm_grad,
        {"epsilon": EPS, "output_mask": (1, 1, 1, 1)},
        sizes=IMAGES,
        label="relu",
    ),
    OpCase(
        "com.microsoft",
        "BatchNormalizationGrad",
        (*[Spec("n 6 h w")] * 2, Spec("6"), Spec("6"), Spec("6", **POSITIVE), *[Spec("n 6 h w")] * 2),
        lambda dy, *inputs: masked_batch_norm_grad(dy + inputs[5], *inputs[:5]),
        {"epsilon": EPS, "output_mask": (1, 1, 1, 1)},
        sizes=IMAGES,
        label="sum relu",
    ),
    OpCase(
        "com.microsoft",
        "BatchNormalizationGrad",
        (*[Spec("n 6 h w")] * 2, Spec("6"), Spec("6"), Spec("6", **POSITIVE), None, Spec("n 6 h w")),
        lambda dy, x, scale, mean, inv_std, y, added: (*batch_norm_grad(dy + added, x, scale, mean, inv_std), None),
        {"epsilon": EPS},
        sizes=IMAGES,
        label="sum",
    ),
    OpCase(
        "",
        "BatchNormalization",
        (Spec("n 6 h w"), *CHANNELS, *RUNNING),
        lambda x, w, b, mean, var: F.batch_norm(x, mean, var, w, b, False, 0.0, EPS),
        {"epsilon": EPS},
        specials=True,
    ),
    OpCase(
        "onnxtrain",
        "BatchNormalizationInferenceGrad",
        (Spec("n 6 h w"), Spec("n 6 h w"), Spec("6"), *RUNNING),
        inference_grad,
        {"epsilon": EPS},
    ),
    OpCase(
        "onnxtrain",
        "GroupNormalization",
        (Spec("n 6 h w"), *CHANNELS),
        lambda x, w, b: (F.group_norm(x, 3, w, b, EPS), None, None),
        {"epsilon": EPS, "num_groups": 3},
        sizes=[*IMAGES, {"n": 0, "h": 2, "w": 3}],
        specials=True,
    ),
    OpCase(
        "onnxtrain",
        "GroupNormalization",
        (Spec("n 6 h"), None, None),
        lambda x, w, b: (F.group_norm(x, 2, w, b, EPS), None, None),
        {"epsilon": EPS, "num_groups": 2},
        sizes=IMAGES,
        label="plain",
    ),
    OpCase(
        "onnxtrain",
        "GroupNormalizationGrad",
        (Spec("n 6 h w"), Spec("n 6 h w"), Spec("6"), Spec("n 3"), Spec("n 3", **POSITIVE)),
        group_norm_grad,
        {"num_groups": 3},
        sizes=IMAGES,
    ),
    OpCase("onnxtrain", "WeightNorm", (Spec("o i"), Spec("o 1")), weight_norm(0), sizes=WEIGHTS),
    OpCase(
        "onnxtrain",
        "WeightNorm",
        (Spec("o i k"), Spec("1 1 k")),
        weight_norm(2),
        {"dim": 2},
        sizes=WEIGHTS,
        label="last",
    ),
    OpCase(
        "onnxtrain",
        "WeightNorm",
        (Spec("o i k"), Spec("1 i 1")),
        weight_norm(1),
        {"dim": 1},
        sizes=MIDDLE,
        label="middle",
    ),
    OpCase(
        "onnxtrain", "WeightNorm", (Spec("o i"), Spec("")), weight_norm(-1), {"dim": -1}, sizes=WEIGHTS, label="all"
    ),
    OpCase(
        "onnxtrain",
        "WeightNormGrad",
        (Spec("o i"), Spec("o i"), Spec("o 1"), Spec("o 1", **POSITIVE)),
        weight_norm_grad,
        sizes=WEIGHTS,
    ),
]
