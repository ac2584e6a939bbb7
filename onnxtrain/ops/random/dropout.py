"""Dropout, and how it samples its mask.

    Dropout(x, ratio, training_mode) -> y = x * mask / (1 - ratio), mask        mask is bool, true with 1 - ratio
    DropoutGrad(dy, mask, ratio, training_mode) -> dx = dy * mask / (1 - ratio)

The metadata `rng` of a node says which random bits it samples:

    torch (default)   eager PyTorch's: F.dropout(x, ratio) after the same seed gives the same y, bit for bit
    fast              16 bits per element, computed from a key that the same generator samples (`keyed_bits.py`), so
                      that seeds and saved RNG states apply too. The ratio is rounded to a multiple of 1/65536 and the
                      scale follows the rounded ratio: E[y] = x exactly. With the pass `regenerate_dropout_masks` such
                      a node saves the key only

On a CPU, the pass `pack_dropout_masks` lets a node that samples eager's bits save its mask in bits
(`packed_dropout.py`). Other random tensors: `onnx_random.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import MICROSOFT, ONNX, TensorType, constant_of, dtype_of, is_float, type_of
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.constructors import define_pure
from onnxtrain.ops.definition import (
    STANDARD,
    Call,
    Effects,
    Gradient,
    Kernel,
    NodeView,
    OpDef,
    numel,
)
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.index.creation import filled
from onnxtrain.ops.interfaces.recompute import REPLAYS, Replay
from onnxtrain.ops.random.keyed_bits import DROP_LEVELS, keep_mask, sample_key
from onnxtrain.ops.registry import define

_DEFAULT_RATIO = 0.5

MASKS = "masks"  # metadata of a node whose mask may be saved in bits: "packed"


# Facts from a node's constants


def _number(value: ir.Value | None, default: Any) -> Any:
    """Return a 0-dimensional input as a Python number; None if it is not constant."""
    if value is None:
        return default
    if "scalar" in value.meta:
        return value.meta["scalar"]
    constant = constant_of(value)
    return None if constant is None else constant.item()


def drops_elements(n: NodeView) -> bool:
    """Return whether the node is known to drop some elements, but not all."""
    ratio = _number(n.ratio, _DEFAULT_RATIO)
    return ratio is not None and 0 < ratio < 1 and bool(_number(n.training_mode, False))


def uses_fast_rng(n: NodeView) -> bool:
    """Return whether the node samples, with 16 bits per element."""
    is_random = Effects.RANDOM in n.definition.effects
    if not is_random or n.node.metadata_props.get("rng") != "fast" or not drops_elements(n):
        return False
    share = round(float(_number(n.ratio, _DEFAULT_RATIO)) * DROP_LEVELS)
    return 0 < share < DROP_LEVELS


def drop_ratio(n: NodeView) -> float:
    """Return the share of elements that the node drops."""
    ratio = float(_number(n.ratio, _DEFAULT_RATIO))
    return round(ratio * DROP_LEVELS) / DROP_LEVELS if uses_fast_rng(n) else ratio


@functools.cache
def dropout_scale(ratio: float, dtype: torch.dtype) -> float:
    """Return 1 / (1 - ratio) as eager PyTorch rounds it: by dividing a tensor of ones by 1 - ratio."""
    return float(torch.ones((), dtype=dtype).div_(1 - ratio).item())


# Kernels. The mask is uint8 viewed as bool, because PyTorch's loops over bool are slow. Milliseconds for forward and
# backward of [16, 12, 128, 128] and of [2048, 384], float32, 2 threads of a Xeon at 2.8 GHz: eager PyTorch 26.1 and
# 10.9; fast bits with a bool mask 13.0 and 2.1, with uint8 viewed as bool 7.9 and 1.5, with float noise, which takes
# four times the memory until backward, 7.1 and 1.4.


_SMALL = 2048  # elements; below this the number of calls decides the time


def apply_mask(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    if mask.numel() < _SMALL:
        return x.mul(mask).mul_(scale)
    return mask.view(torch.uint8).to(x.dtype).mul_(x).mul_(scale)


def torch_mask(x: torch.Tensor, keep: float) -> torch.Tensor:
    """Sample the mask of F.dropout on a CPU: bernoulli_ gives the same elements in every dtype."""
    return torch.empty_like(x, dtype=torch.bool).bernoulli_(keep)


def fast_mask(x: torch.Tensor, dropped: int) -> torch.Tensor:
    """Sample a mask, dense, with the strides of x. An element is dropped for `dropped` of its 65536 possible values."""
    kept = keep_mask(sample_key(), x.numel(), dropped).view(x.shape)
    mask = kept if x.is_contiguous() else torch.empty_like(x, dtype=torch.uint8).copy_(kept)
    return mask.view(torch.bool)


def dropout(x: torch.Tensor, keep: float, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply dropout with the random bits of F.dropout."""
    mask = torch_mask(x, keep)
    return apply_mask(x, mask, scale), mask


