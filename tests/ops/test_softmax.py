"""Captures of PyTorch's softmax functions, and `safe_softmax` against PyTorch's."""

import math

import pytest
import torch
import torch.nn.functional as F

from onnxtrain.ops.softmax.softmax import safe_softmax
from tests.op_case import Spec
from tests.ops.captures import check_capture


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_captured_softmax_matches_eager(dtype):
    def softmaxes(x):
        return (
            torch.softmax(x, -1),
            torch.softmax(x, 1),
            torch.softmax(x, -1, dtype=torch.float64),
            F.log_softmax(x, 0),
            F.log_softmax(x, -1, dtype=torch.float32),
            F.softmin(x, 1),
        )

    check_capture(softmaxes, dtype=dtype)


def test_scalar_is_a_row_of_one_element():
    check_capture(lambda x: (x.softmax(-1), x.log_softmax(0)), Spec(""), sizes=({},))


def test_integers_are_cast_before_softmax():
    check_capture(lambda i, x: (i.softmax(0, dtype=torch.float32), x * 2), Spec("b s", dtype="int64"), Spec("b"))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_safe_softmax_is_bitwise_equal_to_pytorchs(dim):
    x = torch.randn(4, 5, 6)
    reference = torch.ops.aten._safe_softmax.default
    torch.testing.assert_close(safe_softmax(x, dim), reference(x, dim), rtol=0, atol=0)
    x.select(dim, 2).fill_(-math.inf)
    torch.testing.assert_close(safe_softmax(x, dim), reference(x, dim), rtol=0, atol=0)
    x[:, 1] = -math.inf
    x[0], x[3, :, 2] = -math.inf, math.nan
    torch.testing.assert_close(safe_softmax(x, dim), reference(x, dim), rtol=0, atol=0, equal_nan=True)
    for empty in (torch.randn(0, 3), torch.randn(3, 0)):
        torch.testing.assert_close(safe_softmax(empty, 1), reference(empty, 1), rtol=0, atol=0)
