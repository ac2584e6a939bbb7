"""Attention and RotaryEmbedding of ONNX's own domain, which exporters write for transformers.

    Attention(q, k, v, mask, past_k, past_v) -> y, present_k, present_v, scores
        q[b, h, s, d], k[b, g, t, d], v[b, g, t, e] -> y[b, h, s, e]      h / g heads share k and v
        y = softmax(cap(scale * q @ k^T) + mask) @ v                      a fully masked row gives 0
    RotaryEmbedding(x, cos, sin, positions) -> y
        pairs of x's elements (x1, x2) become (x1 cos - x2 sin, x1 sin + x2 cos)

Both also take [b, s, h * d]. Past keys and values are concatenated before the present ones. With `is_causal`, a query
attends to no later key. `qk_matmul_output_mode` selects the output `scores`: raw (0), capped (1), masked (2), or after
the softmax (3).

Sources: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; Su et al. 2021, https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import TensorType, dtype_of, rank_of, type_of
from onnxtrain.ops.attention.heads import group_size, repeat_heads
from onnxtrain.ops.body_parts import cast, mul_scalar, reshaped
from onnxtrain.ops.constructors import define_by_body, no_axes
from onnxtrain.ops.definition import Call, NodeView, numel
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.interfaces.stock_kernels import STOCK_KERNELS
from onnxtrain.ops.reshape.dims import transposed, unsqueezed
from onnxtrain.ops.reshape.join import concatenated, split
from onnxtrain.ops.reshape.rows import arange, vector_along
from onnxtrain.torch_compat import aten_kernels

Tensor = torch.Tensor
_RAW, _CAPPED, _MASKED, _PROBABILITIES = range(4)


# Heads


def _heads(n: NodeView, name: str) -> int:
    count = getattr(n, name)
    if not count:
        raise GraphError(
            f"{n.definition.name} of inputs with three dimensions has no number of heads",
            expected=f"a positive {name}",
            got=str(count),
        )
    return int(count)


def _shape_with_heads(x: ir.Value, heads: Callable[[], int]) -> Sizes:
    """Return the shape [b, h, s, d] of x; `heads` returns h if x has three dimensions."""
    shape = sizes.dims_of(x)
    if len(shape) == 4:
        return shape
    batch, steps, hidden = shape
    count = heads()
    return batch, count, steps, sizes.floor_divide(hidden, count)


def _split_heads(op: Builder, x: ir.Value, heads: Callable[[], int]) -> ir.Value:
    """Return x[b, s, h * d] as [b, h, s, d]."""
    if rank_of(x) == 4:
        return x
    batch, count, steps, size = _shape_with_heads(x, heads)
    return transposed(op, reshaped(op, x, (batch, steps, count, size)), [0, 2, 1, 3])


def _merge_heads(op: Builder, x: ir.Value, rank: int) -> ir.Value:
    """Return x[b, h, s, d] as [b, s, h * d] if the inputs have `rank` 3."""
    if rank == 4:
        return x
    batch, count, steps, size = sizes.dims_of(x)
    return reshaped(op, transposed(op, x, [0, 2, 1, 3]), (batch, steps, sizes.multiply(count, size)))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return x[b, s, h * d] as [b, h, s, d]."""
    if x.ndim == 4:
        return x
    apart: Tensor = x.unflatten(2, (heads, -1) if x.numel() else (heads, x.shape[2] // heads))
    return apart.transpose(1, 2)


# Attention


def _query_shape(n: NodeView) -> Sizes:
    return _shape_with_heads(n.q, lambda: _heads(n, "q_num_heads"))


def _present_shape(n: NodeView, value: ir.Value, past: ir.Value | None) -> Sizes:
    batch, heads, steps, size = _shape_with_heads(value, lambda: _heads(n, "kv_num_heads"))
    return batch, heads, steps if past is None else sizes.add(sizes.dims_of(past)[2], steps), size


def _attention_types(n: NodeView) -> Sequence[TensorType]:
    dtype = dtype_of(n.q)
    batch, heads, steps, _ = _query_shape(n)
    keys, values = _present_shape(n, n.k, n.past_k), _present_shape(n, n.v, n.past_v)
    y: Sizes = (batch, heads, steps, values[3])
    if rank_of(n.q) == 3:
        y = (batch, steps, sizes.multiply(heads, values[3]))
    types = [(dtype, y), (dtype, keys), (dtype_of(n.v), values), (dtype, (batch, heads, steps, keys[2]))]
    return [TensorType(element_type, shape) for element_type, shape in types[: len(n.node.outputs)]]


def _scale(n: NodeView, head: Size) -> float:
    if n.scale is not None:
        return float(n.scale)
    if isinstance(head, str):
        raise GraphError(
            "Attention without a scale has heads of unknown size",
            expected="a constant last dimension of q",
            got=head,
            todo="set its attribute scale",
        )
    return 1 / math.sqrt(head)


def _causal_mask(op: Builder, rows: Size, columns: Size, past: Size) -> ir.Value:
    """Return the bool mask [rows, columns], true where key j is not later than query i: j <= i + past."""
    queries = op.Add(vector_along(op, arange(op, rows), 0, 2), op.size(past))
    return op.LessOrEqual(vector_along(op, arange(op, columns), 1, 2), queries)


def _masked(op: Builder, n: NodeView, scores: ir.Value) -> ir.Value:
    minus_infinity = op.scalar(-math.inf, like=scores)
    if n.is_causal:
        rows, columns = sizes.dims_of(scores)[2:]
        past = 0 if n.past_k is None else sizes.dims_of(n.past_k)[2]
        scores = op.Where(_causal_mask(op, rows, columns, past), scores, minus_infinity)
    if n.mask is None:
        return scores
    if dtype_of(n.mask) == ir.DataType.BOOL:
        return op.Where(n.mask, scores, minus_infinity)
    return op.Add(scores, cast(op, n.mask, dtype_of(scores)))


def _attention_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    q = _split_heads(op, n.q, lambda: _heads(n, "q_num_heads"))
    k, v = (_split_heads(op, x, lambda: _heads(n, "kv_num_heads")) for x in (n.k, n.v))
    k, v = (x if past is None else concatenated(op, [past, x], 2) for x, past in ((k, n.past_k), (v, n.past_v)))
    group, head = group_size(q, k), sizes.dims_of(q)[3]
    keys = op.Transpose(repeat_heads(op, k, group), perm=[0, 1, 3, 2])
    stages = [mul_scalar(op, op.MatMul(q, keys), _scale(n, head))]
    stages.append(
        mul_scalar(op, op.Tanh(mul_scalar(op, stages[0], 1 / n.softcap)), n.softcap) if n.softcap else stages[0]
    )
    stages.append(_masked(op, n, stages[1]))
    wide = cast(op, stages[2], ir.DataType(n.softmax_precision or dtype_of(n.q)))
    stages.append(cast(op, op.own.SafeSoftmax(wide, axis=-1), dtype_of(n.q)))
    y = _merge_heads(op, op.MatMul(stages[3], repeat_heads(op, v, group)), rank_of(n.q))
    return (y, op.Identity(k), op.Identity(v), op.Identity(stages[n.qk_matmul_output_mode]))[: len(n.node.outputs)]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    past_k: Tensor | None,
    past_v: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, ...]:
    """Return y, the present keys and values, and the scores; `options` holds the node's attributes and its scale."""
    rank = q.ndim
    q = split_heads(q, options["q_heads"])
    k, v = (split_heads(x, options["kv_heads"]) for x in (k, v))
    past = 0 if past_k is None else past_k.shape[2]
    k, v = (x if cached is None else torch.cat([cached, x], 2) for x, cached in ((k, past_k), (v, past_v)))
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    keys, values = (x if group == 1 else x.repeat_interleave(group, 1) for x in (k, v))
    softcap = options["softcap"]
    stages = [(q @ keys.mT) * options["scale"]]
    stages.append(torch.tanh(stages[0] / softcap) * softcap if softcap else stages[0])
    scores = stages[1]
    if options["causal"]:
        visible = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril(past)
        scores = scores.masked_fill(~visible, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    stages.append(scores)
    stages.append(aten_kernels.safe_softmax(scores.to(options["precision"]), -1).to(q.dtype))
    y = stages[3] @ values
    return (y.transpose(1, 2).flatten(2) if rank == 3 else y), k, v, stages[options["mode"]]


def first_of_attention(*arguments: Any) -> Tensor:
    return attention(*arguments)[0]


def _lower_attention(n: NodeView, *inputs: Any) -> Call:
    dtype = TORCH_DTYPES[ir.DataType(n.softmax_precision) if n.softmax_precision else dtype_of(n.q)]
    options = {
        "q_heads": n.q_num_heads,
        "kv_heads": n.kv_num_heads,
        "scale": _scale(n, _query_shape(n)[3]),
        "softcap": n.softcap,
        "causal": bool(n.is_causal),
        "precision": dtype,
        "mode": n.qk_matmul_output_mode,
    }
    return Call(first_of_attention if len(n.node.outputs) == 1 else attention, *inputs, options)


def _attention_flops(n: NodeView) -> Size:
    keys = _present_shape(n, n.k, n.past_k)
    return sizes.multiply(4, numel(n.q), keys[2])


ATTENTION = define_by_body(
    "Attention",
    ("q", "k", "v", "mask?", "past_k?", "past_v?"),
    _attention_body,
    _lower_attention,
    outputs=("y", "present_k?", "present_v?", "scores?"),
    attributes={
        "is_causal": 0,
        "kv_num_heads": None,
        "q_num_heads": None,
        "qk_matmul_output_mode": _RAW,
        "scale": None,
        "softcap": 0.0,
        "softmax_precision": None,
    },
    shapes=_attention_types,
    aliases={1: 1, 2: 2},  # if there are no past keys and values
    axes=no_axes,
    flops=_attention_flops,
)
STOCK_KERNELS.register(ATTENTION, lambda n: dtype_of(n.q) == ir.DataType.FLOAT)


# RotaryEmbedding


def _rotary_body(op: Builder, n: NodeView) -> ir.Value:
    """Rotate x as [b, s, h, d]."""
    shape = sizes.dims_of(n.x)
    if len(shape) == 4:
        x = transposed(op, n.x, [0, 2, 1, 3])
    else:
        heads = _heads(n, "num_heads")
        x = reshaped(op, n.x, (*shape[:2], heads, sizes.floor_divide(shape[2], heads)))
    *outer, size = sizes.dims_of(x)
    rotary_size = n.rotary_embedding_dim or size
    parts = split(op, x, [rotary_size, sizes.subtract(size, rotary_size)], 3) if rotary_size != size else (x,)
    half = sizes.floor_divide(rotary_size, 2)
    cos, sin = (
        unsqueezed(op, table if n.positions is None else op.Gather(table, n.positions, axis=0), 2)
        for table in (n.cos, n.sin)
    )
    if n.interleaved:
        pairs = split(op, reshaped(op, parts[0], (*outer, half, 2)), [1, 1], 4)
        first, second = (reshaped(op, p, (*outer, half)) for p in pairs)
    else:
        first, second = split(op, parts[0], [half, half], 3)
    real = op.Sub(op.Mul(cos, first), op.Mul(sin, second))
    imaginary = op.Add(op.Mul(sin, first), op.Mul(cos, second))
    if n.interleaved:
        rotated_pairs = concatenated(op, [unsqueezed(op, real, 4), unsqueezed(op, imaginary, 4)], 4)
        rotated = reshaped(op, rotated_pairs, (*outer, rotary_size))
    else:
        rotated = concatenated(op, [real, imaginary], 3)
    y = concatenated(op, [rotated, *parts[1:]], 3)
    return transposed(op, y, [0, 2, 1, 3]) if len(shape) == 4 else reshaped(op, y, shape)


def rotary_embedding(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, heads: int, rotary_size: int
) -> Tensor:
    """Rotate x as [b, h, s, d]; a `rotary_size` of 0 is d."""
    y = split_heads(x, heads)
    rotary_size = rotary_size or y.shape[-1]
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    head, rest = y[..., :rotary_size], y[..., rotary_size:]
    first, second = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    real, imaginary = cos * first - sin * second, sin * first + cos * second
    rotated = torch.stack([real, imaginary], -1).flatten(-2) if interleaved else torch.cat([real, imaginary], -1)
    y = torch.cat([rotated, rest], -1)
    return y if x.ndim == 4 else y.transpose(1, 2).flatten(2)


define_by_body(
    "RotaryEmbedding",
    ("x", "cos", "sin", "positions?"),
    _rotary_body,
    lambda n, x, cos, sin, positions: Call(
        rotary_embedding, x, cos, sin, positions, bool(n.interleaved), n.num_heads, n.rotary_embedding_dim
    ),
    attributes={"interleaved": 0, "num_heads": 0, "rotary_embedding_dim": 0},
    shapes=lambda n: (type_of(n.x),),
    axes=no_axes,
    nondiff_inputs=frozenset({"positions"}),
    flops=lambda n: sizes.multiply(4, numel(n.x)),
)
