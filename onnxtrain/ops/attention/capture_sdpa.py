"""Capture of torch.nn.functional.scaled_dot_product_attention.

A call for which PyTorch may choose its flash kernel becomes FlashAttention; with dropout only on a GPU, whose kernels
sample the dropout mask. A call that PyTorch runs in its math path for all sizes (dropout on a CPU, ranks other than 4)
becomes the nodes of that path in the same order, so that the same random numbers are sampled; the pass `fuse_attention`
fuses them unless bitwise equality with eager is requested.
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
from onnxtrain.ops.attention.heads import group_size, repeat_heads, strip_repeat
from onnxtrain.ops.attention.masks import additive_mask, causal_mask
from onnxtrain.ops.attention.scores import scale_as_attribute, scale_value, score_dtype
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.random.dropout import dropout_nodes
from onnxtrain.ops.registry import register_captures


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
    is_empty = any(0 in sizes.dims_of(x) for x in (query, key, value))
    mask = None if is_empty else attn_mask  # PyTorch does not read it then: it has no gradient and may have any shape
    if mask is not None and dtype_of(mask) == ir.DataType.BOOL:
        mask = additive_mask(op, mask, dtype_of(query))
    groups = group_size(query, key) if enable_gqa else 1
    drops = dropout_p > 0
    if drops and op.device == "cuda" and 0 < dropout_p < 1 and not _may_need_gradient(mask):
        drops = False  # PyTorch's kernels for a GPU sample the dropout mask themselves
    switched_off = op.device == "cpu" and not torch.backends.cuda.flash_sdp_enabled()  # a GPU has other kernels, too
    if drops or is_empty or switched_off or not _has_flash_form(query, key, value, mask, groups):
        return _math_path(op, query, key, value, mask, dropout_p, is_causal, scale, groups)
    query, scale = scale_as_attribute(op, query, scale)
    (k, groups_k), (v, groups_v) = strip_repeat(op, key), strip_repeat(op, value)
    if groups_k == groups_v and not dropout_p > 0:
        # The kernel shares heads: the model's repeat_kv is not needed. With dropout it is eager's kernel for what the
        # model gives it, because another one would sample another mask.
        key, value = k, v
    attributes = {"scale": scale, "is_causal": int(is_causal) or None}
    if dropout_p > 0:
        ratio, training = op.scalar(dropout_p, ir.DataType.DOUBLE), op.scalar(True, ir.DataType.BOOL)
        return op.own.FlashAttentionDropout(query, key, value, mask, ratio, training, **attributes)[0]
    return op.own.FlashAttention(query, key, value, mask, **attributes)[0]


def _may_need_gradient(mask: ir.Value | None) -> bool:
    """Return whether a mask is computed from floating-point inputs of the graph: a learned bias."""
    visited: set[ir.Value] = set()
    rest = [mask]
    while rest:
        value = rest.pop()
        if value is None or value in visited:
            continue
        visited.add(value)
        node = value.producer()
        if node is None and value.const_value is None and is_float(dtype_of(value)):
            return True
        if is_float(dtype_of(value)) and node is not None:
            rest.extend(node.inputs)
    return False


def _has_flash_form(q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value | None, groups: Size) -> bool:
    """Return whether ranks and sizes allow PyTorch's flash kernel; its other conditions are checked at run time."""
    if any(rank_of(x) != 4 for x in (q, k, v)):
        return False
    if mask is not None and rank_of(mask) not in (2, 4):
        return False
    shapes = [sizes.dims_of(x) for x in (q, k, v)]
    batch, heads, width = ({shape[axis] for shape in shapes} for axis in (0, 1, 3))
    return _may_be_equal(batch) and (groups != 1 or _may_be_equal(heads)) and _may_be_equal(width)


def _may_be_equal(distinct: set[Size]) -> bool:
    return sum(isinstance(size, int) for size in distinct) <= 1 and (1 not in distinct or len(distinct) == 1)


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
    """Build aten._scaled_dot_product_attention_math: q and k are each scaled by √scale, half types run in float32."""
    dtype = dtype_of(q)
    (k, groups_k), (v, groups_v) = ((k, groups), (v, groups)) if groups != 1 else (strip_repeat(op, x) for x in (k, v))
    inner = dtype if torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed() else score_dtype(dtype)
    q, k, v = (cast(op, x, inner) for x in (q, k, v))
    root = scale_value(op, q, scale, 0.5)
    positive = root if scale is None or scale >= 0 else op.scalar(math.sqrt(-scale), like=q)
    k = repeat_heads(op, op.Mul(k, positive), groups_k)
    scores = op.ms.FusedMatMul(op.Mul(q, root), k, transB=1)
    if is_causal:
        mask = causal_mask(op, sizes.dims_of(q)[-2], sizes.dims_of(k)[-2], inner)
    if mask is not None:
        scores = op.Add(scores, cast(op, mask, inner))
    p = op.own.SafeSoftmax(scores, axis=-1)
    if dropout_p > 0:
        p, _ = dropout_nodes(op, p, dropout_p)
    return cast(op, op.MatMul(p, repeat_heads(op, v, groups_v)), dtype)


register_captures({"aten.scaled_dot_product_attention.default": _capture})
