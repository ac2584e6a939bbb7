"""Cases of ops that ONNX Runtime Training defines, with PyTorch as the reference."""

from typing import Any

import torch
import torch.nn.functional as F

from onnxtrain.graph.values import MICROSOFT, OWN
from tests.op_case import OpCase, Spec


def gradient_of(function: Any) -> Any:
    """Return autograd's gradient of `function`, as a function of (dy, x, others…)."""

    def gradient(dy: torch.Tensor, x: torch.Tensor, *others: Any) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x, *others), x, dy)[0]

    return gradient


def gelu(x: Any, bias: Any) -> Any:
    return F.gelu(x + bias)


def fast_gelu(x: Any, bias: Any = None) -> Any:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


def erf_gelu(x: Any) -> Any:
    return 0.5 * x * (1.0 + torch.erf(x / 2.0**0.5))


WIDE, X, BIAS = Spec("b s h", low=-5, high=5), Spec("b s h"), Spec("h")
GELUS = [
    OpCase(MICROSOFT, "Gelu", (WIDE,), erf_gelu, specials=True),
    OpCase(OWN, "ErfGeluGrad", (X, WIDE), gradient_of(erf_gelu), specials=True),
    OpCase(MICROSOFT, "FastGelu", (WIDE,), fast_gelu, specials=True),
    OpCase(MICROSOFT, "FastGelu", (X, BIAS), fast_gelu, label="bias"),
    OpCase(MICROSOFT, "BiasGelu", (X, BIAS), gelu),
    OpCase(MICROSOFT, "FastGeluGrad", (X, WIDE), gradient_of(fast_gelu)),
    OpCase(MICROSOFT, "BiasGeluGrad_dX", (X, X, BIAS), gradient_of(gelu)),
    OpCase(MICROSOFT, "BiasFastGeluGrad_dX", (X, X, BIAS), gradient_of(fast_gelu)),
]


# Token packing


