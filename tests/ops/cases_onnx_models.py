"""Cases of ONNX ops that other exporters write, against PyTorch, or against the specification if PyTorch lacks the op.

Ops whose gradient crops padding run in both dtypes without their body, and in float32 with it: onnxruntime's
convolutions and pools lack double, and `onnx.reference` lacks negative padding.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F

from tests.op_case import OpCase, SizesOf, Spec

EPS = 2.0**-15
AXES = Spec("1", "int64", value=[1])
POSITIVE = Spec("b s h", low=0.5, high=3.0)


def with_body_in_float32_only(case: OpCase) -> list[OpCase]:
    """Return the case in both dtypes without its body, and in float32 with it."""
    inputs = tuple(
        dataclasses.replace(i, dtype=torch.float32) if isinstance(i, Spec) and i.dtype == "float" else i
        for i in case.inputs
    )
    single = dataclasses.replace(case, inputs=inputs, label=f"{case.label}float32")
    return [dataclasses.replace(case, bodies=False), single]


def shrink(x: Any, bias: float, lambd: float) -> Any:
    return (x + bias) * (x < -lambd) + (x - bias) * (x > lambd)


ACTIVATIONS = [
    OpCase("", "Celu", (Spec("b s h"),), lambda x: F.celu(x, 0.75), {"alpha": 0.75}, specials=True),
    OpCase("", "Softsign", (Spec("b s h"),), F.softsign),
    OpCase("", "Swish", (Spec("b s h"),), F.silu, specials=True),
    OpCase("", "Swish", (Spec("b s"),), lambda x: x * torch.sigmoid(1.5 * x), {"alpha": 1.5}, label="alpha"),
    OpCase("", "ThresholdedRelu", (Spec("b s h"),), lambda x: F.threshold(x, 0.5, 0.0), {"alpha": 0.5}),
    OpCase("", "Shrink", (Spec("b s h"),), lambda x: shrink(x, 0.25, 0.75), {"bias": 0.25, "lambd": 0.75}),
    OpCase("", "Shrink", (Spec("b s h"),), F.hardshrink, label="hard"),
    OpCase(
        "",
        "Hardmax",
        (Spec("b s h"),),
        lambda x: F.one_hot(x.argmax(1), x.shape[1]).movedim(-1, 1).to(x.dtype),
        {"axis": 1},
        sizes=[{"b": 3, "s": 5, "h": 2}, {"b": 0, "s": 5, "h": 2}, {"b": 1, "s": 1, "h": 1}],
    ),
]


def largest(*terms: Any) -> Any:
    result = terms[0]
    for term in terms[1:]:
        result = torch.maximum(result, term)
    return result


def smallest(*terms: Any) -> Any:
    result = terms[0]
    for term in terms[1:]:
        result = torch.minimum(result, term)
    return result


TERMS = (Spec("b s h"), Spec("s h"), Spec("b 1 1"))
NEAR = tuple(
    Spec(spec.dims, low=-1, high=2, make=lambda s, d, g: torch.randint(-1, 2, s, generator=g).to(d)) for spec in TERMS
)
BITS = Spec("b s", torch.uint8, low=0, high=200)
SHIFTS = Spec("b s", torch.uint8, low=0, high=8)
ELEMENTWISE = [
    OpCase("", "Mean", TERMS, lambda a, b, c: (a + b + c) / 3),
    OpCase("", "Mean", TERMS[:1], lambda a: a, label="one"),
    OpCase("", "Max", TERMS, largest, label="three", specials=True),
    OpCase("", "Max", TERMS[:1], lambda a: a * 1, label="one"),
    OpCase("", "Max", NEAR, largest, label="ties"),
    OpCase("", "Min", TERMS, smallest, label="three"),
    OpCase("", "Min", NEAR, smallest, label="ties"),
    OpCase("", "CastLike", (Spec("b s"), Spec("h", torch.float16, grad=False)), lambda a, b: a.half()),
    OpCase("", "CastLike", (Spec("b s"), Spec("h", "int64")), lambda a, b: a.long(), label="int"),
    OpCase("", "CastLike", (Spec("b s"), Spec("h", grad=False)), lambda a, b: a.clone(), label="same"),
    OpCase("", "BitShift", (BITS, SHIFTS), torch.bitwise_left_shift, {"direction": "LEFT"}),
    OpCase("", "BitShift", (BITS, SHIFTS), torch.bitwise_right_shift, {"direction": "RIGHT"}, label="right"),
]

REDUCTIONS = [
    OpCase("", "ReduceLogSum", (POSITIVE, AXES), lambda x, axes: x.sum(1, keepdim=True).log()),
    OpCase(
        "", "ReduceLogSum", (POSITIVE,), lambda x: x.log(), {"noop_with_empty_axes": 1, "keepdims": 0}, label="none"
    ),
    OpCase("", "ReduceSumSquare", (Spec("b s h"), AXES), lambda x, axes: x.square().sum(1), {"keepdims": 0}),
    OpCase("", "ReduceSumSquare", (Spec("b s h"),), lambda x: x.square().sum(), {"keepdims": 0}, label="all"),
    OpCase(
        "",
        "CumSum",
        (Spec("b s h"), Spec("", "int64", value=1)),
        lambda x, _: x.cumsum(1) - x,
        {"exclusive": 1},
        label="exclusive",
    ),
    OpCase(
        "",
        "CumSum",
        (Spec("b s h"), Spec("", "int64", value=1)),
        lambda x, _: x.flip(1).cumsum(1).flip(1) - x,
        {"exclusive": 1, "reverse": 1},
        label="exclusive-reverse",
    ),
    *(
        OpCase(
            "",
            f"Arg{name}",
            (Spec("b 5 h", make=NEAR[0].make),),
            lambda x, f=f: 4 - f(x.flip(1), 1),
            {"axis": 1, "keepdims": 0, "select_last_index": 1},
            label="last",
        )
        for name, f in (("Max", torch.argmax), ("Min", torch.argmin))
    ),
]


# Norms


def mean_variance(x: Any) -> Any:
    mean = x.mean((0, 2), keepdim=True)
    return (x - mean) / ((x - mean).square().mean((0, 2), keepdim=True).sqrt() + 1e-9)


def local_response(x: Any, size: int, alpha: float, beta: float, bias: float) -> Any:
    """Compute the formula of ONNX's specification, channel by channel."""
    planes = []
    for c in range(x.shape[1]):
        low, high = max(0, c - (size - 1) // 2), min(x.shape[1] - 1, c + size // 2)
        around = x[:, low : high + 1].square().sum(1)
        planes.append(x[:, c] / (bias + alpha / size * around) ** beta)
    return torch.stack(planes, 1) if planes else x * 1


IMAGES = [{"n": 2, "p": 3, "q": 5}, {"n": 1, "p": 1, "q": 1}, {"n": 0, "p": 2, "q": 3}, {"n": 3, "p": 1, "q": 4}]
SIDES = [{"n": 2, "c": 3, "p": 9, "q": 8}, {"n": 1, "c": 1, "p": 7, "q": 5}, {"n": 3, "c": 2, "p": 6, "q": 10}]
LRN = {"alpha": 0.5, "beta": 0.75, "bias": 1.5}
NORMS = [
    OpCase(
        "",
        "InstanceNormalization",
        (Spec("n 4 p q"), Spec("4"), Spec("4")),
        lambda x, w, b: F.group_norm(x, 4, w, b, EPS),
        {"epsilon": EPS},
        sizes=[{"n": 2, "p": 3, "q": 5}, {"n": 1, "p": 5, "q": 1}, {"n": 3, "p": 1, "q": 4}],
    ),
    OpCase(
        "",
        "GroupNormalization",
        (Spec("n 6 p q"), Spec("6"), Spec("6")),
        lambda x, w, b: F.group_norm(x, 3, w, b, EPS),
        {"num_groups": 3, "epsilon": EPS},
        sizes=IMAGES[:1] + IMAGES[3:],
    ),
    OpCase(
        "", "RMSNormalization", (Spec("b s 8"), Spec("8")), lambda x, w: F.rms_norm(x, (8,), w, EPS), {"epsilon": EPS}
    ),
    OpCase(
        "",
        "RMSNormalization",
        (Spec("b 4 8"), Spec("8")),
        lambda x, w: F.rms_norm(x, (4, 8), None, EPS) * w,
        {"epsilon": EPS, "axis": 1},
        label="broadcast",
    ),
    OpCase(
        "",
        "MeanVarianceNormalization",
        (Spec("n c p"),),
        mean_variance,
        {"axes": [0, 2]},
        sizes=[{"n": 3, "c": 5, "p": 4}, {"n": 2, "c": 1, "p": 7}],
    ),
    OpCase(
        "",
        "LpNormalization",
        (Spec("b s h", low=0.1),),
        lambda x: x / x.norm(2, 1, True),
        {"axis": 1},
        sizes=[{"b": 3, "s": 5, "h": 2}, {"b": 1, "s": 1, "h": 1}, {"b": 0, "s": 5, "h": 2}],
    ),
    OpCase(
        "",
        "LpNormalization",
        (Spec("b s"),),
        lambda x: x / x.abs().sum(-1, keepdim=True),
        {"p": 1},
        label="L1",
        sizes=[{"b": 3, "s": 5}, {"b": 1, "s": 1}, {"b": 0, "s": 5}],
    ),
    OpCase(
        "",
        "LpNormalization",
        (Spec("b 3", make=lambda s, d, g: torch.zeros(s, dtype=d)),),
        lambda x: x * 1,
        label="zero",
    ),
    *with_body_in_float32_only(
        OpCase(
            "",
            "LRN",
            (Spec("n c p q"),),
            lambda x: local_response(x, 3, 0.5, 0.75, 1.5),
            {"size": 3, **LRN},
            sizes=SIDES,
        )
    ),
    *with_body_in_float32_only(
        OpCase(
            "",
            "LRN",
            (Spec("n c p"),),
            lambda x: local_response(x, 4, 0.5, 0.75, 1.5),
            {"size": 4, **LRN},
            sizes=SIDES,
            label="even",
        )
    ),
]


# Movements


def depth_to_space(x: Any) -> Any:
    n, c, h, w = x.shape
    return x.reshape(n, 2, 2, c // 4, h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // 4, h * 2, w * 2)


def space_to_depth(x: Any) -> Any:
    n, c, h, w = x.shape
    return x.reshape(n, c, h // 2, 2, w // 2, 2).permute(0, 3, 5, 1, 2, 4).reshape(n, c * 4, h // 2, w // 2)


def reverse_sequences(x: Any, lengths: Any) -> Any:
    """Reverse the first elements of each sequence of x[time, batch, ..]."""
    columns = []
    for i, length in enumerate(lengths.tolist()):
        columns.append(torch.cat([x[:length, i].flip(0), x[length:, i]]))
    return torch.stack(columns, 1)


def crop_or_pad(x: Any, shape: tuple[int, ...]) -> Any:
    result = x.new_zeros(shape)
    source, target = [], []
    for source_size, target_size in zip(x.shape, shape, strict=True):
        common = min(source_size, target_size)
        source.append(slice((source_size - common) // 2, (source_size - common) // 2 + common))
        target.append(slice((target_size - common) // 2, (target_size - common) // 2 + common))
    result[tuple(target)] = x[tuple(source)]
    return result


LENGTHS = Spec("b", "int64", low=1, high=5)
RAGGED = [{"b": 3, "t": 5, "h": 2}, {"b": 1, "t": 4, "h": 1}, {"b": 2, "t": 7, "h": 0}]
PLANES = [{"n": 2, "h": 3, "w": 5}, {"n": 1, "h": 1, "w": 1}, {"n": 0, "h": 2, "w": 3}]
MOVEMENTS = [
    OpCase(
        "",
        "Flatten",
        (Spec("b s h w"),),
        lambda x: x.flatten(2).flatten(0, 1),
        {"axis": 2},
        sizes=[{"b": 3, "s": 2, "h": 4, "w": 5}, {"b": 1, "s": 1, "h": 1, "w": 1}, {"b": 0, "s": 2, "h": 3, "w": 1}],
    ),
    OpCase(
        "",
        "Flatten",
        (Spec("b s"),),
        lambda x: x.reshape(1, -1),
        {"axis": 0},
        label="all",
        sizes=[{"b": 3, "s": 2}, {"b": 1, "s": 1}, {"b": 2, "s": 9}],
    ),
    OpCase(
        "",
        "Flatten",
        (Spec("b s"),),
        lambda x: x.reshape(-1, 1),
        {"axis": 2},
        label="end",
        sizes=[{"b": 3, "s": 2}, {"b": 1, "s": 1}, {"b": 2, "s": 9}],
    ),
    OpCase("", "DepthToSpace", (Spec("n 8 h w"),), depth_to_space, {"blocksize": 2}, sizes=PLANES),
    OpCase(
        "",
        "DepthToSpace",
        (Spec("n 8 h w"),),
        lambda x: F.pixel_shuffle(x, 2),
        {"blocksize": 2, "mode": "CRD"},
        sizes=PLANES,
        label="CRD",
    ),
    OpCase(
        "",
        "SpaceToDepth",
        (Spec("n 3 h w"),),
        space_to_depth,
        {"blocksize": 2},
        sizes=[{"n": 2, "h": 4, "w": 6}, {"n": 1, "h": 2, "w": 2}, {"n": 0, "h": 2, "w": 4}],
    ),
    OpCase("", "ReverseSequence", (Spec("t b h"), LENGTHS), reverse_sequences, sizes=RAGGED),
    OpCase(
        "",
        "ReverseSequence",
        (Spec("b t"), LENGTHS),
        lambda x, n: reverse_sequences(x.T, n).T,
        {"batch_axis": 0, "time_axis": 1},
        sizes=RAGGED,
        label="batch-first",
    ),
    OpCase(
        "",
        "CenterCropPad",
        (Spec("a b"), Spec("2", "int64", value=[4, 5])),
        lambda x, _: crop_or_pad(x, (4, 5)),
        sizes=[{"a": 7, "b": 2}, {"a": 1, "b": 8}, {"a": 4, "b": 5}, {"a": 0, "b": 9}],
    ),
    OpCase(
        "",
        "CenterCropPad",
        (Spec("a b"), Spec("1", "int64", value=[3])),
        lambda x, _: crop_or_pad(x, (x.shape[0], 3)),
        {"axes": [-1]},
        label="axis",
        sizes=[{"a": 7, "b": 2}],
    ),
    OpCase(
        "",
        "Col2Im",
        (Spec("n 12 20"), Spec("2", "int64", value=[5, 6]), Spec("2", "int64", value=[2, 2])),
        lambda x, *_: F.fold(x, (5, 6), (2, 2)),
        sizes=[{"n": 2}, {"n": 1}],
    ),
    OpCase("", "Compress", (Spec("b 4 h"), Spec("4", "bool")), lambda x, keep: x[:, keep], {"axis": 1}),
    OpCase("", "Compress", (Spec("b 3"), Spec("3*b", "bool")), lambda x, keep: x.flatten()[keep], label="flat"),
    OpCase("", "Size", (Spec("b s h"),), lambda x: torch.tensor(x.numel())),
]


# Losses


def labels(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


LABELS = Spec("n d", "int64", make=labels)
SCORES, WEIGHTS = Spec("n 5 d"), Spec("5", low=0.1, high=2.0, grad=False)
ROWS = [{"n": 4, "d": 3}, {"n": 1, "d": 1}, {"n": 7, "d": 2}, {"n": 0, "d": 3}]
LOSSES = [
    OpCase(
        "",
        "SoftmaxCrossEntropyLoss",
        (SCORES, LABELS),
        lambda x, y: (F.cross_entropy(x, y), x.log_softmax(1)),
        sizes=ROWS,
    ),
    OpCase(
        "",
        "SoftmaxCrossEntropyLoss",
        (SCORES, Spec("n d", torch.int32, make=labels), WEIGHTS),
        lambda x, y, w: (F.cross_entropy(x, y.long(), w, ignore_index=2), x.log_softmax(1)),
        {"ignore_index": 2},
        sizes=ROWS[:3],
        label="weights",
    ),
    OpCase(
        "",
        "SoftmaxCrossEntropyLoss",
        (SCORES, LABELS, WEIGHTS),
        lambda x, y, w: (F.cross_entropy(x, y, w, reduction="none"), x.log_softmax(1)),
        {"reduction": "none"},
        sizes=ROWS,
        label="each",
    ),
    *(
        OpCase(
            "",
            "NegativeLogLikelihoodLoss",
            (SCORES, LABELS, WEIGHTS),
            lambda x, y, w, r=r: F.nll_loss(x, y, w, ignore_index=3, reduction=r),
            {"reduction": r, "ignore_index": 3},
            sizes=ROWS[:3],
            label=r,
        )
        for r in ("mean", "sum", "none")
    ),
    OpCase(
        "",
        "NegativeLogLikelihoodLoss",
        (Spec("n 5"), Spec("n", "int64", make=labels)),
        F.nll_loss,
        sizes=ROWS,
        label="plain",
    ),
]


# Pools


def lp_pool(x: Any, order: int, *, kernel: tuple[int, int], pad: list[int], stride: tuple[int, int]) -> Any:
    planes = x.abs().pow(order).reshape(-1, 1, *x.shape[2:])
    sums = F.conv2d(F.pad(planes, pad), x.new_ones(1, 1, *kernel), stride=stride)
    return sums.pow(1 / order).reshape(*x.shape[:2], *sums.shape[2:])


IMAGE = Spec("n c p q", low=0.5, high=2.0)
WINDOW = {"kernel_shape": [2, 3], "strides": [2, 1]}


def unpool(x: Any, indices: Any, shape: tuple[int, ...]) -> Any:
    return x.new_zeros(shape).flatten().scatter(0, indices.flatten(), x.flatten()).reshape(shape)


def window_indices(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return the index of the first element of each window of 2, in order."""
    return torch.arange(torch.Size(shape).numel()).mul(2).reshape(shape)


POOLS = [
    OpCase("", "GlobalMaxPool", (Spec("n c p q"),), lambda x: F.adaptive_max_pool2d(x, 1), sizes=SIDES),
    OpCase(
        "",
        "GlobalMaxPool",
        (Spec("n c p", make=NEAR[0].make),),
        lambda x: F.adaptive_max_pool1d(x, 1),
        sizes=SIDES,
        label="ties",
    ),
    OpCase("", "GlobalLpPool", (IMAGE,), lambda x: x.pow(3).sum((2, 3), True).pow(1 / 3), {"p": 3}, sizes=SIDES),
    *with_body_in_float32_only(
        OpCase(
            "",
            "LpPool",
            (IMAGE,),
            lambda x: lp_pool(x, 2, kernel=(2, 3), stride=(2, 1), pad=[1, 0, 0, 1]),
            {**WINDOW, "pads": [0, 1, 1, 0]},
            sizes=SIDES,
        )
    ),
    *with_body_in_float32_only(
        OpCase(
            "",
            "LpPool",
            (Spec("n c 9 8", low=0.5),),
            lambda x: lp_pool(x, 3, kernel=(2, 3), stride=(2, 1), pad=[1, 1, 0, 1]),
            {**WINDOW, "auto_pad": "SAME_UPPER", "p": 3},
            sizes=[{"n": 2, "c": 3}],
            label="same",
        )
    ),
    OpCase(
        "",
        "MaxUnpool",
        (Spec("n c p"), Spec("n c p", "int64", make=window_indices), SizesOf("n c 2*p")),
        unpool,
        {"kernel_shape": [2], "strides": [2]},
        sizes=SIDES,
    ),
]


# Attention


def attention(q: Any, k: Any, v: Any, mask: Any = None, **options: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, **options)


def capped(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(2 * torch.tanh(q @ k.mT / 8**0.5 / 2), -1) @ v


def with_past(q: Any, k: Any, v: Any, _: Any, past_k: Any, past_v: Any) -> Any:
    k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(past_k.shape[2])
    scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    return attention(q, k, v, seen), k, v, scores


def in_heads(function: Any, *counts: int) -> Any:
    def reference(*inputs: Any) -> Any:
        apart = [x.unflatten(2, (h, -1)).transpose(1, 2) for x, h in zip(inputs, counts, strict=True)]
        return function(*apart).transpose(1, 2).flatten(2)

    return reference


def rotate(x: Any, cos: Any, sin: Any, interleaved: bool = False) -> Any:
    """Rotate x[b, h, s, d] as complex values."""
    d = x.shape[-1]
    pairs = x.unflatten(-1, (d // 2, 2)) if interleaved else x.unflatten(-1, (2, d // 2)).transpose(-1, -2)
    real = pairs[..., 0] * cos - pairs[..., 1] * sin
    imaginary = pairs[..., 0] * sin + pairs[..., 1] * cos
    rotated = torch.stack([real, imaginary], -1)
    return (rotated if interleaved else rotated.transpose(-1, -2)).flatten(-2)


def positions(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 7, shape, generator=generator)


Q, K, V = Spec("b 4 s 8"), Spec("b 2 t 8"), Spec("b 2 t 6")
TOKENS = [{"b": 2, "s": 5, "t": 3}, {"b": 1, "s": 1, "t": 1}, {"b": 3, "s": 2, "t": 7}]
ATTENTION = [
    OpCase("", "Attention", (Q, K, V), lambda q, k, v: (attention(q, k, v), None, None, None), sizes=TOKENS),
    OpCase(
        "",
        "Attention",
        (Q, Spec("b 2 s 8"), Spec("b 2 s 6"), None, Spec("b 2 t 8"), Spec("b 2 t 6")),
        with_past,
        {"is_causal": 1},
        sizes=TOKENS,
        label="past",
    ),
    OpCase(
        "",
        "Attention",
        (Q, K, V, Spec("s t")),
        lambda *x: (attention(*x), None, None, None),
        sizes=TOKENS,
        label="mask",
    ),
    OpCase(
        "",
        "Attention",
        (
            Q,
            K,
            V,
            Spec(
                "b 1 s t", "bool", make=lambda s, d, g: torch.arange(s[-1]).expand(s) < 1 + torch.arange(s[-2])[:, None]
            ),
        ),
        lambda *x: (attention(*x), None, None, None),
        {"scale": 8**-0.5},
        sizes=TOKENS,
        label="bool",
    ),
    OpCase(
        "",
        "Attention",
        (Spec("b 4 s 8"), Spec("b 4 t 8"), Spec("b 4 t 6")),
        lambda *x: (capped(*x), None, None, None),
        {"softcap": 2.0},
        sizes=TOKENS,
        label="softcap",
    ),
    OpCase(
        "",
        "Attention",
        (Spec("b s 32"), Spec("b t 16"), Spec("b t 12")),
        lambda *x: (in_heads(attention, 4, 2, 2)(*x), None, None, None),
        {"q_num_heads": 4, "kv_num_heads": 2},
        sizes=TOKENS,
        label="3d",
    ),
    OpCase(
        "",
        "RotaryEmbedding",
        (Spec("b 3 s 8"), Spec("7 4"), Spec("7 4"), Spec("b s", "int64", make=positions)),
        lambda x, cos, sin, p: rotate(x, cos[p][:, None], sin[p][:, None]),
        sizes=TOKENS,
    ),
    OpCase(
        "",
        "RotaryEmbedding",
        (Spec("b s 24"), Spec("b s 4"), Spec("b s 4")),
        lambda x, cos, sin: (
            rotate(x.unflatten(2, (3, 8)).transpose(1, 2), cos[:, None], sin[:, None], True).transpose(1, 2).flatten(2)
        ),
        {"interleaved": 1, "num_heads": 3},
        sizes=TOKENS,
        label="3d",
    ),
    OpCase(
        "",
        "RotaryEmbedding",
        (Spec("b 3 s 8"), Spec("b s 2"), Spec("b s 2")),
        lambda x, cos, sin: torch.cat([rotate(x[..., :4], cos[:, None], sin[:, None]), x[..., 4:]], -1),
        {"rotary_embedding_dim": 4},
        sizes=TOKENS,
        label="part",
    ),
]


# Padding


def pad_all(mode: str, *amounts: tuple[int, int]) -> Any:
    """Return a reference that pads axis by axis, by indexing."""

    def reference(x: Any, *_: Any) -> Any:
        for axis, (before, after) in enumerate(amounts):
            size = x.shape[axis]
            indices = torch.arange(-before, size + after)
            if mode == "wrap":
                indices = indices % size
            elif mode == "edge":
                indices = indices.clamp(0, size - 1)
            else:
                indices = (indices.abs() % (2 * size - 2)).apply_(lambda i, s=size: min(i, 2 * s - 2 - i))
            x = x.index_select(axis, indices)
        return x

    return reference


PADS = Spec("6", "int64", value=[1, 2, 0, 2, 1, 3])
SIDES3 = [{"a": 4, "b": 5, "c": 6}, {"a": 3, "b": 4, "c": 5}]
PADDINGS = [
    *(
        OpCase(
            "",
            "Pad",
            (Spec("a b c"), PADS),
            pad_all(mode, (1, 2), (2, 1), (0, 3)),
            {"mode": mode},
            sizes=SIDES3,
            label=mode,
        )
        for mode in ("wrap", "edge", "reflect")
    ),
    OpCase(
        "",
        "Pad",
        (Spec("a b c"), Spec("2", "int64", value=[2, 1]), None, Spec("1", "int64", value=[-1])),
        lambda x, *_: F.pad(x, (2, 1), "circular"),
        {"mode": "wrap"},
        sizes=SIDES3,
        label="wrap-last",
    ),
    OpCase(
        "",
        "Pad",
        (Spec("a b"), Spec("4", "int64", value=[1, 0, 0, 2]), Spec("", grad=False)),
        lambda x, _, value: F.pad(x, (0, 2, 1, 0), value=float(value)),
        label="computed",
    ),
    OpCase(
        "onnxtrain",
        "PadGrad",
        (Spec("a 9"), SizesOf("a 6"), Spec("2", "int64", value=[2, 1]), Spec("1", "int64", value=[1])),
        lambda dy, *_: dy[:, 2:8].clone().index_add(1, torch.tensor([4, 5, 0]), dy[:, [0, 1, 8]]),
        {"mode": "wrap"},
        label="wrap",
    ),
]

CASES = [
    *ACTIVATIONS,
    *ELEMENTWISE,
    *REDUCTIONS,
    *NORMS,
    *MOVEMENTS,
    *LOSSES,
    *POOLS,
    *ATTENTION,
    *PADDINGS,
]
