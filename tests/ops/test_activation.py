"""Captures of PyTorch's activations, and PReLU's slopes."""

import pytest
import torch
import torch.nn.functional as F

from tests.op_case import Spec
from tests.ops.captures import check_capture, check_captures, in_groups

SPEC = Spec("b s h", low=-8.0, high=8.0)

FUNCTIONS = {
    "relu": F.relu,
    "relu-in-place": lambda x: F.relu(x * 2, inplace=True),
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "quick-gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid": torch.sigmoid,
    "sigmoid-int": lambda x: torch.sigmoid(x.long()),
    "expit": torch.special.expit,
    "tanh": torch.tanh,
    "leaky-relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": F.elu,
    "elu-alpha": lambda x: F.elu(x, 0.5),
    "selu": F.selu,
    "elu-scaled": lambda x: torch.ops.aten.elu.default(x, 1.5, 1.2),
    "celu": lambda x: F.celu(x, 0.7),
    "softplus": F.softplus,
    "softplus-scaled": lambda x: F.softplus(x, 2.0, 5.0),
    "softsign": F.softsign,
    "mish": F.mish,
    "logsigmoid": F.logsigmoid,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": lambda x: F.hardtanh(x, -2.0, 1.0),
    "relu6": F.relu6,
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "tanhshrink": F.tanhshrink,
    "glu": F.glu,
    "glu-axis": lambda x: F.glu(x.transpose(1, 2), 1),
}


OF_ONE_TENSOR = {name: (function, SPEC) for name, function in FUNCTIONS.items()}


@pytest.mark.parametrize("names", in_groups(OF_ONE_TENSOR))
def test_captured_function_matches_eager(names: list[str]) -> None:
    check_captures(OF_ONE_TENSOR, names)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_captured_function_alone_matches_eager(name: str, dtype: torch.dtype) -> None:
    check_capture(FUNCTIONS[name], SPEC, dtype=dtype)


@pytest.mark.parametrize("slopes", [1, 4])
@pytest.mark.parametrize("dims", ["b 4", "b 4 s", "b 4 s h"])
def test_prelu_with_one_slope_or_one_per_channel(dims: str, slopes: int) -> None:
    check_capture(F.prelu, Spec(dims), Spec(f"{slopes}"))
