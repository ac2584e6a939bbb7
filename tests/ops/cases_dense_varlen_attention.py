"""Cases of ScaledDotProductAttention, VarlenAttention and RotaryEmbedding, and of their gradients."""

import functools
import math

import torch

from onnxtrain.testing import OpCase, Spec
from tests.ops.cases_attention import softmax

SIZES = [
    {"b": 2, "h": 3, "l": 5, "s": 4, "e": 8},
    {"b": 1, "h": 1, "l": 1, "s": 1, "e": 1},
    {"b": 2, "h": 1, "l": 0, "s": 4, "e": 8},
    {"b": 0, "h": 2, "l": 3, "s": 4, "e": 4},
    {"b": 3, "h": 5, "l": 7, "s": 1, "e": 3},
]
SIZES_OF_BLOCKS = [*SIZES[:2], {"b": 3, "h": 4, "l": 300, "s": 301, "e": 3}]  # the last has several blocks of heads
QKV = (Spec("b h l e"), Spec("b h s e"), Spec("b h s 6"))
GROUPED = (Spec("b 4 l e"), Spec("b 2 s e"), Spec("b 2 s 6"))
RATIO = (Spec(dtype=torch.float64, value=0.25), Spec(dtype="bool", value=True))


def _repeated(x, heads):
    return x.repeat_interleave(heads // x.shape[1], 1) if x.shape[1] not in (0, heads) else x


def _scores(q, k, bias, mask, fill, scale):
    width = q.shape[-1]
    scores = q @ _repeated(k, q.shape[1]).mT * (1 / math.sqrt(width) if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if mask is not None and mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -math.inf if fill is None else fill.item())
    return scores if mask is None else scores + mask


def attention(q, k, v, bias=None, mask=None, fill=None, ratio=None, training=None, *, scale=None, safe=0):
    """Compute attention as models write it, with the softmax of half types in float32."""
    scores = _scores(q, k, bias, mask, fill, scale)
    scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    p = softmax(scores) if safe else torch.softmax(scores, -1)
    v = _repeated(v, q.shape[1])
    if ratio is None:
        return p.to(v.dtype) @ v, p.detach()
    dropout_mask = torch.empty(p.shape, dtype=torch.bool).bernoulli_(1 - ratio.item())
    return (p * dropout_mask / (1 - ratio.item())).to(v.dtype) @ v, p.detach(), dropout_mask


def _bool_mask(sizes, dtype, generator):
    """Return a random bool mask whose first row is False only."""
    visible = torch.rand(sizes, generator=generator) < 0.7
    if visible.numel():
        visible[..., 0, :] = False
    return visible


def _infinite_mask(sizes, dtype, generator):
    mask = torch.randn(sizes, generator=generator)
    return mask.masked_fill(~_bool_mask(sizes, dtype, generator), -math.inf).to(dtype)


def _lowest_mask(sizes, dtype, generator):
    """Return an additive mask of 0 and float32's finfo.min; the first row has the minimum only."""
    return torch.where(_bool_mask(sizes, dtype, generator), 0.0, torch.finfo(torch.float32).min).to(dtype)


VISIBLE = Spec("b 1 l s", dtype="bool", make=_bool_mask)


def _case(label, *masks, inputs=QKV, dropout=False, sizes=SIZES, **attributes):
    name = "ScaledDotProductAttention" + ("Dropout" if dropout else "")
    operands = (*inputs, *masks, *[None] * (3 - len(masks)), *RATIO) if dropout else (*inputs, *masks)
    reference = functools.partial(attention, **attributes)
    return OpCase(
        "onnxtrain", name, operands, reference, attributes=attributes, sizes=sizes, label=label, bodies=not dropout
    )


def _dense_gradient(
    dy, q, k, v, bias, mask, fill, y, p, dropout_mask=None, ratio=None, *, scale=None, output_dscores=0
):
    """Return the gradients for given probabilities, which need not be those of q and k."""
    keep = 1 if dropout_mask is None else dropout_mask.to(p.dtype) / (1 - ratio.item())
    ds = torch._softmax_backward_data((dy @ v.mT) * keep, p, -1, p.dtype)
    if mask is not None and mask.dtype == torch.bool:
        ds = ds * mask
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return ds @ k * factor, ds.mT @ q * factor, (p * keep).mT @ dy, ds if output_dscores else None


def _grad_case(label, mask=None, fill=None, dropout_mask=None, **attributes):
    operands = (Spec("b h l 6"), *QKV, None, mask, fill, Spec("b h l 6"), Spec("b h l s", low=0.0, high=1.0))
    if dropout_mask is not None:
        operands = (*operands, dropout_mask, RATIO[0])
    return OpCase(
        "onnxtrain",
        "ScaledDotProductAttentionGrad",
        operands,
        functools.partial(_dense_gradient, **attributes),
        attributes=attributes,
        sizes=SIZES,
        label=label,
    )


# Packed sequences. The number of offsets n selects the lengths from ROWS and COLUMNS; c is the number of scores.


ROWS = {5: [2, 0, 3, 1], 4: [5, 1, 6], 2: [1], 3: [0, 0], 1: []}
COLUMNS = {5: [3, 2, 0, 4], 4: [5, 1, 6], 2: [1], 3: [0, 0], 1: []}
PACKED = [
    {"n": 5, "t": 6, "u": 9, "h": 2, "e": 8, "c": 20},
    {"n": 4, "t": 14, "u": 12, "h": 3, "e": 4, "c": 186},  # two tokens behind the last sequence
    {"n": 2, "t": 1, "u": 1, "h": 1, "e": 1, "c": 1},
    {"n": 3, "t": 0, "u": 0, "h": 2, "e": 4, "c": 0},
    {"n": 1, "t": 3, "u": 2, "h": 2, "e": 3, "c": 0},  # no sequence
]


def _offsets(lengths):
    def make(sizes, dtype, generator):
        return torch.tensor([0, *lengths[sizes[0]]]).cumsum(0).to(dtype)

    return make


TOKENS = (Spec("t h e"), Spec("u h e"), Spec("u h 6"))
TOKENS_GROUPED = (Spec("t 4 e"), Spec("u 2 e"), Spec("u 2 6"))
OFFSETS = (Spec("n", "int64", make=_offsets(ROWS)), Spec("n", torch.int32, make=_offsets(COLUMNS)))


def _by_sequence(q, k, v, cu_seqlens_q, cu_seqlens_k):
    """Yield the rows, q, k and v [heads, tokens, size] of each sequence."""
    for start, end, first, last in zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:], strict=False):
        operands = (x.repeat_interleave(q.shape[1] // x.shape[1], 1)[first:last].transpose(0, 1) for x in (k, v))
        yield slice(start, end), q[start:end].transpose(0, 1), *operands


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, bias=None, ratio=None, training=None, *, scale=None, is_causal=0):
    y, parts = q.new_zeros(*q.shape[:2], v.shape[2]), []
    dropout_mask = None
    if ratio is not None:
        count = q.shape[1] * int((cu_seqlens_q.diff() * cu_seqlens_k.diff()).sum())
        dropout_mask = torch.empty(count, dtype=torch.bool).bernoulli_(1 - ratio.item())
    start = 0
    for rows, a, b, c in _by_sequence(q, k, v, cu_seqlens_q.tolist(), cu_seqlens_k.tolist()):
        scores = a @ b.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if bias is not None:
            scores = scores + bias[:, : scores.shape[1], : scores.shape[2]]
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -math.inf)
        p = softmax(scores)
        if dropout_mask is not None:
            p = p * dropout_mask[start : start + p.numel()].view(p.shape) / (1 - ratio.item())
            start += p.numel()
        parts.append(((p @ c).transpose(0, 1), rows))
    for part, rows in parts:
        y = torch.cat([y[: rows.start], part, y[rows.stop :]])
    return (y, None) if dropout_mask is None else (y, None, dropout_mask)


