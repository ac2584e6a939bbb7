"""Cases of attention that is written out, of packed sequences and of RotaryEmbedding, and of their gradients."""

import functools
import math

import torch

from tests.op_case import OpCase, Spec
from tests.ops.cases_attention import softmax
from tests.ops.cases_keyed_dropout import KEY, keyed_samples

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


def _random_probabilities(sizes, dtype, generator):
    return torch.randn(sizes, generator=generator).double().softmax(-1).to(dtype)


VISIBLE = Spec("b 1 l s", dtype="bool", make=_bool_mask)


def _case(label, *masks, inputs=QKV, dropout=False, sizes=SIZES, **attributes):
    name = "ScaledDotProductAttention" + ("Dropout" if dropout else "")
    operands = (*inputs, *masks, *[None] * (3 - len(masks)), *RATIO) if dropout else (*inputs, *masks)
    reference = functools.partial(attention, **attributes)
    return OpCase(
        "onnxtrain", name, operands, reference, attributes=attributes, sizes=sizes, label=label, bodies=not dropout
    )


def _dense_gradient(dy, q, k, v, bias, mask, fill, p, dropout_mask=None, ratio=None, *, scale=None, output_dscores=0):
    """Return the gradients for given probabilities, which need not be those of q and k."""
    keep = 1 if dropout_mask is None else dropout_mask.to(p.dtype) / (1 - ratio.item())
    ds = torch._softmax_backward_data((dy @ v.mT) * keep, p, -1, p.dtype)
    if mask is not None and mask.dtype == torch.bool:
        ds = ds * mask
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return ds @ k * factor, ds.mT @ q * factor, (p * keep).mT @ dy, ds if output_dscores else None


def _grad_case(label, mask=None, fill=None, dropout_mask=None, **attributes):
    operands = (Spec("b h l 6"), *QKV, None, mask, fill, Spec("b h l s", make=_random_probabilities))
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


def memory_efficient(q, k, v, bias=None, mask=None, fill=None, key=None, *, scale=None, safe=0, dropped=0):
    """Compute attention whose dropout mask is a function of a key."""
    scores = _scores(q, k, bias, mask, fill, scale)
    scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    p, v = softmax(scores) if safe else torch.softmax(scores, -1), _repeated(v, q.shape[1])
    return _dropped(p, key, dropped).to(v.dtype) @ v


def _dropped(p, key, dropped):
    if key is None:
        return p
    kept = keyed_samples(key, p.numel()).view(p.shape) >= dropped - 2**15
    return p * kept / (1 - dropped / 2**16)


def _keyed_case(label, *masks, inputs=QKV, sizes=SIZES, dropped=0, **attributes):
    operands = (*inputs, *masks, *[None] * (3 - len(masks)), KEY) if dropped else (*inputs, *masks)
    attributes |= {"dropped": dropped} if dropped else {}
    return OpCase(
        "onnxtrain",
        "MemoryEfficientAttention",
        operands,
        functools.partial(memory_efficient, **attributes),
        attributes=attributes,
        sizes=sizes,
        label=label,
    )


def _keyed_gradient(dy, q, k, v, bias, mask, fill, key=None, *, output_dscores=0, dropped=0, **attributes):
    bias = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.promote_types(q.dtype, torch.float32))
    leaves = [x.detach().requires_grad_() for x in (q, k, v, bias)]
    y = memory_efficient(*leaves, mask, fill, key, dropped=dropped, **attributes)
    gradients = torch.autograd.grad(y, leaves, dy)
    return gradients if output_dscores else gradients[:3]


def _keyed_grad_case(label, mask=None, fill=None, key=None, **attributes):
    return OpCase(
        "onnxtrain",
        "MemoryEfficientAttentionGrad",
        (Spec("b h l 6"), *QKV, None, mask, fill, key),
        functools.partial(_keyed_gradient, **attributes),
        attributes=attributes,
        sizes=SIZES,
        label=label,
    )


