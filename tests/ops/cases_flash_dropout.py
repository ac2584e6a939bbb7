"""Cases of FlashAttentionDropout and its gradient, for kernels whose dropout mask a key determines."""

import functools
import math

import torch

from tests.op_case import OpCase, Spec
from tests.ops.cases_attention import GROUPED, KEYS, QKV, QUERIES, SIZES, scores, softmax
from tests.ops.cases_keyed_dropout import KEY, keyed_samples

RATIO = (Spec(dtype=torch.float64, value=0.25), Spec(dtype="bool", value=True))
DROPPED = 16384  # of 65536


def _dropped(p, key):
    return p * (keyed_samples(key, p.numel()).view(p.shape) >= DROPPED - 2**15) / (1 - DROPPED / 2**16)


def _attention(q, k, v, mask, key, **attributes):
    p = softmax(scores(q, k, mask, attributes.get("scale"), attributes.get("is_causal", 0)))
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1) if v.shape[1] not in (0, q.shape[1]) else v
    return _dropped(p, key).to(v.dtype) @ v


def _reference(q, k, v, mask, ratio, training, **attributes):
    """Return y for the key that the op samples too, and the key."""
    key = torch.empty(2, dtype=torch.int64).random_(-(2**63), None)
    return _attention(q, k, v, mask, key, **attributes), None, key


def _gradient(dy, q, k, v, mask, y, logsumexp, key, ratio, **attributes):
    """Return the gradients; they are computed from q, k and v alone."""
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (k, v))
    p = softmax(scores(q, k, mask, attributes.get("scale"), attributes.get("is_causal", 0)))
    dp = _dropped(dy @ wide_v.mT, key)
    ds = p * (dp - (dp * p).sum(-1, keepdim=True))
    ds = ds * (attributes.get("scale") or (1 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0))

    def summed(dx):
        return dx.unflatten(1, (k.shape[1], group)).sum(2)

    return ds @ wide_k, summed(ds.mT @ q), summed(_dropped(p, key).mT @ dy)


def _case(label, mask=None, inputs=QKV, **attributes):
    return OpCase(
        "onnxtrain",
        "FlashAttentionDropout",
        (*inputs, mask, *RATIO),
        functools.partial(_reference, **attributes),
        attributes=attributes,
        sizes=SIZES,
        label=label,
        bodies=False,
    )


CASES = [
    _case("plain"),
    _case("scale", scale=0.25),
    _case("causal", is_causal=1),
    _case("grouped", inputs=GROUPED),
    _case("padding", Spec("b 1 1 s", grad=False)),
    OpCase(
        "onnxtrain",
        "FlashAttentionGrad",
        (Spec("b h 3 8"), QUERIES, KEYS, KEYS, None, Spec("b h 3 8"), Spec("b h 3"), KEY, RATIO[0]),
        _gradient,
        sizes=[{"b": 2, "h": 3}, {"b": 1, "h": 1}, {"b": 0, "h": 2}],
        label="dropout",
    ),
]
