"""What PyTorch's scaled_dot_product_attention becomes.

Where PyTorch may take its flash kernel it is FlashAttention. What PyTorch computes in its math path whatever the sizes
(dropout, other ranks) becomes the nodes of that path, in its order, so that the same random numbers are drawn; the pass
`fuse_attention` makes one op of them where eager's bits are not asked for.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import dtype_of, is_float, rank_of
from onnxtrain.ops.attention.parts import (
    accumulated,
    additive,
    causal_mask,
    groups_of,
    repeated,
    scale_of,
    unrepeated,
    with_attribute,
)
from onnxtrain.ops.constructors import cast
from onnxtrain.ops.random.dropout import dropped_out
from onnxtrain.ops.registry import compose


def _capture(
    op: Builder,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    attn_mask: ir.Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if not is_float(dtype_of(query)) or isinstance(scale, str):
        return NotImplemented
    mask = attn_mask
    if mask is not None and dtype_of(mask) == ir.DataType.BOOL:
        mask = additive(op, mask, dtype_of(query))
    groups = groups_of(query, key) if enable_gqa else 1
    if dropout_p > 0 or not _has_flash_form(query, key, value, mask, groups):
        return _math_path(op, query, key, value, mask, dropout_p, is_causal, scale, groups)
    query, scale = with_attribute(op, query, scale)
    (k, groups_k), (v, groups_v) = unrepeated(op, key), unrepeated(op, value)
    if groups_k == groups_v:  # heads that a model repeats by itself are shared in the kernel
        key, value = k, v
    return op.own.FlashAttention(query, key, value, mask, scale=scale, is_causal=int(is_causal) or None)[0]


def _has_flash_form(q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value | None, groups: Size) -> bool:
    """Whether PyTorch may take its flash kernel: what it asks of ranks and sizes. The rest is asked when it runs."""
    if not torch.backends.cuda.flash_sdp_enabled() or any(rank_of(x) != 4 for x in (q, k, v)):
        return False
    if mask is not None and rank_of(mask) not in (2, 4):
        return False
    shapes = [sizes.dims_of(x) for x in (q, k, v)]
    batch, heads, width = ({shape[axis] for shape in shapes} for axis in (0, 1, 3))
    return _may_be_equal(batch) and (groups != 1 or _may_be_equal(heads)) and _may_be_equal(width)


def _may_be_equal(found: set[Size]) -> bool:
    return sum(isinstance(size, int) for size in found) <= 1 and (1 not in found or len(found) == 1)


def _math_path(
    op: Builder,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    mask: ir.Value | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    groups: Size,
) -> ir.Value:
    """The nodes of aten._scaled_dot_product_attention_math: √scale on q and on k, half types computed in float."""
    wanted = dtype_of(q)
    (k, groups_k), (v, groups_v) = ((k, groups), (v, groups)) if groups != 1 else (unrepeated(op, x) for x in (k, v))
    inner = wanted if torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed() else accumulated(wanted)
    q, k, v = (cast(op, x, inner) for x in (q, k, v))
    root = scale_of(op, q, scale, 0.5)
    positive = root if scale is None or scale >= 0 else op.scalar(math.sqrt(-scale), like=q)
    k = repeated(op, op.Mul(k, positive), groups_k)
    scores = op.ms.FusedMatMul(op.Mul(q, root), k, transB=1)
    if is_causal:
        mask = causal_mask(op, sizes.dims_of(q)[-2], sizes.dims_of(k)[-2], inner)
    if mask is not None:
        scores = op.Add(scores, cast(op, mask, inner))
    p = op.own.SafeSoftmax(scores, axis=-1)
    if dropout_p > 0:
        p, _ = dropped_out(op, p, dropout_p)
    return cast(op, op.MatMul(p, repeated(op, v, groups_v)), wanted)


compose({"aten.scaled_dot_product_attention.default": _capture})
