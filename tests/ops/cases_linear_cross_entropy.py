"""Cases of LinearCrossEntropy and its gradient, with F.linear and F.cross_entropy as the reference."""

from typing import Any

import torch
import torch.nn.functional as F

from tests.op_case import OpCase, Spec
from tests.ops.cases_loss import IGNORED, WEIGHTS, labels

SIZES = [{"n": 5, "h": 3}, {"n": 1, "h": 1}, {"n": 9, "h": 2}, {"n": 0, "h": 3}, {"n": 200, "h": 5}]
TARGET = Spec("n", "int64", make=labels)
ALL = (1, 1, 1)


def loss_of(reduction: str) -> Any:
    def loss(x: Any, w: Any, b: Any, target: Any, weights: Any) -> Any:
        return F.cross_entropy(F.linear(x, w, b), target, weights, ignore_index=IGNORED, reduction=reduction)

    return loss


def gradients_of(reduction: str) -> Any:
    """Return autograd's gradients for a gradient dy of the loss; they are 0 without rows."""
    loss = loss_of(reduction)

    def gradients(dy: Any, x: Any, w: Any, b: Any, target: Any, weights: Any) -> Any:
        operands = [None if v is None else v.detach().clone().requires_grad_() for v in (x, w, b)]
        with torch.enable_grad():
            y = loss(*operands, target, weights)
        present = [v for v in operands if v is not None]
        results = iter(torch.autograd.grad(y, present, dy.detach()))
        return tuple(None if v is None else next(results) for v in operands)

    return gradients


def with_gradients(reduction: str) -> Any:
    """Return the loss, and its gradients by autograd."""

    def loss_and_gradients(x: Any, w: Any, b: Any, target: Any, weights: Any) -> Any:
        gradients = gradients_of(reduction)(x.new_ones(()), x, w, b, target, weights)
        return loss_of(reduction)(x, w, b, target, weights), *gradients

    return loss_and_gradients


def case(reference: Any, reduction: str, bias: bool, weights: bool, **attributes: Any) -> OpCase:
    operands = (
        Spec("n h"), Spec("7 h"), Spec("7") if bias else None, TARGET, WEIGHTS if weights else None,
    )  # fmt: skip
    name = "LinearCrossEntropy"
    if "output_mask" in attributes:
        operands, name = (Spec(""), *operands), "LinearCrossEntropyGrad"
    label = "-".join([reduction, *["bias"] * bias, *["weights"] * weights, *attributes])
    all_attributes = {"reduction": reduction, "ignore_index": IGNORED, **attributes}
    return OpCase("onnxtrain", name, operands, reference, all_attributes, sizes=SIZES, label=label)


CASES = [
    case(make(reduction), reduction, bias, weights, **attributes)
    for make, attributes in (
        (loss_of, {}),
        (with_gradients, {"gradients": ALL}),
        (gradients_of, {"output_mask": ALL}),
    )
    for reduction, bias, weights in (("mean", True, True), ("sum", True, False), ("mean", False, False))
    if bias or not attributes
]
