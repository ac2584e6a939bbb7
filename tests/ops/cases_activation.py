"""What PyTorch computes for the activations."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from onnxtrain.graph.values import MICROSOFT, OWN
from onnxtrain.testing import OpCase, Spec

Function = Callable[[torch.Tensor], torch.Tensor]


def knots(*values: float) -> Callable[..., torch.Tensor]:
    """Elements among these values: the places where a piecewise function bends."""

    def make(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), shape, generator=generator)]

    return make


def slope_of(function: Function) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """What the gradient op computes, by autograd."""

    def gradient(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x), x, dy)[0]

    return gradient


def pair(
    name: str,
    function: Function,
    *,
    domain: str = "",
    grad_domain: str = OWN,
    grad_name: str | None = None,
    bends: tuple[float, ...] = (),
    specials: bool = True,
    wide: float = 5.0,
    label: str = "",
    attributes: dict[str, Any] | None = None,
    grad_attributes: dict[str, Any] | None = None,
) -> list[OpCase]:
    """The activation, the same at its bends, and its gradient op alone."""
    spec = Spec("b s h", low=-wide, high=wide)
    given = attributes or {}
    cases = [OpCase(domain, name, (spec,), function, given, specials=specials, label=label)]
    if bends:
        at = Spec("b s", make=knots(*bends))
        cases.append(OpCase(domain, name, (at,), function, given, label=f"{label}bends"))
    backward = slope_of(function)
    cases.append(
        OpCase(
            grad_domain,
            grad_name or f"{name}Grad",
            (Spec("b s h"), spec),
            backward,
            given if grad_attributes is None else grad_attributes,
            specials=specials,
            label=f"of-{name}{label}",
        )
    )
    return cases


def of_output(name: str, function: Function, inverse: Function) -> list[OpCase]:
    """A gradient op that takes the output in place of the input."""
    spec = Spec("b s h", low=-3.0, high=3.0)

    def backward(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return slope_of(function)(dy, inverse(y.double()).to(y.dtype))

    grad = OpCase(MICROSOFT, f"{name}Grad", (Spec("b s h"), Spec("b s h", low=0.1, high=0.9)), backward)
    return [OpCase("", name, (spec,), function, specials=True), grad]


SMOOTH = [
    *of_output("Sigmoid", torch.sigmoid, torch.logit),
    *of_output("Tanh", torch.tanh, torch.atanh),
    *pair("Gelu", F.gelu, grad_domain=MICROSOFT, specials=False),
    *pair(
        "Gelu",
        lambda x: F.gelu(x, approximate="tanh"),
        grad_domain=MICROSOFT,
        attributes={"approximate": "tanh"},
        specials=False,
        label="tanh",
    ),
    *pair(
        "QuickGelu",
        F.silu,
        domain=MICROSOFT,
        grad_domain=MICROSOFT,
        attributes={"alpha": 1.0},
        specials=False,
        label="silu",
    ),
    *pair(
        "QuickGelu",
        lambda x: x * torch.sigmoid(1.702 * x),
        domain=MICROSOFT,
        grad_domain=MICROSOFT,
        attributes={"alpha": 1.702},
        specials=False,
    ),
    *pair("Softplus", F.softplus, wide=30.0, bends=(20.0, -20.0, 0.0)),
    *pair(
        "Softplus",
        lambda x: F.softplus(x, 2.5, 4.0),
        domain=OWN,
        attributes={"beta": 2.5, "threshold": 4.0},
        label="scaled",
    ),
    *pair("Mish", F.mish, specials=False),
    *pair("LogSigmoid", F.logsigmoid, domain=OWN, wide=30.0),
    *pair("Elu", F.elu, grad_attributes={}, bends=(-0.0, 0.0, 1e-30, -1e-30)),
    *pair("Elu", lambda x: F.elu(x, 0.7), attributes={"alpha": 0.7}, grad_attributes={"alpha": 0.7}, label="0.7"),
    *pair(
        "Selu",
        F.selu,
        grad_name="EluGrad",
        grad_attributes={"alpha": 1.6732632423543772848, "scale": 1.0507009873554804934},
        bends=(-0.0, 0.0),
    ),
    *pair(
        "Celu",
        lambda x: F.celu(x, 0.6),
        domain=OWN,
        attributes={"alpha": 0.6},
        grad_name="EluGrad",
        grad_attributes={"alpha": 0.6, "input_scale": 1 / torch.tensor(0.6).item()},
    ),
]

CHANNELS = Spec("c 1", low=0.1, high=0.5)
RECTIFIED = [
    OpCase("", "Relu", (Spec("b s h"),), torch.relu, specials=True),
    OpCase("", "Relu", (Spec("b s", make=knots(-0.0, 0.0, 1.0, -1.0)),), torch.relu, label="bends"),
    OpCase(
        MICROSOFT,
        "ReluGrad",
        (Spec("b s h"), Spec("b s h", make=knots(-0.0, 0.0, 1.0, 2.5))),
        lambda dy, y: torch.ops.aten.threshold_backward(dy, y, 0),
        specials=True,
    ),
    *pair("LeakyRelu", F.leaky_relu, grad_domain=MICROSOFT, bends=(-0.0, 0.0, 1.0)),
    *pair(
        "LeakyRelu",
        lambda x: F.leaky_relu(x, -0.3),
        grad_domain=MICROSOFT,
        attributes={"alpha": -0.3},
        bends=(-0.0, 0.0, 1.0),
        label="negative",
    ),
    *pair(
        "Threshold",
        lambda x: F.threshold(x, 0.1, 2.2),
        domain=OWN,
        attributes={"threshold": 0.1, "value": 2.2},
        bends=(0.1, 0.0, 0.2),
    ),
    *pair("Hardtanh", F.hardtanh, domain=OWN, bends=(-1.0, 1.0, 0.0)),
    *pair("Hardtanh", F.relu6, domain=OWN, attributes={"low": 0.0, "high": 6.0}, bends=(0.0, 6.0, 3.0), label="relu6"),
    *pair("HardSigmoid", F.hardsigmoid, attributes={"alpha": 1 / 6}, bends=(-3.0, 3.0, 0.0)),
    *pair("HardSwish", F.hardswish, bends=(-3.0, 3.0, 0.0), specials=False),
    *pair("Hardshrink", F.hardshrink, domain=OWN, bends=(0.5, -0.5, 0.0)),
    *pair("Softshrink", F.softshrink, domain=OWN, bends=(0.5, -0.5, 0.0)),
    OpCase(
        "", "PRelu", (Spec("b c s"), CHANNELS), lambda x, w: F.prelu(x, w.reshape(-1)), sizes=[{"b": 2, "c": 3, "s": 4}]
    ),
    OpCase("", "PRelu", (Spec("b c"), Spec("", low=0.1)), F.prelu, specials=True, label="one"),
    OpCase(
        OWN,
        "PReluGrad",
        (Spec("b c s"), Spec("b c s"), CHANNELS),
        lambda dy, x, w: (torch.where(x > 0, dy, dy * w), torch.where(x > 0, torch.zeros_like(x), dy * x)),
        specials=True,
    ),
]

GATED = [
    case
    for axis, dims in ((-1, "b s 2*h"), (1, "b 2*h s"))
    for case in (
        OpCase(
            OWN, "Glu", (Spec(dims),), lambda x, d=axis: F.glu(x, d), {"axis": axis}, specials=True, label=f"{axis}"
        ),
        OpCase(
            OWN,
            "GluGrad",
            (Spec(dims.replace("2*", "")), Spec(dims)),
            lambda dy, x, d=axis: slope_of(lambda x: F.glu(x, d))(dy, x),
            {"axis": axis},
            label=f"{axis}",
        ),
    )
]

ACTIVATIONS: dict[str, Function] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh_gelu": lambda x: F.gelu(x, approximate="tanh"),
}


def gated_slopes(activation: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Both gradients, by autograd."""

    def gradients(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (gate, up)]
        return torch.autograd.grad(ACTIVATIONS[activation](leaves[0]) * leaves[1], leaves, dy)

    return gradients


# At a gate of -5 the slope is 20 times as far off as onnxruntime's float32 tanh (2e-7), and up may be large there.
GATE = Spec("b s h", low=-3.0, high=3.0)
GATED += [
    case
    for name, function in ACTIVATIONS.items()
    for case in (
        OpCase(
            OWN,
            "GatedActivation",
            (GATE, Spec("b s h")),
            lambda gate, up, f=function: f(gate) * up,
            {"activation": name},
            label=name,
        ),
        OpCase(
            OWN,
            "GatedActivationGrad",
            (Spec("b s h"), GATE, Spec("b s h")),
            gated_slopes(name),
            {"activation": name},
            label=name,
        ),
    )
]

CASES = [*SMOOTH, *RECTIFIED, *GATED]
