"""Cases of Softmax, LogSoftmax, SafeSoftmax and their gradients."""

import math

import torch

from tests.op_case import OpCase, Spec


def _scores(sizes: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return scores of which some are -inf, and a first row of -inf, as of fully masked attention."""
    x = torch.randn(sizes, generator=generator)
    x = x.masked_fill(torch.rand(sizes, generator=generator) < 0.2, -math.inf)
    if x.shape[0]:
        x[0] = -math.inf
    return x.to(dtype)


def _safe_softmax(x: torch.Tensor) -> torch.Tensor:
    masked = (x == -math.inf).all(-1, keepdim=True)
    return torch.where(masked, 0.0, torch.softmax(torch.where(masked, 0.0, x), -1))


def _gradient_of(function, axis: int):
    """Return the formula of a softmax's gradient, for any y: the op reads the output, not x."""

    def reference(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if function is torch.softmax:
            return y * (dy - (dy * y).sum(axis, keepdim=True))
        return dy - y.exp() * dy.sum(axis, keepdim=True)

    return reference


CASES = [
    OpCase("", "Softmax", (Spec("b s h"),), lambda x: torch.softmax(x, -1), specials=True),
    OpCase("", "Softmax", (Spec("b s h"),), lambda x: torch.softmax(x, 1), attributes={"axis": 1}, label="middle"),
    OpCase("", "Softmax", (Spec("b s", make=_scores),), lambda x: torch.softmax(x, -1), label="masked"),
    OpCase("", "LogSoftmax", (Spec("b s h"),), lambda x: torch.log_softmax(x, -1), attributes={"axis": -1}),
    OpCase(
        "", "LogSoftmax", (Spec("b s h"),), lambda x: torch.log_softmax(x, 0), attributes={"axis": 0}, label="first"
    ),
    OpCase("", "LogSoftmax", (Spec("b s", make=_scores),), lambda x: torch.log_softmax(x, -1), label="masked"),
    OpCase("onnxtrain", "SafeSoftmax", (Spec("b s h"),), lambda x: torch.softmax(x, -1), specials=True),
    OpCase("onnxtrain", "SafeSoftmax", (Spec("b s h", make=_scores),), _safe_softmax, label="masked"),
    OpCase(
        "onnxtrain",
        "SafeSoftmax",
        (Spec("b s h"),),
        lambda x: torch.softmax(x, 1),
        attributes={"axis": 1},
        label="middle",
    ),
    OpCase("com.microsoft", "SoftmaxGrad_13", (Spec("b s h"), Spec("b s h")), _gradient_of(torch.softmax, -1)),
    OpCase(
        "com.microsoft",
        "SoftmaxGrad_13",
        (Spec("b s h"), Spec("b s h")),
        _gradient_of(torch.softmax, 1),
        attributes={"axis": 1},
        label="middle",
    ),
    OpCase("com.microsoft", "LogSoftmaxGrad_13", (Spec("b s h"), Spec("b s h")), _gradient_of(torch.log_softmax, -1)),
]
