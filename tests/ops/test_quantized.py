"""Training with quantization, as PyTorch writes it."""

import pytest
import torch

from onnxtrain.testing import Spec
from tests.ops.captures import check_capture
from tests.ops.modules import ops_of

X = Spec("b s h", low=-3, high=3)


def test_fake_quantize() -> None:
    model = check_capture(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.25, 3, -8, 7), X)
    assert "com.microsoft::FakeQuant" in ops_of(model)


def test_fake_quantize_with_tensors() -> None:
    def quantize(x: torch.Tensor) -> torch.Tensor:
        return torch.fake_quantize_per_tensor_affine(
            x, torch.tensor([0.25]), torch.tensor([3], dtype=torch.int32), 0, 15
        )

    check_capture(quantize, X)


@pytest.mark.parametrize(("x", "axis"), [("3 b s", 0), ("b 3 s", 1), ("b s 3", -1)])
def test_fake_quantize_by_channel(x: str, axis: int) -> None:
    def quantize(x: torch.Tensor) -> torch.Tensor:
        scale, zero_point = torch.tensor([0.25, 0.5, 1.0]), torch.tensor([3, -1, 0], dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(x, scale, zero_point, axis % 3, -8, 7)

    model = check_capture(quantize, Spec(x, low=-5, high=5))
    assert "com.microsoft::FakeQuant" in ops_of(model)
