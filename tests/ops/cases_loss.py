"""Losses, compared with torch.nn.functional."""

from typing import Any

import torch
import torch.nn.functional as F

from tests.op_case import OpCase, Spec

IGNORED = 2  # one of the classes: ignore_index may be a valid class
SIZES = [{"n": 5, "d": 3}, {"n": 1, "d": 1}, {"n": 9, "d": 2}, {"n": 0, "d": 3}]


def labels(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return labels of seven classes; the first label is ignored."""
    targets = torch.randint(7, shape, generator=generator)
    if targets.numel() > 1:
        targets.view(-1)[0] = IGNORED
    return targets


def all_ignored(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.full(shape, IGNORED)


def cross_entropy(reduction: str) -> Any:
    def reference(scores: Any, target: Any, weights: Any, ignore_index: Any) -> Any:
        index = int(ignore_index)
        loss = F.cross_entropy(scores, target, weights, reduction=reduction, ignore_index=index)
        return loss, F.log_softmax(scores, 1).detach(), None

    return reference


def nll(reduction: str) -> Any:
    def reference(x: Any, target: Any, weights: Any, ignore_index: Any) -> Any:
        return F.nll_loss(x, target, weights, reduction=reduction, ignore_index=int(ignore_index)), None

    return reference


def cross_entropy_grad(
    dy: Any, log_prob: Any, target: Any, weights: Any, ignore_index: Any, bias: Any, total: Any
) -> Any:
    """Compute the gradient of a mean with an arbitrary total weight."""
    row_weights = (target != int(ignore_index)) * weights[target]
    one_hot = F.one_hot(target, 7)
    dx = (log_prob.exp() - one_hot) * (row_weights * dy / total)[:, None]
    return dx if bias is None else dx + bias


def nll_grad(dy: Any, log_prob: Any, target: Any, weights: Any, ignore_index: Any, total: Any) -> Any:
    is_counted = target != int(ignore_index)
    return -(F.one_hot(target, 7).movedim(-1, 1) * (is_counted * dy / total)[:, None])


INDEX = Spec("", "int64", value=IGNORED)
WEIGHTS = Spec("7", low=0.5, high=2.0, grad=False)
TARGET = Spec("n", "int64", make=labels)
PAIR = (Spec("n d"), Spec("n d"))
TOTAL = Spec("", low=1.0, high=9.0)


def saving_logits(reduction: str) -> Any:
    def reference(scores: Any, target: Any, weights: Any, ignore_index: Any) -> Any:
        loss = F.cross_entropy(scores, target, weights, reduction=reduction, ignore_index=int(ignore_index))
        peak = scores.detach().amax(1)
        return loss, peak, (scores.detach() - peak[:, None]).logsumexp(1), None

    return reference


def saving_logits_grad(reduction: str) -> Any:
    """The gradient with arbitrary peak, log_sum and total weight, which need not belong to the scores."""

    def gradient(dy: Any, x: Any, peak: Any, log_sum: Any, target: Any, weights: Any, index: Any, total: Any) -> Any:
        each = dy / total if reduction == "mean" else dy
        kept = (target != int(index)) * each * (1 if weights is None else weights[target])
        one_hot = F.one_hot(target, x.shape[1]).movedim(-1, 1)
        return ((x - peak[:, None] - log_sum[:, None]).exp() - one_hot) * kept[:, None]

    return gradient


def saving_logits_cases() -> list[OpCase]:
    """Cross entropy with 7 and 37 classes: less than one vector, and full vectors with a remainder."""
    cases = []
    for reduction in ("none", "mean", "sum"):
        for axes, classes, weights in (("", 7, WEIGHTS), ("", 37, None), ("d", 7, None)):
            scores, target = Spec(f"n {classes} {axes}"), Spec(f"n {axes}", "int64", make=labels)
            label = f"{reduction}-{classes}-{2 + len(axes)}d"
            attributes = {"reduction": reduction}
            forward = (scores, target, weights, INDEX)
            dy, each = Spec(f"n {axes}" if reduction == "none" else ""), Spec(f"n {axes}")
            backward = (dy, scores, each, each, target, weights, INDEX, TOTAL)
            for name, inputs, reference in (
                ("CrossEntropy", forward, saving_logits(reduction)),
                ("CrossEntropyGrad", backward, saving_logits_grad(reduction)),
            ):
                cases.append(OpCase("onnxtrain", name, inputs, reference, attributes, sizes=SIZES, label=label))
    return cases


def cross_entropies() -> list[OpCase]:
    """Return cases of both ops with all reductions, with and without weights, for ranks two to five."""
    cases = []
    for name, reference in (
        ("SoftmaxCrossEntropyLossInternal", cross_entropy),
        ("NegativeLogLikelihoodLossInternal2", nll),
    ):
        for reduction in ("none", "mean", "sum"):
            for axes, weights in (("", WEIGHTS), ("d", None), ("d 2", WEIGHTS), ("d 2 3", None)):
                inputs = (Spec(f"n 7 {axes}"), Spec(f"n {axes}", "int64", make=labels), weights, INDEX)
                label = f"{reduction}-{2 + len(axes.split())}d"
                attributes = {"reduction": reduction}
                cases.append(
                    OpCase("com.microsoft", name, inputs, reference(reduction), attributes, sizes=SIZES, label=label)
                )
    return cases


def pointwise(name: str, reference: Any, *inputs: Spec, **attributes: Any) -> list[OpCase]:
    return [
        OpCase(
            "onnxtrain",
            name,
            inputs,
            lambda *t, r=reduction: reference(*t, reduction=r),
            {**attributes, "reduction": reduction},
            label=reduction,
            specials=reduction == "none",
        )
        for reduction in ("none", "mean", "sum")
    ]


def backward(name: str, reference: Any, *inputs: Spec, **attributes: Any) -> list[OpCase]:
    """The backward op of a loss, compared with autograd."""

    def gradient(reduction: str) -> Any:
        def compute(dy: Any, x: Any, *rest: Any) -> Any:
            x = x.detach().requires_grad_()
            return torch.autograd.grad(reference(x, *rest, reduction=reduction), x, dy)[0]

        return compute

    return [
        OpCase(
            "onnxtrain",
            f"{name}Grad",
            (Spec("n d" if reduction == "none" else ""), *inputs),
            gradient(reduction),
            {**attributes, "reduction": reduction},
            label=reduction,
        )
        for reduction in ("none", "mean", "sum")
    ]


def both(name: str, reference: Any, *inputs: Spec, **attributes: Any) -> list[OpCase]:
    return [*pointwise(name, reference, *inputs, **attributes), *backward(name, reference, *inputs, **attributes)]


def with_weights(function: Any) -> Any:
    return lambda x, t, weight, pos_weight, reduction: function(
        x, t, weight, pos_weight=pos_weight, reduction=reduction
    )


PROBABILITY = Spec("n d", low=0.05, high=0.95)
CONSTANT = {"grad": False}

CASES = [
    *cross_entropies(),
    *saving_logits_cases(),
    OpCase(
        "onnxtrain",
        "CrossEntropy",
        (Spec("n 7"), Spec("n", "int64", make=all_ignored), WEIGHTS, INDEX),
        saving_logits("mean"),
        label="all-ignored",
        sizes=SIZES,
    ),
    OpCase(
        "onnxtrain",
        "CrossEntropy",
        (Spec("n 37"), TARGET),
        lambda x, t: (F.cross_entropy(x, t), None, None, None),
        specials=True,
        label="plain",
        sizes=SIZES,
    ),
    OpCase(
        "com.microsoft",
        "SoftmaxCrossEntropyLossInternal",
        (Spec("n 7"), Spec("n", "int64", make=all_ignored), WEIGHTS, INDEX),
        cross_entropy("mean"),
        label="all-ignored",
        sizes=SIZES,
    ),
    OpCase(
        "com.microsoft",
        "SoftmaxCrossEntropyLossInternal",
        (Spec("n 7"), TARGET),
        lambda x, t: (F.cross_entropy(x, t), F.log_softmax(x, 1).detach(), None),
        specials=True,
        label="plain",
        sizes=SIZES,
    ),
    OpCase(
        "com.microsoft",
        "SoftmaxCrossEntropyLossInternal",
        (Spec("n 7", torch.float16), TARGET, None, INDEX),
        lambda x, t, w, i: (F.cross_entropy(x.float(), t, ignore_index=int(i)), None, None),
        {"output_type": 1},
        label="wider",
        sizes=SIZES,
    ),
    *(
        OpCase(
            "com.microsoft",
            "SoftmaxCrossEntropyLossInternalGrad",
            (Spec(""), Spec("n 7"), TARGET, WEIGHTS, INDEX, bias, TOTAL),
            cross_entropy_grad,
            label="plain" if bias is None else "bias",
            sizes=SIZES,
        )
        for bias in (None, Spec("n 7"))
    ),
    OpCase(
        "onnxtrain",
        "NegativeLogLikelihoodLossGrad",
        (Spec(""), Spec("n 7 d"), Spec("n d", "int64", make=labels), None, INDEX, TOTAL),
        nll_grad,
        sizes=SIZES,
    ),
    *both("MseLoss", F.mse_loss, *PAIR),
    *both("SmoothL1Loss", lambda *t, reduction: F.smooth_l1_loss(*t, beta=0.75, reduction=reduction), *PAIR, beta=0.75),
    *both("HuberLoss", lambda *t, reduction: F.huber_loss(*t, delta=0.75, reduction=reduction), *PAIR, delta=0.75),
    *both("SoftMarginLoss", F.soft_margin_loss, Spec("n d"), Spec("n d", **CONSTANT)),
    *pointwise("KlDivLoss", F.kl_div, Spec("n d"), Spec("n d", low=0.1)),
    *pointwise(
        "KlDivLoss", lambda *t, reduction: F.kl_div(*t, reduction=reduction, log_target=True), *PAIR, log_target=1
    ),
    *both("BinaryCrossEntropy", F.binary_cross_entropy, PROBABILITY, PROBABILITY, Spec("n d", low=0.5, **CONSTANT)),
    *both("BinaryCrossEntropyWithLogits", F.binary_cross_entropy_with_logits, *PAIR),
    *both(
        "BinaryCrossEntropyWithLogits",
        with_weights(F.binary_cross_entropy_with_logits),
        *PAIR,
        Spec("n d", low=0.5, **CONSTANT),
        Spec("d", low=0.5, **CONSTANT),
    ),
]