def _varlen_case(label, bias=None, inputs=TOKENS, dropout=False, **attributes):
    operands = (*inputs, *OFFSETS, bias)
    return OpCase(
        "onnxtrain",
        "VarlenAttention" + ("Dropout" if dropout else ""),
        (*operands, *RATIO) if dropout else operands if bias else operands[:-1],
        functools.partial(varlen, **attributes),
        attributes=attributes,
        sizes=PACKED,
        label=label,
        bodies=not dropout,
    )


def _varlen_gradient(dy, q, k, v, cu_seqlens_q, cu_seqlens_k, bias, y, saved, dropout_mask=None, ratio=None):
    """Return the gradients for the saved probabilities of one sequence after another."""
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    start = 0
    starts = zip(cu_seqlens_k.tolist(), cu_seqlens_k.tolist()[1:], strict=False)
    for (rows, a, b, c), (first, last) in zip(
        _by_sequence(q, k, v, cu_seqlens_q.tolist(), cu_seqlens_k.tolist()), starts, strict=True
    ):
        shape = (q.shape[1], a.shape[1], b.shape[1])
        p, cotangent = saved[start : start + math.prod(shape)].view(shape), dy[rows].transpose(0, 1)
        start += math.prod(shape)
        ds = torch._softmax_backward_data(cotangent @ c.mT, p, -1, p.dtype) / math.sqrt(q.shape[-1])
        for gradient, part, tokens in (
            (dq, ds @ b, rows),
            (dk, ds.mT @ a, slice(first, last)),
            (dv, p.mT @ cotangent, slice(first, last)),
        ):
            gradient[tokens] = part.transpose(0, 1)
    return dq, dk, dv