def fast_dropout(x: torch.Tensor, dropped: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply dropout with 16 random bits per element."""
    mask = fast_mask(x, dropped)
    return apply_mask(x, mask, scale), mask


def reads_ratio_on_host(n: NodeView) -> bool:
    """Return whether the kernel for dynamic ratio and mode reads one of them on the host."""
    return any(v is not None and v.const_value is None for v in (n.ratio, n.training_mode))


def dropout_of_dynamic_ratio(
    x: torch.Tensor, ratio: torch.Tensor | float | None, training: torch.Tensor | bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply dropout whose ratio or mode is known at run time only, or that samples nothing."""
    ratio = _DEFAULT_RATIO if ratio is None else float(ratio)
    if not training or ratio == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if ratio == 1:
        return x * 0, torch.zeros_like(x, dtype=torch.bool)
    return dropout(x, 1 - ratio, dropout_scale(ratio, x.dtype))


def dropout_backward_of_dynamic_ratio(
    dy: torch.Tensor,
    mask: torch.Tensor,
    ratio: torch.Tensor | float | None,
    training: torch.Tensor | bool | None,
) -> torch.Tensor:
    """Return the gradient of `dropout_of_dynamic_ratio` with respect to x."""
    ratio = _DEFAULT_RATIO if ratio is None else float(ratio)
    if not training or ratio == 0:
        return dy.clone()
    return apply_mask(dy, mask, 0.0 if ratio == 1 else dropout_scale(ratio, dy.dtype))


def _lower_dropout(n: NodeView, x: Any, ratio: Any, training: Any) -> Call:
    return Call(dropout, x, 1 - drop_ratio(n), dropout_scale(drop_ratio(n), TORCH_DTYPES[dtype_of(n.x)]))


def _lower_fast_dropout(n: NodeView, x: Any, *_: Any) -> Call:
    return Call(
        fast_dropout, x, round(drop_ratio(n) * DROP_LEVELS), dropout_scale(drop_ratio(n), TORCH_DTYPES[dtype_of(n.x)])
    )


# Dropout


def _dropout_types(n: NodeView) -> Sequence[TensorType]:
    return type_of(n.x), TensorType(ir.DataType.BOOL, sizes.dims_of(n.x))


def _dropout_axes(n: NodeView) -> str:
    """Elementwise in the first input; ratio and mode are 0-dimensional."""
    return f"...{', ' * (len(n.node.inputs) - 1)} -> ..., ..."


def _dropout_gradient(op: Builder, n: NodeView, dy: ir.Value | None, dmask: ir.Value | None) -> list[ir.Value | None]:
    return [None if dy is None else _masked_nodes(op, n, dy, n.mask), None, None][: len(n.node.inputs)]


def _masked_nodes(op: Builder, n: NodeView, x: ir.Value, mask: ir.Value) -> ir.Value:
    """Apply the mask and scale of Dropout to x; the kernels of Dropout and DropoutGrad compute the same."""
    ratio = op.scalar(drop_ratio(n), ir.DataType.DOUBLE) if drops_elements(n) else n.ratio
    return op.ms.DropoutGrad(x, mask, ratio, n.training_mode)


def dropout_nodes(op: Builder, x: ir.Value, ratio: float, training: bool = True) -> tuple[ir.Value, ir.Value]:
    """Build nodes for `F.dropout`: its result and its mask. They sample nothing where PyTorch samples nothing."""
    if training and 0 < ratio < 1:
        # A double, so that the ratio is exactly PyTorch's in a file too.
        y, mask = op.Dropout(x, op.scalar(ratio, ir.DataType.DOUBLE), op.scalar(True, ir.DataType.BOOL))
        return y, mask
    keeps_all = not training or ratio == 0
    y = x if keeps_all else op.Mul(x, op.scalar(0.0, like=x))
    return y, filled(op, sizes.dims_of(x), keeps_all, ir.DataType.BOOL)


def _capture_native_dropout(op: Builder, x: ir.Value, ratio: float, training: bool | None) -> Any:
    return dropout_nodes(op, x, ratio, training is not False) if is_float(dtype_of(x)) else NotImplemented


def _capture_dropout(op: Builder, x: ir.Value, ratio: float, training: bool) -> Any:
    return dropout_nodes(op, x, ratio, training)[0] if is_float(dtype_of(x)) else NotImplemented


DROPOUT = define(
    OpDef(
        domain=ONNX,
        name="Dropout",
        inputs=("x", "ratio?", "training_mode?"),
        outputs=("y", "mask"),
        attributes={"seed": None},
        from_torch={"aten.native_dropout.default": _capture_native_dropout, "aten.dropout.default": _capture_dropout},
        shapes=_dropout_types,
        body=STANDARD,
        gradient=(Gradient(_dropout_gradient, reads=("mask",)),),
        nondiff_inputs=frozenset({"ratio", "training_mode"}),
        kernels=(
            Kernel(
                lower=lambda n, x, ratio, training: Call(torch.native_dropout, x, drop_ratio(n), True),
                applies=lambda n, device: device == "cuda" and drops_elements(n),
            ),
            Kernel(lower=_lower_fast_dropout, applies=lambda n, device: uses_fast_rng(n)),
            Kernel(lower=_lower_dropout, applies=lambda n, device: drops_elements(n)),
            Kernel(
                lower=lambda n, *arguments: Call(dropout_of_dynamic_ratio, *arguments),
                accepts_scalars=True,
                synchronizes=reads_ratio_on_host,
            ),
        ),
        axes=_dropout_axes,
        effects=Effects.RANDOM,
        aliases={},
    )
)
REPLAYS.register(DROPOUT, Replay(("mask",), lambda op, n, mask: _masked_nodes(op, n, n.x, mask)))


# DropoutGrad


def _grad_axes(n: NodeView) -> str:
    return f"..., ...{', ' * (len(n.node.inputs) - 2)} -> ..."


def _grad_body(op: Builder, n: NodeView) -> ir.Value:
    """If training_mode is false, Dropout returns its input, and the gradient is dy."""
    dtype = dtype_of(n.dy)
    ratio = op.scalar(_DEFAULT_RATIO, dtype) if n.ratio is None else cast(op, n.ratio, dtype)
    scale = op.Reciprocal(op.Sub(op.scalar(1.0, dtype), ratio))
    dx = op.Mul(op.Mul(cast(op, n.mask, dtype), n.dy), scale)
    if n.training_mode is None:
        return op.Identity(n.dy)
    return dx if _number(n.training_mode, False) else op.Where(n.training_mode, dx, n.dy)


def _lower_grad(n: NodeView, dy: Any, mask: Any, ratio: Any, training: Any) -> Call:
    return Call(apply_mask, dy, mask, dropout_scale(drop_ratio(n), TORCH_DTYPES[dtype_of(n.dy)]))


def _lower_native_grad(n: NodeView, dy: Any, mask: Any, ratio: Any, training: Any) -> Call:
    return Call(torch.ops.aten.native_dropout_backward.default, dy, mask, 1 / (1 - drop_ratio(n)))


def _grad_flops(n: NodeView) -> Size:
    return sizes.multiply(2, numel(n.dy))


DROPOUT_GRAD = define_pure(
    MICROSOFT,
    "DropoutGrad",
    ("dy", "mask", "ratio?", "training_mode?"),
    ("dx",),
    shapes=lambda n: (type_of(n.dy),),
    body=_grad_body,
    kernels=(
        Kernel(lower=_lower_native_grad, applies=lambda n, device: device == "cuda" and drops_elements(n)),
        Kernel(lower=_lower_grad, applies=lambda n, device: drops_elements(n)),
        Kernel(
            lower=lambda n, *arguments: Call(dropout_backward_of_dynamic_ratio, *arguments),
            accepts_scalars=True,
            synchronizes=reads_ratio_on_host,
        ),
    ),
    axes=_grad_axes,
    flops=_grad_flops,
)
