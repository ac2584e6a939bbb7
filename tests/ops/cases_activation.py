"""Cases of the activation ops: inputs, attributes and PyTorch's reference functions."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from onnxtrain.graph.values import MICROSOFT, OWN
from tests.op_case import OpCase, Spec

Function = Callable[[torch.Tensor], torch.Tensor]


def samples_of(*values: float) -> Callable[..., torch.Tensor]:
    """Return a function that makes tensors whose elements are drawn from `values`."""

    def make(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), shape, generator=generator)]

    return make


def gradient_of(function: Function) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return autograd's gradient of a function, as a function of dy and x."""

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
    kinks: tuple[float, ...] = (),
    specials: bool = True,
    limit: float = 5.0,
    label: str = "",
    attributes: dict[str, Any] | None = None,
    grad_attributes: dict[str, Any] | None = None,
) -> list[OpCase]:
    """Return cases of an activation, of the activation at its kinks, and of its gradient op.

    Elements of x lie between -limit and limit.
    """
    spec = Spec("b s h", low=-limit, high=limit)
    attributes = attributes or {}
    cases = [OpCase(domain, name, (spec,), function, attributes, specials=specials, label=label)]
    if kinks:
        at_kinks = Spec("b s", make=samples_of(*kinks))
        cases.append(OpCase(domain, name, (at_kinks,), function, attributes, label=f"{label}kinks"))
    backward = gradient_of(function)
    cases.append(
        OpCase(
            grad_domain,
            grad_name or f"{name}Grad",
            (Spec("b s h"), spec),
            backward,
            attributes if grad_attributes is None else grad_attributes,
            specials=specials,
            label=f"of-{name}{label}",
        )
    )
    return cases


def pair_by_output(name: str, function: Function, inverse: Function) -> list[OpCase]:
    """Return cases of an activation and of its gradient op, which reads y, not x."""
    spec = Spec("b s h", low=-3.0, high=3.0)

    def backward(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return gradient_of(function)(dy, inverse(y.double()).to(y.dtype))

    grad = OpCase(MICROSOFT, f"{name}Grad", (Spec("b s h"), Spec("b s h", low=0.1, high=0.9)), backward)
    return [OpCase("", name, (spec,), function, specials=True), grad]


SMOOTH = [
    *pair_by_output("Sigmoid", torch.sigmoid, torch.logit),
    *pair_by_output("Tanh", torch.tanh, torch.atanh),
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
    *pair("Softplus", F.softplus, limit=30.0, kinks=(20.0, -20.0, 0.0)),
    *pair(
        "Softplus",
        lambda x: F.softplus(x, 2.5, 4.0),
        domain=OWN,
        attributes={"beta": 2.5, "threshold": 4.0},
        label="scaled",
    ),
    *pair("Mish", F.mish, specials=False),
    *pair("LogSigmoid", F.logsigmoid, domain=OWN, limit=30.0),
    *pair("Elu", F.elu, grad_attributes={}, kinks=(-0.0, 0.0, 1e-30, -1e-30)),
    *pair("Elu", lambda x: F.elu(x, 0.7), attributes={"alpha": 0.7}, grad_attributes={"alpha": 0.7}, label="0.7"),
    *pair(
        "Selu",
        F.selu,
        grad_name="EluGrad",
        grad_attributes={"alpha": 1.6732632423543772848, "scale": 1.0507009873554804934},
        kinks=(-0.0, 0.0),
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
    OpCase("", "Relu", (Spec("b s", make=samples_of(-0.0, 0.0, 1.0, -1.0)),), torch.relu, label="kinks"),
    OpCase(
        MICROSOFT,
        "ReluGrad",
        (Spec("b s h"), Spec("b s h", make=samples_of(-0.0, 0.0, 1.0, 2.5))),
        lambda dy, y: torch.ops.aten.threshold_backward(dy, y, 0),
        specials=True,
    ),
    *pair("LeakyRelu", F.leaky_relu, grad_domain=MICROSOFT, kinks=(-0.0, 0.0, 1.0)),
    *pair(
        "LeakyRelu",
        lambda x: F.leaky_relu(x, -0.3),
        grad_domain=MICROSOFT,
        attributes={"alpha": -0.3},
        kinks=(-0.0, 0.0, 1.0),
        label="negative",
    ),
    *pair(
        "Threshold",
        lambda x: F.threshold(x, 0.1, 2.2),
        domain=OWN,
        attributes={"threshold": 0.1, "value": 2.2},
        kinks=(0.1, 0.0, 0.2),
    ),
    *pair("Hardtanh", F.hardtanh, domain=OWN, kinks=(-1.0, 1.0, 0.0)),
    *pair("Hardtanh", F.relu6, domain=OWN, attributes={"low": 0.0, "high": 6.0}, kinks=(0.0, 6.0, 3.0), label="relu6"),
    *pair("HardSigmoid", F.hardsigmoid, attributes={"alpha": 1 / 6}, kinks=(-3.0, 3.0, 0.0)),
    *pair("HardSwish", F.hardswish, kinks=(-3.0, 3.0, 0.0), specials=False),
    *pair("Hardshrink", F.hardshrink, domain=OWN, kinks=(0.5, -0.5, 0.0)),
    *pair("Softshrink", F.softshrink, domain=OWN, kinks=(0.5, -0.5, 0.0)),
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
            lambda dy, x, d=axis: gradient_of(lambda x: F.glu(x, d))(dy, x),
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


def gated_gradients(activation: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return autograd's gradients of activation(gate) * up, as a function of dy, gate and up."""

    def gradients(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (gate, up)]
        return torch.autograd.grad(ACTIVATIONS[activation](leaves[0]) * leaves[1], leaves, dy)

    return gradients


# At a gate of -5 the derivative's error is 20 times that of onnxruntime's float32 tanh (2e-7), and `up` may scale it.
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
            gated_gradients(name),
            {"activation": name},
            label=name,
        ),
    )
]

CASES = [*SMOOTH, *RECTIFIED, *GATED]