def some_rows(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return distinct row indices below their own number, which the flattened tensor has for all sizes."""
    return torch.randperm(shape[0], generator=generator).to(dtype)


def unflatten(x: Any, rows: Any, _: Any) -> Any:
    dims = (3, 5)
    return x.new_zeros(dims[0] * dims[1], *x.shape[1:]).index_copy(0, rows, x).reshape(*dims, *x.shape[1:])


ROWS = Spec("n", "int64", make=some_rows)
TOKENS = [{"b": 3, "s": 5, "h": 2, "n": 7}, {"b": 1, "s": 1, "h": 1, "n": 1}, {"b": 2, "s": 4, "h": 3, "n": 0}]
SPARSITY = [
    OpCase(
        MICROSOFT,
        "ShrunkenGather",
        (Spec("b s h"), Spec("n", "int64", low=0, high=1)),
        lambda x, rows: x[:, rows],
        {"axis": 1},
        sizes=TOKENS,
    ),
    OpCase(
        MICROSOFT,
        "FlattenAndUnpad",
        (Spec("b s h"), ROWS),
        lambda x, rows: (x.flatten(0, 1)[rows], torch.tensor(x.shape[:2])),
        sizes=TOKENS,
    ),
    OpCase(
        MICROSOFT,
        "FlattenAndUnpad",
        (Spec("b s"), Spec("n", torch.int32, make=some_rows)),
        lambda x, rows: (x.flatten()[rows.long()], torch.tensor(x.shape[:2])),
        sizes=TOKENS,
        label="int32",
    ),
    OpCase(
        MICROSOFT, "PadAndUnflatten", (Spec("n h"), ROWS, Spec("2", "int64", value=[3, 5])), unflatten, sizes=TOKENS
    ),
    OpCase(
        MICROSOFT,
        "PadAndUnflatten",
        (Spec("n"), ROWS, Spec("2", "int64", value=[3, 5])),
        unflatten,
        sizes=TOKENS,
        label="1d",
    ),
]


# Concat, Split, Trilu

JOINING = [
    OpCase(
        MICROSOFT,
        "SplitTraining",
        (Spec("b 7 h"), Spec("3", "int64", value=[2, 4, 1])),
        lambda x, _: x.split([2, 4, 1], 1),
        {"axis": 1},
    ),
    OpCase(
        MICROSOFT,
        "ConcatTraining",
        (Spec("b s"), Spec("b h")),
        lambda *xs: (torch.cat(xs, 1), torch.tensor([x.shape[1] for x in xs])),
        {"axis": 1},
    ),
    OpCase(MICROSOFT, "Trilu", (Spec("b s h"),), torch.tril, {"upper": 0}),
    OpCase(MICROSOFT, "Trilu", (Spec("s h"), Spec("", "int64", value=1)), lambda x, _: x.triu(1), label="k"),
]


# Dropout. The kernels sample as PyTorch does; bodies are not compared, because they sample other values.


def packed(mask: torch.Tensor) -> torch.Tensor:
    """Pack a mask into 32-bit words, in Python integers."""
    bits = mask.flatten().tolist()
    mask_words = [sum(int(b) << i for i, b in enumerate(bits[k : k + 32])) for k in range(0, len(bits), 32)]
    return torch.tensor(mask_words, dtype=torch.int64).to(torch.uint32)


def drop(x: torch.Tensor, ratio: float) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - ratio)
    return x * mask / (1 - ratio), mask


def packed_drop(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    y, mask = drop(x, 0.25)
    return y, packed(mask)


def dropped(dy: torch.Tensor, mask: torch.Tensor, *_: Any) -> torch.Tensor:
    return dy * mask / 0.75


def random_words(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2**32, shape, generator=generator).to(dtype)


def dropped_by_words(dy: torch.Tensor, mask: torch.Tensor, *_: Any) -> torch.Tensor:
    bits = [w >> i & 1 for w in mask.to(torch.int64).tolist() for i in range(32)]
    return dy * torch.tensor(bits)[: dy.numel()].reshape(dy.shape) / 0.75


RATIO, TRAINING = Spec("", torch.float64, value=0.25), Spec("", "bool", value=True)
DROPOUTS = [
    OpCase(MICROSOFT, "BitmaskDropout", (Spec("b s h"), RATIO, TRAINING), packed_drop, bodies=False),
    OpCase(MICROSOFT, "BitmaskDropout", (Spec("b s h"),), lambda x: (x * 1, packed(torch.ones_like(x))), label="off"),
    OpCase(
        MICROSOFT,
        "BitmaskDropoutGrad",
        (Spec("n 33"), Spec("(33*n+31)//32", torch.uint32, make=random_words), RATIO, TRAINING),
        dropped_by_words,
    ),
    OpCase(
        MICROSOFT,
        "BiasDropout",
        (Spec("b s h"), Spec("h"), Spec("b s h"), RATIO, TRAINING),
        lambda x, bias, residual, *_: (drop(x + bias, 0.25)[0] + residual, None),
        bodies=False,
    ),
    OpCase(MICROSOFT, "BiasDropout", (Spec("b s h"), Spec("h")), lambda x, bias: (x + bias, None), label="off"),
    OpCase(
        MICROSOFT,
        "BitmaskBiasDropout",
        (Spec("b s h"), Spec("h"), None, RATIO, TRAINING),
        lambda x, bias, *_: packed_drop(x + bias),
        bodies=False,
    ),
]


# Softmax


def flat_softmax(x: Any, log: bool = False) -> Any:
    """Apply softmax to the last two axes, flattened."""
    rows = x.flatten(-2)
    return (rows.log_softmax(-1) if log else rows.softmax(-1)).reshape(x.shape)


def bias_softmax_dropout(x: Any, bias: Any, *_: Any) -> Any:
    probabilities = (x + bias).softmax(-1)
    return drop(probabilities, 0.25)[0], None, probabilities


def softmax_grad(y: Any, dy: Any, axes: Any = -1) -> Any:
    return y * (dy - (dy * y).sum(axes, keepdim=True))


SOFTMAX_SIZES = [{"b": 3, "s": 5, "h": 2}, {"b": 1, "s": 1, "h": 1}, {"b": 0, "s": 4, "h": 3}, {"b": 2, "s": 1, "h": 9}]
SOFTMAXES = [
    OpCase(
        MICROSOFT,
        "BiasSoftmax",
        (Spec("b s h"), Spec("b 1 h")),
        lambda x, bias: (x + bias).softmax(-1),
        {"axis": 2, "is_inner_broadcast": 1},
        sizes=SOFTMAX_SIZES,
    ),
    OpCase(
        MICROSOFT,
        "BiasSoftmax",
        (Spec("b s h"), Spec("1 s h")),
        lambda x, bias: flat_softmax(x + bias),
        {"axis": 1, "is_inner_broadcast": 0},
        sizes=SOFTMAX_SIZES,
        label="flat",
    ),
    OpCase(
        MICROSOFT,
        "BiasSoftmaxDropout",
        (Spec("b s h"), Spec("b 1 h"), RATIO),
        bias_softmax_dropout,
        {"axis": 2, "is_inner_broadcast": 1},
        sizes=SOFTMAX_SIZES,
        bodies=False,
    ),
    OpCase(
        MICROSOFT,
        "SoftmaxDropoutGrad",
        (Spec("b s h"), Spec("b s h", "bool"), Spec("b s h"), RATIO),
        lambda dy, mask, y, _: softmax_grad(y, dy * mask / 0.75, 1),
        {"axis": 1},
    ),
    OpCase(
        MICROSOFT, "SoftmaxGrad", (Spec("b s h"), Spec("b s h")), lambda dy, y: softmax_grad(y, dy, (1, 2)), {"axis": 1}
    ),
    OpCase(
        MICROSOFT,
        "LogSoftmaxGrad",
        (Spec("b s h"), Spec("b s h")),
        lambda dy, y: dy - y.exp() * dy.sum((1, 2), keepdim=True),
        {"axis": 1},
    ),
]


# Norms


def skip_layer_norm(x: Any, skip: Any, scale: Any, b: Any = None, bias: Any = None) -> Any:
    total = x + skip if bias is None else x + skip + bias
    return F.layer_norm(total, (8,), scale, b, EPS), None, None, total


def skip_rms_norm(x: Any, skip: Any, scale: Any, bias: Any = None) -> Any:
    total = x + skip if bias is None else x + skip + bias
    return F.rms_norm(total, (8,), scale, EPS), None, None, total


def from_output(dy: Any, y: Any, scale: Any, b: Any, inv_std: Any) -> Any:
    z, g = (y - b) / scale, dy * scale
    dx = inv_std * (g - g.mean(-1, keepdim=True) - z * (g * z).mean(-1, keepdim=True))
    return dx, (dy * z).sum((0, 1)), dy.sum((0, 1))


EPS = 2.0**-15
HIDDEN, POSITIVE = Spec("b s 8"), Spec("8", low=0.5, high=2.0)
BATCHES = [{"b": 3, "s": 5}, {"b": 1, "s": 1}, {"b": 0, "s": 5}]
NORMS = [
    OpCase(
        MICROSOFT,
        "SkipLayerNormalization",
        (HIDDEN, HIDDEN, Spec("8"), Spec("8"), Spec("8")),
        skip_layer_norm,
        {"epsilon": EPS},
        sizes=BATCHES,
    ),
    OpCase(
        MICROSOFT,
        "SkipLayerNormalization",
        (HIDDEN, HIDDEN, Spec("8")),
        skip_layer_norm,
        {"epsilon": EPS},
        sizes=BATCHES,
        label="plain",
    ),
    OpCase(
        MICROSOFT,
        "SkipSimplifiedLayerNormalization",
        (HIDDEN, HIDDEN, Spec("8"), Spec("8")),
        skip_rms_norm,
        {"epsilon": EPS},
        sizes=BATCHES,
    ),
    OpCase(
        MICROSOFT,
        "InvertibleLayerNormalizationGrad",
        (HIDDEN, HIDDEN, POSITIVE, Spec("8"), Spec("b s 1", low=0.5)),
        from_output,
        sizes=BATCHES,
    ),
]


# Matmul, Gemm, Conv


def batch_first(x: Any) -> Any:
    return x.movedim(0, -2)


MATRICES = [
    OpCase(
        MICROSOFT,
        "TransposeMatMul",
        (Spec("b k m"), Spec("b n k")),
        lambda a, b: 0.5 * a.mT @ b.mT,
        {"alpha": 0.5, "transA": 1, "transB": 1},
    ),
    OpCase(
        MICROSOFT,
        "FusedMatMul",
        (Spec("m b k"), Spec("n b k")),
        lambda a, b: batch_first(a) @ batch_first(b).mT,
        {"transBatchA": 1, "transBatchB": 1, "transB": 1},
        label="batch-gradient",
        sizes=[{"m": 3, "b": 2, "k": 5, "n": 4}, {"m": 1, "b": 1, "k": 1, "n": 1}],
    ),
    OpCase(
        MICROSOFT,
        "FusedGemm",
        (Spec("k m"), Spec("k n"), Spec("n")),
        lambda a, b, c: F.leaky_relu(a.T @ b * 0.5 + c, 0.25),
        {"alpha": 0.5, "transA": 1, "activation": "LeakyRelu", "activation_alpha": 0.25},
    ),
    OpCase(
        MICROSOFT,
        "FusedGemm",
        (Spec("m k"), Spec("k n")),
        lambda a, b: torch.tanh(a @ b),
        {"activation": "Tanh"},
        label="tanh",
    ),
    *(
        OpCase(
            MICROSOFT,
            "FusedConv",
            (Spec("n 3 p q", t), Spec("4 3 3 3", t), Spec("4", t), Spec("n 4 p q", t)),
            lambda x, w, b, z: torch.relu(F.conv2d(x, w, b, 1, 1) + z),
            {"pads": [1] * 4, "activation": "Relu"},
            bodies=t != "float",
            label=str(t),
            sizes=[{"n": 2, "p": 5, "q": 4}, {"n": 1, "p": 1, "q": 1}],
        )
        for t in ("float", torch.float32)
    ),
]


# Quantization

LEVELS = Spec("b s h", low=-3, high=3)


def fake_quant_by_division(x: Any, scale: Any, zero: Any) -> Any:
    y, mask = fake_quant(x / scale, torch.ones_like(scale), zero)
    return y * scale, mask


def fake_quant(x: Any, scale: Any, zero: Any) -> Any:
    if x.dtype == torch.float32 and scale.dim() == 0:
        y = torch.fake_quantize_per_tensor_affine(x, float(scale), int(zero), 0, 15)
    else:
        level = (x * (1 / scale)).round() + zero
        inside = (level >= 0) & (level <= 15)
        exact = (level.clamp(0, 15) - zero) * scale
        y = (x * inside) + (exact - x * inside).detach()
    level = (x.detach() * (1 / scale)).round() + zero
    return y, (level >= 0) & (level <= 15)


def int8(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-128, 128, shape, generator=generator).to(dtype)


SCALE, ZERO = Spec("", value=0.25, grad=False), Spec("", value=7.0, grad=False)
QUANTIZED = [
    OpCase(MICROSOFT, "FakeQuant", (LEVELS, SCALE, ZERO), fake_quant, {"quant_min": 0, "quant_max": 15}),
    OpCase(
        MICROSOFT,
        "FakeQuant",
        (LEVELS, Spec("s 1", low=0.2, high=1, grad=False), Spec("s 1", value=7.0, grad=False)),
        fake_quant,
        {"quant_min": 0, "quant_max": 15},
        label="by channel",
    ),
    OpCase(
        MICROSOFT,
        "FakeQuant",
        (LEVELS, Spec("", value=0.3, grad=False), ZERO),
        fake_quant_by_division,
        {"quant_min": 0, "quant_max": 15, "divide": 1},
        label="by division",
    ),
    OpCase(MICROSOFT, "FakeQuantGrad", (Spec("b s h"), Spec("b s h", "bool")), lambda dy, mask: dy * mask),
    OpCase(
        "",
        "QuantizeLinear",
        (LEVELS, SCALE, Spec("", torch.uint8, value=7)),
        lambda x, scale, zero: ((x / scale).round() + zero).clamp(0, 255).to(torch.uint8),
    ),
    OpCase(
        "",
        "QuantizeLinear",
        (LEVELS, Spec("s", low=0.01, high=0.1, grad=False), Spec("s", torch.int8, make=int8)),
        lambda x, scale, zero: ((x / scale[:, None]).round() + zero[:, None]).clamp(-128, 127).to(torch.int8),
        label="slices",
    ),
    OpCase(
        "",
        "DequantizeLinear",
        (Spec("b s h", torch.int8, make=int8), Spec("s", low=0.01), Spec("s", torch.int8, make=int8)),
        lambda x, scale, zero: (x.to(scale.dtype) - zero[:, None]) * scale[:, None],
    ),
    OpCase(
        "",
        "DequantizeLinear",
        (Spec("b s", torch.uint8, low=0, high=255), Spec("")),
        lambda x, scale: x * scale,
        label="plain",
    ),
]


# Sums, quotients, checks


def at_least_single(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


SCALES = {"scale_0": 0.5, "scale_1": -2.0, "scale_2": 0.25}
SUMS = [
    OpCase(MICROSOFT, "ScaledSum", (Spec("b s"),) * 3, lambda a, b, c: 0.5 * a - 2 * b + 0.25 * c, SCALES),
    OpCase(
        MICROSOFT,
        "ScaledSum",
        (Spec("b s"),) * 2,
        lambda a, b: 0.5 * a - 2 * b,
        {"scale_0": 0.5, "scale_1": -2.0},
        label="two",
    ),
    OpCase(MICROSOFT, "BatchScale", (Spec("b s"),), lambda x: (0.5 * x, -2 * x, 0.25 * x), SCALES),
    OpCase(
        MICROSOFT,
        "DivGrad",
        (Spec("b s h"), Spec("s h"), Spec("b 1 h", low=0.5)),
        lambda dy, a, b: ((dy / b).sum(0), (-dy * a / b**2).sum(1, keepdim=True)),
    ),
    OpCase(MICROSOFT, "Scale", (Spec("b s"), Spec("1", torch.float32, value=[0.5])), lambda x, _: x * 0.5),
    OpCase(
        MICROSOFT,
        "Scale",
        (Spec("b s"), Spec("", torch.float32, value=4.0)),
        lambda x, _: x / 4,
        {"scale_down": 1},
        label="down",
    ),
    OpCase(
        MICROSOFT,
        "ReduceSumTraining",
        (Spec("b s h"), Spec("2", "int64", value=[0, 2])),
        lambda x, _: x.sum((0, 2), True),
    ),
    OpCase(
        MICROSOFT,
        "ReduceSumTraining",
        (Spec("b s"), Spec("0", "int64", value=[])),
        lambda x, _: x * 1,
        {"noop_with_empty_axes": 1},
        label="none",
    ),
    OpCase(
        MICROSOFT,
        "ReduceAllL2",
        (Spec("b s"), Spec("h")),
        lambda a, b: at_least_single(torch.cat([a.flatten(), b])).norm(),
    ),
    OpCase(
        MICROSOFT,
        "IsAllFinite",
        (Spec("b s"), Spec("h")),
        lambda a, b: torch.tensor(bool(a.isfinite().all() & b.isfinite().all())),
        specials=True,
    ),
    OpCase(
        MICROSOFT,
        "IsAllFinite",
        (Spec("b s"),),
        lambda a: ~a.isnan().any(),
        {"isnan_only": 1},
        specials=True,
        label="nan",
    ),
    OpCase(
        MICROSOFT,
        "IsAllFinite",
        (Spec("b s"),),
        lambda a: ~a.isinf().any(),
        {"isinf_only": 1},
        specials=True,
        label="inf",
    ),
    OpCase(MICROSOFT, "All", (Spec("b s", "bool"),), lambda x: x.all()),
]


# Losses


def labels(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


def loss_grad(reduction: str, ignore_index: int = -100) -> Any:
    def gradient(dy: Any, log_prob: Any, y: Any, w: Any = None) -> Any:
        x = log_prob.detach().requires_grad_()  # log_prob itself are scores whose log-softmax is log_prob
        shifted = x - x.logsumexp(1, keepdim=True)
        loss = F.nll_loss(shifted, y, w, ignore_index=ignore_index, reduction=reduction)
        return torch.autograd.grad(loss, x, dy)[0]

    return gradient


def log_probabilities(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    axis = 1 if len(shape) == 3 and shape[1] == 5 else -1
    return torch.randn(shape, generator=generator).to(dtype).log_softmax(axis)


def soft_label_loss(reduction: str) -> Any:
    def loss(x: Any, probabilities: Any) -> Any:
        log_prob = x.log_softmax(-1)
        total = -(probabilities * log_prob).sum()
        return (total / (x.numel() // 5) if reduction == "mean" and x.numel() else total), log_prob

    return loss


def sparse_loss(reduction: str) -> Any:
    def loss(x: Any, y: Any, w: Any = None) -> Any:
        log_prob = x.log_softmax(-1)
        losses = F.nll_loss(log_prob.reshape(-1, 5), y.flatten(), reduction="none")
        weights = torch.ones_like(losses) if w is None else w.flatten()
        total = (losses * weights).sum()
        return (total / weights.sum() if reduction == "mean" else total), log_prob

    return loss


def by_autograd(loss: Any) -> Any:
    def gradient(dy: Any, log_prob: Any, *others: Any) -> Any:
        x = log_prob.detach().requires_grad_()
        return torch.autograd.grad(loss(x, *others)[0], x, dy)[0]

    return gradient


CLASSES, NUMBERS = Spec("n 5 d", make=log_probabilities, grad=False), Spec("n d", "int64", make=labels)
LAST, PLACES, EACH = (
    Spec("n d 5", make=log_probabilities),
    Spec("n d", "int64", make=labels),
    Spec("n d", low=0.1, grad=False),
)
WEIGHTS, SHARES = Spec("5", low=0.1, high=2.0, grad=False), Spec("n d 5", low=0, high=1, grad=False)
SOME = [{"n": 4, "d": 3}, {"n": 1, "d": 1}, {"n": 7, "d": 2}]
LOSSES = [
    *(
        OpCase(
            MICROSOFT,
            "SoftmaxCrossEntropyLossGrad",
            (Spec("" if r != "none" else "n d"), CLASSES, NUMBERS, WEIGHTS),
            loss_grad(r, 3),
            {"reduction": r, "ignore_index": 3},
            sizes=SOME,
            label=r,
        )
        for r in ("mean", "sum", "none")
    ),
    OpCase(
        MICROSOFT,
        "SoftmaxCrossEntropyLossGrad",
        (Spec(""), CLASSES, NUMBERS),
        loss_grad("mean"),
        sizes=SOME,
        label="plain",
    ),
    OpCase(
        MICROSOFT,
        "NegativeLogLikelihoodLossInternal",
        (Spec("n 5 d"), NUMBERS, WEIGHTS, Spec("", "int64", value=2)),
        lambda x, y, w, _: F.nll_loss(x, y, w, ignore_index=2),
        sizes=SOME,
    ),
    *(
        OpCase(
            MICROSOFT,
            "SoftmaxCrossEntropy",
            (Spec("n d 5"), SHARES),
            soft_label_loss(r),
            {"reduction": r},
            sizes=SOME,
            label=r,
        )
        for r in ("mean", "sum")
    ),
    *(
        OpCase(
            MICROSOFT,
            "SparseSoftmaxCrossEntropy",
            (Spec("n d 5"), PLACES, EACH),
            sparse_loss(r),
            {"reduction": r},
            sizes=SOME,
            label=r,
        )
        for r in ("mean", "sum")
    ),
    OpCase(
        MICROSOFT, "SparseSoftmaxCrossEntropy", (Spec("n d 5"), PLACES), sparse_loss("mean"), sizes=SOME, label="plain"
    ),
    *(
        OpCase(
            MICROSOFT,
            "SoftmaxCrossEntropyGrad",
            (Spec(""), LAST, SHARES),
            by_autograd(soft_label_loss(r)),
            {"reduction": r},
            sizes=SOME,
            label=r,
        )
        for r in ("mean", "sum")
    ),
    *(
        OpCase(
            MICROSOFT,
            "SparseSoftmaxCrossEntropyGrad",
            (Spec(""), LAST, PLACES, EACH),
            by_autograd(sparse_loss(r)),
            {"reduction": r},
            sizes=SOME,
            label=r,
        )
        for r in ("mean", "sum")
    ),
    OpCase(
        MICROSOFT,
        "SparseSoftmaxCrossEntropyGrad",
        (Spec(""), LAST, PLACES),
        by_autograd(sparse_loss("mean")),
        sizes=SOME,
        label="plain",
    ),
]

CASES = [*GELUS, *SPARSITY, *JOINING, *DROPOUTS, *SOFTMAXES, *NORMS, *MATRICES, *QUANTIZED, *SUMS, *LOSSES]
