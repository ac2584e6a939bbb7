"""Cases of FlashAttention and its gradient."""

import math
from dataclasses import replace

import torch

from tests.op_case import OpCase, Spec

SIZES = [
    {"b": 2, "h": 3, "l": 5, "s": 4, "e": 8},
    {"b": 3, "h": 2, "l": 40, "s": 70, "e": 16},
    {"b": 1, "h": 1, "l": 1, "s": 1, "e": 1},
    {"b": 2, "h": 1, "l": 0, "s": 4, "e": 8},
    {"b": 0, "h": 2, "l": 3, "s": 4, "e": 4},
    {"b": 1, "h": 4, "l": 1, "s": 6, "e": 3},
]
# Without bodies: stock onnxruntime reuses the scores' memory for the maximum of no scores, and then raises.
NO_KEYS = [SIZES[0], {"b": 2, "h": 2, "l": 3, "s": 0, "e": 4}]


def _some_masked(sizes: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return an additive mask with elements of -inf, and a first row of -inf only."""
    mask = torch.randn(sizes, generator=generator)
    mask = mask.masked_fill(torch.rand(sizes, generator=generator) < 0.3, -math.inf)
    if mask.numel():
        mask[..., 0, :] = -math.inf
    return mask.to(dtype)


def scores(q, k, mask=None, scale=None, causal=False):
    """Return the masked scores."""
    width = q.shape[-1]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1) if k.shape[1] not in (0, q.shape[1]) else k
    masked = q @ k.mT * (scale if scale is not None else 1 / math.sqrt(width) if width else 1.0)
    if mask is not None:
        masked = masked + mask
    if causal:
        masked = masked.masked_fill(torch.ones(masked.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return masked


def softmax(x):
    masked = (x == -math.inf).all(-1, keepdim=True)
    return torch.where(masked, 0.0, torch.softmax(torch.where(masked, 0.0, x), -1))


def _attention(scale=None, causal=False, logsumexp=True):
    def reference(q, k, v, mask=None):
        masked = scores(q, k, mask, scale, causal)
        wide = masked.float() if masked.dtype in (torch.bfloat16, torch.float16) else masked
        total = wide.logsumexp(-1).detach()
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1) if v.shape[1] not in (0, q.shape[1]) else v
        return softmax(masked) @ v, torch.where(total == -math.inf, 0.0, total) if logsumexp else None

    return reference


def _gradient(scale=None, causal=False):
    """Return a reference that computes the gradients for a given y; `logsumexp` is that of the scores."""

    def reference(dy, q, k, v, mask, y, logsumexp):
        p = softmax(scores(q, k, mask, scale, causal))
        factor = scale if scale is not None else 1 / math.sqrt(q.shape[-1])
        ds = p * (dy @ v.mT - (dy * y).sum(-1, keepdim=True)) * factor
        return ds @ k, ds.mT @ q, p.mT @ dy

    return reference


def _zeros(sizes, dtype, generator):
    return torch.zeros(sizes, dtype=dtype)


QUERIES, KEYS = Spec("b h 3 8"), Spec("b h 4 8")


def _gradient_case(label, q=QUERIES, k=KEYS, mask=None, **attributes):
    """Return a case whose q or k is zero, so that the scores are those of the mask alone."""
    causal = bool(attributes.get("is_causal"))
    allowed = torch.ones(3, 4, dtype=torch.bool).tril() if causal else torch.ones(3, 4, dtype=torch.bool)
    total = torch.zeros(3, 4).double() if mask is None else torch.tensor(mask).double()
    logsumexp = total.masked_fill(~allowed, -math.inf).logsumexp(-1)
    logsumexp = torch.where(logsumexp == -math.inf, 0.0, logsumexp)
    inputs = (
        QUERIES,
        q,
        k,
        KEYS,
        None if mask is None else Spec("3 4", value=mask),
        QUERIES,
        Spec("b h 3", make=lambda sizes, dtype, generator: logsumexp.to(dtype).expand(sizes).contiguous()),
    )
    reference = _gradient(attributes.get("scale"), causal)
    sizes = [{"b": 2, "h": 3}, {"b": 1, "h": 1}, {"b": 0, "h": 2}]
    return OpCase("onnxtrain", "FlashAttentionGrad", inputs, reference, attributes=attributes, sizes=sizes, label=label)


MASK = [[0.0, 1.0, -math.inf, 0.5], [-math.inf] * 4, [0.25, 0.0, 0.0, -1.0]]
QKV = (Spec("b h l e"), Spec("b h s e"), Spec("b h s e"))
GROUPED = (Spec("b 4 l e"), Spec("b 2 s e"), Spec("b 2 s e"))


def _case(label, *masks, inputs=QKV, **attributes):
    scale, causal = attributes.get("scale"), bool(attributes.get("is_causal"))
    return OpCase(
        "onnxtrain",
        "FlashAttention",
        (*inputs, *masks),
        _attention(scale, causal),
        attributes=attributes,
        sizes=SIZES,
        label=label,
    )


CASES = [
    _case("plain"),
    _case("scale", scale=0.25),
    _case("causal", is_causal=1),
    _case("grouped", inputs=GROUPED),
    _case("mask", Spec("b 1 l s", make=_some_masked, grad=False)),
    _case("padding", Spec("b 1 1 s", grad=False)),
    _case("bias", Spec("b h l s")),
    _case("shared-bias", Spec("l s")),
    _case("one-bias", Spec("1 h l s"), scale=0.5),
    _case("wide-values", inputs=(Spec("b h l e"), Spec("b h s e"), Spec("b h s 3"))),
    _case("grouped-bias", Spec("b 1 l s"), inputs=GROUPED),
    replace(_case("no-keys"), sizes=NO_KEYS, bodies=False),
    replace(_case("no-keys-bias", Spec("b h l s")), sizes=NO_KEYS, bodies=False),
    _gradient_case("of-q", q=Spec("b h 3 8", make=_zeros)),
    _gradient_case("of-k", k=Spec("b h 4 8", make=_zeros), scale=0.5),
    _gradient_case("causal", q=Spec("b h 3 8", make=_zeros), is_causal=1),
    _gradient_case("mask", q=Spec("b h 3 8", make=_zeros), mask=MASK),
]