# Packed sequences. The number of offsets n selects the lengths from ROWS and COLUMNS.


ROWS = {5: [2, 0, 3, 1], 4: [5, 1, 6], 2: [1], 3: [0, 0], 1: []}
COLUMNS = {5: [3, 2, 0, 4], 4: [5, 1, 6], 2: [1], 3: [0, 0], 1: []}
PACKED = [
    {"n": 5, "t": 6, "u": 9, "h": 2, "e": 8},
    {"n": 4, "t": 14, "u": 12, "h": 3, "e": 4},  # two tokens behind the last sequence
    {"n": 2, "t": 1, "u": 1, "h": 1, "e": 1},
    {"n": 3, "t": 0, "u": 0, "h": 2, "e": 4},
    {"n": 1, "t": 3, "u": 2, "h": 2, "e": 3},  # no sequence
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


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, bias=None, key=None, *, scale=None, is_causal=0, dropped=0):
    y, start, heads = q.new_zeros(*q.shape[:2], v.shape[2]), 0, q.shape[1]
    kept = None
    if key is not None:
        kept = keyed_samples(key, heads * int((cu_seqlens_q.diff() * cu_seqlens_k.diff()).sum())) >= dropped - 2**15
    for rows, p, c in _probabilities(q, k, v, cu_seqlens_q, cu_seqlens_k, bias, scale, is_causal):
        if kept is not None:
            p = p * kept[start : start + p.numel()].view(p.shape) / (1 - dropped / 2**16)
            start += p.numel()
        y = torch.cat([y[: rows.start], (p @ c).transpose(0, 1), y[rows.stop :]])
    return y


def _probabilities(q, k, v, cu_seqlens_q, cu_seqlens_k, bias=None, scale=None, is_causal=0):
    """Yield the rows, the probabilities [h, l, s] and the values [h, s, d] of each sequence."""
    for rows, scores, c in _scores_by_sequence(q, k, v, cu_seqlens_q, cu_seqlens_k, bias, scale, is_causal):
        yield rows, softmax(scores), c


def _scores_by_sequence(q, k, v, cu_seqlens_q, cu_seqlens_k, bias=None, scale=None, is_causal=0):
    for rows, a, b, c in _by_sequence(q, k, v, cu_seqlens_q.tolist(), cu_seqlens_k.tolist()):
        scores = a @ b.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if bias is not None:
            scores = scores + bias[:, : scores.shape[1], : scores.shape[2]]
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -math.inf)
        yield rows, scores, c


def varlen_flash(q, k, v, cu_seqlens_q, cu_seqlens_k, ratio=None, training=None, **attributes):
    """Compute y and the logsumexp; with dropout y alone, for the key that the op samples too."""
    operands = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    if ratio is not None:
        key = torch.empty(2, dtype=torch.int64).random_(-(2**63), None)
        return varlen(*operands, None, key, dropped=round(ratio.item() * 2**16), **attributes), None, key
    logsumexp = q.new_zeros(q.shape[1], q.shape[0])
    for rows, scores, _ in _scores_by_sequence(*operands, **attributes):
        if scores.shape[2]:
            logsumexp[:, rows] = scores.logsumexp(-1).detach()
    return varlen(*operands, **attributes), logsumexp


def _varlen_case(label, bias=None, inputs=TOKENS, **attributes):
    operands = (*inputs, *OFFSETS, bias)
    return OpCase(
        "onnxtrain",
        "VarlenAttention",
        (*operands, KEY) if attributes.get("dropped") else operands if bias else operands[:-1],
        functools.partial(varlen, **attributes),
        attributes=attributes,
        sizes=PACKED,
        label=label,
    )


def _flash_case(label, inputs=TOKENS, dropout=False, **attributes):
    return OpCase(
        "onnxtrain",
        "VarlenFlashAttention" + ("Dropout" if dropout else ""),
        (*inputs, *OFFSETS, *(RATIO if dropout else ())),
        functools.partial(varlen_flash, **attributes),
        attributes=attributes,
        sizes=PACKED,
        label=label,
        bodies=not dropout,
    )


