"""Sizes of images are fixed where expressions over them take PyTorch too long."""

import copy

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.capture import capture
from onnxtrain.frontend.ort_module import engine_of
from tests.reference import assert_matches


class Windows(nn.Module):
    """As Swin: images are cut into windows, after padding to a multiple of their size."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = x.shape
        x = nn.functional.pad(x, (0, -width % 4, 0, -height % 4))
        windows = x.view(batch, channels, x.shape[2] // 4, 4, x.shape[3] // 4, 4)
        return windows.mean((3, 5)) * self.scale[:, None, None]


@pytest.mark.parametrize(("seconds", "captures"), [(0.0, 2), (60.0, 1)])
def test_sizes_of_images_are_fixed_if_they_take_too_long(
    seconds: float, captures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "_SECONDS_FOR_IMAGES", seconds)
    eager = Windows()
    ours = ORTModule(copy.deepcopy(eager), fallback_policy="FALLBACK_DISABLE")
    for shape in ((2, 3, 7, 9), (2, 3, 7, 9), (3, 3, 7, 9), (2, 3, 7, 9)):
        x = torch.randn(shape)
        assert_matches(ours(x), eager, x)
    assert engine_of(ours).captures == captures