VARLEN_GRADIENT = OpCase(
    "onnxtrain",
    "VarlenAttentionGrad",
    (Spec("t h 6"), *TOKENS, *OFFSETS, None, Spec("t h 6"), Spec("c", low=0.0, high=1.0)),
    _varlen_gradient,
    sizes=PACKED,
    bodies=False,  # the body recomputes the probabilities: it is tested together with VarlenAttention
)


def _rotate(x):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _rotary(x, cos, sin):
    return x * cos + _rotate(x) * sin


def _rotary_grad(dy, cos, sin):
    return dy * cos - _rotate(dy * sin)


CASES = [
    OpCase("onnxtrain", "RotaryEmbedding", (Spec("b h s 6"), Spec("b 1 s 6"), Spec("s 6")), _rotary),
    OpCase("onnxtrain", "RotaryEmbeddingGrad", (Spec("b h s 6"), Spec("1 s 6"), Spec("h s 6")), _rotary_grad),
    _case("plain"),
    _case("scale", scale=0.25),
    _case("grouped", inputs=GROUPED),
    _case("bias", Spec("b h l s")),
    _case("bias-and-mask", Spec("1 h l s"), Spec("b 1 1 s")),
    _case("shared-bias", Spec("l s"), scale=0.5),
    _case("padding", None, Spec("b 1 1 s", grad=False)),
    _case("lowest", None, Spec("b 1 l s", make=_lowest_mask, grad=False)),
    _case("infinite", None, Spec("b 1 l s", make=_infinite_mask, grad=False)),
    _case("infinite-safe", None, Spec("b 1 l s", make=_infinite_mask, grad=False), safe=1),
    _case("seen", None, VISIBLE),
    _case("seen-safe", Spec("h l s"), VISIBLE, safe=1),
    _case("seen-filled", None, VISIBLE, Spec(value=-1e4)),
    _case("grouped-bias", Spec("b 1 l s"), inputs=GROUPED),
    _case("blocks", None, Spec("b 1 1 s"), sizes=SIZES_OF_BLOCKS),
    _case("blocks-grouped", Spec("1 4 l s"), inputs=GROUPED, sizes=SIZES_OF_BLOCKS),
    _case("plain", dropout=True),
    _case("masked", Spec("1 h l s"), VISIBLE, dropout=True, scale=0.5),
    _case("grouped", None, Spec("b 1 1 s"), inputs=GROUPED, dropout=True),
    _grad_case("plain"),
    _grad_case("seen", VISIBLE, Spec(value=-1e4), scale=0.5, output_dscores=1),
    _grad_case("dropout", dropout_mask=Spec("b h l s", dtype="bool")),
    _varlen_case("plain"),
    _varlen_case("causal", is_causal=1, scale=0.25),
    _varlen_case("bias", Spec("h 6 6")),
    _varlen_case("one-bias", Spec("1 6 6"), is_causal=1),
    _varlen_case("grouped", inputs=TOKENS_GROUPED),
    _varlen_case("dropout", Spec("h 6 6"), dropout=True),
    VARLEN_GRADIENT,
]
