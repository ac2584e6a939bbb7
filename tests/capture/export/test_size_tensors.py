"""Tensors that forward computes from sizes alone are sizes."""

import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of


class Chunks(nn.Module):
    """As Longformer: the number of chunks is a tensor that `torch.div` of two ints makes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = torch.div(x.shape[0], 2, rounding_mode="trunc")
        overlaps = 2 * (count - 1) + 1
        return torch.cat([x.view(count, 2, -1).sum(1), x.new_zeros((overlaps, x.shape[1]))]) + overlaps


def test_sizes_that_forward_computes_as_tensors_are_one_capture() -> None:
    ours = ORTModule(Chunks(), fallback_policy="FALLBACK_DISABLE")
    for shape in [(4, 3), (6, 3), (2, 5), (12, 4)]:
        x = torch.randn(shape)
        torch.testing.assert_close(ours(x), Chunks()(x))
    assert engine_of(ours).captures == 1
