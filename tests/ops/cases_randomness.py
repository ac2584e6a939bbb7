"""Cases of dropout. Its body is not compared, because it samples other values."""

import torch
import torch.nn.functional as F

from tests.op_case import OpCase, Spec


def _dropout(ratio: float, training: bool):
    """Return eager dropout as the reference; the mask is the dropout of ones."""

    def reference(x: torch.Tensor, *constants: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = torch.get_rng_state()
        mask = F.dropout(torch.ones_like(x), ratio, training) != 0
        torch.set_rng_state(state)
        return F.dropout(x, ratio, training), mask

    return reference


def _dropout_case(ratio: float, training: bool) -> OpCase:
    inputs = (Spec("b s h"), Spec(dtype=torch.float64, value=ratio), Spec(dtype="bool", value=training))
    label = f"{ratio}-{'training' if training else 'inference'}"
    return OpCase("", "Dropout", inputs, _dropout(ratio, training), bodies=False, label=label)


def _gradient_case(ratio: float, training: bool) -> OpCase:
    def reference(dy: torch.Tensor, mask: torch.Tensor, *constants: torch.Tensor) -> torch.Tensor:
        return dy * mask / (1 - ratio) if training else dy

    inputs = (
        Spec("b s h"),
        Spec("b s h", dtype="bool"),
        Spec(dtype=torch.float64, value=ratio),
        Spec(dtype="bool", value=training),
    )
    label = f"{ratio}-{'training' if training else 'inference'}"
    return OpCase("com.microsoft", "DropoutGrad", inputs, reference, label=label)


CASES = [
    _dropout_case(0.1, True),
    _dropout_case(0.75, True),
    _dropout_case(0.0, True),
    _dropout_case(0.3, False),
    OpCase("", "Dropout", (Spec("b s"),), lambda x: (x, torch.ones_like(x, dtype=torch.bool)), label="defaults"),
    _gradient_case(0.1, True),
    _gradient_case(0.5, True),
    _gradient_case(0.3, False),
    OpCase(
        "com.microsoft", "DropoutGrad", (Spec("b s"), Spec("b s", dtype="bool")), lambda dy, mask: dy, label="defaults"
    ),
]