def _varlen_gradient(dy, *operands, **attributes):
    leaves = [x.detach().requires_grad_() for x in operands[:3]]
    return torch.autograd.grad(varlen(*leaves, *operands[3:], **attributes), leaves, dy)


def _varlen_flash_gradient(dy, q, k, v, cu_seqlens_q, cu_seqlens_k, y, logsumexp, key=None, ratio=None):
    """Return the gradients; the loop over the sequences reads neither y nor the logsumexp."""
    dropped = 0 if ratio is None else round(ratio.item() * 2**16)
    return _varlen_gradient(dy, q, k, v, cu_seqlens_q, cu_seqlens_k, None, key, dropped=dropped)


def _flash_grad_case(label, *dropout):
    return OpCase(
        "onnxtrain",
        "VarlenFlashAttentionGrad",
        (Spec("t h 6"), *TOKENS, *OFFSETS, Spec("t h 6"), Spec("h t"), *dropout),
        _varlen_flash_gradient,
        sizes=PACKED,
        label=label,
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
    _keyed_case("plain"),
    _keyed_case("scale", scale=0.25),
    _keyed_case("grouped", inputs=GROUPED),
    _keyed_case("bias", Spec("b h l s")),
    _keyed_case("bias-and-mask", Spec("1 h l s"), Spec("b 1 1 s")),
    _keyed_case("lowest", None, Spec("b 1 l s", make=_lowest_mask, grad=False)),
    _keyed_case("infinite", None, Spec("b 1 l s", make=_infinite_mask, grad=False)),
    _keyed_case("infinite-safe", None, Spec("b 1 l s", make=_infinite_mask, grad=False), safe=1),
    _keyed_case("seen", None, VISIBLE),
    _keyed_case("seen-safe", Spec("h l s"), VISIBLE, safe=1),
    _keyed_case("seen-filled", None, VISIBLE, Spec(value=-1e4)),
    _keyed_case("grouped-bias", Spec("b 1 l s"), inputs=GROUPED),
    _keyed_case("blocks", None, Spec("b 1 1 s"), sizes=SIZES_OF_BLOCKS),
    _keyed_case("blocks-grouped", Spec("1 4 l s"), inputs=GROUPED, sizes=SIZES_OF_BLOCKS),
    _keyed_case("dropout", dropped=16384),
    _keyed_case("dropout-masked", Spec("1 h l s"), VISIBLE, dropped=6554, scale=0.5),
    _keyed_case("dropout-grouped", None, Spec("b 1 1 s"), inputs=GROUPED, dropped=16384),
    _keyed_grad_case("plain", output_dscores=1),
    _keyed_grad_case("seen", VISIBLE, Spec(value=-1e4), scale=0.5, output_dscores=1),
    _keyed_grad_case("dropout", key=KEY, dropped=16384),
    _varlen_case("plain"),
    _varlen_case("causal", is_causal=1, scale=0.25),
    _varlen_case("bias", Spec("h 6 6")),
    _varlen_case("one-bias", Spec("1 6 6"), is_causal=1),
    _varlen_case("grouped", inputs=TOKENS_GROUPED),
    _varlen_case("dropout", dropped=16384),
    _varlen_case("bias-dropout", Spec("h 6 6"), dropped=6554, is_causal=1),
    OpCase(
        "onnxtrain",
        "VarlenAttentionGrad",
        (Spec("t h 6"), *TOKENS, *OFFSETS, None, KEY),
        functools.partial(_varlen_gradient, dropped=16384),
        attributes={"dropped": 16384},
        sizes=PACKED,
    ),
    _flash_case("plain"),
    _flash_case("causal", is_causal=1, scale=0.25),
    _flash_case("grouped", inputs=TOKENS_GROUPED),
    _flash_case("dropout", dropout=True),
    _flash_grad_case("plain"),
    _flash_grad_case("dropout", KEY, RATIO[0]),
]
