"""Cases of the optimizer steps: AdamW against its formula, SGD against torch.optim.SGD."""

from typing import Any

import torch

from onnxtrain.graph.values import OWN
from tests.op_case import OpCase, Spec

BETAS = (0.875, 0.75)
BETA_ATTRIBUTES = {"beta1": BETAS[0], "beta2": BETAS[1]}
TENSOR, SECOND, SCALAR = Spec("n h"), Spec("n h", low=0.0), Spec("", low=0.1, high=1.0)


def adamw(last: bool) -> Any:
    """Return algorithm 2 of the paper, without bias corrections."""

    def step(weight: Any, gradient: Any, m: Any, v: Any, size: Any, epsilon: Any, decay: Any = 1.0) -> Any:
        m = BETAS[0] * m + (1 - BETAS[0]) * gradient
        v = BETAS[1] * v + (1 - BETAS[1]) * gradient**2
        update = size * m / (torch.sqrt(v) + epsilon)
        return (decay * (weight - update) if last else decay * weight - update), m, v

    return step


def sgd(weight: Any, gradient: Any, buffer: Any, rate: Any) -> Any:
    """Run a step of torch.optim.SGD with a momentum buffer."""
    parameter = torch.nn.Parameter(weight.detach().clone())
    optimizer = torch.optim.SGD([parameter], lr=float(rate), momentum=0.5)
    optimizer.state[parameter]["momentum_buffer"] = buffer.detach().clone()
    parameter.grad = gradient.detach().clone()
    optimizer.step()
    return parameter.detach(), optimizer.state[parameter]["momentum_buffer"]


STATE = (TENSOR, TENSOR, TENSOR, SECOND, SCALAR, SCALAR)
CASES = [
    OpCase(OWN, "AdamWStep", STATE, adamw(last=False), BETA_ATTRIBUTES),
    OpCase(OWN, "AdamWStep", (*STATE, SCALAR), adamw(last=False), BETA_ATTRIBUTES, label="decay"),
    OpCase(
        OWN,
        "AdamWStep",
        (*STATE, SCALAR),
        adamw(last=True),
        {**BETA_ATTRIBUTES, "decay_last": 1},
        label="decay-last",
    ),
    OpCase(OWN, "SGDStep", (TENSOR, TENSOR, TENSOR, SCALAR), sgd, {"momentum": 0.5}),
]
